"""The captured graphs against Hugging Face in float32, every fixture.

Their rows and tokens are static, so that every prompt is padded or comes in pieces.
"""

from __future__ import annotations

import pytest

from tests import scenarios
from tests.hf_fixtures import FIXTURES
from tests.scenarios import GROUPS, LAYOUTS, LENGTHS, PREFIXES
from tests.support import GRAPH_TOKENS, exported

pytestmark = pytest.mark.slow
NAMES = list(FIXTURES)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_one_row(name: str, length: int) -> None:
    scenarios.one_row(exported(name), name, length)


@pytest.mark.parametrize("lengths", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch_then_decode(name: str, lengths: tuple[int, ...]) -> None:
    layout = LAYOUTS[(NAMES.index(name) + GROUPS.index(lengths)) % 3]
    scenarios.ragged_batch(exported(name), name, lengths, layout, GRAPH_TOKENS)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", NAMES)
def test_prompt_cut_anywhere(name: str, prefix: int) -> None:
    layout = LAYOUTS[(NAMES.index(name) + PREFIXES.index(prefix)) % 3]
    scenarios.continued_in_pieces(exported(name), name, prefix, layout)


@pytest.mark.parametrize("name", NAMES)
def test_joins_and_leaves(name: str) -> None:
    scenarios.joins_and_leaves(exported(name), name)
