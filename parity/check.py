"""A comparison as an assertion, for the tests of a port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.result import Comparison
from nxdi_qwen.parity.session import Asked, run_session


def assert_parity(model: Path | str, target: str = "eager", **options: Any) -> Comparison:
    """Fails unless `target` agrees with Hugging Face's float32 model of the checkpoint `model`, or with `reference`.

    `target` and all `options` as in `session.Asked`, for example ``dtype="bfloat16"``, ``prompts="lengths,repeated"``.
    Returns the comparison. AssertionError with the report's lines where it fails, InputError where nothing can be
    compared::

        from nxdi_qwen.parity import assert_parity

        def test_port():
            assert_parity("checkpoints/tiny", target="artifact:build/tiny", tolerance=1e-5)
    """
    outcome = run_session(Asked(Path(model), target, **options))
    # Raised, not asserted: Python's option -O takes assertions out.
    if outcome is None:
        raise InputError("a comparison needs a reference: leave reference out, or give another one than none")
    if not outcome.passed:
        raise AssertionError("\n".join((f"{target} is not {outcome.reference.kind}", *outcome.lines)))
    return outcome
