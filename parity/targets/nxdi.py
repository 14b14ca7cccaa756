"""The port on NxDI's base classes, in NxDI's CPU mode: NxDI's own code around the modules that it would trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxdi_qwen.compile.artifact import current_libraries
from nxdi_qwen.compile.source import DTYPES, ModelSource
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.nxdi_application import check_nxdi, cpu_application, single_rank
from nxdi_qwen.parity.targets.side import OF_THE_CHECKPOINT, Side
from nxdi_qwen.parity.targets.states import StateLog
from nxdi_qwen.parity.targets.tap import Choice, ModuleTap, Tap, joined

SLOTS = 3
# Continuous batching, one prompt at a time, as `neuron-compile` has it.
OPTIONS: dict[str, Any] = {
    "batch_size": SLOTS,
    "ctx_batch_size": 1,
    "tkg_batch_size": SLOTS,
    "is_continuous_batching": True,
}


class NxdiSide(Side):
    """The logits after a prompt's last token and of decode steps are the application's; those of the tokens before,
    which NxDI drops, are what its head makes of the same pass.
    """

    def __init__(self, source: ModelSource, dtype: str) -> None:
        """Raises InputError where NxDI is missing."""
        check_nxdi("nxdi")
        description = Description("nxdi", OF_THE_CHECKPOINT, dtype, current_libraries())
        super().__init__(description, source.config, source.config.max_position_embeddings)
        assert source.folder is not None
        self._source = source
        self._folder = source.folder
        self._application: Any = None
        self._slot = 0

    def twin(self) -> EagerSide:
        return EagerSide.of_checkpoint(self._source, self.description.dtype)

    def release(self) -> None:
        self._application = None

    @torch.no_grad()
    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        steps = steps if forced is None else len(forced)
        count = len(prompt.ids)
        with single_rank():
            app = self._loaded(count + steps)
            slot = self._slot = (self._slot + 1) % SLOTS
            tokens: list[int] = []
            log = StateLog(self._description, slot)
            encoder, decoder = (model.model for model in (app.context_encoding_model, app.token_generation_model))
            with _tap(encoder).open() as tap, _Caught(encoder.norm) as normed:
                last = _call(app, prompt.ids, 0, slot)
                caught = [tap.take(0, [count])]
                before = encoder.lm_head(normed.output[:1, : count - 1])[0].float()
            logits = [before, last]
            log.add(_state(app))
            with _tap(decoder).open() as tap:
                for step in range(steps):
                    tokens.append(int(logits[-1][-1].argmax()) if forced is None else forced[step])
                    logits.append(_call(app, tokens[-1:], count + step, slot))
                    caught.append(tap.take(slot, [1]))  # NxDI fills the batch up, so that row i is slot i
                    log.add(_state(app))
        seen = joined(caught)
        return Run(
            prompt,
            tuple(tokens),
            torch.cat(logits),
            hidden=seen.hidden,
            states=log.states(count + steps),
            experts=seen.experts,
            router_margins=seen.margins,
        )

    def _loaded(self, tokens: int) -> Any:
        """The application, made again if its slots are too short."""
        if self._application is None or self._application.neuron_config.max_length < tokens:
            from nxdi_qwen.modeling.nxdi.model import describe

            options = OPTIONS | {"seq_len": max(self.longest, tokens), "torch_dtype": DTYPES[self.description.dtype]}
            self._application = None
            self._application = cpu_application(self._folder, **options)
            self._description = describe(self._application.config)
        return self._application


class _Caught:
    """The output of a module's last pass while open."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.output = torch.empty(0)

    def __enter__(self) -> _Caught:
        self._handle = self._module.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _keep(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.output = output


def _tap(model: Any) -> Tap:
    return ModuleTap(list(model.layers), _router_of, _read_router)


def _router_of(layer: nn.Module) -> nn.Module | None:
    return getattr(getattr(layer.mlp, "routed", None), "router", None)


def _read_router(_: nn.Module, __: Tensor, output: Any) -> Choice:
    logits, _affinities, experts = output
    return Choice(logits, experts)


def _state(app: Any) -> list[Tensor]:
    return [state.data for state in app.token_generation_model.model.kv_mgr.past_key_values]


def _call(app: Any, tokens: Sequence[int], start: int, slot: int) -> Tensor:
    """Logits [1, V] float32 after the tokens."""
    positions = torch.arange(start, start + len(tokens))[None]
    # As NxDI's generation adapter passes it: over a prompt, and over everything so far in decode.
    mask = torch.ones(1, start + len(tokens), dtype=torch.int64)
    output = app(
        input_ids=torch.tensor([list(tokens)]),
        position_ids=positions,
        attention_mask=mask,
        seq_ids=torch.tensor([slot]),
    )
    logits: Tensor = output.logits[:, -1].float().clone()
    return logits
