"""Finds where a target's logits part from a reference's: the layer, the position and the likely reason."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxdi_qwen.parity.check import assert_parity

__all__ = ["assert_parity"]


def __getattr__(name: str) -> Any:
    # Not imported before it is asked for: pytest imports this package with every start, for its plugin.
    if name == "assert_parity":
        from nxdi_qwen.parity.check import assert_parity

        return assert_parity
    raise AttributeError(name)
