"""The first stage: converts source files into the tables positions, games, sources and rejected of a store.

It works in three steps. It reads every source once into a spool, a folder of temporary tables (``spool``).
It decides ids, value conventions and duplicates over all sources (``run``). It writes the parts of the store
from the spools (``publish``), and the manifest last.
"""

from __future__ import annotations

from collections.abc import Sequence

from hexdata.cards import write_cards
from hexdata.checks import check_location, check_options
from hexdata.convert.inputs import find_sources
from hexdata.convert.options import ConvertOptions, ConvertResult
from hexdata.convert.run import ConvertRun
from hexdata.engine import LOCAL, Engine
from hexdata.progress import SILENT, Progress
from hexdata.sql.database import write_database
from hexdata.storage import AnyPath, as_path
from hexdata.store import Store
from hexdata.store.commands import RunRecord

__all__ = ["ConvertOptions", "ConvertResult", "convert_sources"]


def convert_sources(
    inputs: str | AnyPath | Sequence[str | AnyPath],
    store: str | AnyPath,
    options: ConvertOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
) -> ConvertResult:
    """Convert source files into a new or an existing store.

    Rows of an existing store keep their ids. Sources whose bytes the store already has are skipped.

    Args:
        inputs: One path or address in an object store, or a sequence of them. Each is a file, or a folder,
            which is read with its subfolders. Files in a folder are skipped if their names match none of
            ``hexdata.formats.known_patterns()``, such as ".trmph", ".sgf" or ".pkl.gz" at the end.
        store: Folder of the store, or its address in an object store.
        options: Options of the conversion. Default None: ``ConvertOptions()``.
        progress: Receives progress reports and notes. Default: ignores them.
        engine: Runs the tasks that read sources and write tables. Default: processes on this machine.

    Returns:
        Counts, reject reasons, flags, notes and skipped files of this run.

    Raises:
        ConfigError: An argument has the wrong type, or the store was created with other split shares or has
            another board size.
        InputError: An input is missing, has changed or has no known format, or the disk fails to read it; the
            files have several board sizes; or the value convention of a file is not clear.
        BudgetError: The memory or the disk space is too small.
        RejectRateError: More was rejected than ``options.max_reject_rate`` allows; nothing was published.
        StoreError: The store is damaged or locked by another process, or an object store fails.
        EngineError: A machine of ``engine`` differs from this one or cannot access the files.
    """
    options = check_options(options, ConvertOptions)
    given = [inputs] if isinstance(inputs, str) or not isinstance(inputs, Sequence) else inputs
    for path in given:
        check_location("inputs", path)
    listed = [as_path(path) for path in given]
    target = Store.open_or_create(store, shares_work=engine.remote)
    files, skipped = find_sources(listed, target.path, options.format)
    run = RunRecord.of(options, listed)
    with target.writing("convert", run) as finish, engine.sharing(target.work):
        before = target.manifest.total_bytes
        result = ConvertRun(target, options, progress, engine, files, run).convert(skipped)
        # After the manifest, from which they are made. If this run is killed before, the next one makes them.
        write_database(target)
        write_cards(target)
        if result.sources:
            finish(positions=result.positions, bytes=target.manifest.total_bytes - before, resumed=False)
        return result
