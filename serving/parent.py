"""vLLM's engine does not notice when the process that started it is killed: it would hold the device for ever."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

_ENGINE = "EngineCore"  # how the names of vLLM's engine processes begin; the workers leave with their engine


def leave_with_parent() -> None:
    """In an engine process: from now on it leaves as soon as the one that started it is gone. Elsewhere nothing."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(_ENGINE):
        threading.Thread(target=_leave_after, args=(parent,), name="parent", daemon=True).start()


def _leave_after(parent: BaseProcess) -> None:
    wait([parent.sentinel])
    os._exit(1)  # at once: nobody is left to answer to, and the main thread may be within a graph
