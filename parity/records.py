"""What one side of a comparison yields, and the seam that every side stands behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from nxdi_qwen.modeling.config import ModelConfig

if TYPE_CHECKING:
    from nxdi_qwen.parity.layer_run import LayerCase, LayerRun
    from nxdi_qwen.parity.plain_weights import OuterWeights, Weights


@dataclass(frozen=True)
class Prompt:
    """`name` says where the prompt comes from."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TopLogprobs:
    """What a server gives that returns only the k best log probabilities of a position.

    ids: [N, k] int64, best first, -1 where absent. logprobs: [N, k] float32, NaN where absent.
    """

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Run:
    """What one side yields for one prompt of T tokens followed by S forced ones: N = T + S positions.

    Attributes:
        prompt: the T tokens.
        forced: the S tokens after the prompt.
        logits: [N, V] float32, after every prompt token and after every forced one.
        top: instead of `logits`, for positions 0 .. N - 1.
        hidden: [layers + 1, N, H] in the side's dtype: what enters layer 0 (the embedding), then what leaves every
            layer.
        states: for layer i, "layers.{i}.recurrent" [1 + S, Hv, dk, dv] float32 and "layers.{i}.conv" [1 + S, C, K - 1]
            (after the prompt, then after every forced token), or "layers.{i}.key" and "layers.{i}.value" [N, Hkv, d].
        experts: [sparse layers, N, k] int64, ascending within a token.
        router_margins: [sparse layers, N] float32, the k-th best minus the (k + 1)-th best router probability.
    """

    prompt: Prompt
    forced: tuple[int, ...]
    logits: Tensor | None = None
    top: TopLogprobs | None = None
    hidden: Tensor | None = None
    states: dict[str, Tensor] | None = None
    experts: Tensor | None = None
    router_margins: Tensor | None = None


@dataclass(frozen=True)
class Description:
    """Who ran.

    Attributes:
        kind: "huggingface", "eager", "artifact", "nxdi", "lowered", "server" or "stored".
        model_sha256: identity of the weights and the configuration; "unknown" for a server.
        dtype: of the computation, "float32" or "bfloat16"; "unknown" for a server.
        versions: of the libraries that computed.
        notes: what this side cannot give, and where that is taken from instead.
    """

    kind: str
    model_sha256: str
    dtype: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()


class Target(Protocol):
    """One side of a comparison."""

    @property
    def description(self) -> Description: ...

    @property
    def config(self) -> ModelConfig: ...

    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        """Runs the prompt, then `forced`, or with None its own `steps` greedy tokens."""
        ...

    def run_layer(self, index: int, case: LayerCase) -> LayerRun | None:
        """One decoder layer alone, in its own dtype; None where the target cannot."""
        ...

    def layer_weights(self, index: int) -> Weights | None:
        """A layer's weights as a reference has them (`plain_weights.layer_weights`); None for what is no reference."""
        ...

    def outer_weights(self) -> OuterWeights | None:
        """What stands outside the layers (`plain_weights.outer_weights`); None for what is no reference."""
        ...
