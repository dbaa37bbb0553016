"""Sends Ctrl-C to this process while it computes, independent of the speed of the machine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOST = 60.0
"""Seconds until the signal is repeated, because DuckDB ignores it while it prepares a query."""


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """Interrupt the main thread after the process has used ``seconds`` of CPU time.

    The block must compute until it is interrupted, and must be inside the block that expects the
    KeyboardInterrupt.
    """
    main, over = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt() -> None:
        begin = (
            time.process_time()
        )  # CPU time of all threads, which does not advance while the machine is paused
        while time.process_time() - begin < seconds:
            if over.wait(0.01):
                return
        signal.pthread_kill(main, signal.SIGINT)
        while not over.wait(LOST):
            signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=interrupt, name="ctrl-c", daemon=True)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
