"""Small legacy pickles with random content, in random spellings, and damaged ones.

Python's own pickler writes them. Values that a pickler of any protocol can spell in several ways are spelled
in one of these, mostly the same in a whole file, so that its examples are alike.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

__all__ = ["content", "damaged", "opcodes_of", "written"]

N = 3
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 255, 256, 65_535, 65_536, -1, 1 << 31, -(1 << 31), 1 << 40, -(1 << 70)),
    *(0.0, -0.0, 1.0, 0.5, 0.1, -1.5, 1e300, float("inf"), float("nan"), b"", b"b", b"raw"),
    *("", "BLUE", "RED", "b", "1", "2", "blue", "a.trmph", "\u00e9", "hexdata:dialect", "dialect", "\x00"),
    *("winner", "game_id", "zoo", [1, [2]], {"a": (1,)}, (1,), (1, "a"), [], {}, ()),
    *(np.float32(0.5), np.int64(3), np.arange(3, dtype="<i2"), np.ones((2, 2), ">f8"), np.dtype("<f4")),
]
"""Values that can replace each other in metadata, in the header and as fields."""


def some_policy(rng: random.Random, dtype: str) -> Any:
    """Return a policy of one move, of several or of none, with zeros of either sign; or None."""
    policy = np.zeros(N * N, dtype)
    if policy.dtype.kind == "f":
        policy[rng.randrange(9)] = -0.0
    for _ in range(rng.choice((0, 1, 1, 2))):
        policy[rng.randrange(9)] = 1
    return None if rng.random() < 0.2 else policy


def content(rng: random.Random, count: int) -> dict[str, Any]:
    """Return the content of a file of so many examples, which are mostly alike."""
    name, game_id = "game.trmph", (3, 5)
    kind, dtype = rng.randrange(4), rng.choice(("<f4", "<f4", "<f8", ">f4", "|u1", "|b1"))
    order: Any = rng.choice("CCF")
    examples: list[Any] = []
    is_odd, is_searched = rng.random() < 0.3, rng.random() < 0.3
    for ply in range(count):
        board = np.zeros((2, N, N), dtype, order=order)
        board[0].flat[: (ply + 1) // 2] = 1
        board[1].flat[5 : 5 + ply // 2] = 1
        policy = np.zeros(N * N, dtype)
        policy[[ply % 9, 8]] = 1 if kind == 3 or dtype[1] != "f" else 0.25
        policy[8] = kind != 3
        fields = {
            "board": board,
            "policy": policy if ply % 5 else None,
            "value": (0.0, np.float32(1), 0.5, 1)[kind],
        }
        if is_odd and rng.random() < 0.3:
            fields["policy"] = some_policy(rng, dtype)
        if kind == 2:
            examples.append(tuple(fields.values()))
            continue
        metadata: dict[str, Any] = {
            "game_id": game_id if ply % 2 else (3, 5 + ply),
            "position_in_game": ply,
            "total_positions": 300,
            "value_sample_tier": 1,
            "winner": "BLUE",
            "source_file": name,
        }
        examples.append(fields | {"player_to_move": ply % 2, "metadata": metadata})
        if is_searched:
            examples[-1]["policy_search_target"] = some_policy(rng, "<f4")
    for _ in range(rng.choice((0, 0, 1, 2, 5))):  # values that differ
        example = rng.choice(examples) if examples else ()
        part = (
            example.get(rng.choice(("metadata", "metadata", "board"))) if isinstance(example, dict) else None
        )
        if isinstance(part, dict):
            part[rng.choice([*part, "zoo", "trmph_game"])] = rng.choice(VALUES)
        elif isinstance(example, dict):
            example[rng.choice([*example, "visits"])] = rng.choice(VALUES)
    stats = {"rate": 0.5, "names": (name, b"raw", rng.choice(VALUES)), "zoo": rng.choice(VALUES)}
    before = {"made": name, "sizes": [N, N]} if rng.random() < 0.5 else {}
    return before | {"examples": examples, "processing_stats": stats, "again": stats["names"]}


def spellings(value: Any) -> list[bytes]:
    """Return the opcodes that push a value, in each way that protocols 2 to 5 have."""
    if isinstance(value, bool):
        return [b"\x88" if value else b"\x89"]
    if isinstance(value, int):
        raw = value.to_bytes((value.bit_length() >> 3) + 1 if value else 0, "little", signed=True)
        size = len(raw)
        found = [b"\x8a%c" % size + raw, b"\x8b" + struct.pack("<i", size) + raw]
        found += [b"K%c" % value] if 0 <= value < 1 << 8 else []
        found += [b"M" + struct.pack("<H", value)] if 0 <= value < 1 << 16 else []
        return found + ([b"J" + struct.pack("<i", value)] if -(1 << 31) <= value < 1 << 31 else [])
    if isinstance(value, float):
        return [b"G" + struct.pack(">d", value)]
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        found = [b"X" + struct.pack("<I", len(raw)) + raw, b"\x8d" + struct.pack("<Q", len(raw)) + raw]
        return found + ([b"\x8c%c" % len(raw) + raw] if len(raw) < 256 else [])
    found = [b"B" + struct.pack("<I", len(value)) + value, b"\x8e" + struct.pack("<Q", len(value)) + value]
    return found + ([b"C%c" % len(value) + value] if len(value) < 256 else [])


_Base: Any = pickle._Pickler


class RandomPickler(_Base):  # type: ignore[misc]
    """Python's pickler with other spellings, memo numbers, batches and frames. Determined by ``rng``."""

    dispatch: ClassVar[dict[type, Any]] = {**_Base.dispatch}

    def __init__(self, file: io.BytesIO, rng: random.Random, protocol: int) -> None:
        super().__init__(file, protocol)
        self.rng = rng
        self.style = rng.random()  # which spelling is the usual one
        self.odd = rng.choice((0, 0, 0.01, 0.2))  # share of values in another one
        self.forgets = rng.choice((0, 0, 0.01, 0.3))  # share of objects without a memo number
        self.explicit = protocol < 4 or rng.random() < 0.2
        self.gap = rng.choice((1, 1, 2, 40, 70_000)) if self.explicit else 1
        self._BATCHSIZE = rng.choice((1000, 1000, 2, 1))
        self.framer._FRAME_SIZE_TARGET = rng.choice((64 << 10, 1_500, 200, 40))

    def pick(self, found: list[bytes]) -> bytes:
        part = self.rng.random() if self.rng.random() < self.odd else self.style
        return found[int(part * len(found))]

    def save_value(self, value: Any) -> None:
        self.write(self.pick(spellings(value)))
        if isinstance(value, (str, bytes)):
            self.memoize(value)

    for _kind in (bool, int, float, str):
        dispatch[_kind] = save_value

    def save_bytes(self, value: bytes) -> None:
        # Older protocols write a call of a codec.
        (_Base.save_bytes if self.proto < 3 else RandomPickler.save_value)(self, value)

    dispatch[bytes] = save_bytes

    def memoize(self, value: Any) -> None:
        if self.rng.random() >= self.forgets:
            number = len(self.memo) * self.gap
            self.write(self.put(number))
            self.memo[id(value)] = number, value

    def put(self, number: int) -> bytes:
        options = [b"r" + struct.pack("<I", number)]
        options += [b"q%c" % number] if number < 256 else []
        return self.pick(options) if self.explicit else b"\x94"

    def get(self, number: int) -> bytes:
        options = [b"j" + struct.pack("<I", number)]
        return self.pick(options + ([b"h%c" % number] if number < 256 else []))


def written(rng: random.Random, count: int) -> bytes:
    """Return a pickle of so many examples, of protocol 2 to 5."""
    file = io.BytesIO()
    RandomPickler(file, rng, rng.choice((2, 3, 4, 4, 4, 5))).dump(content(rng, count))
    return file.getvalue()


def opcodes_of(raw: bytes) -> list[bytes]:
    """Split a pickle into opcodes with their arguments, without FRAME, as changes make its length wrong."""
    starts = [position for _, _, position in pickletools.genops(raw)]
    pieces = [raw[start:stop] for start, stop in zip(starts, [*starts[1:], len(raw)], strict=True)]
    return [piece for piece in pieces if piece[:1] != b"\x95"]


# fmt: off
ALTERNATIVES = [
    b"N", b"\x88", b"\x89", b"I01\n", b"I00\n", b"K\x01", b"K\x00", b"I1\n", b"I010\n", b"I0x1\n",
    b"L1L\n", b"L010L\n", b"F1\n", b"F1_0\n", b"F 1\n", b"F1e3\n", b"Finf\n",
    b"G?\xf0\x00\x00\x00\x00\x00\x00", b"\x8a\x01\x01", b"\x8a\x00", b"M\x01\x00",
    b"J\xff\xff\xff\xff", b"X\x01\x00\x00\x00<", b"X\x01\x00\x00\x00>", b"V\\u0041\n",
    b"\x8c\x01|", b"\x8c\x01C", b"\x8c\x01F", b"C\x01b", b"\x96\x01\x00\x00\x00\x00\x00\x00\x00b",
    b"]", b"}", b")", b"(", b"t", b"\x85", b"\x86", b"\x87", b"l", b"d", b"a", b"e", b"s", b"u",
    b"R", b"b", b"\x94", b"q\x05", b"q ", b"r@\x00\x00\x00", b"p7\n", b"p90\n", b"h\x00", b"h\x01",
    b"h\x02", b"h\x05", b"g3\n", b"j\t\x00\x00\x00", b"\x93", b"0", b"1", b"2", b"\x8f", b"\x81",
    b".", b"\x80\x02", b"\x80\x04", b"\x95\x03\x00\x00\x00\x00\x00\x00\x00",
]
# fmt: on
"""Opcodes with arguments that can replace each other."""


def damaged(opcodes: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a pickle with one to three of its opcodes changed at random."""
    pieces = [*opcodes]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind, length = rng.randrange(len(pieces) or 1), rng.randrange(8), rng.choice((1, 1, 2, 3, 8))
        if kind == 0:
            pieces.insert(at, rng.choice(ALTERNATIVES))
        elif kind == 1:
            pieces[at : at + 1] = [rng.choice((*ALTERNATIVES, b"h%c" % rng.randrange(40)))]
        elif kind == 2:
            del pieces[at : at + length]
        elif kind == 3:
            pieces[at : at + 2 * length] = [*pieces[at + length : at + 2 * length], *pieces[at : at + length]]
        elif kind == 4:
            other = rng.randrange(len(pieces) or 1)
            pieces[at:at] = pieces[other : other + length]
        elif kind == 5 and pieces:  # each of one kind alike, so that examples stay alike
            old, new = pieces[at], rng.choice((*ALTERNATIVES, b"", pieces[at] * 2))
            pieces = [new if piece == old else piece for piece in pieces]
        elif pieces and len(pieces[at]) > 1:  # a byte of an argument, mostly by one
            place = rng.randrange(1, len(pieces[at]))
            changed = (pieces[at][place] + rng.choice((1, 1, -1, 7, 128, rng.randrange(256)))) % 256
            pieces[at] = pieces[at][:place] + bytes([changed]) + pieces[at][place + 1 :]
    return b"".join(pieces)
