"""Converts into copies of a store and kills itself with SIGKILL.

Run as a script: ``kill_convert.py MODE ARGUMENTS``.

``changes``: one copy per change of a name on disk, killed right before it, with one worker. A name changes
when a file is renamed or removed. Nothing else that a later run can see changes in between.
``requests``: a new store per N-th request to an object store, killed right before it.
``stage``: killed in the middle of a stage while worker processes run; their ids are printed first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.progress import Silent


def kill_self() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before_change(moment: int) -> None:
    """Kill this process right before it changes a name on disk for the ``moment``-th time, from 0."""
    moments = itertools.count()

    def killing(change: Callable[..., Any]) -> Callable[..., Any]:
        def killing_change(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == moment:
                kill_self()
            return change(*args, **kwargs)

        return killing_change

    Path.replace = killing(Path.replace)  # type: ignore[method-assign]
    Path.unlink = killing(Path.unlink)  # type: ignore[method-assign]
    shutil.rmtree = killing(shutil.rmtree)  # type: ignore[assignment]


def changes(store: str, inputs: str, folder: str, first: str, step: str) -> None:
    """Create one store per step-th moment in ``folder``; each starts as a copy of ``store``, if it exists."""
    pa.array([0])  # imports pandas, if installed, once instead of in every child
    for moment in itertools.count(int(first), step=int(step)):
        copy = Path(folder, f"{moment:03d}")
        if Path(store).exists():
            shutil.copytree(store, copy)
        child = os.fork()
        if not child:
            kill_before_change(moment)
            convert_sources([inputs], copy, ConvertOptions(workers=1, max_reject_rate=1.0))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the run failed"
            shutil.rmtree(copy)
            return


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
                    kill_self()
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
            print(*(child.pid for child in psutil.Process().children(recursive=True)))
            kill_self()


def stage(store: str, inputs: str, name: str) -> None:
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
    {"changes": changes, "requests": requests, "stage": stage}[sys.argv[1]](*sys.argv[2:])
