"""Export of a store's positions as legacy pickles, as their original files or as shuffled files.

The export does not change the tables of the store. Each file is written by one task that depends on its
arguments and the store only, so the bytes do not depend on the number of workers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.cards import write_cards
from hexdata.checks import check_choice, check_fields, check_options
from hexdata.engine import LOCAL, Engine
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.export.run import ExportRun, ReplacingOptions
from hexdata.formats.legacy import DIALECTS, write_legacy
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, positions_schema, raw_schema
from hexdata.shards.position_check import check_positions
from hexdata.storage import AnyPath, storage_of
from hexdata.store import Store
from hexdata.store.commands import RunRecord
from hexdata.store.files import FileFacts
from hexdata.store.integrity import require_buckets
from hexdata.store.journal import journaled
from hexdata.store.originals import PICKLE_SUFFIX, WINNERS, Original, list_originals, pickle_names
from hexdata.store.parquet import ParquetRows, read_rows
from hexdata.strict_json import parse_metadata, shortened
from hexdata.text import encodable

__all__ = ["ORDERS", "PicklesOptions", "PicklesResult", "export_pickles"]

ORDERS: Final = ("shuffled", "original")

PROGRESS_NAME: Final = "shuffling_progress.json"
"""The legacy loader reads ``shuffled_*.pkl.gz`` only from a folder that contains this file."""

_INPUTS: Final = {"original": ("sources", "games", "positions"), "shuffled": ("sources", "games", "shuffled")}
"""The folders that an export reads, by order."""

NO_TIME: Final = "1970-01-01T00:00:00"
"""Value of all times in the pickles, such as ``shuffled_at``, because the store contains no times."""

_SHUFFLED_DIALECT: Final = {
    **DIALECTS["dicts-player"],
    "metadata_keys": [
        *("game_id", "position_in_game", "total_positions", "value_sample_tier", "winner"),
        "original_source",
    ],
}


@dataclass(frozen=True)
class PicklesOptions(ReplacingOptions):
    """Options of ``export_pickles``.

    Attributes:
        order: "shuffled", the default, for one file per bucket of the shuffle, or "original" for one file
            per source.
        workers: Number of processes. Default None: 1 for little data, else one per core, as far as ``memory``
            allows.
        memory: Memory limit in bytes for all processes together. Default 1 GB.
        level: Compression level of gzip, 1 to 9. Default 6.
        replace: Whether to remove the present pickles of the store before the new ones are written, to save
            disk space. Default False: they are replaced when all new files are complete.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int] = 250 << 20

    order: str = "shuffled"
    level: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("order", self.order, ORDERS)
        check_fields(self, {"level": 1})
        if self.level > 9:
            raise ConfigError("level cannot be used", found=self.level, expected="an integer, 1 to 9")


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
    target = Store.open(store, shares_work=engine.machines.separate)
    stage = f"pickles-{settings.order}"
    with target.writing(stage, RunRecord.of(settings)), journaled(target.path, stage) as journal:
        if settings.order == "shuffled":
            target.require_stage("shuffle")
        engine.require([], target.path)
        resumed, already_done = _PickleExport(target, settings, progress, engine).run()
        write_cards(target)
        files = target.manifest.files_in(f"pickles/{settings.order}")
        result = PicklesResult(
            order=settings.order,
            positions=sum(facts.rows for facts in files.values()),
            files=_count_pickles(files),
            bytes=sum(facts.bytes for facts in files.values()),
            resumed=resumed,
            already_done=already_done,
        )
        if not already_done:
            journal.finish(positions=result.positions, bytes=result.bytes, resumed=resumed > 0)
        return result


_WRITER_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that the pickle writer raises on headers and metadata that ``convert`` never writes."""


class _PickleFile(ABC):
    """A file of the export: a pickle, or the progress file beside it."""

    positions: int

    def write(self, path: AnyPath) -> FileFacts:
        """Write the file and return its size and digest."""
        try:
            return self.write_content(path)
        except HexdataError as error:
            raise error.at(path) from None
        except _WRITER_ERRORS as error:
            raise StoreError(
                "the store's description of a source cannot be written as a pickle",
                path=path,
                found=shortened(f"{type(error).__name__}: {error}"),
                expected="headers and metadata as `hexdata convert` writes them",
                hint="Run `hexdata verify` to list the damaged files.",
            ) from error

    @abstractmethod
    def write_content(self, path: AnyPath) -> FileFacts: ...


@dataclass(frozen=True)
class _OriginalFile(_PickleFile):
    """The pickle of one source."""

    source: Original
    positions: int
    level: int

    def write_content(self, path: AnyPath) -> FileFacts:
        source = self.source
        with storage_of(path).publish(replace=False) as file:
            count = write_legacy(
                file,  # type: ignore[arg-type]
                source.batches(partial(check_positions, games=sum(rows for _, rows in source.game_parts))),
                board_size=source.board_size or 0,
                dialect=source.dialect,
                header=_processed_header(source) if source.is_raw else source.header,
                all_metadata=source.is_raw,
                level=self.level,
            )
            return FileFacts.of(file, count)


def _processed_header(source: Original) -> dict[str, object]:
    """Return the top-level keys, except ``examples``, that the legacy tool would write for a raw source."""
    return {
        "source_file": source.name,
        "processing_stats": {
            "file_path": source.name,
            "all_games": source.games + source.records - source.positions,
            "valid_games": source.games,
            "skipped_games": source.records - source.positions,
            "examples_generated": source.positions,
            "file_error": None,
        },
        "processed_at": NO_TIME,
    }


@dataclass(frozen=True)
class _ShuffledFile(_PickleFile):
    """The pickle of one bucket."""

    bucket: AnyPath
    positions: int
    level: int
    number: int
    buckets: int
    """Number of buckets of the split."""
    board_size: int
    games: tuple[AnyPath, ...]
    """The parts of the table games."""
    sources: pa.Table
    """The sources with positions: ``name``, ``origin``, and ``end``, their last position_id + 1."""

    def write_content(self, path: AnyPath) -> FileFacts:
        header = {
            "shuffling_stats": {
                "num_buckets": self.buckets,
                "bucket_id": self.number,
                "total_examples": self.positions,
                "shuffled_at": NO_TIME,
                "source_files": self.sources["name"].to_pylist(),
            }
        }
        with storage_of(path).publish(replace=False) as file:
            count = write_legacy(
                file,  # type: ignore[arg-type]
                self._batches(),
                board_size=self.board_size,
                dialect=_SHUFFLED_DIALECT,
                header=header,
                level=self.level,
            )
            return FileFacts.of(file, count)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the bucket as ``raw_schema``, in the convention of dict files: value 0.0 is a win of blue."""
        games = self._games()
        rows = ParquetRows(((self.bucket, self.positions),), 0, self.positions)
        row = 0
        for batch in read_rows(rows, positions_schema(self.board_size)):
            check_positions(batch, self.bucket, row, games.num_rows)
            row += batch.num_rows
            yield self._raw(batch, games)

    def _games(self) -> pa.Table:
        """Return the games with the schema ``_GAMES``; row i is the game with id i. A row has 12 bytes."""
        listed = []
        for path in self.games:
            with storage_of(path).open() as file:
                part = pq.read_table(file, columns=_GAMES.names, read_dictionary=["winner", "origin"])
            listed.append(part.cast(_GAMES))
        return pa.concat_tables([_GAMES.empty_table(), *listed]).unify_dictionaries().combine_chunks()

    def _raw(self, stored: pa.RecordBatch, games: pa.Table) -> pa.RecordBatch:
        schema = raw_schema(self.board_size)
        game = games.take(stored.column("game_id")).combine_chunks()
        columns = {name: stored.column(name) for name in schema.names if name in stored.schema.names}
        columns |= {
            "record": stored.column("position_id"),
            "value": stored.column("value").cast(pa.float64()),
            "file_idx": game["source_id"].combine_chunks(),
            "line_idx": _number_in_source(stored.column("game_id"), games),
            "winner": pc.index_in(
                pc.coalesce(stored.column("winner").cast(pa.string()), _text(game, "winner")),
                pa.array(WINNERS),
            ),
            **{
                name: pa.nulls(stored.num_rows, schema.field(name).type)
                for name in ("origin", "end_reason", "swap")
            },
            "metadata": self._metadata(stored, _text(game, "origin")),
        }
        return pa.RecordBatch.from_arrays([columns[f.name].cast(f.type) for f in schema], schema=schema)

    def _metadata(self, stored: pa.RecordBatch, of_game: pa.Array) -> pa.Array:
        """Return ``original_source`` as JSON: the raw file stated by the game, else metadata, else source."""
        source = np.searchsorted(self.sources["end"], stored.column("position_id"), side="right")
        if len(source) and source.max() >= self.sources.num_rows:
            raise StoreError(
                "the sources have fewer positions than the store",
                path=self.bucket,
                found=f"position {stored.column('position_id')[int(source.argmax())]}",
                hint="Run `hexdata verify` to list the damaged files.",
            )
        of_source = self.sources["origin"].combine_chunks().take(pa.array(source))
        origin = pc.coalesce(
            of_game, _named_origins(stored.column("metadata")), of_source
        ).dictionary_encode()
        texts = [json.dumps({"original_source": name}) for name in origin.dictionary.to_pylist()]
        return pa.array(texts, pa.string()).take(origin.indices)


@dataclass(frozen=True)
class _ProgressFile(_PickleFile):
    """The progress file that a complete run of the legacy shuffle writes beside its buckets."""

    buckets: int
    examples: int
    sources: tuple[str, ...]
    positions: int = 0

    def write_content(self, path: AnyPath) -> FileFacts:
        content = {
            "started_at": NO_TIME,
            "last_updated": NO_TIME,
            "processed_files": self.sources,
            "completed_buckets": list(range(self.buckets)),
            "current_phase": "completed",
            "stats": {
                "files_processed": len(self.sources),
                "total_examples": self.examples,
                "buckets_completed": self.buckets,
                "start_time": 0,
            },
        }
        with storage_of(path).publish(replace=False) as file:
            file.write(json.dumps(content, indent=2).encode("ascii"))
            return FileFacts.of(file, 0)


_TEXTS: Final = pa.dictionary(pa.int32(), pa.string())
_GAMES: Final = pa.schema([("source_id", pa.int32()), ("winner", _TEXTS), ("origin", _TEXTS)])
"""The columns that are loaded of every game of the store."""


def _text(game: pa.Table, name: str) -> pa.Array:
    return game[name].combine_chunks().cast(pa.string())


def _number_in_source(game_id: pa.Array, games: pa.Table) -> pa.Array:
    """Return the number of each game within its source, from 1; null where ``game_id`` is null."""
    owner = games["source_id"].to_numpy()
    ids = game_id.fill_null(0).to_numpy()
    owned = owner[ids] if len(owner) else ids
    first = np.searchsorted(owner, owned)  # sources ascend with games, so the games of one are a range
    return pa.array(ids - first + 1, mask=game_id.is_null().to_numpy(zero_copy_only=False))


def _named_origins(metadata: pa.Array) -> pa.Array:
    """Return the raw file that ``metadata`` names, or null where it names none."""
    named = pc.match_substring_regex(metadata, '"(source_file|original_source)":').fill_null(False)
    texts = pc.if_else(named, metadata, None).dictionary_encode()
    origins = [
        _named_origin(parse_metadata(text, None, "metadata of a position"))
        for text in texts.dictionary.to_pylist()
    ]
    return pa.array(origins, pa.string()).take(texts.indices)


def _named_origin(metadata: dict[str, Any]) -> str | None:
    named = [_encodable(metadata.get(key)) for key in ("original_source", "source_file")]
    return named[0] or named[1]


def _encodable(name: object) -> str | None:
    """Return ``name`` as text that UTF-8 can encode, like the names of sources, or None if it is no text."""
    return encodable(name) if isinstance(name, str) else None


class _PickleExport(ExportRun):
    """One run of ``export_pickles``."""

    ENTRY = FileFacts
    seconds_per_position = 1e-4  # most of it for gzip
    PLAN = ("order", "level")

    options: PicklesOptions

    def __init__(self, store: Store, options: PicklesOptions, progress: Progress, engine: Engine) -> None:
        super().__init__(store, options, progress, engine)
        self.stage = f"pickles-{options.order}"
        self.folder = f"pickles/{options.order}"
        self.inputs = _INPUTS[options.order]

    def find_damage(self) -> dict[str, StoreError]:
        damage = super().find_damage()
        if self.options.order == "shuffled":  # an export of an earlier release lacks these files
            splits = {name.split("/")[1] for name in self.store.manifest.buckets()}
            names = {f"{self.folder}/{split}/{PROGRESS_NAME}" for split in splits}
            for name in names - self.store.manifest.files.keys():
                damage[name] = StoreError("the file is missing", path=self.store.path / name)
        return damage

    def require_inputs(self, plan: Mapping[str, Any], damage: Mapping[str, StoreError] | None) -> None:
        if self.options.order == "shuffled":
            require_buckets(self.store)
        super().require_inputs(plan, damage)

    def list_files(self) -> Mapping[str, _PickleFile]:
        return self._shuffled_files() if self.options.order == "shuffled" else self._original_files()

    def _original_files(self) -> dict[str, _PickleFile]:
        """Return the file of each source that was not rejected as a whole."""
        sources = [source for source in list_originals(self.store) if source.format != "unknown"]
        names = pickle_names(sources)
        return {
            f"{self.folder}/{name}": _OriginalFile(source, source.positions, self.options.level)
            for source, name in zip(sources, names, strict=True)
        }

    def _shuffled_files(self) -> dict[str, _PickleFile]:
        manifest = self.store.manifest
        assert manifest.board_size is not None
        sources = _source_table([s for s in list_originals(self.store) if s.positions])
        files: dict[str, _PickleFile] = {}
        for split in SPLITS:
            buckets = manifest.files_in(f"shuffled/{split}")
            for number, (name, facts) in enumerate(buckets.items()):
                files[f"{self.folder}/{split}/shuffled_{number:04d}{PICKLE_SUFFIX}"] = _ShuffledFile(
                    bucket=(self.store.path / name).resolve(),
                    positions=facts.rows,
                    level=self.options.level,
                    number=number,
                    buckets=len(buckets),
                    board_size=manifest.board_size,
                    games=tuple(self.store.files("games")),
                    sources=sources,
                )
            if buckets:
                files[f"{self.folder}/{split}/{PROGRESS_NAME}"] = _ProgressFile(
                    len(buckets),
                    sum(facts.rows for facts in buckets.values()),
                    tuple(sources["name"].to_pylist()),
                )
        return files

    def complete(self, entries: Mapping[str, FileFacts]) -> tuple[dict[str, FileFacts], dict[str, Any]]:
        found = sum(facts.rows for facts in entries.values())
        manifest = self.store.manifest
        if self.options.order == "shuffled":
            inputs, expected = "shuffle", sum(facts.rows for facts in manifest.files_in("shuffled").values())
        else:
            inputs, expected = "store", manifest.counts.get("positions", 0)
        if found != expected:
            raise StoreError(
                f"the pickles do not contain every position of the {inputs}",
                path=self.store.path,
                found=f"{found:,} positions",
                expected=f"{expected:,} positions",
                hint="Run `hexdata verify` to list the damaged files.",
            )
        return {}, {"files": _count_pickles(entries)}


def _count_pickles(names: Iterable[str]) -> int:
    """Return the number of pickles among the files of an export."""
    return sum(name.endswith(PICKLE_SUFFIX) for name in names)


def _source_table(sources: list[Original]) -> pa.Table:
    """Return the table of sources for ``_ShuffledFile.sources``."""
    origins = [_encodable(source.header.get("source_file")) or source.name for source in sources]
    return pa.table(
        {
            "name": pa.array([source.name for source in sources], pa.string()),
            "origin": pa.array(origins, pa.string()),
            "end": np.cumsum([source.positions for source in sources], dtype=np.int64),
        }
    )
