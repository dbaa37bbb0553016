"""The global shuffle: positions in the order (split, bucket, sort key), out of core.

``plan_shuffle`` says what will be done, ``shuffle_store`` does it. The stage resumes unit
by unit and publishes its manifest last.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hexdata.checks import check_options
from hexdata.engine import LOCAL, Engine
from hexdata.progress import SILENT, Progress
from hexdata.remote import AnyPath
from hexdata.shuffle.options import ShuffleOptions
from hexdata.shuffle.outlook import ShufflePlan, look_ahead
from hexdata.shuffle.patience import Patience
from hexdata.shuffle.prepare import is_same_shuffle, prepare
from hexdata.shuffle.stage import LEDGER_NAME, Run, ShuffleResult, open_ledger
from hexdata.sql.database import write_database
from hexdata.store import Store
from hexdata.store.integrity import find_published_damage
from hexdata.store.journal import journaled
from hexdata.store.room import telling_full_temporary

__all__ = ["Patience", "ShuffleOptions", "ShufflePlan", "ShuffleResult", "plan_shuffle", "shuffle_store"]


def plan_shuffle(
    store: str | AnyPath, options: ShuffleOptions | None = None, *, engine: Engine = LOCAL
) -> ShufflePlan:
    """Say what ``shuffle_store`` would do, and try on some rows what it would cost. Writes nothing.

    Raises:
        StoreError: there is no store, or it holds no position.
        ConfigError: an argument is of another kind, or a choice cannot be made on this store.
        BudgetError: the memory is too small, or the disk full that temporary files are on.
    """
    target = Store.open(store, shares_work=engine.machines.separate)
    options = check_options(options, ShuffleOptions)
    with telling_full_temporary(), tempfile.TemporaryDirectory(prefix="hexdata-plan-") as folder:
        prepared = prepare(target, options, Path(folder), None, engine.machines)
    path = target.work / "shuffle" / LEDGER_NAME
    ledger = open_ledger(path, prepared.ledger_plan, only_look=True)
    is_done = is_same_shuffle(target, options) and not find_published_damage(
        target, "shuffled", engine=engine
    )
    return look_ahead(target, options, prepared, ledger, is_done)


def shuffle_store(
    store: str | AnyPath,
    options: ShuffleOptions | None = None,
    progress: Progress = SILENT,
    *,
    patience: Patience | None = None,
    engine: Engine = LOCAL,
) -> ShuffleResult:
    """Shuffle a store's positions globally: by split, bucket and sort key, out of core.

    Another seed, number of buckets or choice replaces an earlier shuffle, and what was made of it.

    Args:
        store: with positions.
        options: how to shuffle, and what.
        progress: is told what is done.
        patience: with errors of the disk that may pass.
        engine: where slices are scattered and buckets sorted.

    Raises:
        StoreError: there is no store, it holds no position, or another process writes to it.
        ConfigError: a choice cannot be made on this store.
        BudgetError: the memory or the disk is too small.
        EngineError: the engine's machines cannot do it.
    """
    asked = check_options(options, ShuffleOptions)
    target = Store.open(store, shares_work=engine.machines.separate)
    with target.writing("shuffle"), journaled(target.path, "shuffle") as watched:
        engine.require([], target.path)
        run = Run(target, asked, progress, patience or Patience(), engine)
        result = run.shuffle()
        write_database(target)
        if not result.already_done:
            watched.finish(positions=result.positions, bytes=result.bytes, resumed=result.resumed > 0)
        return result
