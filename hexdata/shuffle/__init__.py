"""The global shuffle: sorts a store's positions by (split, bucket, sort key) on disk.

``plan_shuffle`` estimates the disk space and ``shuffle_store`` does the work. An interrupted shuffle resumes
with the buckets that are not finished. The manifest is published last.
"""

from __future__ import annotations

from hexdata.cards import write_cards
from hexdata.checks import check_options
from hexdata.engine import LOCAL, Engine
from hexdata.options import ShuffleOptions
from hexdata.progress import SILENT, Progress
from hexdata.shuffle.plan import ShufflePlan
from hexdata.shuffle.sort import SortedBucket
from hexdata.shuffle.stage import ShuffleResult, ShuffleRun, is_same_shuffle, prepare, with_seed
from hexdata.sql.database import write_database
from hexdata.storage import AnyPath, translate_errors
from hexdata.store import Store
from hexdata.store.commands import RunRecord
from hexdata.store.integrity import find_damage
from hexdata.store.stage_files import StageFiles
from hexdata.temporary import temporary_folder

__all__ = ["ShuffleOptions", "ShufflePlan", "ShuffleResult", "plan_shuffle", "shuffle_store"]


def plan_shuffle(
    store: str | AnyPath, options: ShuffleOptions | None = None, *, engine: Engine = LOCAL
) -> ShufflePlan:
    """Return the plan of a shuffle: its rows, buckets, passes and disk space. Writes nothing to the store.

    Args:
        store: Folder or address of the store.
        options: How to shuffle and which positions; None for the defaults (default).
        engine: Engine that would do the work (default: this machine).

    Raises:
        StoreError: There is no store, or it contains no positions.
        ConfigError: An argument has another type, or an option cannot be used with this store.
        BudgetError: The memory is too small, or the disk for temporary files is full.
    """
    target = Store.open(store, shares_work=engine.remote)
    options = with_seed(target, check_options(options, ShuffleOptions))
    # The small tables are written outside the store, which may be read-only or in use.
    with translate_errors(target.path), temporary_folder("plan") as folder:
        prepared = prepare(target, options, folder, None, engine.cores)
    files = StageFiles(target, "shuffle", SortedBucket, SILENT)
    ledger = files.open_ledger(prepared.lineage)
    done = [bucket for bucket in prepared.buckets if bucket.name in ledger.done]
    is_done = is_same_shuffle(target, options) and not find_damage(target, target.manifest.buckets())
    return prepared.plan(target, options, len(done), already_done=is_done)


def shuffle_store(
    store: str | AnyPath,
    options: ShuffleOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
    restore: bool = True,
) -> ShuffleResult:
    """Shuffle all positions of a store by split, bucket and sort key, without loading them into memory.

    If the store holds a shuffle with another seed, number of buckets or selection, it is replaced when the
    new one is complete. The shards and pickles made from it stay until they are exported again. If the store
    holds this shuffle and some buckets are damaged or were removed by an export with ``free_buckets``, these
    buckets are written again and the shards are kept.

    Args:
        store: Folder or address of a store with positions.
        options: How to shuffle and which positions; None for the defaults (default).
        progress: Receives the steps of the shuffle (default: none).
        engine: Engine that sorts the buckets (default: this machine).
        restore: Whether to write buckets again that an export with ``free_buckets`` removed (default: True).
            False treats such a shuffle as already done.

    Returns:
        A summary of the shuffle.

    Raises:
        StoreError: There is no store, it contains no positions, or another process is writing to it.
        ConfigError: An argument has another type, or an option cannot be used with this store.
        BudgetError: The memory or the disk is too small.
        EngineError: The engine's machines cannot do the work.
    """
    target = Store.open(store, shares_work=engine.remote)
    options = with_seed(target, check_options(options, ShuffleOptions))
    with target.writing("shuffle", RunRecord.of(options)) as finish:
        run = ShuffleRun(target, options, progress, engine, restore)
        with engine.sharing(target.work):
            result = run.shuffle()
        # After the manifest, from which both are made: an error in them leaves a complete shuffle.
        write_database(target)
        write_cards(target)
        # The journal lists runs that wrote something.
        if not result.already_done:
            finish(positions=result.positions, bytes=result.bytes, resumed=result.resumed > 0)
        return result
