"""Reader and writer of TRMPH text, one game per line, and reader of its sidecar.

The reader accepts plain and gzipped text and converts each line to the positions of its game, or to a
rejection with a reason. It repairs no data. The writer produces plain text.

A sidecar states masks and policies of the moves, in one JSON object for each game: ``X.provenance.jsonl``
belongs to ``X.trmph``. It changes the meaning of the games, so it is part of the source: a game whose record
is missing, invalid or contradicts it is rejected.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt

from hexdata.board import TrmphLine, check_no_repeats, format_moves, parse_moves, split_trmph
from hexdata.errors import FormatError, Reason
from hexdata.formats.games import GameRecord
from hexdata.formats.gunzip import GunzipFile, GunzipLimits, read_lines
from hexdata.formats.lines import LineReader, has_trmph, is_comment, listed_moves, without_surroundings
from hexdata.formats.source import FileReader, RawBatch, SourceFormat
from hexdata.policy import SparsePolicies
from hexdata.storage import AnyPath, storage_of

_COPIED: Final = re.compile(
    r"(?P<head>(?:https?://[^\s#]*)?#[0-9]{1,3}),\s{0,9}"
    r"(?P<moves>(?:(?:(?<=[\s,;])[0-9]{1,3}[.)]\s{0,9})?[a-z]{1,2}[0-9]{1,2}[ \t\xa0,;]{0,9}+)+?)"
    r"(?:(?<=[\s,;])(?P<winner>[12brw]|blue|red|black|white))?\s*(?P<comment>(?:(?<=\s)#(?:\s[^\r]*)?)?)",
    re.IGNORECASE,
)
"""A game with blanks, commas or numbers between its moves, and with a word as winner. Repetitions are
bounded, so that a hostile line is not searched for long."""
_WINNERS: Final = {"blue": "b", "black": "b", "red": "r", "white": "r", "w": "r"}


def is_game_line(line: bytes) -> bool:
    """Return whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not is_comment(line)


class TrmphReader(LineReader):
    """Reader of one TRMPH file: a :class:`hexdata.formats.source.SourceReader`.

    A game of m moves yields m + 1 positions. A line that is not a valid game counts as one record and is
    rejected with one of these reasons: "trmph-syntax", "no-moves", "trmph-cell", "repeated-move",
    "board-size" (an invalid size, or another size than the first valid game), "no-winner" (none is stated
    and the final board has no winning chain) or "line-too-long".

    A stated winner is kept even if the final board has a winning chain of the other player.

    If the file has a sidecar, the positions have the column ``policy_weight`` and, in
    version 2, the policies of the search. A game whose record in the sidecar is missing, invalid or
    contradicts it is rejected with a reason that begins with "sidecar-".

    Args:
        path: The file, gzipped or plain.
        salvage: If True, a damaged file yields the complete lines before the damage instead of raising.
        part: Range of bytes to read of a text without gzip. Its lines have the numbers of the whole file, and
            its records are numbered from 0. Default None: the whole file.
        has_sidecar: Whether a sidecar is looked for. Default True.
    """

    winner_hint: ClassVar[str] = "b or r after the moves"

    def __init__(self, path: str | AnyPath, *, has_sidecar: bool = True, **options: Any) -> None:
        super().__init__(path, **options)
        self._sidecar: SidecarReader | None = None
        if has_sidecar and (found := find_sidecar(self.path)):
            self._sidecar = self._opened.enter_context(SidecarReader(found, salvage=self._salvage))
            self.targets = ("policy_weight",)

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once; see :class:`SourceReader`."""
        # The rest of the sidecar comes after the last batch: a file of another board size is left out, not
        # refused, and only its records show its size.
        renamed = _NO_TEXT.sub(".trmph", self.path.name)
        is_misnamed = renamed != self.path.name and find_sidecar(self.path.parent / renamed)
        for batch in super().batches():
            if is_misnamed:  # an empty file may have any name
                reason = f"games with a sidecar, in a file with the name of positions; rename it to {renamed}"
                raise FormatError(reason, Reason.SIDECAR_MISMATCH)
            yield batch
        # The sidecar of a growing file may have records of games after the part.
        is_whole = self._part is None or (storage_of(self.path).size() or 0) <= self._part.stop
        if self._sidecar is not None and self.damage is None and is_whole:
            self._sidecar.finish()

    def _add_to_game(self, line: bytes, game: GameRecord | None) -> None:
        if self._sidecar is not None:
            self._sidecar.add_to(line, game)

    def read_line(self, text: str, game: GameRecord) -> None:
        """Read a line, also as people copy it: see :func:`_as_copied`."""
        try:
            line, moves = _parse(text)
        except FormatError as error:
            # Nearly all lines are in the exact notation, so the tolerant one is tried only after an error.
            copied = _as_copied(text) if error.code == Reason.TRMPH_SYNTAX else None
            if copied is None:
                raise
            line, moves = _parse(copied)
        if not line.moves:
            raise FormatError("a game without moves", Reason.NO_MOVES, expected="#13,a1b2c3 b")
        check_no_repeats(moves, line.board_size)
        game.board_size, game.moves, game.winner = line.board_size, moves, line.winner


def _parse(text: str) -> tuple[TrmphLine, npt.NDArray[np.uint16]]:
    line = split_trmph(text)
    return line, parse_moves(line.moves, line.board_size)


def _as_copied(text: str) -> str | None:
    """Return a line as people copy it in the notation of ``split_trmph``, or None if it is no game.

    There may be text around the game, cells in upper case, blanks, commas or numbers between the moves, and
    the winner as a word: White is the second player, as red is. TRMPH states no kind of swap, so a line with
    one is no game. A number after a comma may be anything, so it is no winner.

    Raises:
        FormatError: "trmph-syntax", if moves have wrong numbers.
    """
    game = _COPIED.fullmatch(without_surroundings(text))
    if game is None:
        return None
    moves = "".join(listed_moves(game["moves"].lower()))
    winner = (game["winner"] or "").lower()
    if winner in ("1", "2") and game["moves"].rstrip().endswith((",", ";")):
        return None  # a column of numbers
    return f"{game['head']},{moves} {_WINNERS.get(winner, winner)} {game['comment']}"


def write_trmph(
    target: str | Path | IO[str], games: Iterable[tuple[npt.NDArray[np.uint16], int | None]], board_size: int
) -> int:
    """Write games in the newer notation, ``#13,a1b2c3 b``, one per line.

    Args:
        target: Path, which is overwritten as UTF-8 text with LF line endings; or an open text file.
        games: Moves and winner of each game: cell indices uint16 (m,), and ``BLUE``, ``RED`` or None.
        board_size: Cells along an edge, the same for all games.

    Returns:
        The number of games written.
    """
    if isinstance(target, str | Path):
        with Path(target).open("w", encoding="utf-8", newline="\n") as file:
            return write_trmph(file, games, board_size)
    count = 0
    for moves, winner in games:
        ending = "" if winner is None else " r" if winner else " b"
        target.write(f"#{board_size},{format_moves(moves, board_size)}{ending}\n")
        count += 1
    return count


# Sidecars

SIDECAR_SUFFIXES: Final = (".provenance.jsonl", ".provenance.jsonl.gz")
_NO_TEXT: Final = re.compile(r"\.(?:pkl|pickle|npz|examples)(?:\.gz)?\Z", re.IGNORECASE)
"""End of the name of a file of positions, which has no sidecar. A text with any other name may be TRMPH."""
_LIMITS: Final = GunzipLimits(decompressed_bytes=1 << 40, ratio=1000, ratio_floor=4 << 20)
_MAX_LINE: Final = 8 << 20
"""Maximum length of a line in bytes. Policies of the longest game on a board of size 32 take 3 MB."""
_GAME: Final = re.compile(rb"#|[a-z][0-9]", re.IGNORECASE)
"""A part of each line of TRMPH with a game, also of a damaged one."""

_Letters = Annotated[str, msgspec.Meta(pattern=r"^[VGCT]*\Z")]


class _Record(msgspec.Struct, kw_only=True):
    """A record of version 1, or with ``policy_target…`` of version 2. Other keys are ignored."""

    game_index: int
    move_count: int
    move_codes: _Letters
    policy_train_mask: Annotated[str, msgspec.Meta(pattern=r"^[01]*\Z")]
    policy_target_encoding: Any = None
    policy_targets_blob: bytes | None = None
    policy_target_size: int | None = None
    policy_target_source_codes: _Letters | None = None
    policy_target_version: Annotated[int, msgspec.Meta(ge=0)] | None = None


def is_sidecar(name: str) -> bool:
    """Return whether a file has the name of a sidecar."""
    return name.lower().endswith(SIDECAR_SUFFIXES)


def sidecar_names(name: str) -> list[str]:
    """Return the possible names of the sidecar of a file, such as X.provenance.jsonl for X.trmph.gz.

    There are none for the name of a pickle or another file that is no text.
    """
    if _NO_TEXT.search(name):
        return []
    plain = name[:-3] if name.lower().endswith(".gz") else name
    stem = plain.rpartition(".")[0] or plain  # of a name; a PurePath takes ten times as long
    return [stem + suffix for suffix in SIDECAR_SUFFIXES]


def find_sidecar(path: AnyPath) -> AnyPath | None:
    """Return the sidecar of a file of games, or None if it has none.

    Raises:
        FormatError: "sidecar-mismatch", if there are two.
    """
    possible = [path.parent / name for name in sidecar_names(path.name)]
    found = [each for each in possible if storage_of(each).version()]
    if len(found) > 1:
        reason = f"{' and '.join(each.name for each in found)} are both its sidecar; remove one"
        raise FormatError(reason, Reason.SIDECAR_MISMATCH)
    return found[0] if found else None


class SidecarReader(FileReader):
    """Reads the records of a sidecar in order. A context manager.

    Args:
        path: The sidecar, gzipped or plain.
        salvage: If True, a damaged gzip stream ends the sidecar instead of raising.
    """

    def __init__(self, path: AnyPath, *, salvage: bool = False) -> None:
        super().__init__(path, salvage=salvage)
        file = GunzipFile(storage_of(path).open(), _LIMITS, salvage=salvage)
        self._lines = enumerate(read_lines(self._opened.enter_context(file), _MAX_LINE), 1)
        # One record is read ahead: if it is of a later game, the record of the present one is missing.
        self._game, self._line, self._ahead = -1, 0, self._read_line()

    def add_to(self, line: bytes, game: GameRecord | None) -> None:
        """Add the weights and the policies that the sidecar states for the game of a line, or reject it.

        Args:
            line: The next line that is no comment. It counts as a game if it may be a damaged one, too.
            game: The game, which may be rejected already; None if it is not read.

        Raises:
            FormatError: The sidecar is damaged; or "sidecar-mismatch", if the next record is of an earlier
                game than one that is not read.
        """
        if not _GAME.search(line):
            return
        self._game += 1
        self._line, record = self._ahead
        index = record.get("game_index") if isinstance(record, dict) else None
        other = index - self._game if type(index) is int else 0
        if record is not None and other <= 0:  # otherwise it is the record of a later game
            self._ahead = self._read_line()
        try:
            _require(
                other >= 0, Reason.SIDECAR_MISMATCH, "a record of an earlier game", f"game_index {index}"
            )
            if game is None or game.reason:
                return
            _require(record is not None and other == 0, Reason.SIDECAR_MISSING, "no record of the game")
            moves = game.moves.astype(np.int64)
            game.weights, game.policies = _read_record(record, moves, game.board_size)
            game.has_policy = np.full(len(moves), game.policies is not None)
        except FormatError as error:
            error.record = f"line {self._line} of {self.path.name}" if self._line else self.path.name
            if game is None:
                raise
            if not game.reason:
                game.reject(error, "line")

    def finish(self) -> None:
        """Check that no record is left.

        Raises:
            FormatError: "sidecar-mismatch".
        """
        line, record = self._ahead
        if record is not None:
            reason, place = "a record of no game, or not in their order", f"line {line} of {self.path.name}"
            raise FormatError(reason, Reason.SIDECAR_MISMATCH, str(record)[:80], record=place)

    def _read_line(self) -> tuple[int, Any]:
        """Return the number and the JSON object of the next line that is not blank; None at the end.

        If the line is not a JSON object, a text takes its place, which ``_read_record`` rejects and shows.
        """
        number = 0
        try:
            for number, (line, _) in self._lines:
                if len(line) > _MAX_LINE:
                    return number, f"more than {_MAX_LINE:,} bytes"
                if line.strip():
                    # Letters that cannot be read do not matter outside of the parts that are checked.
                    found = json.loads(line.decode(errors="replace"))
                    return number, found if isinstance(found, dict) else f"{found!r:.80}"
        except FormatError as error:  # the stream is damaged, which ends the sidecar if it is salvaged
            self._stop_at(error)
        except (ValueError, RecursionError) as error:
            return number, f"no JSON: {error}"
        return number, None


def _require(condition: object, code: Reason, reason: str, found: object = "") -> None:
    """Raise an error of a record unless a condition holds."""
    if not condition:
        raise FormatError(reason, code, str(found)[:80] or None)


def _read_record(
    content: Any, moves: np.ndarray, board_size: int
) -> tuple[np.ndarray, SparsePolicies | None]:
    """Return the weights of the policies, 0 or 1, (m,); and the m policies, or None in version 1.

    Args:
        content: The record.
        moves: Cells of the game, (m,).
        board_size: N of the game.

    Raises:
        FormatError: "sidecar-version", "sidecar-record" or "sidecar-mismatch".
    """
    invalid, version_fault, mismatch = Reason.SIDECAR_RECORD, Reason.SIDECAR_VERSION, Reason.SIDECAR_MISMATCH
    count, cells, other = len(moves), board_size**2, "the record is of another game"
    _require(isinstance(content, dict), invalid, "the record is no JSON object", content)
    # The version comes first: in another one, the keys may mean something else.
    version = content.get("schema_version")
    _require(type(version) is int and version in (1, 2), version_fault, "not version 1 or 2", version)
    try:
        record = msgspec.convert(content, _Record)
    except msgspec.ValidationError as error:
        raise FormatError("the record is not valid", invalid, str(error)) from error
    codes, mask = record.move_codes, record.policy_train_mask
    # The lengths, and below the occupied cells, distinguish the record from that of another game.
    lengths = record.move_count, len(codes), len(mask)
    stated = "move_count {}, {} letters and a mask of {}".format(*lengths)
    _require({*lengths} == {count}, mismatch, other, f"{stated} for {count} moves")
    stated = "".join("0" if code == "C" else "1" for code in codes)
    _require(mask == stated, invalid, "the mask contradicts the letters of the moves", mask)
    weights = np.array([*map(int, mask)], np.float32)
    if version == 1:
        has_policies = any(getattr(record, name) is not None for name in _Record.__struct_fields__[4:])
        _require(not has_policies, invalid, "a record of version 1 has policies")
        return weights, None
    encoding, size = record.policy_target_encoding, record.policy_target_size
    _require(encoding == "dense_fp16_zlib_base64", version_fault, "policies in another encoding", encoding)
    _require(size == cells, mismatch, "policies of another board size", size)
    is_whole = record.policy_target_source_codes == codes and record.policy_target_version is not None
    _require(is_whole, invalid, "the version or the letters of the policies are missing or differ")
    unpacker, most = zlib.decompressobj(), 2 * count * cells
    try:
        # One byte more shows that there are too many.
        data = unpacker.decompress(record.policy_targets_blob or b"", most + 1)
    except zlib.error as error:
        raise FormatError("policy_targets_blob is damaged", invalid, str(error)) from error
    is_whole = len(data) == most and unpacker.eof and not unpacker.unused_data
    _require(is_whole, invalid, f"policy_targets_blob has not {most:,} bytes")
    targets = np.frombuffer(data, "<f2").reshape(count, cells).astype(np.float32)
    _require((np.isfinite(targets) & (targets >= 0)).all(), invalid, "a policy has invalid probabilities")
    # Zeros are valid where the policy is not to be trained.
    empty = np.flatnonzero(~targets.any(axis=1) & (weights > 0))
    _require(not len(empty), invalid, "a policy is zero, but is to be trained", f"moves {empty + 1}")
    # The policy of move k is of the board before it, so the cells of earlier moves are occupied.
    occupied = np.tril(targets[:, moves] > 0, -1).any(axis=1)
    _require(not occupied.any(), mismatch, other, f"an occupied cell at move {occupied.argmax() + 1}")
    return weights, SparsePolicies.from_dense(targets)


FORMAT: Final = SourceFormat(
    "trmph",
    ("*.trmph", "*.trmph.gz"),
    lambda head, name: ".trmph" in name or has_trmph(head),
    TrmphReader,
    "TRMPH games",
    appendable=True,
    options=("salvage", "part", "has_sidecar"),
)
