"""The result of the first pass over a batch of sources: their facts, and spools with their content.

A spool is a folder of Arrow files. It contains the records of one source, or of several small ones, one after
the other. ``publish`` writes the tables of the store from it, after the run has assigned the ids.
A batch is complete when its ``facts.json`` exists. Headers, which may be large, are in a table of their own,
since only ``publish`` reads them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Meta, Struct, to_builtins
from msgspec import field as struct_field

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import Reason
from hexdata.formats import FilePart, Rejection
from hexdata.games.convention import Convention, Decision, Votes
from hexdata.json_models import Count, HexDigest, Model
from hexdata.schema import rejected_schema
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.local import Version
from hexdata.store.files import Sidecar, digest_file, identity_of, read_sealed, write_sealed
from hexdata.text import encodable

REJECTED: Final = rejected_schema()
"""The table ``rejected`` of a spool, in which ``source_id`` is the number of the source in the spool."""
_FACTS: Final = "facts.json"


class SpoolFacts(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """The result of the first pass over one source. ``records`` is ``positions`` + ``rejected``."""

    format: str = "unknown"
    board_size: Annotated[int, Meta(ge=MIN_SIZE, le=MAX_SIZE)] | None = None
    records: Count = 0
    positions: Count = 0
    rejected: Count = 0
    with_id: Count = 0
    """Number of positions whose metadata has the id of their game."""
    reasons: dict[str, tuple[Count, str]] = {}
    """Number of rejected records by reason, and the detail of the first one."""
    games: Count = 0
    mixed: bool = False
    """The source was shuffled, so neighbouring positions need not belong to one game."""
    failure: tuple[str, str] | None = None
    """Reason and detail of a file that was rejected as a whole, which counts as one record."""
    votes: Votes = struct_field(default_factory=Votes)
    """Evidence for the convention of ``value``, one vote per position."""
    ballots: Votes = struct_field(default_factory=Votes)
    """The votes that decide: one per sound game, and one per sound position of an unknown game."""
    header_bytes: Count = 2
    """Length of the header as JSON text."""
    layout: Convention | None = None
    """The convention that the legacy tool used in files of this layout."""
    shuffle: str = ""
    """Digest of what the files of one shuffle have in common; empty if the source states no shuffle."""
    raw_file: str | None = None
    """The raw file that the header names."""
    stated: dict[str, Any] = {}
    """The counts in ``processing_stats`` of the header."""
    run: dict[str, Any] = {}
    """Columns of the table sources that describe the run of self-play, with the date as text."""
    notes: tuple[str, ...] = ()
    damage: str | None = None
    """Detail of the damage, if the examples before it were salvaged."""
    sizes: dict[str, Count] = {}
    """Number of records that were rejected because of their board size, by this size."""
    cut: Count = 0
    """Number of positions rejected after a repeated move, because truncation was requested."""
    loose: tuple[tuple[Count, Count], ...] = ()
    """Findings of positions of unknown games, and the number of positions with these."""
    declared: tuple[str, ...] = ()
    """The optional columns of positions that the reader gives."""
    targets: tuple[str, ...] = ()
    """All optional columns of positions that the source can have, sorted."""
    not_targets: dict[str, str] = {}
    """The reason for each name whose numbers stay in the metadata only."""
    filled: tuple[str, ...] = ()
    """Columns that the examples state, and whose values in the store may differ from those stated."""
    spool: Annotated[str, Meta(pattern=r"^[0-9]{6,9}\Z")] | None = None
    """Path of the spool with its records, relative to the folder of the batch; None if no record was read."""

    @property
    def spooled(self) -> int:
        """Number of rows of its spool: positions, also those that are cut off."""
        return self.positions + self.cut

    @property
    def other_sizes(self) -> int:
        """Number of records that were rejected because of their board size."""
        return sum(self.sizes.values())

    @classmethod
    def failed(cls, reason: Reason, detail: str) -> SpoolFacts:
        """Return the facts of a file that is rejected as a whole, with a reason code and a message."""
        detail = encodable(detail)
        return cls(records=1, rejected=1, failure=(reason, detail), reasons={reason: (1, detail)})

    def reject(self, rejected: Sequence[Rejection]) -> None:
        """Count rejected records."""
        self.rejected += len(rejected)
        for each in rejected:
            count, first = self.reasons.get(each.reason, (0, encodable(each.detail)))
            self.reasons[each.reason] = (count + 1, first)
            if each.board_size is not None:
                size = str(each.board_size)
                self.sizes[size] = self.sizes.get(size, 0) + 1


@dataclass(frozen=True)
class Spool:
    """A folder of tables with the records of one or more sources.

    ``raw`` has the positions that were read, ``rows`` the game of each and ``games`` the games; ``rejected``
    has the rejected records, and ``cut`` the positions that were cut off.
    """

    folder: AnyPath

    def batches(
        self, table: str, columns: Sequence[str] | None = None, start: int = 0, stop: int = sys.maxsize
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table in batches. If it does not exist, nothing is yielded.

        Args:
            table: Name of the table.
            columns: Columns to read and decompress. Default None: all.
            start: First row. Default 0.
            stop: Row after the last one. Default: that of the table.
        """
        try:
            opened = storage_of(self.folder / f"{table}.arrow").open()
        except FileNotFoundError:
            return
        with opened as file:
            names = pa.ipc.open_file(file).schema.names
            # The options take numbers of columns, which only the schema shows.
            fields = [names.index(name) for name in columns or names]
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            reader, first = pa.ipc.open_file(file, options=options), 0
            for index in range(reader.num_record_batches):
                if first >= stop:
                    return
                batch = reader.get_batch(index)
                low, high = max(start - first, 0), min(stop - first, batch.num_rows)
                if low < high:
                    yield batch.slice(low, high - low)
                first += batch.num_rows

    def positions(self, start: int, stop: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Yield the positions of the rows from ``start`` to ``stop``, and the same positions as ``ROWS``."""
        rows = self.batches("rows", None, start, stop)
        behind = None
        for raw in self.batches("raw", None, start, stop):
            while raw.num_rows:  # the batches of the two tables have different bounds
                if behind is None or not behind.num_rows:
                    behind = next(rows)
                count = min(raw.num_rows, behind.num_rows)
                yield raw.slice(0, count), behind.slice(0, count)
                raw, behind = raw.slice(count), behind.slice(count)


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


def write_rejected(
    writer: pa.ipc.RecordBatchFileWriter, source: int | npt.NDArray[np.int32], rejected: Sequence[Rejection]
) -> None:
    """Write rejected records of one source, or of one source each, (N,), to the table ``rejected``."""
    if rejected:
        columns = {
            "source_id": np.broadcast_to(source, len(rejected)),
            "record": [each.record for each in rejected],
            "reason": [each.reason for each in rejected],
            "detail": [encodable(each.detail) for each in rejected],
        }
        writer.write_batch(pa.RecordBatch.from_pydict(columns, REJECTED))


_Content = bytes  # a field of the class below is called bytes


class Source(Struct, gc=False):
    """A source of a run: its file, what was read of it, and what the run decided, one step after the other.

    ``facts`` includes decisions of the run, such as a rejected file. The spool contains the source's own
    content, which does not depend on the other sources of a run.
    """

    # Found below the inputs.
    name: str
    """The name of the input folder and the path below it, so the same on every machine."""
    path: AnyPath
    bytes: int
    """Size; when the file was found, until it is digested."""
    beside: AnyPath | None = None
    """Path of its sidecar, if it has one."""

    # Digested, and compared with the sources of the store.
    sha256: str = ""
    """Empty if the file cannot be read, and until it is digested."""
    version: tuple[Version | None, ...] = ()
    """``inputs.source_version`` of the file, taken before it was digested."""
    content: _Content | None = None
    """The bytes that were digested, of a small text, until it is read; None for other files."""
    sidecar: Sidecar | None = None
    """The facts of its sidecar."""
    continues: int | None = None
    """``source_id`` of the source of the store that is the beginning of its file."""
    part: FilePart | None = None
    """The lines of a grown file that the store does not have; None to read the whole file."""

    # Read, unless the facts state a failure already.
    facts: SpoolFacts = struct_field(default_factory=SpoolFacts)
    folder: AnyPath = Path()
    """Folder of the batch with which it was read."""
    number: int = -1
    """Its number in the batch; -1 if it was not read."""
    index: int = 0
    """Number of the source in its spool."""
    first_row: int = 0
    """Row of its first position in its spool."""
    first_spooled_game: int = 0
    """Row of its first game in its spool."""

    # Decided over all sources of the run.
    decision: Decision | None = None
    """The value convention and its evidence; None without positions."""
    source_id: int = -1
    first_position: int = 0
    first_game: int = 0
    collection: str = ""
    """Key of the collection of a shuffled source, else empty."""
    owns_games: bool = True
    origins: tuple[tuple[int, str], ...] = ()
    """(file_idx, raw file) for games whose raw file only a companion names."""
    targets: tuple[str, ...] = ()
    """Optional columns of its positions in the store."""
    notes: tuple[str, ...] = ()

    @property
    def new_bytes(self) -> int:
        """Number of bytes to read."""
        return self.bytes - (self.part.start if self.part else 0)

    @property
    def identity(self) -> str:
        """The key that identifies the content: the digest, or the name if the file cannot be read."""
        return identity_of(self.sha256, self.sidecar) if self.sha256 else self.name

    @property
    def spool(self) -> Spool:
        """The spool with its records, also those of other small sources."""
        return Spool(self.folder / (self.facts.spool or ""))

    @property
    def games(self) -> tuple[int, int]:
        """The first of its games in the spool, and the one after the last."""
        return self.first_spooled_game, self.first_spooled_game + self.facts.games

    @property
    def convention(self) -> Convention | None:
        """The value convention; None without positions."""
        return None if self.decision is None else self.decision.convention


class _BatchFacts(Model, frozen=True):
    """The content of ``facts.json``."""

    sources: list[SpoolFacts]
    digests: dict[str, HexDigest]
    """SHA-256 of each file when the facts were saved."""


def _digests(folder: AnyPath) -> dict[str, str]:
    """Return the SHA-256 of each file of a batch, except its facts."""
    names = storage_of(folder).files().keys() - {_FACTS}
    return {name: digest_file(folder / name)[1] for name in sorted(names)}


def save_facts(folder: AnyPath, sources: Sequence[SpoolFacts]) -> None:
    """Write the facts of the sources of a batch and the digests of its files, which completes the batch."""
    # The facts are written last and synced: a batch that has them is complete.
    content = to_builtins(_BatchFacts(list(sources), _digests(folder)))
    write_sealed(folder / _FACTS, json.dumps(content).encode("ascii"))  # also surrogates


def load_facts(folder: AnyPath) -> list[SpoolFacts] | None:
    """Return the facts of the sources of a batch; None if it is incomplete, or lacks or has a damaged file.

    Raises:
        StoreError: The file of the facts is damaged.
    """
    path, what = folder / _FACTS, "the temporary file of a source"
    hint = f"Remove {folder}; its sources are then read again."
    try:
        batch = read_sealed(path, _BatchFacts, what=what, hint=hint, metadata=True)
    except FileNotFoundError:
        return None
    # The run may have added files, such as the games of a shuffled collection.
    return batch.sources if _digests(folder).items() >= batch.digests.items() else None
