"""The stage that opens files and takes the games out of them. A bad file is counted and named, and no more.

What games are in a file, what they are called and what their labels mean is found out by ``games``; how
the bytes are read is known to ``formats``. Never finds out that a file has changed, and repairs nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

import pyarrow as pa

from hexdata.board import check_board_size
from hexdata.checks import check_choice, check_count, check_shares
from hexdata.errors import ConfigError, FormatError, InputError
from hexdata.formats import open_source
from hexdata.games.convention import CONVENTIONS, Convention, layout_convention
from hexdata.games.evidence import is_mixed
from hexdata.games.labels import split_of
from hexdata.live.chunk import (
    NOTHING_READ,
    SCANNED,
    Chunk,
    ChunkSource,
    FoundFile,
    Reading,
    begins_as,
    digest_games,
)
from hexdata.live.hub import Stopped
from hexdata.live.shard_source import looks_like_shard, shard_batches, shard_split
from hexdata.live.source_games import Found, found_games, trmph_games
from hexdata.live.stage import Stage, Transform
from hexdata.schema import SPLITS
from hexdata.text import printable

__all__ = ["ChunkSourceLoader"]

NAMED: Final = 20
"""So many of the last bad files are remembered by name."""


@dataclass(frozen=True)
class _Content:
    """What is in a file."""

    found: Found
    split: str | None = None
    """Which split its name says that it is of."""
    records: int | None = None
    """How many it has, if more may come at its end: of a text."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Reasons of rejected records that were counted when the file came before."""

    @property
    def chunks(self) -> list[Chunk]:
        """Its games, of all splits."""
        return self.found.chunks


@runtime_checkable
class _Finder(Protocol):
    """What finds files again that have changed, if it is told how far they were read."""

    def expect_readings(self) -> None: ...

    def was_read(self, file: FoundFile, reading: Reading | None) -> None: ...

    def was_not_read(self, file: FoundFile) -> None: ...


class ChunkSourceLoader(Transform):
    """Turns :class:`FoundFile` into :class:`ChunkSource`: TRMPH games, legacy pickles, shards of hexdata.

    The content of a file tells what it is. Games are told apart, named and judged as ``convert`` does it,
    but file by file, and duplicates are not looked for. Where the positions of a file come from everywhere
    (shards, pickles that were shuffled), ids tell its games apart, and one of which the file has only a
    part is named by them. The name of a game decides its split; but a shard, where ``export`` named it, is of
    the split that it says. Positions of no known game are counted and left out.

    A stage that has ``expect_readings`` is told of each file how far it was read, so that the file may come
    again once it has changed: a bad one, one that could not be opened, and a text, which may go on. Of a text
    that comes again, the games that came before are left out; one that does not begin with them is bad
    ("rewritten").

    With several threads the chunks are the same, but sources may overtake each other, and the end of the
    first scan the last of its files.

    Counted are ``files``, ``games`` and ``positions`` that were passed on, ``other_split`` (games), ``loose``
    (positions of no known game), ``rejected`` (records), ``bad_files``, and by the code of the reason
    ``rejected.CODE`` and ``bad.CODE``. A file without a game is bad as well. One that comes again is counted
    as bad each time, and as good once.

    Args:
        board_size: of all games; a file of another size is bad. None for that of the first good file.
        value_convention: what the values of a file mean whose games and layout do not show it; with "auto",
            such a file is bad.
        split: "train", "val" or "test": games of other splits are left out. None for all games.
        val: share of the games in the validation split.
        test: share of the games in the test split.
        max_file_bytes: a larger file is bad.
        max_positions: a file of more positions, with the records that are none, is bad. Memory is 100 to
            400 bytes for each of them.
        threads: of the stage.

    Raises:
        ConfigError: an option cannot be used.
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
        self._bad: deque[tuple[str, str]] = deque(maxlen=NAMED)
        self._finder: _Finder | None = None

    def meet(self, stages: Sequence[Stage]) -> None:
        """Find who is to know how far files were read."""
        self._finder = next((stage for stage in stages if isinstance(stage, _Finder)), None)
        if self._finder is not None:
            self._finder.expect_readings()

    def process(self, item: FoundFile) -> Iterable[ChunkSource]:
        """Open one file; a bad one gives nothing."""
        if item.path is None:
            return [ChunkSource(SCANNED)]
        try:
            found = self._find(item, item.path, self.hub.stopping)
        except InputError as error:
            self._name_bad(item, error.code, error.detail())
            self._tell(item, NOTHING_READ if item.is_moved else item.after or NOTHING_READ)
            return []
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            self._name_bad(item, "gone" if gone else "unreadable", error.strerror or str(error))
            if self._finder is not None:
                self._finder.was_not_read(item)
            return []
        if item.after and not begins_as(found.chunks, item.after):
            if not item.is_moved:
                games = f"its {item.after.games:,} games that came before"
                self._name_bad(item, "rewritten", f"it does not begin with {games}, so none of it is taken")
                self._tell(item, None)
                return []
            self._count_rejected(found.passed_over)
            item = replace(item, after=None)
        source = self._source(item, found)
        self._tell(item, source.reading)
        return self._pass_on(source)

    def _pass_on(self, source: ChunkSource) -> list[ChunkSource]:
        """Count a file that was read; give it, unless it has come before and there is nothing new."""
        before = source.file.after
        self.count("files", int(before is None or not before.games))
        self.count("games", len(source.chunks))
        self.count("positions", sum(chunk.positions for chunk in source.chunks))
        if before is None:
            return [source]
        with self._lock:
            kept = [each for each in self._bad if each[0] != printable(source.file.name)]
            self._bad = deque(kept, maxlen=NAMED)
        return [source] if source.chunks else []

    def _tell(self, file: FoundFile, reading: Reading | None) -> None:
        if self._finder is not None:
            self._finder.was_read(file, reading)

    def _name_bad(self, file: FoundFile, code: str, reason: str) -> None:
        self.count("bad_files")
        self.count(f"bad.{code}")
        with self._lock:
            self._bad.append((printable(file.name), printable(f"{code}: {reason}")))

    def _count_rejected(self, reasons: Counter[str]) -> None:
        for reason, amount in reasons.items():
            self.count("rejected", amount)
            self.count(f"rejected.{reason}", amount)

    def read(self, file: FoundFile, stopping: threading.Event | None = None) -> ChunkSource:
        """Return the games of a file that are of the split, in the file's order; none that came before.

        The same file gives the same games. What is left out of it is counted; a bad file is not.

        Args:
            file: one that was found; of ``after``, only the numbers count.
            stopping: when it is set, reading ends early.

        Raises:
            InputError: the file is bad; its ``code`` says why.
            OSError: it cannot be read, or is not there.
            Stopped: ``stopping`` was set.
        """
        assert file.path is not None
        return self._source(file, self._find(file, file.path, stopping))

    def _source(self, file: FoundFile, found: _Content) -> ChunkSource:
        """Return what is new in a file and of the split."""
        new = found.chunks[file.after.games :] if file.after else found.chunks
        chunks = [chunk for chunk in new if self.split in (None, found.split or self._split_of(chunk))]
        self.count("other_split", len(new) - len(chunks))
        reading = None
        if found.records is not None:
            reading = Reading(len(found.chunks), found.records, digest_games(found.chunks))
        return ChunkSource(file, chunks, reading)

    def _find(self, file: FoundFile, path: Path, stopping: threading.Event | None) -> _Content:
        """Return all that is in a file, whatever came before; errors as :meth:`read` has them."""
        if file.size > self.max_file_bytes:
            raise _too_large(path, f"{file.size:,} bytes", f"{self.max_file_bytes:,}", "max_file_bytes")
        if looks_like_shard(path):
            content = _Content(self._read_shard(file, path, stopping), split=shard_split(file.name))
        else:
            content = self._read_source(file, path, stopping)
        self.count("loose", content.found.loose)
        if not content.chunks:
            found = f"{content.found.loose:,} positions of no game"
            raise FormatError("no game in it", code="no-games", found=found)
        self._hold_size(content.chunks[0].board_size)
        return content

    def _split_of(self, chunk: Chunk) -> str:
        return split_of(chunk.game_hash, self.val, self.test)

    def _read_source(self, file: FoundFile, path: Path, stopping: threading.Event | None) -> _Content:
        known = file.after.records if file.after else 0
        raw: list[pa.RecordBatch] = []
        rejected: Counter[str] = Counter()
        passed_over: Counter[str] = Counter()
        records = 0
        with open_source(path) as reader:
            for batch in reader.batches():
                for each in batch.rejected:
                    (rejected if each.record >= known else passed_over)[each.reason] += 1
                if batch.positions.num_rows:
                    raw.append(batch.positions)
                records += batch.records
                self._go_on(path, records, stopping)
            size, kind, header = reader.board_size, reader.format, reader.header
        self._count_rejected(rejected)
        if not raw or size is None:
            raise FormatError(
                "no position in it", code="no-positions", found=f"{rejected.total():,} rejected"
            )
        if kind == "trmph":
            games = trmph_games(file.name, raw, size)
            return _Content(games, records=records, passed_over=passed_over)
        otherwise = None if self.value_convention == "auto" else cast("Convention", self.value_convention)
        layout, mixed = layout_convention(header), is_mixed(kind, header)
        found = found_games(file.name, raw, size, mixed=mixed, layout=layout, otherwise=otherwise)
        return _Content(found)

    def _read_shard(self, file: FoundFile, path: Path, stopping: threading.Event | None) -> Found:
        raw: list[pa.RecordBatch] = []
        sizes: set[int] = set()
        records = 0
        for size, positions in shard_batches(path):
            sizes.add(size)
            raw.append(positions)
            records += positions.num_rows
            self._go_on(path, records, stopping)
        if not raw:
            raise FormatError("no position in it", code="no-positions")
        if len(sizes) > 1:
            raise FormatError("boards of more than one size", code="board-size", found=sorted(sizes))
        return found_games(file.name, raw, sizes.pop(), mixed=True, sure_ids=True, convention="blue-is-0")

    def _go_on(self, path: Path, records: int, stopping: threading.Event | None) -> None:
        """Be asked, while a file is read, whether to read on: records that are no positions take time too."""
        if stopping is not None and stopping.is_set():
            raise Stopped
        if records > self.max_positions:
            found = f"at least {records:,} records"
            raise _too_large(path, found, f"{self.max_positions:,}", "max_positions")

    def _hold_size(self, size: int) -> None:
        """See that a good file's boards have the size of all others; the first one says which."""
        with self._lock:
            self.board_size = self.board_size or size
        if size != self.board_size:
            raise FormatError(
                "another board size than the games before",
                code="board-size",
                found=size,
                expected=self.board_size,
            )

    def state(self) -> dict[str, Any]:
        """Return the size of the boards."""
        return {"board_size": self.board_size}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the size of the boards."""
        self.board_size = state["board_size"]

    def notes(self) -> dict[str, Any]:
        """Return the last bad files: (name, reason)."""
        return {"bad": list(self._bad)} if self._bad else {}


def _too_large(path: Path, found: str, most: str, option: str) -> FormatError:
    return FormatError(
        "the file is too large",
        code="too-large",
        path=path,
        found=found,
        expected=f"at most {most}",
        hint=f"Raise {option} if there is the memory for it.",
    )
