"""Which request holds which slot of an artifact."""

from __future__ import annotations

from collections.abc import Container


class SlotTable:
    """`slots` slots, and the requests that hold them; the lowest free one is given first."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._held: dict[str, int] = {}

    def __contains__(self, request: str) -> bool:
        return request in self._held

    def __getitem__(self, request: str) -> int:
        return self._held[request]

    @property
    def free(self) -> int:
        """How many slots nobody holds."""
        return len(self._free)

    def take(self, request: str) -> int:
        """A free slot for a request. Raises RuntimeError where there is none."""
        if not self._free:
            raise RuntimeError(
                f"no slot is free for request {request}: all {len(self._held)} are held; vLLM admitted more requests "
                "than the artifact holds"
            )
        slot = self._held[request] = self._free.pop(0)
        return slot

    def release(self, request: str) -> int | None:
        """Frees the slot of a request; None where it holds none."""
        slot = self._held.pop(request, None)
        if slot is not None:
            self._free = sorted([*self._free, slot])
        return slot

    def holders_outside(self, requests: Container[str]) -> list[str]:
        """Requests that hold a slot and are not among `requests`."""
        return [request for request in self._held if request not in requests]
