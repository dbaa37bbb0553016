"""From legacy files to the store: positions, games, sources, rejected. The first stage.

Three passes: every source is read once into a spool (``spool``), the run decides ids, conventions and
duplicates over all of them (``run``), and every spool is published (``publish``). The manifest comes last.
"""

from __future__ import annotations

from collections.abc import Sequence

from hexdata.checks import check_location, check_options
from hexdata.convert.inputs import find_sources
from hexdata.convert.options import ConvertOptions, ConvertResult
from hexdata.convert.run import Run
from hexdata.engine import LOCAL, Engine
from hexdata.progress import SILENT, Progress
from hexdata.remote import AnyPath, as_path
from hexdata.sql.database import write_database
from hexdata.store import Store
from hexdata.store.arrow_memory import arrow_system_memory
from hexdata.store.journal import journaled

__all__ = ["ConvertOptions", "ConvertResult", "convert_sources"]


def convert_sources(
    inputs: str | AnyPath | Sequence[str | AnyPath],
    store: str | AnyPath,
    options: ConvertOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
) -> ConvertResult:
    """Convert legacy files into a store, new or existing; what is there already keeps its ids.

    Args:
        inputs: one or several files, or folders taken with all that lies below them; addresses in an object
            store too.
        store: the store's folder, or its address.
        options: how; None for the defaults.
        progress: who watches.
        engine: where the sources are read and written.

    Raises:
        ConfigError: an argument is of another kind.
        InputError: an input is missing or has changed, or its value convention is not clear.
        RejectRateError: too much was rejected; nothing was published.
        StoreError: the store cannot be used, or another process writes to it; an object store fails.
        EngineError: the engine's machines cannot do it.
    """
    options = check_options(options, ConvertOptions)
    given = [inputs] if isinstance(inputs, str) or not isinstance(inputs, Sequence) else inputs
    for path in given:
        check_location("inputs", path)
    listed = [as_path(path) for path in given]
    target = Store.open_or_create(store, shares_work=engine.machines.separate)
    files = find_sources(listed, target.path)
    with target.writing("convert"), journaled(target.path, "convert") as watched:
        engine.require(listed, target.path)
        before = target.manifest.total_bytes
        with arrow_system_memory():
            result = Run(target, options, progress, engine, files).convert()
        write_database(target)
        if result.sources:
            watched.finish(positions=result.positions, bytes=target.manifest.total_bytes - before)
        return result
