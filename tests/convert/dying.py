"""Converts into copies of a store and dies by SIGKILL, as a script of its own: ``dying.py HOW ARGUMENTS``.

``names``: before every other change of a name on disk, from the first or the second on, with one worker.
Nothing else that is seen after a death changes in between, so these are all the moments there are.
``requests``: before every so many requests to an object store, each time into a new store.
``stage``: in the middle of a stage, with worker processes at work, whose ids are printed first.
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


def die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_change(moment: int) -> None:
    """Let this process die right before it changes a name on disk for the ``moment``-th time."""
    moments = itertools.count()

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == moment:
                die()
            return change(*args, **kwargs)

        return changed

    Path.replace = dying(Path.replace)  # type: ignore[method-assign]
    Path.unlink = dying(Path.unlink)  # type: ignore[method-assign]
    shutil.rmtree = dying(shutil.rmtree)  # type: ignore[assignment]


def names(store: str, inputs: str, folder: str, first: str) -> None:
    """Leave a store for each moment in ``folder``: copies of ``store``, if there is one."""
    pa.array([0])  # where pandas is installed, this imports it: once, and not in every child
    for moment in itertools.count(int(first), step=2):
        copy = Path(folder, f"{moment:03d}")
        if Path(store).exists():
            shutil.copytree(store, copy)
        child = os.fork()
        if not child:
            die_before_change(moment)
            convert_sources([inputs], copy, ConvertOptions(workers=1, max_reject_rate=1.0))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the run failed"
            shutil.rmtree(copy)
            return


def requests(inputs: str, store: str, step: str) -> None:
    """Leave a store for each moment, ``store`` and a number. The parent speaks to no object store."""
    from aiobotocore.client import AioBaseClient

    for moment in itertools.count(int(step) - 1, step=int(step)):
        child = os.fork()
        if not child:
            asked = itertools.count()
            ask = AioBaseClient._make_api_call

            async def dying(
                self: Any, *args: Any, asked: Any = asked, ask: Any = ask, last: int = moment
            ) -> Any:
                if next(asked) == last:
                    die()
                return await ask(self, *args)

            AioBaseClient._make_api_call = dying
            convert_sources([inputs], f"{store}{moment:03d}", ConvertOptions(workers=1, max_reject_rate=1.0))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the run failed"
            return


class Watcher(Silent):
    """Dies when something of a stage is done."""

    def __init__(self, stage: str) -> None:
        self.stage, self.current = stage, ""

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.current = stage

    def advance(self, amount: int) -> None:
        if amount and self.current == self.stage:
            print(*(child.pid for child in psutil.Process().children(recursive=True)))
            die()


def stage(store: str, inputs: str, name: str) -> None:
    convert_sources(
        [inputs], store, ConvertOptions(workers=2, memory=2 * 10**9, max_reject_rate=1.0), Watcher(name)
    )


def still_there(printed: str) -> list[psutil.Process]:
    """Return those of the processes whose ids ``stage`` has printed that have not ended yet."""
    found = []
    for pid in printed.split():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


if __name__ == "__main__":
    {"names": names, "requests": requests, "stage": stage}[sys.argv[1]](*sys.argv[2:])
