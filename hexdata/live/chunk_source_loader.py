"""The stage that reads files and extracts their games. It counts and names a bad file, and continues.

``source_games`` groups and names the games. This module repairs nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.checks import check_choice, check_count, check_fields
from hexdata.errors import FormatError, InputError, Reason
from hexdata.formats import open_source
from hexdata.games.convention import CONVENTIONS, Convention
from hexdata.games.findings import split_of
from hexdata.live.chunk import NAMED_FILES, SCANNED, Chunk, ChunkSource, KnownFile
from hexdata.live.source_games import extract_games
from hexdata.live.stage import Stopped, Transform
from hexdata.schema import is_legacy_format
from hexdata.text import printable


@dataclass(kw_only=True, eq=False)
class ChunkSourceLoader(Transform):
    """Reads the games of each file: names in, :class:`ChunkSource` out.

    The format is detected from the content. Games are grouped, named and checked as in ``convert``, but file
    by file, and without a search for duplicates. If the positions of a file are from many files (shuffled
    pickles), ids group them into games, and an incomplete game is named by its id. The name of a game
    determines its split. Positions of no known game are counted and left out.

    A file may arrive again after a change. Of a text, the games of earlier readings are left out; if it no
    longer starts with them, it is bad ("rewritten"), as is another good file that has changed. A bad file is
    read again as a whole. A file that exists and cannot be opened is delivered again by the provider.

    The counts are ``files``, ``games`` and ``positions`` (passed on), ``other_split`` and ``other_rank``
    (games), ``ungrouped`` (positions of no known game), ``rejected`` (records), ``bad_files``, and for each
    reason code ``rejected.CODE`` and ``bad.CODE``. A file without a game is also bad.

    Args:
        directory: Directory that contains the files.
        board_size: Board size n of all games; a file of another size is bad. None (default) for the size of
            the first good file.
        value_convention: Value convention of files where neither the games nor the layout show it,
            "blue-is-0" or "blue-is-1". With "auto" (default), such a file is bad.
        split: "train", "val" or "test" to leave out the games of other splits. None (default) for all games.
        val: Share of the games in the validation split. Default 0.05.
        test: Share of the games in the test split. Default 0.01.
        max_positions: Maximum number of records in a file, rejected ones included; a file with more is bad.
            Each record takes 100 to 400 bytes of memory. Default 2,000,000.
        rank: Number of this process among those that share the games, from 0. Default 0.
        world_size: Number of processes that share the games; each game is passed on by one of them, which
            its hash determines. Default 1.

    Raises:
        ConfigError: An option cannot be used.
    """

    directory: Path
    board_size: int | None = None
    value_convention: str = "auto"
    split: str | None = None
    val: float = 0.05
    test: float = 0.01
    max_positions: int = 2_000_000
    rank: int = 0
    world_size: int = 1

    consumes = "files"
    produces = "sources"

    def __post_init__(self) -> None:
        super().__init__()
        check_choice("value_convention", self.value_convention, ("auto", *CONVENTIONS))
        check_fields(self, {"max_positions": 1})
        if self.board_size is not None:
            check_count("board_size", self.board_size, MIN_SIZE, MAX_SIZE)

    def process(self, item: str) -> Iterable[ChunkSource | str]:
        """Read one file; return nothing for a bad file or one without new games."""
        if item == SCANNED:
            return [SCANNED]
        known = self.coordinator.files.setdefault(item, KnownFile())
        try:
            is_new = not known.games
            source = self.read(item, known)
        except InputError as error:
            code, reason = error.code, error.detail()
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            code, reason = Reason.GONE if is_gone else Reason.UNREADABLE, str(error.strerror)
            # Deliver it again if it is still found: its drive may have been missing for a moment.
            known.delivered = None
        else:
            self.count("files", int(is_new))
            self.count("games", len(source.chunks))
            self.count("positions", sum(chunk.positions for chunk in source.chunks))
            # It was bad while it was being written.
            named = self.named_files.get("bad", ())
            self.named_files["bad"] = deque([e for e in named if e[0] != printable(item)], NAMED_FILES)
            return [source] if source.chunks else []
        self.count("bad_files")
        self.count(f"bad.{code}")
        self.name_file("bad", item, f"{code}: {reason}")
        return []

    def read(self, name: str, known: KnownFile | None = None) -> ChunkSource:
        """Return the new games of a file that belong to the split and rank, in the file's order.

        The same file always gives the same games. Games and records that are left out are counted; a bad file
        is not.

        Args:
            name: Name of the file, relative to the directory.
            known: How far earlier readings read the file, updated. None (default) if all games are new.

        Raises:
            InputError: The file is bad; its ``code`` gives the reason.
            OSError: The file does not exist or cannot be read.
        """
        known = known or KnownFile()
        if not known.may_grow:
            raise FormatError("it was complete and has changed since", code=Reason.REWRITTEN)
        chunks, records, may_grow = self._read_all(name, known.records)
        # A text is read from its start after each change, which is rare: the wait before each reading is
        # twice as long as before. So a text that was replaced by another one is recognized.
        if _digest(chunks[: known.games]) != (known.digest or _digest([])):
            reason = f"it no longer starts with the {known.games:,} games read from it before"
            raise FormatError(reason, code=Reason.REWRITTEN)
        new = self._select(chunks[known.games :])
        # Games of other splits count too: the next reading compares and skips all games of the file.
        known.games, known.digest = len(chunks), _digest(chunks)
        known.records, known.may_grow = records, may_grow
        return ChunkSource(name, new)

    def _read_all(self, name: str, known_records: int) -> tuple[list[Chunk], int, bool]:
        """Return all games of a file, the number of its records, and whether it may grow.

        Rejected records before ``known_records`` were counted by an earlier reading.
        """
        path = Path(name)
        if path.anchor or ".." in path.parts or "\0" in name:  # of a state that hexdata did not write
            raise InputError("the file is outside the directory", path=path)
        raw: list[pa.RecordBatch] = []
        records, rejected, sizes = 0, Counter[str](), set[int]()
        with open_source(self.directory / path) as reader:
            if wanted := self.board_size or self.coordinator.board_size:
                reader.select_board_size(wanted)
            for batch in reader.batches():
                # Those of an earlier reading were counted then.
                rejected.update(each.reason for each in batch.rejected if each.record >= known_records)
                sizes.update(each.board_size for each in batch.rejected if each.board_size)
                if batch.positions.num_rows:
                    raw.append(batch.positions)
                records += batch.records
                # Here, so that the reading ends if the pipeline stops.
                if self.coordinator.stopping.is_set():
                    raise Stopped
                if records > self.max_positions:
                    fault = f"the file has at least {records:,} records"
                    reason = f"{fault}, and max_positions is {self.max_positions:,}"
                    raise FormatError(reason, code=Reason.TOO_LARGE)
        if sizes and not raw:
            raise FormatError("the boards have other sizes", code=Reason.BOARD_SIZE, found=sorted(sizes))
        chunks, ungrouped = list[Chunk](), 0
        if raw:
            default = None if self.value_convention == "auto" else cast("Convention", self.value_convention)
            chunks, ungrouped = extract_games(name, raw, reader, default)
        for reason, amount in rejected.items():
            self.count("rejected", amount)
            self.count(f"rejected.{reason}", amount)
        self.count("ungrouped", ungrouped)
        # It may still be written: a bad file is read again after each change, from the beginning.
        if not chunks:
            code = Reason.NO_GAMES if ungrouped else Reason.NO_POSITIONS
            found = f"{ungrouped:,} other positions, {rejected.total():,} rejected records"
            raise FormatError("the file contains no game", code=code, found=found)
        self.coordinator.require_size(chunks[0].board_size)
        # Only texts grow line by line.
        return chunks, records, not is_legacy_format(reader.format)

    def _select(self, new: list[Chunk]) -> list[Chunk]:
        """Return the games that belong to the split and rank."""
        chunks = new
        if self.split is not None:
            chunks = [c for c in new if split_of(c.game_hash, self.val, self.test) == self.split]
        self.count("other_split", len(new) - len(chunks))
        if self.world_size > 1:
            # The split is determined by the first half of the hash, so the second divides every split evenly.
            ranks = [int.from_bytes(chunk.game_hash[8:], "big") % self.world_size for chunk in chunks]
            chunks = [chunk for chunk, rank in zip(chunks, ranks, strict=True) if rank == self.rank]
            self.count("other_rank", len(ranks) - len(chunks))
        return chunks

    def wait_reason(self) -> str | None:
        """Return the counts if there is no game to pass on since the start, and the last bad file."""
        counted = [f"{name} {amount:,}" for name, amount in sorted(self.counts.items()) if amount]
        # Games that a resumed pool reads again are counted too, but are no reason.
        if self.counts.get("games") or not (self.counts.get("files") or self.counts.get("bad_files")):
            return None
        bad = "".join(f"; {name}: {fault}" for name, fault in self.notes().get("bad", [])[-1:])
        return f"no game of split {self.split} and rank {self.rank}: {', '.join(counted)}{bad}"


def _digest(chunks: Iterable[Chunk]) -> bytes:
    return hashlib.blake2b(b"".join(chunk.game_hash for chunk in chunks), digest_size=16).digest()
