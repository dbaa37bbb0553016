"""Kills a stage with SIGKILL at every change on disk, each time on a new copy of a store.

The fixture ``kill_at_every_change`` runs this module as a script, because it forks. A change is a file that
the stage renames or removes, or lines that it appends to its ledger.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hexdata.export import ExportOptions, export_shards
from hexdata.extras import hide_pandas
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage.local import LocalStorage

STAGES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "shuffle": (shuffle_store, ShuffleOptions),
    "export": (export_shards, ExportOptions),
}


def kill_before_change(moment: int) -> None:
    """Kill this process right before its ``moment``-th change, from 0, or while it appends to the ledger."""
    moments = itertools.count()

    def killing(change: Callable[..., Any]) -> Callable[..., Any]:
        def killing_change(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **kwargs)

        return killing_change

    extend = LocalStorage.extend

    def killing_extend(storage: LocalStorage, data: bytes, size: int) -> bool:
        if next(moments) == moment:
            extend(storage, data[: len(data) // 2], size)
            os.kill(os.getpid(), signal.SIGKILL)
        return extend(storage, data, size)

    LocalStorage.extend = killing_extend  # type: ignore[method-assign]
    Path.replace = killing(Path.replace)  # type: ignore[method-assign]
    Path.unlink = killing(Path.unlink)  # type: ignore[method-assign]
    shutil.rmtree = killing(shutil.rmtree)  # type: ignore[assignment]


def run_killed(store: Path, arguments: dict[str, Any], moment: int) -> bool:
    """Run the stage in a child that is killed at a moment; return whether it reached the moment."""
    child = os.fork()
    if not child:
        kill_before_change(moment)
        run, options = STAGES[arguments["stage"]]
        run(store, options(**arguments["options"]))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, "the stage failed"
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def main() -> None:
    hide_pandas()  # each child would import it
    store, folder, arguments = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    for moment in itertools.count(step=arguments["every"]):
        copy = folder / f"{moment:03d}"
        shutil.copytree(store, copy)
        if not run_killed(copy, arguments, moment):
            shutil.rmtree(copy)
            return


if __name__ == "__main__":
    main()
