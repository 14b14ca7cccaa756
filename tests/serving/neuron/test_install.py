"""What `install` changes, and where it changes nothing."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
from typing import Any

import pytest

from nxdi_qwen.modeling.config_loader import parse_config
from tests.modeling.config_samples import DENSE, MOE, nested

pytestmark = pytest.mark.vllm_neuron

METHODS = ("check_and_update_config", "support_hybrid_kv_cache")


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A subclass of the plugin's platform, which is vLLM's current one."""
    import vllm.platforms
    from vllm_neuron.platform import NeuronPlatform

    own = type("OwnPlatform", (NeuronPlatform,), {"__module__": NeuronPlatform.__module__})
    monkeypatch.setattr(vllm.platforms, "_current_platform", own())
    return own


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged as a warning."""
    from nxdi_qwen.serving import neuron_plugin

    lines: list[str] = []
    monkeypatch.setattr(neuron_plugin.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def changed(platform: Any) -> set[str]:
    return set(METHODS) & set(vars(platform))


def test_twice_is_once(platform: Any, warnings: list[str]) -> None:
    from nxdi_qwen.serving.neuron_plugin import install

    install()
    assert changed(platform) == set(METHODS)
    first = {name: vars(platform)[name] for name in METHODS}
    install()
    assert {name: vars(platform)[name] for name in METHODS} == first
    assert not warnings
    assert not platform.support_hybrid_kv_cache()  # no configuration was checked yet


@pytest.mark.parametrize(
    ("plugin", "engine"), [("0.6.0", "0.16.0"), ("0.4.1", "0.16.0"), ("0.5.0", "0.24.0"), ("0.5.0", "0.15.1")]
)
def test_other_versions_are_left_alone(
    platform: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch, plugin: str, engine: str
) -> None:
    import vllm

    from nxdi_qwen.serving.neuron_plugin import install

    monkeypatch.setattr(importlib.metadata, "version", lambda name: plugin)
    monkeypatch.setattr(vllm, "__version__", engine)
    install()
    assert warnings == [
        f"nxdi-qwen leaves the Neuron plugin as it is: found vllm-neuron {plugin} with vllm {engine}; "
        "hybrid models are supplied for vllm-neuron 0.5.0 with vllm 0.16.0."
    ]
    assert not changed(platform)


def test_a_local_build_of_the_version_is_that_version(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from nxdi_qwen.serving.neuron_plugin import install

    monkeypatch.setattr(vllm, "__version__", "0.16.0+cpu")
    install()
    assert changed(platform) == set(METHODS)


def test_another_platform_is_left_alone(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    from nxdi_qwen.serving.neuron_plugin import install

    own = type("OwnPlatform", (UnspecifiedPlatform,), {})
    monkeypatch.setattr(vllm.platforms, "_current_platform", own())
    install()
    assert not changed(own) and not warnings


@pytest.mark.parametrize("values", [DENSE, MOE, nested(DENSE), nested(MOE), DENSE | {"model_type": "qwen3_5"}])
def test_configurations_are_read(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers, which does not know Qwen3.5; also in a copy and in what another process is sent."""
    from transformers import AutoConfig

    from nxdi_qwen.serving.hf_configs import register

    register()
    monkeypatch.setattr(AutoConfig, "register", lambda *_: pytest.fail("these are known by now"))
    register()
    config, model = AutoConfig.for_model(**values), parse_config(values)
    for each in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert parse_config(each.to_dict()) == model
        # Where vLLM and the plugin look.
        assert (each.num_key_value_heads, each.head_dim) == (model.num_key_value_heads, model.head_dim)
        assert each.get_text_config().vocab_size == model.vocab_size
        assert not hasattr(each, "no_such_key")
