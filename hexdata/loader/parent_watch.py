"""The end of a worker process whose parent process was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess
from typing import Final

__all__ = ["end_with_parent"]

_SECONDS_BETWEEN: Final = 1.0
_STATUS: Final = 1
_watched: int | None = None
"""The process that is watched over: a fork has this variable and no thread."""


def end_with_parent() -> None:
    """End this worker process within seconds after its parent process has ended; call it in the worker.

    A DataLoader's worker that notices the end of its parent still waits until its messages are read. The
    pipe holds only 64 kB of them, and the workers themselves keep its reading end open, so a larger message
    blocks for ever. A thread therefore ends the process. It does not use the signal that Linux sends when a
    parent dies, as that comes when the *thread* ends that started the worker.
    """
    global _watched
    parent = multiprocessing.parent_process()
    assert parent is not None
    if _watched != os.getpid():
        _watched = os.getpid()
        threading.Thread(
            target=_watch, args=(parent, os.getppid()), name="hexdata-parent", daemon=True
        ).start()


def _watch(parent: BaseProcess, started_by: int) -> None:
    # A fork server lives on with its workers; forked workers hold each other's sign that the parent lives.
    while parent.is_alive() and os.getppid() == started_by:
        parent.join(_SECONDS_BETWEEN)
    os._exit(_STATUS)
