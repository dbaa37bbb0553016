"""The stage that reads files and extracts their games. It counts and names a bad file, and continues.

``games`` groups and names the games and determines the meaning of their labels; ``formats`` reads the bytes.
This module does not detect changed files, and it repairs nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import pyarrow as pa

from hexdata.board import check_board_size
from hexdata.checks import check_choice, check_count, check_shares
from hexdata.errors import ConfigError, FormatError, InputError, Reason
from hexdata.formats import SizeSelectingReader, open_source
from hexdata.games.convention import CONVENTIONS, Convention, layout_convention
from hexdata.games.evidence import is_mixed
from hexdata.games.labels import split_of
from hexdata.live.chunk import (
    NAMED_FILES,
    NOTHING_READ,
    SCANNED,
    Chunk,
    ChunkSource,
    FoundFile,
    ReadProgress,
    digest_games,
    starts_with,
)
from hexdata.live.coordinator import Stopped
from hexdata.live.shard_source import looks_like_shard, shard_batches, shard_split
from hexdata.live.source_games import FileGames, extract_games, extract_trmph_games
from hexdata.live.stage import Stage, Transform
from hexdata.schema import GAME_FORMATS, SPLITS, is_legacy_format
from hexdata.text import printable

__all__ = ["ChunkSourceLoader"]


@dataclass(frozen=True)
class _Content:
    """The content of a file."""

    games: FileGames
    split: str | None = None
    """Split that the file name states; None if it states none."""
    records: int | None = None
    """Number of records read, if the file is a text, which may grow; otherwise None."""
    known_rejects: Counter[str] = field(default_factory=Counter)
    """Reasons of rejected records that an earlier reading of the file counted."""

    @property
    def chunks(self) -> list[Chunk]:
        """Games of the file, of all splits."""
        return self.games.chunks


def rank_of(game_hash: bytes, world_size: int) -> int:
    """Return the rank to which a game belongs. It does not depend on the first half of the hash.

    The first half determines the split, so every split is divided evenly.
    """
    return int.from_bytes(game_hash[8:], "big") % world_size


@runtime_checkable
class _ReadingMonitor(Protocol):
    """A stage that emits a changed file again, and needs to know how far each file was read."""

    def expect_readings(self) -> None: ...

    def was_read(self, file: FoundFile, progress: ReadProgress | None) -> None: ...

    def was_not_read(self, file: FoundFile) -> None: ...


class ChunkSourceLoader(Transform):
    """Reads the games of each file: :class:`FoundFile` in, :class:`ChunkSource` out.

    Files are TRMPH games, legacy pickles or hexdata shards. The format is detected from the content. Games
    are grouped, named and checked as in ``convert``, but file by file, and without a search for duplicates.
    If the positions of a file are from many files (shards, shuffled pickles), ids group them into games, and
    an incomplete game is named by its id. The name of a game determines its split, except that a shard with a
    name as ``export`` writes it belongs to the split in that name. Positions of no known game are counted and
    left out.

    A stage with ``expect_readings`` is notified how far each file was read. It may emit a file again once the
    file has changed: a bad file, a file that could not be opened, or a text, which may grow. If a text is
    emitted again, the games of earlier readings are left out. A text that no longer starts with those games
    is bad ("rewritten").

    With several threads the chunks are the same, but the order of sources may change, and the end of the
    first scan may precede the last files of that scan.

    The counts are ``files``, ``games`` and ``positions`` (passed on), ``other_split`` and ``other_rank``
    (games), ``ungrouped`` (positions of no known game), ``rejected`` (records), ``bad_files``, and for each
    reason code ``rejected.CODE`` and ``bad.CODE``. A file without a game is also bad. A file that is emitted
    again is counted as bad each time and as good once.

    Args:
        board_size: Board size n of all games; a file of another size is bad. None (default) for the size of
            the first good file.
        value_convention: Value convention of files where neither the games nor the layout show it,
            "blue-is-0" or "blue-is-1". With "auto" (default), such a file is bad.
        split: "train", "val" or "test" to leave out the games of other splits. None (default) for all games.
        val: Share of the games in the validation split. Default 0.05.
        test: Share of the games in the test split. Default 0.01.
        max_file_bytes: Maximum size of a file in bytes; a larger file is bad. Default 1 GiB.
        max_positions: Maximum number of records in a file, rejected ones included; a file with more is bad.
            Each record takes 100 to 400 bytes of memory. Default 2,000,000.
        rank: Number of this process among those that share the games, from 0. Default 0.
        world_size: Number of processes that share the games; each game is passed on by one of them, which
            its hash determines. Default 1.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: An option cannot be used.
    """

    def __init__(
        self,
        *,
        board_size: int | None = None,
        value_convention: str = "auto",
        split: str | None = None,
        val: float = 0.05,
        test: float = 0.01,
        max_file_bytes: int = 1 << 30,
        max_positions: int = 2_000_000,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 1,
    ) -> None:
        super().__init__(threads=threads)
        check_choice("value_convention", value_convention, ("auto", *CONVENTIONS))
        if split is not None:
            check_choice("split", split, SPLITS)
        check_shares(val, test)
        if board_size is not None:
            try:
                check_board_size(board_size)
            except FormatError as error:
                raise ConfigError(
                    "board_size cannot be used", found=board_size, expected=error.expected
                ) from None
        self.board_size = board_size
        self.value_convention = value_convention
        self.split = split
        self.val = val
        self.test = test
        self.max_file_bytes = check_count("max_file_bytes", max_file_bytes, 1)
        self.max_positions = check_count("max_positions", max_positions, 1)
        self.world_size = check_count("world_size", world_size, 1)
        self.rank = check_count("rank", rank, 0)
        self._bad: deque[tuple[str, str]] = deque(maxlen=NAMED_FILES)
        self._monitor: _ReadingMonitor | None = None

    def link_stages(self, stages: Sequence[Stage]) -> None:
        """Find the stage to which the progress of files is reported."""
        self._monitor = next((stage for stage in stages if isinstance(stage, _ReadingMonitor)), None)
        if self._monitor is not None:
            self._monitor.expect_readings()

    def process(self, item: FoundFile) -> Iterable[ChunkSource]:
        """Read one file; return nothing for a bad file."""
        if item.path is None:
            return [ChunkSource(SCANNED)]
        try:
            content = self._read_content(item, item.path, self.coordinator.stopping)
        except InputError as error:
            self._record_bad(item, error.code, error.detail())
            self._report(item, NOTHING_READ if item.is_moved else item.previous or NOTHING_READ)
            return []
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            self._record_bad(
                item, Reason.GONE if is_missing else Reason.UNREADABLE, error.strerror or str(error)
            )
            if self._monitor is not None:
                self._monitor.was_not_read(item)
            return []
        if item.previous and not starts_with(content.chunks, item.previous):
            if not item.is_moved:
                games = f"the {item.previous.games:,} games read from it before"
                self._record_bad(
                    item, Reason.REWRITTEN, f"it no longer starts with {games}, so none are used"
                )
                self._report(item, None)
                return []
            self._count_rejected(content.known_rejects)
            item = replace(item, previous=None)
        source = self._make_source(item, content)
        self._report(item, source.progress)
        return self._count_source(source)

    def _count_source(self, source: ChunkSource) -> list[ChunkSource]:
        """Count a file that was read and return it, unless it was read before and has no new games."""
        previous = source.file.previous
        self.count("files", int(previous is None or not previous.games))
        self.count("games", len(source.chunks))
        self.count("positions", sum(chunk.positions for chunk in source.chunks))
        if previous is None:
            return [source]
        with self._lock:
            kept = [each for each in self._bad if each[0] != printable(source.file.name)]
            self._bad = deque(kept, maxlen=NAMED_FILES)
        return [source] if source.chunks else []

    def _report(self, file: FoundFile, progress: ReadProgress | None) -> None:
        if self._monitor is not None:
            self._monitor.was_read(file, progress)

    def _record_bad(self, file: FoundFile, code: str, reason: str) -> None:
        self.count("bad_files")
        self.count(f"bad.{code}")
        with self._lock:
            self._bad.append((printable(file.name), printable(f"{code}: {reason}")))

    def _count_rejected(self, reasons: Counter[str]) -> None:
        for reason, amount in reasons.items():
            self.count("rejected", amount)
            self.count(f"rejected.{reason}", amount)

    def read(self, file: FoundFile, stopping: threading.Event | None = None) -> ChunkSource:
        """Return the games of a file that belong to the split, in the file's order, without those of earlier
        readings.

        The same file always gives the same games. Games and records that are left out are counted; a bad file
        is not.

        Args:
            file: File to read. Of ``previous``, only the numbers of games and records are used.
            stopping: Event that ends the reading early. None (default) to read the whole file.

        Raises:
            InputError: The file is bad; its ``code`` gives the reason.
            OSError: The file does not exist or cannot be read.
            Stopped: ``stopping`` was set.
        """
        assert file.path is not None
        return self._make_source(file, self._read_content(file, file.path, stopping))

    def _make_source(self, file: FoundFile, content: _Content) -> ChunkSource:
        """Return the games of a file that are new and belong to the split."""
        new = content.chunks[file.previous.games :] if file.previous else content.chunks
        chunks = [chunk for chunk in new if self.split in (None, content.split or self._split_of(chunk))]
        self.count("other_split", len(new) - len(chunks))
        if self.world_size > 1:
            own = [chunk for chunk in chunks if rank_of(chunk.game_hash, self.world_size) == self.rank]
            self.count("other_rank", len(chunks) - len(own))
            chunks = own
        progress = None
        if content.records is not None:
            progress = ReadProgress(len(content.chunks), content.records, digest_games(content.chunks))
        return ChunkSource(file, chunks, progress)

    def _read_content(self, file: FoundFile, path: Path, stopping: threading.Event | None) -> _Content:
        """Return the whole content of a file, also games of earlier readings. Raises the errors of
        :meth:`read`.
        """
        if file.size > self.max_file_bytes:
            raise _too_large(path, f"{file.size:,} bytes", f"{self.max_file_bytes:,}", "max_file_bytes")
        if looks_like_shard(path):
            content = _Content(self._read_shard(file, path, stopping), split=shard_split(file.name))
        else:
            content = self._read_source(file, path, stopping)
        self.count("ungrouped", content.games.ungrouped)
        if not content.chunks:
            found = f"{content.games.ungrouped:,} positions of no known game"
            raise FormatError("the file contains no game", code=Reason.NO_GAMES, found=found)
        self._check_board_size(content.chunks[0].board_size)
        return content

    def _split_of(self, chunk: Chunk) -> str:
        return split_of(chunk.game_hash, self.val, self.test)

    def _read_source(self, file: FoundFile, path: Path, stopping: threading.Event | None) -> _Content:
        known = file.previous.records if file.previous else 0
        raw: list[pa.RecordBatch] = []
        rejected: Counter[str] = Counter()
        known_rejects: Counter[str] = Counter()
        records = 0
        with open_source(path) as reader:
            if isinstance(reader, SizeSelectingReader) and self.board_size is not None:
                reader.select_board_size(self.board_size)
            for batch in reader.batches():
                for each in batch.rejected:
                    (rejected if each.record >= known else known_rejects)[each.reason] += 1
                if batch.positions.num_rows:
                    raw.append(batch.positions)
                records += batch.records
                self._check_limits(path, records, stopping)
            size, kind, header = reader.board_size, reader.format, reader.header
        self._count_rejected(rejected)
        if not raw or size is None:
            raise FormatError(
                "the file contains no position",
                code=Reason.NO_POSITIONS,
                found=f"{rejected.total():,} rejected records",
            )
        if kind == "trmph":
            games = extract_trmph_games(file.name, raw, size)
            return _Content(games, records=records, known_rejects=known_rejects)
        if not is_legacy_format(kind):
            mixed = is_mixed(kind, header)
            games = extract_games(
                file.name,
                raw,
                size,
                mixed=mixed,
                sure_ids=mixed,
                replayed=kind in GAME_FORMATS,
                convention="blue-is-0",
            )
            return _Content(games, records=records, known_rejects=known_rejects)
        default = None if self.value_convention == "auto" else cast("Convention", self.value_convention)
        layout, mixed = layout_convention(header), is_mixed(kind, header)
        return _Content(extract_games(file.name, raw, size, mixed=mixed, layout=layout, default=default))

    def _read_shard(self, file: FoundFile, path: Path, stopping: threading.Event | None) -> FileGames:
        raw: list[pa.RecordBatch] = []
        sizes: set[int] = set()
        records = 0
        for size, positions in shard_batches(path):
            sizes.add(size)
            raw.append(positions)
            records += positions.num_rows
            self._check_limits(path, records, stopping)
        if not raw:
            raise FormatError("the file contains no position", code=Reason.NO_POSITIONS)
        if len(sizes) > 1:
            raise FormatError(
                "the boards of the file differ in size", code=Reason.BOARD_SIZE, found=sorted(sizes)
            )
        return extract_games(file.name, raw, sizes.pop(), mixed=True, sure_ids=True, convention="blue-is-0")

    def _check_limits(self, path: Path, records: int, stopping: threading.Event | None) -> None:
        """Raise if the reading has to end: the pipeline stops, or the file has too many records.

        Rejected records count too, because they also take time.
        """
        if stopping is not None and stopping.is_set():
            raise Stopped
        if records > self.max_positions:
            found = f"at least {records:,} records"
            raise _too_large(path, found, f"{self.max_positions:,}", "max_positions")

    def _check_board_size(self, size: int) -> None:
        """Check that the boards have the size of all others; the first good file sets it."""
        with self._lock:
            self.board_size = self.board_size or size
        if size != self.board_size:
            raise FormatError(
                "the boards have another size than those of earlier files",
                code=Reason.BOARD_SIZE,
                found=size,
                expected=self.board_size,
            )

    def state(self) -> dict[str, Any]:
        """Return the board size."""
        return {"board_size": self.board_size}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the board size."""
        self.board_size = state["board_size"]

    def notes(self) -> dict[str, Any]:
        """Return the last bad files: (name, reason)."""
        return {"bad": list(self._bad)} if self._bad else {}


def _too_large(path: Path, found: str, maximum: str, option: str) -> FormatError:
    return FormatError(
        "the file is too large",
        code=Reason.TOO_LARGE,
        path=path,
        found=found,
        expected=f"at most {maximum}",
        hint=f"Increase {option} if there is enough memory.",
    )
