"""Fuzz targets for games as text, compared with separate parsers of the same grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fuzz_target import BOTH, NEITHER, Target, check_boards, files_in_memory, read_all, require

import hexdata.formats.games as games_module
from hexdata.board import check_no_repeats, parse_moves, split_trmph
from hexdata.errors import FormatError
from hexdata.formats.games import GameRecord
from hexdata.formats.hexworld import HexWorldReader, looks_like_hexworld
from hexdata.formats.run_header import RUN_FACTS, RunHeader, date_of_name
from hexdata.formats.sgf import SgfReader, _Scanner, contains_sgf, looks_like_sgf
from hexdata.formats.source import FilePart
from hexdata.formats.trmph import TrmphReader, is_game_line, looks_like_trmph

__all__ = ["HexWorldTarget", "RunHeaderTarget", "SgfTarget", "TextFileTarget", "TrmphTarget"]

SIZES = range(3, 33)
TRMPH_LINES = (
    *("#3,a1b1a2b2a3 b", "http://www.trmph.com/hex/board#3,a1b1a2b2a3 1", "#13,a1b1c13m13 r", "#3,b2"),
    *("#26,z26a1 2 # resigned", "#32,af32ff1", "  #11,a10b11  R", "https://x/#3,a1b2 b # c", "#3,a1a1 b"),
)
HEXWORLD_LINES = (
    *("https://hexworld.org/board/#13r9c1,a3:sg7f8:rb", "#3c1,a1b2:S:p,c3:fw", "11n,a10f6", "#3,,a1b1a2b2a3"),
    *("3x3m,b2:rw,,", "#32r1,af32aa1:p:p", "#5c1,c3:sb2:p:rb # a comment", "14", "#3c1,a1:s:S"),
)


def _cell(letters: str, row: str, size: int) -> int | None:
    """Return the cell of a column and a row, None if the board has none."""
    column = 0
    for letter in letters:
        column = column * 26 + ord(letter) - 96
    if not (1 <= column <= size and 1 <= int(row) <= size) or row.startswith("0"):
        return None
    return (int(row) - 1) * size + column - 1


class TrmphTarget(Target):
    """A line of TRMPH: accepted if and only if a regular expression finds a game, with the same moves."""

    name = "trmph"
    max_len: ClassVar[int] = 120
    words = tuple(re.findall(rb"[a-z]+[0-9]*|#[0-9]+,|\W", " ".join(TRMPH_LINES).encode()))

    def seeds(self) -> list[bytes]:
        return [line.encode() for line in TRMPH_LINES]

    def check(self, raw: bytes) -> str:
        text = raw.partition(b"\n")[0].decode("utf-8", "replace")
        expected = _trmph_game(text)
        try:
            parts = split_trmph(text)
            moves = parse_moves(parts.moves, parts.board_size)
            check_no_repeats(moves, parts.board_size)
        except FormatError:
            require(expected is None, f"a valid game is refused: {expected}")
            return NEITHER
        require((parts.board_size, moves.tolist(), parts.winner) == expected, f"not {expected}")
        return BOTH


_TRMPH = re.compile(
    r"(?:https?://[^\s#]*)?#([0-9]{1,3}),((?:[a-z]{1,2}[0-9]+)*)(?:\s+([12bBrR]))?(?:\s+#(?:\s.*)?)?",
    re.DOTALL,
)


def _trmph_game(text: str) -> tuple[int, list[int], int | None] | None:
    """Return board size, cells and winner of a line; None if it is not a valid game."""
    found = _TRMPH.fullmatch(text.strip())
    if found is None or int(found[1]) not in SIZES:
        return None
    size = int(found[1])
    cells = [_cell(*move, size) for move in re.findall("([a-z]+)([0-9]+)", found[2])]
    if None in cells or len(set(cells)) < len(cells):
        return None
    return size, cells, None if found[3] is None else int(found[3] in "2rR")  # type: ignore[return-value]


class Played(NamedTuple):
    """A game as a list of stones."""

    size: int
    first: int
    cells: list[int | None]
    winner: int | None
    swap: str | None


class HexWorldTarget(Target):
    """A HexWorld link: accepted if and only if a separate parser accepts it, with the same game."""

    name = "hexworld"
    max_len: ClassVar[int] = 160
    words = tuple(re.findall(rb":?[a-zA-Z]+[0-9]*|[0-9]+|\W", " ".join(HEXWORLD_LINES).encode()))

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        stack.enter_context(files_in_memory(games_module))
        self.reader = HexWorldReader("/file")

    def seeds(self) -> list[bytes]:
        return [line.encode() for line in HEXWORLD_LINES]

    def check(self, raw: bytes) -> str:
        text = raw.partition(b"\n")[0].decode("utf-8", "replace")
        expected = _hexworld_game(text)
        game = GameRecord(1, 1)
        try:
            self.reader._read_game(text, game)
        except FormatError:
            require(expected is None, f"a valid game is refused: {expected}")
            return NEITHER
        cells = [None if move == 65535 else move for move in game.moves.tolist()]
        found = Played(game.board_size, game.first_player, cells, game.winner, game.swap)
        require(found == expected, f"{found}, not {expected}")
        return BOTH


def _hexworld_game(text: str) -> Played | None:
    """Return the game of a link; None if it is not valid."""
    link = re.split(r"\s", text.strip(), maxsplit=1)
    if len(link) > 1 and link[1].strip() and not link[1].strip().startswith("#"):
        return None
    body = link[0].rpartition("#")[2]
    address = link[0][: len(link[0]) - len(body)]
    if address not in ("", "#") and not re.fullmatch(r"https?://[^#]*#", address):
        return None
    fields = body.rstrip(",").split(",")
    size = re.fullmatch(r"([0-9]{1,4})(?:x([0-9]{1,4}))?((?:[rc][0-9]{1,3}|[mn])*)", fields[0])
    if (
        size is None
        or len(fields) > 3
        or int(size[1]) not in SIZES
        or int(size[2] or size[1]) != int(size[1])
    ):
        return None
    names = re.findall(r":[sSp]|:[rf][bw]|[a-z]{1,3}[1-9][0-9]{0,3}|.", "".join(fields[1:]), re.DOTALL)
    return _play(int(size[1]), names)


def _play(size: int, names: list[str]) -> Played | None:
    stones: list[int | None] = []
    first, winner, swap = 0, None, None
    for name in names:
        if winner is not None:
            return None
        if name == ":p":
            stones.append(None)
        elif name in (":s", ":S"):
            if len(stones) != 1 or stones[0] is None or swap is not None:
                return None
            swap = "pieces" if name == ":s" else "sides"
            if swap == "pieces":
                row, column = divmod(stones[0], size)
                stones, first = [column * size + row], 1
        elif name[0] == ":" and len(name) == 3:
            winner = 1 if name[2] == "b" else 0
        else:
            move = re.fullmatch("([a-z]+)([0-9]+)", name)
            cell = None if move is None else _cell(move[1], move[2], size)
            if cell is None:
                return None
            stones.append(cell)
    played = [cell for cell in stones if cell is not None]
    if not played or len(set(played)) < len(played) or len(stones) - len(played) > size * size:
        return None
    return Played(size, first, stones, winner, swap)


SGF_FILES = (
    "(;GM[11]FF[4]SZ[3]RE[B+R];B[a1];W[b1];B[a2];W[b2];B[a3])",
    "(;FF[4]EV[hex.mc]PB[x]PW[y]SZ[13]RE[W];W[aa];B[swap];W[bb];B[resign])",
    "(;GM[11]SZ[5]PL[B]DT[2020-01-02]CA[UTF-8];B[c3];W[swap-pieces];B[a1];W[pass];B[resign])",
    "text (; ) \n(;GM[11]SZ[3];B[a1](;W[b1])(;W[c1]))\n(;GM[1];B[dd])\n(;GM[11]SZ[3:3]C[a\\]b];B[b2];W[])",
    "(;GM[11](;SZ[3](;B[a1];W[b1];B[a2];W[b2];B[a3])))",
)


class SgfTarget(Target):
    """SGF: pieces of any length give the same games, whose nodes are those of a recursive parser."""

    name = "sgf"
    max_len: ClassVar[int] = 400
    words = tuple(re.findall(rb"[A-Za-z]+[0-9]?|\(;|\W", " ".join(SGF_FILES).encode()))

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(games_module))

    def seeds(self) -> list[bytes]:
        return [text.encode() for text in SGF_FILES]

    def check(self, raw: bytes) -> str:
        whole = _scanned(iter([raw] if raw else []))
        step = 1 + len(raw) % 7
        pieces = (raw[start : start + step] for start in range(0, len(raw), step))
        require(_scanned(pieces) == whole, f"other games in pieces of {step} bytes")
        self._compare_nodes(raw, whole)
        looks_like_sgf(raw), contains_sgf(raw)
        if all(error for _, error, _ in whole):
            return NEITHER
        self.file.content = raw
        rows, _, code = read_all(lambda: SgfReader("/file"))
        if rows:
            size = int((8 * len(rows[0]["board"]) // 2) ** 0.5)
            check_boards(rows, size)
        return BOTH if rows and not code else NEITHER

    @staticmethod
    def _compare_nodes(raw: bytes, games: list[Any]) -> None:
        """Compare the games before the first error with those of a recursive parser."""
        text = raw.removeprefix(b"\xef\xbb\xbf") if raw.lstrip().startswith(b"\xef\xbb\xbf") else raw
        offset = 0
        for nodes, error, _ in games:
            if error:
                return
            start = text.find(b"(", offset)
            parsed, offset = _sgf_tree(text, start)
            require(parsed is not None and len(parsed) == len(nodes), "another number of nodes")
            for ours, theirs in zip(nodes, parsed or [], strict=True):
                for name, value in ours:
                    if name in ("AB", "AW", "AE"):
                        require(any(key == name for key, _ in theirs), f"no {name}")
                    else:
                        require((name, value) in theirs, f"no {name}[{value!r}] in {theirs}")


def _scanned(pieces: Iterator[bytes]) -> list[Any]:
    return [(game.nodes, game.error and str(game.error), game.is_cut) for game in _Scanner(pieces).games()]


_SGF_TOKEN = re.compile(rb"\s*(?:([();])|([A-Za-z]+)\s*(?=\[)|\[((?:[^\]\\]|\\.)*)\])", re.DOTALL)


def _sgf_tree(text: bytes, start: int) -> tuple[list[list[tuple[str, bytes]]] | None, int]:
    """Return the nodes of the tree that begins at an offset, and the offset after it."""
    nodes: list[list[tuple[str, bytes]]] = []
    depth, name = 0, ""
    while found := _SGF_TOKEN.match(text, start):
        start = found.end()
        if found[1] in (b"(", b")"):
            depth += 1 if found[1] == b"(" else -1
            if depth == 0:
                return nodes, start
        elif found[1]:
            nodes.append([])
        elif found[2]:
            name = "".join(letter for letter in found[2].decode() if letter.isupper())
        else:
            value = re.sub(rb"\\(.)", lambda escape: escape[1].strip(b"\r\n"), found[3], flags=re.DOTALL)
            nodes[-1].append((name, value[:512]))
    return None, start


RUN_LINES = (
    *("# Model: x.pt", "# MCTS simulations: 400", "# temperature 1.0", "# seed = -7", "# git commit: abc"),
    *("# Self-play games - 2025-09-08T12:11:06.123456", "# models = ['a', 'b']", "# Date: 2024-02-30"),
    *(
        "a/tournament_x_250930_15/2025-09-30.trmph",
        "#3,a1 b",
        "# created = 2025-01-01",
        "# simulations: none",
    ),
)


class RunHeaderTarget(Target):
    """Comment lines with facts of a run: facts have their types, and a line that is repeated adds none."""

    name = "run-header"
    max_len: ClassVar[int] = 300
    words = tuple(re.findall(rb"\w+|\W", " ".join(RUN_LINES).encode()))

    def seeds(self) -> list[bytes]:
        return [*(line.encode() for line in RUN_LINES), "\n".join(RUN_LINES).encode()]

    def check(self, raw: bytes) -> str:
        lines = raw.split(b"\n")
        once, twice = RunHeader(), RunHeader()
        for line in lines:
            for header, times in ((once, 1), (twice, 2)):
                for _ in range(times):
                    header.read_comment(line) if line.startswith(b"#") else header.begin_game()
        facts = once.as_json()
        require(facts == twice.as_json(), "a repeated line changes the facts")
        require(json.loads(json.dumps(facts, allow_nan=False)) == facts, "facts that are not JSON")
        run: Any = facts.get("run", {})
        changes: Any = facts.get("run_changes", {})
        for name, values in [*((name, [value]) for name, value in run.items()), *changes.items()]:
            require(name in RUN_FACTS, f"an unknown fact {name}")
            require(all(value is None or _is_fact(name, value) for value in values), f"{name}: {values}")
        name = raw.decode("utf-8", "replace")
        found = date_of_name(name)
        require(found is None or _is_fact("date", found), f"the date {found}")
        if found is not None:
            digits = re.sub(r"\D", "", found)
            require(digits[2:] in re.sub(r"[-_]", "", name), f"the date {found} is not in the name")
        return BOTH if run or changes or found else NEITHER


def _is_fact(name: str, value: Any) -> bool:
    if name in ("simulations", "seed"):
        return type(value) is int and -(1 << 63) <= value < 1 << 63 and (name == "seed" or value >= 0)
    if name == "temperature":
        return type(value) is float and value - value == 0
    if name == "date":
        return date.fromisoformat(value).isoformat() == value
    return isinstance(value, str) and bool(value)


class TextFileTarget(Target):
    """Whole files of TRMPH and HexWorld lines: boards, numbers of lines, and the same games in two parts."""

    name = "text-file"
    max_len: ClassVar[int] = 600
    words = (
        b"\n",
        b"\r\n",
        b"\n\n",
        b"\xef\xbb\xbf",
        b"\n# seed: 3\n",
        *TrmphTarget.words,
        *HexWorldTarget.words,
    )

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(games_module))

    def seeds(self) -> list[bytes]:
        return [
            *(
                "\n".join(lines[k : k + 3]).encode()
                for lines in (TRMPH_LINES + RUN_LINES,)
                for k in range(0, 21, 3)
            ),
            *("\n".join(HEXWORLD_LINES[k : k + 3]).encode() for k in range(0, 9, 3)),
        ]

    def check(self, raw: bytes) -> str:
        if raw.startswith(b"\x1f\x8b"):
            return NEITHER
        self.file.content = raw
        kind: Callable[..., Any] = HexWorldReader if looks_like_hexworld(raw) else TrmphReader
        rows, rejected, code = read_all(lambda: kind("/file"))
        require(not code, f"the error {code}")
        if rows:
            check_boards(rows, int((8 * len(rows[0]["board"]) // 2) ** 0.5))
        if kind is TrmphReader:
            looks_like_trmph(raw)
            text = raw.removeprefix(b"\xef\xbb\xbf")
            games = sum(map(is_game_line, text.split(b"\n")))
            starts = sum(row["position_in_game"] == 0 for row in rows)
            require(
                starts + len(rejected) == games, f"{starts} games and {len(rejected)} rejected of {games}"
            )
        middle = raw.find(b"\n", len(raw) // 2) + 1
        if middle:
            self._compare_parts(kind, raw, middle, rows, len(rejected))
        return BOTH if rows else NEITHER

    def _compare_parts(
        self, kind: Callable[..., Any], raw: bytes, middle: int, rows: list[dict[str, Any]], rejected: int
    ) -> None:
        size = None
        found: list[dict[str, Any]] = []
        for start, stop in ((0, middle), (middle, len(raw))):
            with kind("/file", part=FilePart(start, stop, size)) as reader:
                batches = list(reader.batches())
                size = reader.board_size
            for batch in batches:
                found += batch.positions.to_pylist()
                rejected -= len(batch.rejected)
        for part in (rows, found):
            part[:] = [{**row, "record": 0} for row in part]
        require(found == rows and rejected == 0, "two parts have other games than the whole")
