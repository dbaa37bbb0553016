"""The first pass over one source: decoded once, front to back, into a folder of plain Arrow files.

The spool holds what the source says, unjudged; ``publish`` writes the store from it once it is known
which ids the source gets. A spool is complete when its ``facts.json`` is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from hexdata import __version__
from hexdata.convert.games import GAMES, ROWS, Grouping, board_matrix, column, find_games
from hexdata.convert.sense import Votes
from hexdata.errors import FormatError
from hexdata.formats import Rejection, open_source
from hexdata.store.files import atomic_file, canonical_json, write_bytes

__all__ = ["Spool", "SpoolFacts", "read_source", "write_arrow"]

REJECTED: Final = pa.schema(
    [
        pa.field("record", pa.int64()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


@dataclass
class SpoolFacts:
    """What the first pass found out about a source. in = ``positions`` + ``rejected``."""

    version: str = __version__
    format: str = "unknown"
    board_size: int | None = None
    records: int = 0
    positions: int = 0
    rejected: int = 0
    games: int = 0
    mixed: bool = False
    """Its positions come from everywhere: contiguity says nothing about games."""
    failed: bool = False
    """The file could not be read as a whole: one record, rejected."""
    votes: Votes = field(default_factory=Votes)
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Spool:
    """The folder of one source's first pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def facts(self) -> SpoolFacts | None:
        """Return the facts, or None if the spool is not complete or is of another release."""
        try:
            content = json.loads((self.folder / "facts.json").read_bytes())
        except FileNotFoundError:
            return None
        if content.get("version") != __version__:
            return None
        votes = Votes(**{kind: tuple(counts) for kind, counts in content.pop("votes").items()})
        return SpoolFacts(votes=votes, **content)

    def save_facts(self, facts: SpoolFacts) -> None:
        """Complete the spool."""
        write_bytes(self.folder / "facts.json", canonical_json(asdict(facts)))

    def batches(self, table: str) -> Iterator[pa.RecordBatch]:
        """Read ``"raw"``, ``"rows"``, ``"games"`` or ``"rejected"``, mapped into memory; none if absent."""
        path = self.folder / f"{table}.arrow"
        if not path.exists():
            return
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)

    def table(self, name: str, schema: pa.Schema) -> pa.Table:
        """Return one of the files as a table, mapped into memory; empty if the file is absent."""
        return pa.Table.from_batches(list(self.batches(name)), schema)

    def reject(self, reason: str, detail: str) -> SpoolFacts:
        """Make this the spool of a file that is rejected as a whole: one record, and no position."""
        self.remove()
        with write_arrow(self.folder / "rejected.arrow", REJECTED) as rejected:
            columns = {"record": [None], "reason": [reason], "detail": [detail]}
            rejected.write_table(pa.table(columns, schema=REJECTED))
        facts = SpoolFacts(records=1, rejected=1, failed=True)
        self.save_facts(facts)
        return facts

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def write_arrow(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """Write an uncompressed Arrow IPC file, atomically."""
    with atomic_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


def read_source(path: Path, folder: Path) -> SpoolFacts:
    """Read one source file into a spool at ``folder``, unless a complete one is there.

    A file that cannot be read as a whole gives a spool with one rejected record and no position.
    """
    spool = Spool(folder)
    facts = spool.facts()
    if facts is None:
        spool.remove()
        try:
            facts = _read(path, spool)
        except (FormatError, OSError) as error:
            return _reject_file(error, spool)
        spool.save_facts(facts)
    return facts


def _read(path: Path, spool: Spool) -> SpoolFacts:
    facts = SpoolFacts()
    tally = _Tally()
    with open_source(path) as reader, write_arrow(spool.folder / "rejected.arrow", REJECTED) as rejected:
        with ExitStack() as stack:
            raw = None
            for batch in reader.batches():
                _write_rejected(rejected, batch.rejected)
                facts.rejected += len(batch.rejected)
                if not batch.positions.num_rows:
                    continue
                assert reader.board_size is not None
                positions = _plain(batch.positions)
                if raw is None:
                    raw = stack.enter_context(write_arrow(spool.folder / "raw.arrow", positions.schema))
                raw.write_batch(positions)
                tally.add(positions, reader.board_size)
                facts.positions += positions.num_rows
        facts.board_size = reader.board_size
        facts.format = reader.format
        facts.header = json.loads(json.dumps(reader.header))  # plain JSON, whatever mappings it was made of
    facts.records = facts.positions + facts.rejected
    facts.votes = tally.votes
    facts.mixed = facts.format == "legacy-shuffled" or bool({"chunk_info", "pass_info"} & set(facts.header))
    if facts.positions and not facts.mixed:
        _group(spool, facts, tally)
    return facts


@dataclass
class _Tally:
    """What is counted while a source streams by."""

    votes: Votes = field(default_factory=Votes)
    with_id: int = 0
    with_ply: int = 0

    def add(self, batch: pa.RecordBatch, board_size: int) -> None:
        move_known = batch.column("move").is_valid().to_numpy(zero_copy_only=False)
        policy_known = batch.column("policy").is_valid().to_numpy(zero_copy_only=False)
        self.votes.count(
            board_matrix(batch.column("board")),
            board_size,
            column(batch, "value", float("nan")),
            column(batch, "winner", -1),
            ~(move_known | policy_known),
        )
        self.with_id += batch.num_rows - batch.column("line_idx").null_count
        self.with_ply += batch.num_rows - batch.column("position_in_game").null_count

    def grouping(self) -> Grouping:
        if self.with_id:
            return "ids"
        return "runs" if self.with_ply else "boards"


def _group(spool: Spool, facts: SpoolFacts, tally: _Tally) -> None:
    """Second look at the spool: which game each position belongs to."""
    assert facts.board_size is not None
    grouped = find_games(spool.batches("raw"), facts.board_size, tally.grouping())
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
        facts.notes += _compare(stats, facts)


def _compare(stats: dict[str, Any], facts: SpoolFacts) -> list[str]:
    """Hold the counts of the file's own ``processing_stats`` against what was found."""
    notes = []
    stated = {"records": stats.get("examples_generated"), "games": stats.get("valid_games")}
    for name, count in stated.items():
        found = getattr(facts, name)
        if isinstance(count, int) and count != found:
            notes.append(f"processing_stats say {count} {name}, the file has {found}")
    return notes


def _reject_file(error: FormatError | OSError, spool: Spool) -> SpoolFacts:
    if isinstance(error, FormatError):
        return spool.reject(error.code, error.detail())
    return spool.reject("unreadable", error.strerror or str(error))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decode dictionaries: those of an Arrow file may not change from batch to batch."""
    index = batch.schema.get_field_index("origin")
    return batch.set_column(index, "origin", batch.column(index).dictionary_decode())


def _write_rejected(writer: pa.ipc.RecordBatchFileWriter, rejected: Iterable[Rejection]) -> None:
    listed = [asdict(rejection) for rejection in rejected]
    if listed:
        writer.write_table(pa.Table.from_pylist(listed, schema=REJECTED))
