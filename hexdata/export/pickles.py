"""Export of a store's positions as legacy pickles, as their original files or as shuffled files.

The export does not change the tables of the store. Each file is written by one task that depends on its
arguments and the store only, so the bytes do not depend on the number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.checks import check_choice, check_count, check_options
from hexdata.engine import LOCAL, Engine
from hexdata.errors import HexdataError, StoreError
from hexdata.export.originals import (
    PICKLE_SUFFIX,
    list_originals,
    pickle_names,
    stored_to_raw,
    without_masked_policies,
)
from hexdata.export.run import ExportFile, ReplacingOptions, exporting
from hexdata.formats.legacy import DIALECTS, write_legacy
from hexdata.json_models import read_metadata
from hexdata.options import describe_options
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, games_schema, positions_schema
from hexdata.shards.block_check import check_positions
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store import Store
from hexdata.store.files import FileFacts, write_bytes
from hexdata.store.integrity import require_buckets, require_intact
from hexdata.store.parquet import ParquetRows, open_parquet, read_batches, read_rows
from hexdata.text import encodable, shortened

ORDERS: Final = ("shuffled", "original")

PROGRESS_NAME: Final = "shuffling_progress.json"
"""The legacy loader reads ``shuffled_*.pkl.gz`` only from a folder that contains this file."""

NO_TIME: Final = "1970-01-01T00:00:00"
"""Value of all times in the pickles, such as ``shuffled_at``, because the store contains no times."""


# As the legacy shuffle writes them: examples of all sources become dicts, with the raw file in `metadata`.
_SHUFFLED_DIALECT: Final = {
    **DIALECTS["dicts"],
    "metadata_keys": [
        *("game_id", "position_in_game", "total_positions", "value_sample_tier", "winner"),
        "original_source",
    ],
}


@describe_options
@dataclass(frozen=True)
class PicklesOptions(ReplacingOptions):
    """Options of ``export_pickles``.

    Attributes:
        order: "shuffled", the default, for one file per bucket of the shuffle, or "original" for one file
            per source.
        level: Compression level of gzip, 1 to 9. Default 6.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int] = 290 << 20

    order: str = "shuffled"
    level: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, ORDERS)
        object.__setattr__(self, "level", check_count("level", self.level, 1, 9))


@dataclass(frozen=True)
class PicklesResult:
    """The result of ``export_pickles``.

    Attributes:
        order: "shuffled" or "original".
        positions: Number of positions in the pickles.
        files: Number of pickles.
        bytes: Size of all files together.
        resumed: Number of files that this run did not write again, because an interrupted run had written
            them, or because they were intact in a damaged export.
        already_done: The store already had this export, undamaged, and nothing was written.
    """

    order: str
    positions: int
    files: int
    bytes: int
    resumed: int
    already_done: bool = False


def export_pickles(
    store: str | AnyPath,
    options: PicklesOptions | None = None,
    progress: Progress = SILENT,
    *,
    engine: Engine = LOCAL,
) -> PicklesResult:
    """Write a store's positions as legacy pickles to ``pickles/original`` or ``pickles/shuffled``.

    In the original order, each accepted example equals the example of its source, field for field. The same
    store gives the same bytes. Pickles of an earlier state of the store are replaced. A store can have
    pickles in both orders at the same time.

    Args:
        store: Folder of the store, or its address in an object store.
        options: Options of the export. Default None: ``PicklesOptions()``.
        progress: Receives progress reports and notes. Default: ignores them.
        engine: Runs the tasks that write files. Default: processes on this machine.

    Returns:
        Counts and sizes of the pickles in the store.

    Raises:
        ConfigError: An argument has the wrong type.
        StoreError: There is no store, it is damaged, it has no shuffle (for the order "shuffled"), or
            another process writes to it.
        InputError: A source has content that cannot be written as a pickle; the message names it.
        BudgetError: The workers do not fit into the memory, or the disk is full.
        EngineError: A machine of ``engine`` differs from this one or cannot access the store.
    """
    settings = check_options(options, PicklesOptions)
    stage = f"pickles-{settings.order}"
    with exporting(store, stage, settings, progress, engine) as run:
        if not run.is_done:
            opened, folders, list_files = run.store, ("sources", "games", "positions"), _original_files
            if settings.order == "shuffled":
                require_buckets(opened)
                folders, list_files = ("sources", "games", "shuffled"), _shuffled_files
            # Once before any worker starts, so that no file is made from damaged ones.
            require_intact(opened, folders, run.progress)
            listed = list_files(opened, settings.level)
            files = {f"pickles/{settings.order}/{name}": file for name, file in listed}
            # Most of the time is for gzip.
            run.write(files, run.resume(files, run.published), seconds_per_position=1e-4)
            run.publish({"files": sum(name.endswith(PICKLE_SUFFIX) for name in files)})
    lineage = run.store.manifest.stages[stage]
    return PicklesResult(
        settings.order, lineage["positions"], lineage["files"], run.bytes, run.resumed, run.is_done
    )


_WRITER_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that the pickle writer raises on headers and metadata that ``convert`` never writes."""


def _write_pickle(
    path: AnyPath, *, batches: Callable[[], Iterator[pa.RecordBatch]], **arguments: Any
) -> FileFacts:
    """Write a pickle of the rows that ``batches`` returns. Other arguments: see ``write_legacy``."""
    try:
        # The file gets its name when it is complete and synced, so that
        # a killed worker leaves nothing under it.
        with storage_of(path).publish(replace=False) as file:
            count = write_legacy(file, batches(), **arguments)
            return FileFacts.of(file, count)
    except HexdataError as error:
        # A worker writes many files; the message names this one.
        raise error.at(path) from None
    except _WRITER_ERRORS as error:
        reason = "the store's description of a source cannot be written as a pickle"
        found = shortened(f"{type(error).__name__}: {error}")
        raise StoreError(reason, path=path, found=found, hint=VERIFY_HINT) from error


# --- one pickle per source ----------------------------------------------------------------------------


def _original_files(store: Store, level: int) -> Iterator[tuple[str, ExportFile]]:
    """Yield the file of each source that was not rejected as a whole."""
    # A file that could not be read has no examples, and its format is not known.
    sources = [source for source in list_originals(store) if source.format != "unknown"]
    for source, name in zip(sources, pickle_names(sources), strict=True):
        header = source.header
        if source.is_raw:  # the top-level keys that the legacy tool would write for its file
            statistics = {
                "file_path": source.name,
                "all_games": source.games + source.records - source.positions,
                "valid_games": source.games,
                "skipped_games": source.records - source.positions,
                "examples_generated": source.positions,
                "file_error": None,
            }
            header = {"source_file": source.name, "processing_stats": statistics, "processed_at": NO_TIME}
        write = partial(
            _write_pickle,
            # Legacy examples contain their masks.
            batches=partial(source.batches, masked=not source.is_raw),
            board_size=source.board_size or 0,
            dialect=source.dialect,
            header=header,
            all_metadata=source.is_raw,
            level=level,
        )
        yield name, ExportFile(source.positions, write)


# --- one pickle per bucket ----------------------------------------------------------------------------

_TEXTS: Final = pa.dictionary(pa.int32(), pa.string())
_GAMES: Final = pa.schema([("source_id", pa.int32()), ("winner", _TEXTS), ("origin", _TEXTS)])
"""The columns that are loaded of every game of the store. A row has 12 bytes."""


def _shuffled_files(store: Store, level: int) -> Iterator[tuple[str, ExportFile]]:
    """Yield the file of each bucket, and the progress file of each split."""
    manifest = store.manifest
    assert manifest.board_size is not None
    # A source without positions has no range of ids, by which the source of a position is found.
    sources = [source for source in list_originals(store) if source.positions]
    names = [source.name for source in sources]
    origins = [_encodable(source.header.get("source_file")) or source.name for source in sources]
    # Dict examples have no weight, so that masked policies are left out; see without_masked_policies.
    masked = ["policy_weight"] if "policy_weight" in manifest.targets_of("shuffled") else []
    for split in SPLITS:
        buckets = manifest.files_in(f"shuffled/{split}")
        for number, (name, facts) in enumerate(buckets.items()):
            statistics = {
                "num_buckets": len(buckets),
                "bucket_id": number,
                "total_examples": facts.rows,
                "shuffled_at": NO_TIME,
                "source_files": names,
            }
            batches = partial(
                _shuffled_batches,
                # Absolute, since a worker may have another current folder.
                bucket=(store.path / name).resolve(),
                columns=positions_schema(manifest.board_size, masked),
                all_games=store.rows("games"),
                origins=pa.array(origins, pa.string()),
                ends=np.cumsum([source.positions for source in sources]),
            )
            write = partial(
                _write_pickle,
                batches=batches,
                board_size=manifest.board_size,
                dialect=_SHUFFLED_DIALECT,
                header={"shuffling_stats": statistics},
                level=level,
            )
            yield f"{split}/shuffled_{number:04d}{PICKLE_SUFFIX}", ExportFile(facts.rows, write)
        if buckets:  # the progress file that a complete run of the legacy shuffle leaves beside its buckets
            progress = {
                "started_at": NO_TIME,
                "last_updated": NO_TIME,
                "processed_files": names,
                "completed_buckets": list(range(len(buckets))),
                "current_phase": "completed",
                "stats": {
                    "files_processed": len(names),
                    "total_examples": sum(facts.rows for facts in buckets.values()),
                    "buckets_completed": len(buckets),
                    "start_time": 0,
                },
            }
            data = json.dumps(progress, indent=2).encode("ascii")
            yield f"{split}/{PROGRESS_NAME}", ExportFile(0, partial(write_bytes, data=data, replace=False))


def _shuffled_batches(
    *,
    bucket: AnyPath,
    columns: pa.Schema,
    all_games: ParquetRows,
    origins: pa.Array,
    ends: npt.NDArray[np.int64],
) -> Iterator[pa.RecordBatch]:
    """Yield a bucket as ``raw_schema``, in the convention of dict files: value 0.0 is a win of blue.

    Args:
        bucket: Path of the bucket.
        columns: Its columns that are read.
        all_games: The games of the whole store.
        origins: Name of the raw file of each source with positions.
        ends: Last position_id + 1 of each of these sources.
    """
    schema = pa.schema([games_schema().field(name) for name in _GAMES.names])
    parts = [part.cast(_GAMES) for part in read_rows(all_games, schema)]
    # Each part has a dictionary of its own; a single array is needed to take rows from.
    games = pa.Table.from_batches(parts, _GAMES).unify_dictionaries().combine_chunks()
    owners, first = games["source_id"].to_numpy(), 0
    with open_parquet(bucket, columns) as file:
        for batch in read_batches(file, columns):
            check_positions(batch, bucket, first, games.num_rows)
            first += batch.num_rows
            stored = without_masked_policies(batch)
            game_id = stored.column("game_id")
            game = games.take(game_id).combine_chunks()
            source_id, winner, origin = (column.combine_chunks() for column in game.columns)
            # The number of a game in its source, from 1. Sources ascend with games: each has a range of them.
            number = game_id.fill_null(0).to_numpy() - np.searchsorted(owners, source_id.fill_null(0)) + 1
            # Position ids ascend with sources, so the first end above an id is that of its source.
            source = np.searchsorted(ends, stored.column("position_id"), side="right")
            # The raw file that the game states, else the metadata, else the source.
            stated = _named_origins(stored.column("metadata"))
            raw_files = pc.coalesce(origin.cast(pa.string()), stated, origins.take(pa.array(source)))
            raw_files = raw_files.dictionary_encode()
            # One text for each raw file instead of one for each position.
            texts = [json.dumps({"original_source": name}) for name in raw_files.dictionary.to_pylist()]
            values = {
                "file_idx": source_id,
                "line_idx": pa.array(number, mask=game_id.is_null().to_numpy(zero_copy_only=False)),
                "winner": pc.coalesce(stored.column("winner").cast(pa.string()), winner.cast(pa.string())),
                "metadata": pa.array(texts, pa.string()).take(raw_files.indices),
            }
            yield stored_to_raw(stored, values)


def _named_origins(metadata: pa.Array) -> pa.Array:
    """Return the raw file that ``metadata`` names, or null where it names none."""
    # Texts without these keys need not be parsed.
    named = pc.match_substring_regex(metadata, '"(source_file|original_source)":').fill_null(False)
    texts = pc.if_else(named, metadata, None).dictionary_encode()
    origins = []
    for text in texts.dictionary.to_pylist():
        stated = read_metadata(text, None, "metadata of a position")
        origins.append(_encodable(stated.get("original_source")) or _encodable(stated.get("source_file")))
    return pa.array(origins, pa.string()).take(texts.indices)


def _encodable(name: object) -> str | None:
    """Return ``name`` as text that UTF-8 can encode, like the names of sources, or None if it is no text."""
    return encodable(name) if isinstance(name, str) else None
