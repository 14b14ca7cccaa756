"""Every side yields what Hugging Face's model does, tensor by tensor, in the shapes that `Run` names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.parity.records import Prompt, Run
from nxdi_qwen.parity.targets.artifact import ArtifactSide
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from tests.artifacts import artifact_of, checkpoint_of
from tests.comparison import relative
from tests.hf_fixtures import hf_model, prompt_ids, reference_logits, save_checkpoint

TOLERANCE = 1e-5
STEPS = 3
# Around the convolution's kernel and the chunk; more prompts than an eager side has slots.
LENGTHS = (1, 2, 65, 130)


@pytest.fixture(scope="module", params=["qwen3_next_mixed", "qwen3_5_tied", "qwen3_5_moe"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    name = request.param
    folder = tmp_path_factory.mktemp(name) / name
    # The multimodal class wraps the text model once more.
    return ModelSource.from_checkpoint(save_checkpoint(hf_model(name), folder, nested=name == "qwen3_5_tied"))


def prompt_of(name: str, length: int) -> Prompt:
    return Prompt(f"{length}", tuple(prompt_ids(hf_model(name), length, seed=length).tolist()))


def assert_same(actual: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    """All tensors that `actual` has; states are never left out."""
    assert actual.forced == expected.forced
    assert actual.states is not None and expected.states is not None and actual.states.keys() == expected.states.keys()
    pairs = {name: (actual.states[name], expected.states[name]) for name in expected.states}
    for name in ("logits", "hidden", "router_margins"):
        if getattr(actual, name) is not None:
            pairs[name] = getattr(actual, name), getattr(expected, name)
    assert "logits" in pairs
    for name, (mine, theirs) in pairs.items():
        assert mine.dtype == theirs.dtype, name
        assert relative(mine, theirs) <= tolerance, name
    if actual.experts is not None:
        assert expected.experts is not None and torch.equal(actual.experts, expected.experts)


def test_hugging_face_runs_are_those_of_the_bare_model(source: ModelSource) -> None:
    """The hooks catch what transformers returns when it is asked for hidden states itself."""
    name = source.name
    side = HuggingFaceSide(source, "float32")
    prompt = prompt_of(name, 66)
    run = side.run(prompt, None, STEPS)
    model, config = hf_model(name), source.config
    ids = torch.tensor([[*prompt.ids, *run.forced]])
    assert run.logits is not None and run.hidden is not None and run.states is not None
    assert relative(run.logits, reference_logits(model, ids[0])) <= TOLERANCE
    assert torch.equal(run.logits[65:-1].argmax(dim=-1), torch.tensor(run.forced))
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    routed: list[Tensor] = []
    handles = [gate.register_forward_hook(lambda _, __, output: routed.append(output[0])) for gate in gates]
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    # transformers gives the last one behind the final norm.
    assert relative(run.hidden[:-1], torch.stack(out.hidden_states[:-1])[:, 0]) <= TOLERANCE
    assert relative(model.model.norm(run.hidden[-1]), out.hidden_states[-1][0]) <= TOLERANCE
    for step in range(1 + STEPS):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, : 66 + step], cache=cache, use_cache=True)
        layer = config.layer_types.index("linear_attention")
        assert relative(run.states[f"layers.{layer}.recurrent"][step], cache.get_recurrent_state(layer)[0]) <= TOLERANCE
        kept = cache.get_conv_state(layer)[0][:, 1:]
        assert relative(run.states[f"layers.{layer}.conv"][step], kept) <= TOLERANCE
    layer = config.layer_types.index("full_attention")
    assert relative(run.states[f"layers.{layer}.key"], cache.layers[layer].keys[0].transpose(0, 1)) <= TOLERANCE
    assert (run.experts is not None) == any(config.moe_layers) == bool(routed)
    if run.experts is not None and run.router_margins is not None:
        best, top_k = torch.stack(routed).softmax(dim=-1).sort(dim=-1, descending=True), config.num_experts_per_tok
        assert torch.equal(run.experts, best.indices[..., :top_k].sort(dim=-1).values)
        assert relative(run.router_margins, best.values[..., top_k - 1] - best.values[..., top_k]) <= TOLERANCE


def test_the_eager_model(source: ModelSource) -> None:
    reference, side = HuggingFaceSide(source, "float32"), EagerSide.of_checkpoint(source, "float32")
    side.expect([prompt_of(source.name, length) for length in LENGTHS], STEPS)
    for length in LENGTHS:
        expected = reference.run(prompt_of(source.name, length), None, STEPS)
        assert_same(side.run(expected.prompt, expected.forced, STEPS), expected)
    assert_same(side.run(expected.prompt, None, STEPS), expected)  # its own greedy tokens
    side.release()
    assert_same(side.run(expected.prompt, None, STEPS), expected)


def test_sixteen_bits(source: ModelSource) -> None:
    """Both in bfloat16 where the state is not: the recurrent state is float32 at every dtype."""
    reference, side = HuggingFaceSide(source, "bfloat16"), EagerSide.of_checkpoint(source, "bfloat16")
    expected = reference.run(prompt_of(source.name, 20), None, STEPS)
    actual = side.run(expected.prompt, expected.forced, STEPS)
    assert actual.hidden is not None and actual.hidden.dtype == torch.bfloat16
    assert actual.states is not None and expected.states is not None
    for name, state in actual.states.items():
        recurrent = name.endswith(".recurrent")
        assert state.dtype == expected.states[name].dtype == (torch.float32 if recurrent else torch.bfloat16)
    assert expected.logits is not None and actual.logits is not None
    assert 1e-4 < relative(actual.logits, expected.logits) < 0.5


def test_an_artifact_and_the_eager_model_on_its_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = "qwen3_5"
    source = ModelSource.from_checkpoint(checkpoint_of(tmp_path_factory, name))
    folder = artifact_of(tmp_path_factory, name)
    side = ArtifactSide(folder, open_artifact(folder))
    twin = side.twin()
    assert twin is not None
    reference = HuggingFaceSide(source, "float32")
    for length in (2, 130):  # the second in pieces: the bucket is 64
        expected = reference.run(prompt_of(name, length), None, STEPS)
        actual = side.run(expected.prompt, expected.forced, STEPS)
        assert actual.hidden is not None and actual.experts is None
        assert_same(actual, expected)
        assert_same(twin.run(expected.prompt, expected.forced, STEPS), expected)


@pytest.mark.parametrize("slot_of", ["prefill", "decode"])
def test_a_state_of_another_slot_would_be_seen(tmp_path: Path, slot_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager side's slots are not clean: a model that reads the wrong one cannot pass."""
    from nxdi_qwen.modeling import model

    read = model.read_slots

    def wrong(state: Tensor, slots: Tensor | None, start: Tensor) -> Tensor:
        if slots is None and slot_of == "decode":
            return read(state.roll(1, 0), slots, start)
        if slots is not None and slot_of == "prefill":
            return read(state, slots, start + 1)  # goes on from what is there
        return read(state, slots, start)

    source = ModelSource.from_checkpoint(save_checkpoint(hf_model("qwen3_5"), tmp_path / "model"))
    reference, side = HuggingFaceSide(source, "float32"), EagerSide.of_checkpoint(source, "float32")
    monkeypatch.setattr(model, "read_slots", wrong)
    prompts = [prompt_of("qwen3_5", length) for length in (5, 6, 7, 8)]
    side.expect(prompts, STEPS)
    errors = []
    for prompt in prompts:
        expected = reference.run(prompt, None, STEPS)
        actual = side.run(expected.prompt, expected.forced, STEPS)
        assert actual.logits is not None and expected.logits is not None
        errors.append(relative(actual.logits, expected.logits))
    assert max(errors) > 1e-3
