"""Fuzz target for games as text, compared with other parsers of the same grammars."""

from __future__ import annotations

import re
from typing import Any

from hexdata.formats import open_source
from hexdata.formats.gunzip import has_returns
from hexdata.formats.source import FilePart
from hexdata.formats.trmph import TrmphReader, is_game_line
from tests.fuzz.target import Target, check_boards, read_all, require

__all__ = ["TextTarget"]

TRMPH = """\
#3,a1b1a2b2a3 b
http://www.trmph.com/hex/board#3,a1b1a2b2a3 1
#13,a1b1c13m13 r
#26,z26a1 2 # resigned
#32,af32ff1
  #11,a10b11  R
https://x/#3,a1b2 b # c
#3,a1a1 b
# Model: x.pt
# seed = -7
# Self-play games - 2025-09-08T12:11:06.123456
# models = ['a', 'b']
a/tournament_x_250930_15/2025-09-30.trmph
#3,a1b1a2 b""".splitlines()
HEXWORLD = """\
https://hexworld.org/board/#13r9c1,a3:sg7f8:rb
#3c1,a1b2:S:p,c3:fw
11n,a10f6
3x3m,b2:rw,,
#32r1,af32aa1:p:p
#5c1,c3:sb2:p:rb # a comment""".splitlines()
SGF = (
    "(;GM[11]FF[4]SZ[3]RE[B+R];B[a1];W[b1];B[a2];W[b2];B[a3])",
    "(;FF[4]EV[hex.mc]PB[x]PW[y]SZ[13]RE[W];W[aa];B[swap];W[bb];B[resign])",
    "(;GM[11]SZ[5]PL[B]DT[2020-01-02]CA[UTF-8];B[c3];W[swap-pieces];B[a1];W[pass];B[resign])",
    "text (; ) \n(;GM[11]SZ[3];B[a1](;W[b1])(;W[c1]))\n(;GM[1];B[dd])\n(;GM[11]SZ[3:3]C[a\\]b];B[b2];W[])",
    "(;GM[11](;SZ[3](;B[a1];W[b1];B[a2];W[b2];B[a3])))",
)
_PLAIN_SGF = re.compile(
    rb"\s*\(;GM\[11\]\s*(?:[A-Z]{2}\[[^\[\]\\]*\]\s*)*(?:;[BW]\[[a-z][0-9]{1,2}\]\s*)*\)\s*"
)
"""Games without variations, swaps or escapes."""


class TextTarget(Target):
    """Whole files of TRMPH, HexWorld and SGF.

    Boards are those of a replay, each game line of TRMPH is a game or rejected, two parts of a file have the
    games of the whole, and plain SGF has the moves that a regular expression finds.
    """

    max_len = 600
    words = (
        *(b"\n", b"\r\n", b"\n\n", b"\xef\xbb\xbf", b"\n# seed: 3\n"),
        *re.findall(rb":?[a-zA-Z]+[0-9]*|#[0-9]+,|\(;|\W", " ".join((*TRMPH, *HEXWORLD, *SGF)).encode()),
    )

    def seeds(self) -> list[bytes]:
        parts = ["\n".join(lines[k : k + 3]) for lines in (TRMPH, HEXWORLD) for k in range(0, len(lines), 3)]
        return [text.encode() for text in (*parts, *SGF)]

    def check(self, raw: bytes) -> bool:
        if raw.startswith((b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")):
            return False  # other bytes than those of the text
        self.path.write_bytes(raw)
        kinds: list[str] = []

        def opened(part: FilePart | None = None) -> Any:
            reader = open_source(self.path) if part is None else type(found[0])(self.path, part=part)
            kinds.append(reader.format)
            found.append(reader)
            return reader

        found: list[Any] = []
        rows, rejected, code = read_all(opened)
        check_boards(rows)
        if code:
            return False
        if kinds[0] == "sgf":
            found_cells = re.findall(rb";[BW]\[([a-z])([0-9]{1,2})\]", raw)
            cells = [(int(row) - 1, letter[0] - 97) for letter, row in found_cells]
            is_swap = len(cells) > 1 and cells[1] == cells[0][::-1]  # a reflected stone
            if _PLAIN_SGF.fullmatch(raw) and not rejected and not is_swap:
                moves = [row["move"] for row in rows if row["move"] is not None]
                size = found[0].board_size
                require(moves == [row * size + column for row, column in cells], "other moves")
            return bool(rows)
        if isinstance(found[0], TrmphReader):
            end = b"\r" if has_returns(raw) else b"\n"
            games = sum(map(is_game_line, raw.removeprefix(b"\xef\xbb\xbf").split(end)))
            starts = sum(row["position_in_game"] == 0 for row in rows)
            require(
                starts + len(rejected) == games, f"{starts} and {len(rejected)} rejected of {games} games"
            )
        middle, size, parts, lost = raw.find(b"\n", len(raw) // 2) + 1, None, [], 0
        for start, stop in ((0, middle), (middle, len(raw))) if middle else ():
            more, refused, _ = read_all(lambda: opened(FilePart(start, stop, size)))  # noqa: B023
            parts += [{**row, "record": 0} for row in more]
            lost, size = lost + len(refused), found[-1].board_size
        if middle:
            same = parts == [{**row, "record": 0} for row in rows] and lost == len(rejected)
            require(same, "two parts have other games than the whole")
        return bool(rows)
