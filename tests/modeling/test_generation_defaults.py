"""generation_config.json."""

from functools import partial

import pytest

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.generation_defaults import GenerationDefaults
from tests.modeling.config_samples import DENSE, write_and_load


@pytest.fixture
def load(tmp_path):
    """load_config of a folder that holds these objects."""
    return partial(write_and_load, tmp_path)


def test_generation_defaults_without_a_file_are_off(load):
    assert load(DENSE).generation == GenerationDefaults(False, 1.0, 0, 1.0, 0.0, 1.0)


def test_generation_keys(load):
    stated = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    loaded = load(DENSE, stated | {"transformers_version": "5.0.0", "max_new_tokens": 20, "_from_model_config": True})
    assert loaded.generation == GenerationDefaults(**stated)
    assert loaded.notes == ("ignored generation_config.json keys: max_new_tokens",)
    assert load(DENSE, dict.fromkeys(stated)).generation == GenerationDefaults()


@pytest.mark.parametrize(
    "values, message",
    [
        ({"do_sample": 1}, "do_sample must be true or false, got 1"),
        ({"temperature": "hot"}, "temperature must be a finite number of at least 0, got 'hot'"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_k": 1.5}, "top_k must be an integer of at least 0, got 1.5"),
        ({"top_p": 0}, "top_p must be a finite number greater than 0"),
        ({"top_p": 1.5}, "top_p must be at most 1"),
        ({"min_p": -0.1}, "min_p must be"),
        ({"min_p": 2}, "min_p must be at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be"),
        ({"eos_token_id": "x"}, "eos_token_id must be an integer"),
        ({"eos_token_id": [True]}, "eos_token_id must be an integer"),
        ({"pad_token_id": -1}, "pad_token_id must be an integer of at least 0"),
    ],
)
def test_bad_generation_values(load, values, message):
    with pytest.raises(InputError, match=f"generation_config.json: {message}"):
        load(DENSE, values)
