"""The first pass over the sources: decodes each once, from start to end, into spools.

A worker reads a batch of sources. Sources of a few thousand records are held in memory until they are
complete, and share a spool, since the costs of a spool do not depend on its size. A larger or a shuffled
source has a spool of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from itertools import chain
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from hexdata.convert.inputs import has_same_bytes, require_answer, source_version
from hexdata.convert.options import ConvertOptions
from hexdata.convert.report import notes_of_header
from hexdata.convert.spool import (
    REJECTED,
    Source,
    Spool,
    SpoolFacts,
    load_facts,
    save_facts,
    write_arrow,
    write_rejected,
)
from hexdata.convert.targets import NumberCounter
from hexdata.errors import FormatError, HexdataError, Reason, SourceChangedError
from hexdata.formats import BATCH_ROWS, GAME_FORMATS, RawBatch, Rejection, SourceReader, open_source
from hexdata.formats.run_header import date_of_name
from hexdata.games.convention import layout_convention
from hexdata.games.find import CUT_OFF, EVIDENCE, GAMES, ROWS, Grouping, find_games, grouping_of, is_mixed
from hexdata.games.findings import column, count_votes, with_findings
from hexdata.schema import board_size_of, is_legacy_format
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.text import encodable, shortened

_JOINED_ROWS: Final = 3 * BATCH_ROWS
"""Batches are joined until they have this many rows. A source with fewer records is small."""
_JOINED_BYTES: Final = 8 << 20
"""Batches are joined up to about this many bytes, since metadata may be long. So are headers."""
_COMMON_HEADER: Final = 4096
"""Characters up to which a header may be one of many files."""
_GIVEN: Final = ("salvage", "format", "variations", "alphazero_convention")
"""Options of a run that are options of readers."""
_FILLED: Final = {"player_to_move", "position_in_game", "total_positions"}
"""Columns whose stored value may differ from the source's: nulls are filled in, wrong numbers dropped."""
_RUN: Final = {
    "model": (str,),
    "simulations": (int,),
    "temperature": (int, float),
    "seed": (int,),
    "commit": (str,),
}
"""Columns of sources that a reader states under the key ``run`` of the header, with their types."""

MAX_SURPLUS_REJECTED: Final = 100_000
"""``limit-rejected``: a file may have this many more rejected records than positions."""


def read_sources(files: Sequence[Source], folder: AnyPath, options: ConvertOptions) -> list[SpoolFacts]:
    """Read the sources of a batch into spools, unless intact ones exist.

    A file that cannot be decoded raises no error: its facts state the ``failure``. The headers are in the
    table ``headers`` of the folder, one row per source.

    Args:
        files: The sources with their digests.
        folder: Folder of the batch, whose name is the digest of the files and of what options change.
        options: Options of the run.

    Returns:
        The facts of each source; only the board size if it is not the requested one.

    Raises:
        SourceChangedError: A source has changed since it was digested.
        InputError: The disk fails to read a source.
        StoreError: An object store does not answer, or the facts of an existing batch are damaged.
        OSError: A spool cannot be written.
    """
    facts = load_facts(folder)
    if facts is None:
        # Without facts, the folder is that of a run that was killed, or its files are damaged.
        storage_of(folder).remove_tree()
        with (
            _Spools(folder, options) as spools,
            write_arrow(folder / "headers.arrow", pa.schema([("header", pa.string())])) as writer,
        ):
            facts, headers, size = [], [], 0
            for file in files:
                own, header = spools.read(file)
                facts.append(own)
                headers.append(header)
                size += len(header)
                if size > _JOINED_BYTES or len(facts) == len(files):
                    writer.write_batch(pa.record_batch({"header": pa.array(headers, pa.string())}))
                    headers, size = [], 0
        # An unreadable file may be readable in the next run.
        if all(each.failure is None or each.failure[0] != Reason.UNREADABLE for each in facts):
            save_facts(folder, facts)
    return facts


_Kind = tuple[int, Grouping, str, tuple[str, ...]]
"""The common facts of the sources of a spool: board size, way to find games, format and declared columns."""


@dataclass
class _Reading:
    """A source that is being read. Its facts are complete when its records have ended."""

    file: Source
    options: ConvertOptions
    facts: SpoolFacts = field(default_factory=SpoolFacts)
    header: str = "{}"
    with_ply: int = 0
    """Number of positions that state their ply."""

    @property
    def is_held(self) -> bool:
        """Whether the bytes that are read are certainly those that were digested."""
        file = self.file
        is_alone = file.beside is None and file.part is None
        return file.content is not None and is_alone and self.facts.format in GAME_FORMATS

    @property
    def other_size(self) -> int | None:
        """Its board size if it is not the requested one; None if it is, or if its size is unknown."""
        facts, wanted = self.facts, self.options.board_size
        size = facts.board_size
        if 0 < facts.other_sizes == facts.records:  # if others were rejected, they may have the wanted size
            size = int(max(facts.sizes, key=facts.sizes.__getitem__))
        return None if wanted in (None, size) else size

    @property
    def kind(self) -> _Kind | None:
        """The facts that the other sources of its spool must share; None without positions."""
        facts = self.facts
        if not (facts.board_size and facts.positions):
            return None
        grouping = grouping_of(facts.format, facts.mixed, facts.with_id, self.with_ply)
        return facts.board_size, grouping, facts.format, facts.declared

    def records(self) -> Iterator[tuple[RawBatch, float]]:
        """Yield batches of records, and the size of each as a share of a large source.

        Raises:
            FormatError: The source cannot be read, or has another board size.
            InputError: The disk failed, so nothing is known about the source.
            StoreError: An object store does not answer, so nothing is known about the source.
        """
        file, facts, options, numbers = self.file, self.facts, self.options, NumberCounter()
        try:
            given = {name: getattr(options, name) for name in _GIVEN}
            given |= {"part": file.part, "content": file.content, "has_sidecar": file.beside is not None}
            with open_source(file.path, **given) as reader:
                if options.board_size is not None:
                    reader.select_board_size(options.board_size)
                for batch in reader.batches():
                    facts.reject(batch.rejected)
                    rows = batch.rows
                    facts.positions += rows
                    facts.records += rows + len(batch.rejected)
                    if rows:
                        facts.with_id += batch.stated("line_idx")
                        self.with_ply += batch.stated("position_in_game")
                        if is_legacy_format(reader.format):
                            numbers.add(batch.positions.column("metadata"))
                    if facts.rejected - facts.other_sizes > facts.positions + MAX_SURPLUS_REJECTED:
                        last, counts = batch.rejected[-1], f"{facts.rejected:,} of {facts.records:,}"
                        raise FormatError(
                            "far more records rejected than accepted; probably not a file of positions",
                            code=Reason.LIMIT_REJECTED,
                            found=f"{counts}, the last one for {last.reason} ({last.detail})",
                        )
                    yield batch, max(batch.records / _JOINED_ROWS, batch.nbytes / _JOINED_BYTES)
            if reader.damage is not None:
                yield _damage(reader.damage, facts), 0
            self.header = _describe(reader, facts, numbers, file.name)
        except FormatError:
            raise
        except OSError as error:
            require_answer(file.path, error)
            found = error.strerror or str(error)
            raise FormatError("cannot be read", code=Reason.UNREADABLE, found=found) from error
        except (HexdataError, MemoryError) as error:  # they do not concern the file
            error.add_note(f"while reading {file.path}")
            raise
        except Exception as error:  # a defect of a reader
            record = f"record {facts.records:,} or one of the {BATCH_ROWS:,} after it"
            reason, found = f"its reader failed: {type(error).__name__}", shortened(str(error))
            raise FormatError(reason, code=Reason.READER_ERROR, record=record, found=found) from error
        if self.other_size is not None:
            raise FormatError("the boards have another size", code=Reason.BOARD_SIZE)


class _Spools:
    """Writes the spools of a batch: one for a large source, and one for consecutive small ones of a kind."""

    def __init__(self, folder: AnyPath, options: ConvertOptions) -> None:
        self._folder = folder
        self._options = options
        self._count = 0
        self._open: _SpoolWriter | None = None
        """The spool to which the next small source may be added."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open is not None:
            self._open.__exit__(*error)
        self._open = None

    def read(self, file: Source) -> tuple[SpoolFacts, str]:
        """Read a source; return its facts, which are complete when its spool is written, and its header.

        Raises:
            SourceChangedError: The source has another version than the one that was digested.
        """
        source = _Reading(file, self._options)
        failure: FormatError | None = None
        try:
            self._add(source)
        except FormatError as error:
            failure = error
        # Before the failure: a file of another size is left out whether it is damaged or not.
        if source.other_size is not None:
            return SpoolFacts(board_size=source.other_size), "{}"
        if not source.is_held:
            with translate_errors():
                version = source_version(file.path, file.beside)
                # A missing source has raised an error already. One that failed may have been incomplete.
                is_same = version in ((), file.version) or (not failure and has_same_bytes(file, version))
            if not is_same:
                hint = "Run the command again when no process writes to the file."
                raise SourceChangedError(
                    "this source changed while it was being converted", path=file.path, hint=hint
                )
        if failure is not None:
            detail = ". ".join(filter(None, (failure.detail(), failure.hint)))
            return SpoolFacts.failed(failure.code, detail), "{}"
        return source.facts, source.header

    def _add(self, source: _Reading) -> None:
        """Add the records of a source. If they end with an error, nothing is added."""
        records, head, total = source.records(), list[tuple[RawBatch, float]](), 0.0
        for batch, size in records:
            head.append((batch, size))
            total += size
            if total >= 1:
                self._finish()
                with self._writer() as writer:
                    writer.add(source, chain(head, records))
                return
        # The games of a spool are found together, and nothing else may be in one of a collection. A source
        # without positions fits all.
        kind, is_mixed = source.kind, source.facts.mixed
        others = self._open and self._open.kind
        if is_mixed or not (None in (kind, others) or kind == others):
            self._finish()
        self._open = self._open or self._writer()
        self._open.add(source, head)
        if is_mixed:
            self._finish()

    def _writer(self) -> _SpoolWriter:
        """Return the writer of another spool."""
        self._count += 1
        spool = Spool(self._folder / f"{self._count - 1:06d}")
        return _SpoolWriter(spool, truncate=self._options.truncate_repeats)

    def _finish(self) -> None:
        """Finish the spool of the small sources, if there is one."""
        self.__exit__(None, None, None)


class _SpoolWriter:
    """Writes one spool: the records of its sources, then their games. After an error, nothing remains."""

    def __init__(self, spool: Spool, *, truncate: bool) -> None:
        self.kind: _Kind | None = None
        """The kind of its sources; None without positions."""
        self._spool = spool
        self._truncate = truncate
        self._files = ExitStack()
        self._sources: list[SpoolFacts] = []
        self._rejected = self._files.enter_context(write_arrow(spool.folder / "rejected.arrow", REJECTED))
        self._raw: pa.ipc.RecordBatchFileWriter | None = None
        self._pending: list[RawBatch] = []
        self._size = 0.0
        self._findings = [np.zeros(0, np.uint16)]

    def add(self, source: _Reading, batches: Iterable[tuple[RawBatch, float]]) -> None:
        """Write the records of a source, as of ``_Reading.records``."""
        for batch, size in batches:
            write_rejected(self._rejected, len(self._sources), batch.rejected)
            if batch.rows:
                self._pending.append(batch)
                self._size += size
            if self._size >= 1:
                self._write_pending()
        self._sources.append(source.facts)
        self.kind = self.kind or source.kind

    def _write_pending(self) -> None:
        """Write the positions of the pending batches together, since some steps cost the same for each."""
        joined = self._pending[0].join(self._pending)  # of the class of the batch, which may join games first
        positions = with_findings(joined, board_size_of(joined.schema.field("board").type.byte_width))
        if self._raw is None:
            path = self._spool.folder / "raw.arrow"
            self._raw = self._files.enter_context(write_arrow(path, positions.schema))
        self._raw.write_batch(positions)
        self._findings.append(positions.column("findings").to_numpy())
        self._pending, self._size = [], 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if any(error):
            self._files.__exit__(*error)
            storage_of(self._spool.folder).remove_tree()
            return
        with self._files:
            if self._pending:
                self._write_pending()
        self._find_games()

    def _find_games(self) -> None:
        """Find the games, and set the facts of the sources that depend on the whole spool."""
        spool, facts, found = self._spool, self._sources, np.concatenate(self._findings)
        sizes = [own.positions for own in facts]
        votes = count_votes(found, np.repeat(np.arange(len(sizes)), sizes), len(sizes), sound=False)
        for own, own_votes in zip(facts, votes, strict=True):
            own.spool, own.votes = spool.folder.name, own_votes
        if self.kind is None or facts[0].mixed:
            # The run finds the games of a collection, after its positions, one vote each, have decided.
            facts[0].ballots = count_votes(found)[0]
            return
        board_size, grouping, name, _ = self.kind
        with (
            write_arrow(spool.folder / "rows.arrow", ROWS) as rows,
            write_arrow(spool.folder / "games.arrow", GAMES) as games,
        ):
            raw, replayed = spool.batches("raw", EVIDENCE), name in GAME_FORMATS
            for _, own_rows, own_games in find_games(
                raw, board_size, grouping, sizes, replayed=replayed, truncate=self._truncate
            ):
                rows.write_table(own_rows)
                games.write_table(own_games)
        count_games(spool, facts)


def count_games(spool: Spool, sources: Sequence[SpoolFacts]) -> None:
    """Set the facts of the sources of a spool that depend on games, after ``rows`` has been written.

    The positions that are cut off become rejected records, which are written to ``cut``.
    """
    rows = pa.Table.from_batches(spool.batches("rows", ["game", "findings", "cut"]))
    game, found, cut = (column(rows, name, -1) for name in rows.column_names)
    source = np.repeat(np.arange(len(sources)), [facts.positions for facts in sources])
    is_cut, unknown = cut == CUT_OFF, game < 0
    keys, counts = np.unique(source[unknown] << 16 | found[unknown], return_counts=True)
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        sources[key >> 16].loose += ((key & 0xFFFF, count),)
    cuts = np.bincount(source[is_cut], minlength=len(sources)).tolist()
    detail = "the game was cut before a repeated move, as asked"
    # Of a collection also without any: a run that was killed, with more of its files, may have left others.
    if any(cuts) or sources[0].mixed:
        record = np.concatenate([column(batch, "record", -1) for batch in spool.batches("raw", ["record"])])
        rejected = [Rejection(number, Reason.AFTER_REPEAT, detail) for number in record[is_cut].tolist()]
        with write_arrow(spool.folder / "cut.arrow", REJECTED) as writer:
            write_rejected(writer, source[is_cut], rejected)
    for facts, count in zip(sources, cuts, strict=True):
        if count:
            facts.cut, facts.positions = count, facts.positions - count
            facts.rejected += count
            facts.reasons[Reason.AFTER_REPEAT] = (count, detail)
    if sources[0].mixed:  # its votes were counted by position, and one source of a collection has all games
        return
    # One vote for each game, in the source of its positions, and for each position of an unknown game.
    games = [column(batch, "findings", 0) for batch in spool.batches("games", ["findings"])]
    of_game = np.zeros(sum(map(len, games)), np.int64)
    of_game[game[~unknown]] = source[~unknown]
    bits, voting = np.concatenate([*games, found[unknown]]), np.concatenate([of_game, source[unknown]])
    numbers = np.bincount(of_game, minlength=len(sources)).tolist()
    for facts, votes, count in zip(sources, count_votes(bits, voting, len(sources)), numbers, strict=True):
        facts.ballots, facts.games = votes, count


def _damage(damage: FormatError, facts: SpoolFacts) -> RawBatch:
    """Return the damage of a source as one rejected record; raise it if no position precedes it."""
    if not facts.positions:
        raise damage
    rejection = Rejection(facts.records, damage.code, damage.detail())
    facts.damage = encodable(rejection.detail)
    facts.notes += (f"salvaged: the {facts.records:,} examples before the damage ({facts.damage})",)
    facts.reject([rejection])
    facts.records += 1
    return RawBatch(pa.RecordBatch.from_pydict({}), [rejection])


def _describe(reader: SourceReader, facts: SpoolFacts, numbers: NumberCounter, name: str) -> str:
    """Set the facts that are known when the source has been read; return its header as JSON text."""
    text = json.dumps(reader.header)
    facts.board_size, facts.format = reader.board_size, reader.format
    facts.declared = tuple(sorted(reader.targets))
    facts.header_bytes = len(text)
    before = facts.notes
    # Many small files have the same header.
    read = _facts_of_header if len(text) <= _COMMON_HEADER else _facts_of_header.__wrapped__
    for key, value in read(text, facts.format).items():
        setattr(facts, key, value)
    if "date" not in facts.run and (found := date_of_name(name)):
        facts.run = {**facts.run, "date": found}
    columns, facts.not_targets, notes = numbers.columns()
    facts.targets = tuple(sorted({*facts.declared, *columns}))
    facts.notes = (*before, *notes, *facts.notes)
    # The key that marks a shuffled file is at its end, which a damaged file has lost.
    facts.mixed |= facts.damage is not None and facts.with_id > 0 and is_legacy_format(facts.format)
    return text


@lru_cache(maxsize=64)
def _facts_of_header(text: str, kind: str) -> dict[str, Any]:
    """Return the facts that the header of a source of a format states, by name."""
    header: dict[str, Any] = json.loads(text)
    facts: dict[str, Any] = {"layout": layout_convention(header), "run": _run_of(header)}
    stats, shuffling = header.get("processing_stats"), header.get("shuffling_stats")
    if isinstance(stats, dict):
        keys = ("examples_generated", "valid_games")
        facts["stated"] = {key: stats[key] for key in keys if isinstance(stats.get(key), int)}
    # Files of one shuffle state the same number of buckets and the same raw files, in any order.
    if isinstance(shuffling, dict) and isinstance(shuffling.get("source_files"), list):
        shuffle = [shuffling.get("num_buckets"), sorted(map(str, shuffling["source_files"]))]
        facts["shuffle"] = hashlib.sha256(json.dumps(shuffle).encode("ascii")).hexdigest()
    if isinstance(header.get("source_file"), str):
        facts["raw_file"] = header["source_file"]
    facts["notes"] = () if is_legacy_format(kind) else tuple(notes_of_header(kind, header))
    # What the examples do not have need not be restored by an export.
    facts["filled"] = tuple(sorted(_FILLED & _keys_of(header)))
    if kind == "katahex":  # rows that state no game, but whose boards show it
        facts["filled"] = ("position_in_game", "total_positions")
    facts["mixed"] = is_mixed(kind, header)
    return facts


def _keys_of(header: Mapping[str, Any]) -> set[str]:
    """Return the keys of the examples of a legacy source and of their metadata.

    A null under one of these keys was written in the source; under any other key the value was absent.
    """
    dialect = header.get("dialect", {})
    keys = set()
    for name in ("keys", "metadata_keys"):
        spelling = dialect.get(name, [])
        for listed, _ in spelling["mixed"] if isinstance(spelling, dict) else [(spelling, 0)]:
            keys |= set(listed)
    return keys


def _run_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of sources that describe the run of self-play; values of other types are left out.

    The date is None if the header states several or none that is valid, and missing if it states none.
    """
    run, changes = header.get("run"), header.get("run_changes")
    run = dict(run) if isinstance(run, dict) else {}
    columns = {key: run[key] for key, kinds in _RUN.items() if type(run.get(key)) in kinds}
    # An integer of more bits has no column.
    columns = {k: v for k, v in columns.items() if not (isinstance(v, int) and v.bit_length() > 63)}
    if "date" in run or (isinstance(changes, dict) and "date" in changes):
        columns["date"] = None
        with suppress(KeyError, TypeError, ValueError):
            columns["date"] = date.fromisoformat(run["date"]).isoformat()
    return columns
