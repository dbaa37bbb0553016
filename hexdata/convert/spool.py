"""The first pass over a source: decodes it once, from start to end, into a spool, a folder of Arrow files.

The spool contains the source's own content. ``publish`` writes the tables of the store from it, after the run
has assigned the ids. A spool is complete when its ``facts.json`` exists.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa

from hexdata import __version__
from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.convert.inputs import require_answer
from hexdata.convert.targets import NumberCounter, check_declared, reject_invalid
from hexdata.convert.truncate import NO_CUT, Cuts, cut_games, cut_rows, find_cuts
from hexdata.errors import FormatError, HexdataError, Reason, SourceChangedError, StoreError
from hexdata.formats import (
    BATCH_ROWS,
    FilePart,
    RawBatch,
    Rejection,
    SizeSelectingReader,
    SourceReader,
    open_source,
)
from hexdata.formats.gunzip import is_gzip
from hexdata.games.convention import Votes
from hexdata.games.evidence import SourceEvidence, findings_schema, is_mixed, with_findings
from hexdata.games.find import EVIDENCE, GAMES, ROWS, find_games
from hexdata.games.findings import (
    count_findings_without_game,
    count_game_votes,
    findings_without_game,
    game_findings,
)
from hexdata.schema import GAME_FORMATS, is_legacy_format
from hexdata.storage import AnyPath, storage_of, translate_errors
from hexdata.store.files import digest_beginning, digest_file, read_bounded, write_bytes
from hexdata.strict_json import AtMost, Count, HexDigest, Matching, Within, check_value, parse_json
from hexdata.text import encodable

__all__ = [
    "REJECTED",
    "ReadOptions",
    "Spool",
    "SpoolFacts",
    "SpooledHeader",
    "compare_counts",
    "complete_spools",
    "read_header",
    "read_source",
    "write_arrow",
]

REJECTED: Final = pa.schema(
    [
        pa.field("record", pa.int64()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


FINDINGS: Final = pa.schema([pa.field("findings", pa.uint32(), nullable=False)])

_JOINED_ROWS: Final = 3 * BATCH_ROWS
"""Batches of a reader are joined until they have this many rows, since some steps cost the same per batch."""
_JOINED_BYTES: Final = 8 << 20
"""Batches are joined up to about this many bytes, since metadata may be long."""

_PASSED_ERRORS: Final = (HexdataError, OSError, MemoryError)
"""Errors that readers raise on purpose or that do not concern the file; any other is a defect of a reader."""
_MAX_MESSAGE: Final = 200
"""Maximum number of characters kept of the message of an unexpected error."""
_AFTER_REPEAT_DETAIL: Final = "the game was cut before a repeated move, as asked"

MAX_SURPLUS_REJECTED: Final = 100_000
"""``limit-rejected``: a file may have this many more rejected records than positions."""


@dataclass(frozen=True)
class ReadOptions:
    """The options of a run that change the content of a spool: those of ``ConvertOptions``."""

    salvage: bool = False
    truncate_repeats: bool = False
    board_size: Annotated[int, Within(MIN_SIZE, MAX_SIZE)] | None = None
    """If not None, a source of another size is not read to its end."""
    part: FilePart | None = None
    """The lines to read of a grown text; None to read the whole source."""


_TableName = Annotated[str, Matching("(?:cut/)?[a-z]{1,20}\\.arrow", "the name of a temporary table")]


@dataclass
class SpoolFacts:
    """The result of the first pass over a source. ``records`` is ``positions`` + ``rejected``."""

    version: str = __version__
    format: str = "unknown"
    board_size: Annotated[int, Within(MIN_SIZE, MAX_SIZE)] | None = None
    records: Count = 0
    positions: Count = 0
    rejected: Count = 0
    with_id: Count = 0
    """Number of positions whose metadata has the id of their game."""
    games: Count = 0
    mixed: bool = False
    """The source was shuffled, so neighbouring positions need not belong to one game."""
    failure: tuple[str, str] | None = None
    """Reason and detail of a file that was rejected as a whole, which counts as one record."""
    votes: Votes = field(default_factory=Votes)
    """Evidence for the convention of ``value``, one vote per position."""
    ballots: Votes = field(default_factory=Votes)
    """The votes that decide: one per sound game, and one per sound position of an unknown game."""
    header: Mapping[Any, Any] = field(default_factory=dict)
    header_bytes: Count = 0
    """Length of the header as JSON text."""
    notes: list[str] = field(default_factory=list)
    damage: tuple[str, str] | None = None
    """Code and detail of the damage, if the examples before it were salvaged."""
    other_sizes: Count = 0
    """Number of records rejected because of their board size, if the source usually has several sizes."""
    cut: Count = 0
    """Number of positions rejected after a repeated move, because truncation was requested."""
    loose: Annotated[list[Count], AtMost(32)] = field(default_factory=list)
    """Number of positions of unknown games with each finding, by bit."""
    reading: ReadOptions = field(default_factory=ReadOptions)
    declared: list[str] = field(default_factory=list)
    """The optional columns of positions that the reader gives."""
    seconds: Annotated[float, Within(0, 1 << 62)] = 0.0
    """Time that the pass took, for the log."""
    targets: list[str] = field(default_factory=list)
    """All optional columns of positions that the source can have, sorted."""
    not_targets: dict[str, str] = field(default_factory=dict)
    """The reason for each name whose numbers stay in the metadata only."""
    digests: dict[_TableName, HexDigest] = field(default_factory=dict)
    """SHA-256 of each table when the facts were saved, by path relative to the spool."""

    @classmethod
    def failed(cls, reason: Reason, detail: str) -> SpoolFacts:
        """Return the facts of a file that is rejected as a whole.

        Args:
            reason: Reason code.
            detail: Message.
        """
        return cls(records=1, rejected=1, failure=(reason, encodable(detail)))


class Spool:
    """A folder with the result of the first pass over one source."""

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder

    def facts(self) -> SpoolFacts | None:
        """Return the facts, or None if the spool is incomplete or was written by another release.

        The file is one line: a SHA-256, a space and the JSON with that digest.

        Raises:
            StoreError: The file of the facts is damaged.
        """
        try:
            data = read_bounded(self.folder / "facts.json")
        except FileNotFoundError:
            return None
        path, what = self.folder / "facts.json", "the temporary file of a source"
        hint = f"Remove {self.folder}; the source is then read again."
        if data.startswith(b"{"):
            return None  # without a digest
        digest, _, text = data.partition(b" ")
        if digest != _sha256(text):
            found = "content that does not match its digest"
            raise StoreError(f"{what} is damaged", path=path, found=found, hint=hint)
        content = parse_json(text, path, what=what, hint=hint, metadata=True)
        if isinstance(content, dict) and content.get("version") != __version__:
            return None
        return check_value(SpoolFacts, content, path, what=what, hint=hint)

    def save_facts(self, facts: SpoolFacts) -> None:
        """Write the facts with the digests of all tables, which completes the spool."""
        facts.digests = self._digests()
        content = asdict(replace(facts, header={})) | {"header": read_header(facts.header)}
        text = json.dumps(content).encode("ascii")
        write_bytes(self.folder / "facts.json", _sha256(text) + b" " + text)

    def is_intact(self, facts: SpoolFacts) -> bool:
        """Return whether all tables have the digests in ``facts``."""
        try:
            return all(digest_file(self.folder / name)[1] == sha256 for name, sha256 in facts.digests.items())
        except FileNotFoundError:
            return False

    def _digests(self) -> dict[str, str]:
        names = sorted(name for name in storage_of(self.folder).files() if name.endswith(".arrow"))
        return {name: digest_file(self.folder / name)[1] for name in names}

    def batches(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a table.

        Args:
            table: Name of the table, such as "raw", "rows", "games", "rejected" or "findings". If its file
                does not exist, nothing is yielded.
            columns: Columns to read and decompress. Default None: all.
        """
        path = self.folder / f"{table}.arrow"
        try:
            opened = storage_of(path).open()
        except FileNotFoundError:
            return
        with opened as source:
            names = pa.ipc.open_file(source).schema.names
            fields = [names.index(name) for name in columns or names]
            with pa.ipc.open_file(
                source, options=pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            ) as reader:
                for index in range(reader.num_record_batches):
                    yield reader.get_batch(index)

    @property
    def cut(self) -> Spool:
        """The spool inside this one that contains the tables after the truncation of games."""
        return Spool(self.folder / "cut")

    def remove(self) -> None:
        """Remove the folder."""
        storage_of(self.folder).remove_tree()


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode("ascii")


class SpooledHeader(Mapping[str, Any]):
    """The header of a source, read from its spool at each access instead of kept in memory."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def read(self) -> Mapping[str, Any]:
        """Return the whole header."""
        facts = self._spool.facts()
        assert facts is not None  # the spool was complete when this was made
        return facts.header

    def __getitem__(self, key: str) -> Any:
        return self.read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        return self.read().get(key, default)


@contextmanager
def write_arrow(path: AnyPath, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """Write an Arrow IPC file of a spool atomically, with LZ4 compression.

    It is not synced, because another run compares it with its digest before using it, and reads the source
    again if they differ.

    Args:
        path: The file to write.
        schema: Schema of the table.

    Yields:
        The writer of the file, which is renamed to ``path`` when the block ends without an error.
    """
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with (
        storage_of(path).publish(sync=False) as file,
        pa.ipc.new_file(file, schema, options=options) as writer,
    ):
        yield writer


def read_header(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a header as a mapping that ``json`` can serialize."""
    return header.read() if isinstance(header, SpooledHeader) else header


class _OtherBoardSize(Exception):  # noqa: N818 - a signal, not an error
    """The source has another board size than the requested one."""

    def __init__(self, board_size: int | None) -> None:
        super().__init__(board_size)
        self.board_size = board_size


def read_source(
    path: AnyPath, folder: AnyPath, reading: ReadOptions, version: str, size: int, sha256: str
) -> SpoolFacts:
    """Read a source into a spool, unless an intact spool of the same file and options exists.

    A file that cannot be decoded raises no error: its facts state the ``failure``.

    Args:
        path: The source.
        folder: Folder of the spool.
        reading: Options that affect the content of the spool.
        version: ``Storage.version`` of the source when it was digested.
        size: Number of bytes of the source when it was digested.
        sha256: Digest of these bytes. Lines appended to a TRMPH text since then are not read.

    Returns:
        The facts of the source; only the board size if it is not the one in ``reading``.

    Raises:
        SourceChangedError: The source has changed since it was digested.
        InputError: The disk fails to read the source.
        StoreError: An object store does not answer, or the facts of an existing spool are damaged.
        OSError: The spool cannot be written.
    """
    spool = Spool(folder)
    start = time.perf_counter()
    facts = spool.facts()
    if facts is None or not (_is_reusable(facts, reading) and spool.is_intact(facts)):
        spool.remove()
        try:
            facts = _read(path, spool, reading)
            if _require_version_or_growth(path, version, facts, size, sha256):
                spool.remove()
                part = reading.part or FilePart(0, size)
                facts = replace(_read(path, spool, replace(reading, part=part)), reading=reading)
                _require_version_or_growth(path, version, facts, size, sha256)
        except _OtherBoardSize as other:
            spool.remove()
            return SpoolFacts(board_size=other.board_size)
        except Exception as error:
            if not isinstance(error, FormatError) and isinstance(error, _PASSED_ERRORS):
                error.add_note(f"while reading {path}")
                raise
            spool.remove()
            _require_version(path, version)
            failure = error if isinstance(error, FormatError) else _reader_error(error)
            facts = SpoolFacts.failed(failure.code, failure.detail())
            facts.reading = reading
        facts.seconds = round(time.perf_counter() - start, 3)
        if facts.failure is None or facts.failure[0] != Reason.UNREADABLE:
            spool.save_facts(facts)
    if _is_other(reading.board_size, facts.board_size):
        return SpoolFacts(board_size=facts.board_size)
    return facts


def _is_other(wanted: int | None, found: int | None) -> bool:
    """Return whether a board size is known and is not the requested one."""
    return wanted is not None and found is not None and wanted != found


def _require_version(path: AnyPath, version: str) -> None:
    """Check that a source still has the version that was digested.

    A missing source passes, because reading it has raised an error already.

    Raises:
        SourceChangedError: The source has another version.
    """
    with translate_errors(path):
        found = storage_of(path).version()
    if found not in ("", version):
        raise SourceChangedError(
            "this source changed while it was being converted",
            path=path,
            hint="Run the command again when no process writes to the file.",
        )


def _require_version_or_growth(
    path: AnyPath, version: str, facts: SpoolFacts, size: int, sha256: str
) -> bool:
    """Check as :func:`_require_version`, but allow that lines were appended to a text without gzip.

    Returns:
        Whether the source has grown: it has another version, but still begins with the digested bytes.

    Raises:
        SourceChangedError: The source has changed otherwise.
    """
    try:
        _require_version(path, version)
    except SourceChangedError:
        if facts.format == "trmph" and _has_grown(path, size, sha256):
            return True
        raise
    return False


def _has_grown(path: AnyPath, size: int, sha256: str) -> bool:
    """Return whether a text without gzip is longer than before and begins with the same bytes."""
    with translate_errors(path):
        storage = storage_of(path)
        return (
            (storage.size() or 0) > size
            and not is_gzip(storage.read_range(0, 2))
            and digest_beginning(path, size) == sha256
        )


def _is_reusable(facts: SpoolFacts, reading: ReadOptions) -> bool:
    """Return whether a spool would be the same under ``reading``.

    Some options affect only damaged files and those with boards of several sizes.
    """
    whole = facts.failure is None and facts.damage is None and not facts.other_sizes
    always = (facts.reading.truncate_repeats, facts.reading.part) == (reading.truncate_repeats, reading.part)
    return always and (
        whole or (facts.reading.salvage, facts.reading.board_size) == (reading.salvage, reading.board_size)
    )


@contextmanager
def _translate_read_errors(path: AnyPath) -> Iterator[None]:
    """Convert an ``OSError`` on reading the source to a ``FormatError``. Wrap no code that writes a spool.

    Raises:
        FormatError: The source cannot be read; its code is ``Reason.UNREADABLE``.
        InputError: The disk failed, so nothing is known about the source.
        StoreError: An object store does not answer, so nothing is known about the source.
    """
    try:
        yield
    except OSError as error:
        require_answer(path, error)
        raise FormatError(
            "cannot be read", code=Reason.UNREADABLE, found=error.strerror or str(error)
        ) from error


def _batches(path: AnyPath, reader: SourceReader) -> Iterator[RawBatch]:
    with _translate_read_errors(path):
        try:
            check_declared(reader.targets)
        except ValueError as error:
            raise _reader_error(error) from error
        batches = reader.batches()
        records = 0
        while True:
            try:
                batch = next(batches, None)
            except _PASSED_ERRORS:
                raise
            except Exception as error:
                raise _reader_error(
                    error, f"record {records:,} or one of the {BATCH_ROWS:,} after it"
                ) from error
            if batch is None:
                return
            records += batch.records
            yield reject_invalid(batch, reader.targets) if reader.targets else batch


def _reader_error(error: Exception, record: str | None = None) -> FormatError:
    """Return the error of a file on which its reader raised an unexpected exception."""
    return FormatError(
        f"its reader failed: {type(error).__name__}",
        code=Reason.READER_ERROR,
        record=record,
        found=str(error)[:_MAX_MESSAGE],
    )


def _read(path: AnyPath, spool: Spool, reading: ReadOptions) -> SpoolFacts:
    facts = SpoolFacts(reading=reading)
    evidence = SourceEvidence()
    numbers = NumberCounter()
    with _translate_read_errors(path):
        opened = open_source(path, salvage=reading.salvage, part=reading.part)
    with opened as reader, write_arrow(spool.folder / "rejected.arrow", REJECTED) as rejected:
        if isinstance(reader, SizeSelectingReader) and reading.board_size is not None:
            reader.select_board_size(reading.board_size)
        with ExitStack() as stack:
            raw = None
            for accepted in _joined(_accepted(path, reader, rejected, facts)):
                assert reader.board_size is not None
                positions = with_findings(accepted, reader.board_size)
                if raw is None:
                    raw = stack.enter_context(write_arrow(spool.folder / "raw.arrow", positions.schema))
                raw.write_batch(positions)
                evidence.add(positions)
                if is_legacy_format(reader.format):
                    numbers.add(positions.column("metadata"))
        if reader.damage is not None:
            _record_damage(reader.damage, rejected, facts)
        facts.board_size = reader.board_size
        facts.format = reader.format
        facts.declared = sorted(reader.targets)
        text = json.dumps(reader.header)
        facts.header_bytes = len(text)
        facts.header = json.loads(text)  # plain JSON, as facts read from a spool have it
    found, facts.not_targets, notes = numbers.columns()
    facts.targets = sorted({*facts.declared, *found})
    facts.notes += notes
    facts.records = facts.positions + facts.rejected
    facts.votes, facts.ballots = evidence.votes, evidence.unflagged_votes
    facts.with_id = evidence.with_id
    facts.mixed = is_mixed(facts.format, facts.header)
    if facts.damage is not None and evidence.with_id and is_legacy_format(facts.format):
        facts.mixed = True  # the key that marks a shuffled file is at its end, which is lost
    if facts.positions and not facts.mixed:
        _write_games(spool, facts, evidence)
        (completed,) = complete_spools([spool], [facts])
        games = [batch.column("findings").to_numpy() for batch in completed.batches("findings")]
        facts.ballots = count_game_votes(
            np.concatenate([np.zeros(0, np.uint32), *games]), findings_without_game(completed)
        )
    return facts


def _accepted(
    path: AnyPath, reader: SourceReader, rejected: pa.ipc.RecordBatchFileWriter, facts: SpoolFacts
) -> Iterator[pa.RecordBatch]:
    """Read a source: yield its valid positions, write the other records to ``rejected``, and count both.

    Raises:
        _OtherBoardSize: The source has another board size than the requested one.
        FormatError: The source cannot be read, or far more records are rejected than accepted.
    """
    mixed_sizes = isinstance(reader, SizeSelectingReader)
    for batch in _batches(path, reader):
        if _is_other(facts.reading.board_size, reader.board_size):
            raise _OtherBoardSize(reader.board_size)
        _write_rejected(rejected, batch.rejected)
        facts.rejected += len(batch.rejected)
        if mixed_sizes:
            facts.other_sizes += sum(each.reason == Reason.BOARD_SIZE for each in batch.rejected)
        if facts.rejected - facts.other_sizes > facts.positions + MAX_SURPLUS_REJECTED:
            raise FormatError(
                "far more records rejected than accepted; probably not a file of positions",
                code=Reason.LIMIT_REJECTED,
                found=f"{facts.rejected:,} of the first {facts.positions + facts.rejected:,}, "
                f"the last one for {batch.rejected[-1].reason} ({batch.rejected[-1].detail})",
            )
        facts.positions += batch.positions.num_rows
        if batch.positions.num_rows:
            yield batch.positions


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches until they have ``_JOINED_ROWS`` rows or ``_JOINED_BYTES`` bytes."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        rows, size = sum(b.num_rows for b in pending), sum(b.nbytes for b in pending)
        if rows >= _JOINED_ROWS or size >= _JOINED_BYTES:
            yield pa.concat_batches(pending)
            pending = []
    if pending:
        yield pa.concat_batches(pending)


def _record_damage(damage: FormatError, rejected: pa.ipc.RecordBatchFileWriter, facts: SpoolFacts) -> None:
    """Count the damage of a source as one rejected record; raise it if no position precedes it."""
    records = facts.positions + facts.rejected
    if not facts.positions:
        raise damage
    _write_rejected(rejected, [Rejection(records, damage.code, damage.detail())])
    facts.rejected += 1
    facts.damage = (damage.code, encodable(damage.detail()))
    facts.notes.append(f"salvaged: the {records:,} examples before the damage ({facts.damage[1]})")


def _write_games(spool: Spool, facts: SpoolFacts, evidence: SourceEvidence) -> None:
    """Assign each position of the spool to a game; write ``rows`` and ``games``."""
    assert facts.board_size is not None
    grouped = find_games(spool.batches("raw", EVIDENCE), facts.board_size, evidence.grouping())
    with (
        write_arrow(spool.folder / "rows.arrow", ROWS) as rows,
        write_arrow(spool.folder / "games.arrow", GAMES) as games,
    ):
        for row_table, game_table in grouped:
            rows.write_table(row_table)
            games.write_table(game_table)
            facts.games += game_table.num_rows
    stats = facts.header.get("processing_stats")
    if isinstance(stats, dict):
        facts.notes += compare_counts(stats, facts, "processing_stats say")


def complete_spools(spools: Sequence[Spool], facts: Sequence[SpoolFacts]) -> list[Spool]:
    """Complete spools that share their games, after ``rows`` and ``games`` have been written.

    If truncation was requested, games are cut before repeated moves. Then the findings of each game are
    written to ``findings`` of the first spool, one row per game.

    Args:
        spools: The spools of a source or of a collection; the first has the table ``games``.
        facts: Facts of each spool, which are updated.

    Returns:
        The spool that now contains the tables of each source: itself, or its ``cut``.
    """
    cuts = find_cuts(spools) if facts[0].reading.truncate_repeats else None
    result = list(spools)
    if cuts is not None and (cuts < NO_CUT).any():
        result = _truncate(spools, facts, cuts)
    cut = None if cuts is None else cuts < NO_CUT
    findings = game_findings(result, cut, replayed=facts[0].format in GAME_FORMATS)
    with write_arrow(result[0].folder / "findings.arrow", FINDINGS) as writer:
        writer.write_table(pa.table({"findings": findings}, schema=FINDINGS))
    for spool, own in zip(result, facts, strict=True):
        own.loose = count_findings_without_game(spool)
    return result


def _truncate(spools: Sequence[Spool], facts: Sequence[SpoolFacts], cuts: Cuts) -> list[Spool]:
    """Write the truncated tables of each spool to its ``cut`` and return the new spools."""
    lost = np.zeros(len(cuts), np.int64)
    for spool, own in zip(spools, facts, strict=True):
        assert own.board_size is not None
        with ExitStack() as stack:
            schemas = {
                "raw": findings_schema(own.board_size, own.declared),
                "rows": ROWS,
                "rejected": REJECTED,
            }
            writers = {
                name: stack.enter_context(write_arrow(spool.cut.folder / f"{name}.arrow", schema))
                for name, schema in schemas.items()
            }
            for batch in spool.batches("rejected"):
                writers["rejected"].write_batch(batch)
            for raw, rows, removed in cut_rows(spool, cuts, lost):
                writers["raw"].write_batch(raw)
                writers["rows"].write_batch(rows)
                _write_rejected(
                    writers["rejected"],
                    [Rejection(r, Reason.AFTER_REPEAT, _AFTER_REPEAT_DETAIL) for r in removed],
                )
                own.cut += len(removed)
        own.positions -= own.cut
        own.rejected += own.cut
    assert facts[0].board_size is not None
    with write_arrow(spools[0].cut.folder / "games.arrow", GAMES) as writer:
        for table in cut_games(spools[0], cuts, lost, facts[0].board_size):
            writer.write_table(table)
    for spool, own in zip(spools, facts, strict=True):
        spool.cut.save_facts(own)
    return [spool.cut for spool in spools]


def compare_counts(stats: dict[str, Any], facts: SpoolFacts, said: str) -> list[str]:
    """Return a note for each count in statistics of the legacy tool that differs from the count found.

    Args:
        stats: The statistics.
        facts: Facts of the source.
        said: Beginning of the notes, such as "processing_stats say".
    """
    notes = []
    stated = {"records": stats.get("examples_generated"), "games": stats.get("valid_games")}
    for name, count in stated.items():
        found = getattr(facts, name)
        if isinstance(count, int) and count != found:
            notes.append(f"{said} {count} {name}, the file has {found}")
    return notes


def _write_rejected(writer: pa.ipc.RecordBatchFileWriter, rejected: Iterable[Rejection]) -> None:
    listed = [*rejected]
    if listed:
        columns = [
            pa.array([rejection.record for rejection in listed], pa.int64()),
            pa.array([rejection.reason for rejection in listed], pa.string()),
            pa.array([encodable(rejection.detail) for rejection in listed], pa.string()),
        ]
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=REJECTED))
