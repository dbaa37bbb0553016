"""Converts into a store and kills itself with SIGKILL.

Run as a script: ``kill_convert.py MODE ARGUMENTS``.

``requests``: a new store per N-th request to an object store, killed right before it.
``stage``: killed in the middle of a stage while worker processes run; their ids are printed first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from typing import Any

import psutil

from hexdata.convert import ConvertOptions, convert_sources, run
from hexdata.progress import Silent


def requests(inputs: str, store: str, step: str) -> None:
    """Create one store per moment, named ``store`` and a number. The parent sends no requests itself."""
    from aiobotocore.client import AioBaseClient

    for moment in itertools.count(int(step) - 1, step=int(step)):
        child = os.fork()
        if not child:
            count = itertools.count()
            send = AioBaseClient._make_api_call

            async def killing(
                self: Any, *args: Any, count: Any = count, send: Any = send, last: int = moment
            ) -> Any:
                if next(count) == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return await send(self, *args)

            AioBaseClient._make_api_call = killing
            convert_sources([inputs], f"{store}{moment:03d}", ConvertOptions(workers=1, max_reject_rate=1.0))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the run failed"
            return


class KillsAfterStage(Silent):
    """Kills this process when the given stage reports its first progress."""

    def __init__(self, stage: str) -> None:
        self.stage, self.current = stage, ""

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.current = stage

    def advance(self, amount: int) -> None:
        if amount and self.current == self.stage:
            print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def stage(store: str, inputs: str, name: str) -> None:
    run._BATCH_WEIGHT = 1  # a task for each source
    convert_sources(
        [inputs],
        store,
        ConvertOptions(workers=2, memory=2 * 10**9, max_reject_rate=1.0),
        KillsAfterStage(name),
    )


def running_processes(printed: str) -> list[psutil.Process]:
    """Return the processes whose ids ``stage`` has printed and that are still running."""
    found = []
    for pid in printed.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


if __name__ == "__main__":
    {"requests": requests, "stage": stage}[sys.argv[1]](*sys.argv[2:])
