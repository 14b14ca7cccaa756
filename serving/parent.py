"""vLLM's engine does not notice when the process that started it is killed: it would hold the device for ever."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess


def leave_with_parent() -> None:
    """From now on this process leaves as soon as the one that started it is gone; nothing where vLLM started none."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), name="parent", daemon=True).start()


def _leave_after(parent: BaseProcess) -> None:
    wait([parent.sentinel])
    os._exit(1)  # at once: nobody is left to answer to, and the main thread may be within a graph
