"""How the graph of context encoding grows with its bucket, at a true size: every node is something to compile."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from nxdi_qwen.compile.graph_check import check_graph
from nxdi_qwen.compile.graphs import CONTEXT, capture, graph_state, layer_kind, pass_specs
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.ops import gated_delta
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.modeling.state import describe_state

CONFIG = preset("qwen3.5-0.8b")


def context_nodes(tokens: int, config: ModelConfig = CONFIG) -> int:
    """Nodes of one pass: every part as often as it is used."""
    description = describe_state(config, 1, tokens, torch.bfloat16)
    uses = Counter(layer_kind(config, layer) for layer in range(config.num_hidden_layers))
    total = 0
    for spec in pass_specs(config, CONTEXT, 1, tokens):
        program = capture(spec, config, torch.bfloat16, description)
        nodes = check_graph(program, spec, graph_state(spec, config, description))["nodes"]
        total += nodes * uses.get(spec.part, 1)
    return total


@pytest.mark.slow
def test_32768_tokens_are_no_three_graphs_of_512() -> None:
    short, long = (context_nodes(tokens) for tokens in (512, 32768))
    print(f"{short} nodes for 512 tokens, {long} for 32,768: {long / short:.2f} times")
    assert long <= 3 * short


@pytest.mark.slow
def test_a_serial_scan_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    short = context_nodes(512)
    monkeypatch.setattr(gated_delta, "serial_is_cheaper", lambda chunks: True)
    assert context_nodes(8192) > 3 * short
