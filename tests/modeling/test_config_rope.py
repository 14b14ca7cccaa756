"""The rotary settings of config.json in every spelling."""

from functools import partial

import pytest

from nxdi_qwen.modeling.errors import InputError
from tests.modeling.config_samples import DENSE, NEXT, ROPE, nested, without, write_and_load


@pytest.fixture
def load(tmp_path):
    """load_config of a folder that holds these objects."""
    return partial(write_and_load, tmp_path)


YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "keys, theta, partial",
    [
        ({"rope_theta": 5e6}, 5e6, 0.25),
        ({"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_scaling": None}, 5e6, 0.5),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}, 5e6, 0.25),
        ({"rope_theta": 5e6, "rope_parameters": {"type": "default"}}, 5e6, 0.25),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 5e6}}, 5e6, 0.5),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 1.0}},
            5e6,
            1.0,
        ),
        ({"rope_theta": 5e6, "rope_parameters": {"partial_rotary_factor": None}}, 5e6, 0.25),
    ],
)
def test_theta_and_partial_rotary_factor(load, keys, theta, partial):
    loaded = load(without(NEXT, "rope_theta") | keys)
    rope = loaded.config.rope
    assert (rope.rope_type, rope.theta, rope.partial_rotary_factor) == ("default", theta, partial)
    assert loaded.notes == () and loaded.config.max_position_embeddings == 1024


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_yarn_in_rope_scaling_beside_a_flat_theta(load, type_key):
    loaded = load(NEXT | {"rope_scaling": {type_key: "yarn"} | YARN})
    rope = loaded.config.rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("yarn", 1e7, 4.0)
    assert rope.original_max_position_embeddings == 1024 and rope.truncate and rope.attention_factor is None
    assert loaded.config.max_position_embeddings == 4096
    assert loaded.notes == ("yarn extends max_position_embeddings from 1024 to 4096",)


def test_a_yarn_override_keeps_theta_and_mrope(load):
    override = {"type": "yarn", "beta_fast": 16, "beta_slow": 2, "mscale": 1, "mscale_all_dim": 0.5, "truncate": False}
    rope = load(nested(DENSE | {"rope_scaling": override | YARN})).config.rope
    assert (rope.rope_type, rope.theta, rope.mrope_section) == ("yarn", 1e7, (2, 1, 1))
    assert (rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim, rope.truncate) == (16, 2, 1, 0.5, False)


def test_yarn_inside_rope_parameters(load):
    rope = load(DENSE | {"rope_parameters": ROPE | YARN | {"rope_type": "yarn", "attention_factor": 1.2}}).config.rope
    assert (rope.rope_type, rope.theta, rope.mrope_section, rope.attention_factor) == ("yarn", 1e7, (2, 1, 1), 1.2)


def test_yarn_never_lowers_the_stated_positions(load):
    loaded = load(NEXT | {"max_position_embeddings": 9999, "rope_scaling": {"type": "yarn"} | YARN})
    assert loaded.config.max_position_embeddings == 9999 and loaded.notes == ()


def test_yarn_without_the_original_positions(load):
    loaded = load(NEXT | {"rope_scaling": {"type": "yarn", "factor": 4}})
    assert loaded.config.rope.original_max_position_embeddings == 1024
    assert loaded.config.max_position_embeddings == 1024
    assert loaded.notes == ("yarn without original_max_position_embeddings: 1024 is assumed",)


def test_rope_keys_spread_in_text_config(load):
    loaded = load(nested(without(DENSE, "rope_parameters") | ROPE | {"partial_rotary_factor": 0.25}))
    assert loaded.config.rope.theta == 1e7 and loaded.config.rope.mrope_section == (2, 1, 1) and loaded.notes == ()


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "longrope", "llama3", "mrope", "proportional", 3])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_other_rope_types_are_refused_by_name(load, rope_type, type_key):
    with pytest.raises(InputError, match=f"rope_type {rope_type!r} is not supported; use default or yarn"):
        load(NEXT | {"rope_scaling": {type_key: rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    "config, message",
    [
        (without(NEXT, "rope_theta"), "rope_theta is missing"),
        (NEXT | {"rope_theta": None}, "rope_theta is missing"),
        (NEXT | {"rope_theta": "1e7"}, "rope_theta must be a finite number greater than 1, got '1e7'"),
        (NEXT | {"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        (NEXT | {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (NEXT | {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor must be a finite number"),
        (NEXT | {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": -1}}, "beta_fast must be"),
        (NEXT | {"rope_theta": 10**400}, "rope_theta must be a finite number greater than 1, got 1000"),
        (NEXT | {"rope_scaling": {"type": "yarn", "factor": 10**400}}, "factor must be a finite number"),
        (
            NEXT | {"rope_scaling": {"type": "yarn", "factor": 1e308, "original_max_position_embeddings": 4096}},
            "factor times original_max_position_embeddings must be a finite number, got inf",
        ),
        (NEXT | {"partial_rotary_factor": 0.3}, "must be an even number of rotated dimensions, got 9"),
        (DENSE | {"rope_parameters": ROPE | {"mrope_section": [11, 11, 10]}}, "must sum to 4, half of head_dim 32"),
        (DENSE | {"rope_parameters": ROPE | {"mrope_section": 4}}, "mrope_section must hold three integers"),
    ],
)
def test_bad_rope_values(load, config, message):
    with pytest.raises(InputError, match=message):
        load(config)


def test_unused_rope_keys_are_reported(load):
    loaded = load(NEXT | {"rope_scaling": {"type": "default", "factor": 2, "mrope_section": [1, 1, 2]}})
    assert loaded.notes == ("ignored rope keys: factor, mrope_section",)
    loaded = load(DENSE | {"rope_parameters": without(ROPE, "mrope_section")})
    assert loaded.notes == ("no mrope_section: positions of height and width are not used",)
    loaded = load(DENSE | {"rope_parameters": ROPE | {"mrope_interleaved": False}})
    assert len(loaded.notes) == 1 and "mrope_interleaved" in loaded.notes[0]
