"""The bytes of a slot in lowered decode graphs are those of the state description: there is no dummy KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.presets import preset
from tests.nxdi import measure_state
from tests.nxdi.measure_state import SLOTS, measure

pytestmark = pytest.mark.nxdi
LENGTH = 4096


@pytest.fixture(autouse=True)
def _needs() -> None:
    pytest.importorskip("torch_xla")
    pytest.importorskip("google.protobuf")


def one_period(name: str) -> ModelSource:
    """A public model's first four layers: three with GDN, one with attention."""
    source = ModelSource.from_preset(name)
    layers = {key: getattr(source.config, key)[:4] for key in ("layer_types", "moe_layers")}
    return replace(source, config=replace(source.config, num_hidden_layers=4, **layers))


# The smallest of each family; at degree 8 several ranks hold each KV head.
@pytest.mark.parametrize("degree", [1, 8])
@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b"])
def test_bytes_of_a_slot(name: str, degree: int) -> None:
    source = one_period(name)
    measured = measure(source, degree, LENGTH)
    assert measured.agrees, (measured.graph, measured.description)
    # By hand, for a rank: keys and values in bfloat16; three layers with a float32 recurrent state and the
    # convolution's last three inputs, in bfloat16, of q, k and v.
    attention = 2 * max(1, source.config.num_key_value_heads // degree) * 256 * LENGTH * 2
    keys, values = 16 // degree, source.config.linear_num_value_heads // degree
    gdn = values * 128 * 128 * 4 + (2 * keys + values) * 128 * 3 * 2
    assert len(measured.graph) == 8
    assert measured.own == attention + 3 * gdn
    assert measured.with_dummy_kv == 4 * attention + 3 * gdn


def test_a_state_of_another_size_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nxdi_qwen.modeling.nxdi import model
    from nxdi_qwen.modeling.nxdi.cache import HybridCacheManager

    class WithDummyKeys(HybridCacheManager):
        """Layer 0, a GDN layer, keeps keys as well: NxDI traces, returns and aliases whatever is among its states."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.past_key_values.append(nn.Parameter(torch.zeros(SLOTS, 2, LENGTH, 256), requires_grad=False))

        def update_cache(self, **kwargs: Any) -> list[torch.Tensor]:
            return [*super().update_cache(**kwargs), self.past_key_values[-1] + 1]

    monkeypatch.setattr(model, "HybridCacheManager", WithDummyKeys)
    measured = measure(one_period("qwen3.5-0.8b"), 1, LENGTH)
    assert not measured.agrees
    assert measured.own - sum(measured.description) == 2 * LENGTH * 256 * 4


def test_the_command_fails_where_they_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(source: ModelSource, degree: int, max_length: int) -> measure_state.Measured:
        return measure_state.Measured(
            source.name, degree, (max_length, 9.0 if degree == 16 else 8.0), (max_length, 8), 4
        )

    monkeypatch.setattr(measure_state, "measure", wrong)
    monkeypatch.setattr(measure_state, "PRESETS", {"qwen3.5-0.8b": preset("qwen3.5-0.8b")})
    assert measure_state.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["DIFFERS" in line for line in lines if "qwen3.5" in line] == [False] * 4 + [True]
