"""Seeded mutations of small legacy pickles, for differential fuzzing.

Two kinds. A *respelling* keeps the pickle valid: equivalent opcodes, other values, other memo numbers,
shared or repeated texts. A *damage* changes opcodes at random. Most pickles only get respellings, since a
refused pickle compares nothing.
"""

from __future__ import annotations

import functools
import gzip
import io
import pickle
import pickletools
import random
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hexdata.formats.legacy import LegacyReader, write_legacy

__all__ = ["Mutator", "N", "opcodes_of", "seeds"]

N = 3
"""Board size of the seeds."""


@functools.cache
def seeds(examples: int = 5) -> list[bytes]:
    """Return small pickles like real ones, of every protocol and spelling of arrays.

    Args:
        examples: Number of examples in each pickle.
    """
    found = []
    for protocol in range(6):
        found += [pickle.dumps(_content(kind, protocol, examples), protocol) for kind in range(4)]
        found.append(pickletools.optimize(found[-1]))
    for dialect in ("tuples", "dicts-enums"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a"
            path.write_bytes(pickle.dumps(_content(0, 4, examples), 4))
            with LegacyReader(path) as reader:
                batches = [batch.positions for batch in reader.batches()]
            out = io.BytesIO()
            if dialect == "dicts-enums":
                batches = [
                    b.set_column(b.schema.get_field_index("metadata"), "metadata", _extras(b.num_rows))
                    for b in batches
                ]
            write_legacy(out, batches, board_size=N, dialect=dialect, header={"source_file": "a"})
            found.append(gzip.decompress(out.getvalue()))
    return found


def _extras(count: int) -> Any:
    import pyarrow as pa

    return pa.array(['{"source_file":"a.trmph"}'] * count)


def _content(kind: int, protocol: int, count: int) -> dict[str, Any]:
    examples: list[Any] = []
    name, dtype = "game.trmph", ("<f4", "<f8", ">f4", "|u1")[kind]
    game_id = (3, 5)
    for ply in range(count):
        board = np.zeros((2, N, N), dtype)
        board[0].flat[: (ply + 1) // 2] = 1
        board[1].flat[5 : 5 + ply // 2] = 1
        if kind == 1:
            board = np.asfortranarray(board)
        policy = np.zeros(N * N, dtype)
        policy[ply + 3 :: 4] = 0 if kind == 3 else 0.25
        policy[8] = 1
        value: Any = (0.0, np.float32(1), np.float64(0.5), True and 1)[kind]
        if kind == 2:
            examples.append((board, policy if ply else None, float(value)))
            continue
        metadata = {
            "game_id": game_id,
            "position_in_game": ply,
            "total_positions": 300,
            "value_sample_tier": 1,
            "winner": "BLUE",
            "source_file": name,
        }
        if kind == 1:
            metadata |= {"visits": [ply, 70_000, -3, 0.5, None, {"a": True}], "big": 1 << 40}
        examples.append(
            {
                "board": board,
                "policy": policy,
                "value": value,
                "player_to_move": ply % 2,
                "metadata": metadata,
            }
        )
    head = {"made": name, "sizes": [N, N]} if kind == 1 else {}
    stats = {
        "examples_generated": 5,
        "rate": 0.5,
        "names": (name, b"raw", bytearray(b"new") if protocol == 5 else 1),
    }
    return head | {"examples": examples, "processing_stats": stats, "again": stats["names"]}


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


def opcodes_of(raw: bytes, *, frames: bool) -> list[bytes]:
    """Split a pickle into opcodes with their arguments. FRAME is omitted: mutations make its length wrong."""
    starts = [position for _, _, position in pickletools.genops(raw)]
    pieces = [raw[start:stop] for start, stop in zip(starts, [*starts[1:], len(raw)], strict=True)]
    return [piece for piece in pieces if frames or piece[:1] != b"\x95"]


VALUES: list[object] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        7,
        255,
        256,
        65_535,
        65_536,
        -1,
        300,
        1 << 31,
        -(1 << 31),
        1 << 40,
        -(1 << 70),
    ),
    *(0.0, -0.0, 1.0, 0.5, 0.1, -1.5, 1e300, float("inf"), float("nan")),
    *("", "BLUE", "RED", "b", "1", "2", "blue", "a.trmph", "\u00e9", "hexdata:dialect", "dialect", "\x00"),
    *("winner", "game_id", "zoo", b"", b"b", b"raw"),
]
"""Values that can replace each other in metadata, in the header and as fields."""

PUTS, GETS = b"qrp", b"hjg"


def spellings(value: object) -> list[bytes]:
    """Return the opcodes that push a value, spelled in each way that a writer of some protocol has."""
    if value is None:
        return [b"N"]
    if isinstance(value, bool):
        return [b"\x88", b"I01\n"] if value else [b"\x89", b"I00\n"]
    if isinstance(value, int):
        return _integers(value)
    if isinstance(value, float):
        return [b"G" + struct.pack(">d", value), b"F%s\n" % repr(value).encode().replace(b"e+", b"e")]
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        line = value.encode("raw-unicode-escape").replace(b"\n", b"\\u000a").replace(b"\x00", b"\\u0000")
        found = [b"X" + struct.pack("<I", len(raw)) + raw, b"\x8d" + struct.pack("<Q", len(raw)) + raw]
        found += [b"V" + line + b"\n"] if "\\" not in value else []
        return found + ([b"\x8c%c" % len(raw) + raw] if len(raw) < 256 else [])
    assert isinstance(value, bytes)
    found = [b"B" + struct.pack("<I", len(value)) + value, b"\x8e" + struct.pack("<Q", len(value)) + value]
    return found + ([b"C%c" % len(value) + value] if len(value) < 256 else [])


def _integers(value: int) -> list[bytes]:
    size = (value.bit_length() >> 3) + 1 if value else 0
    raw = value.to_bytes(size, "little", signed=True)
    found = [b"I%d\n" % value if value not in (0, 1) or value is True else b"L%dL\n" % value]
    found += [b"L%dL\n" % value, b"\x8a%c" % size + raw, b"\x8b" + struct.pack("<i", size) + raw]
    found += [b"K%c" % value] if 0 <= value < 1 << 8 else []
    found += [b"M" + struct.pack("<H", value)] if 0 <= value < 1 << 16 else []
    return found + ([b"J" + struct.pack("<i", value)] if -(1 << 31) <= value < 1 << 31 else [])


@functools.lru_cache(maxsize=1 << 14)
def value_of(piece: bytes) -> tuple[object] | None:
    """Return, in a tuple, the value that an opcode pushes; None if it is not an opcode of a single value."""
    if piece[:1] not in b"N\x88\x89KMJIL\x8a\x8bGFXV\x8c\x8dCB\x8e" or not piece:
        return None
    try:
        return (pickle.loads(piece + b"."),)
    except (ValueError, UnicodeDecodeError):  # such as a number with leading zeros
        return None


class Mutator:
    """Iterator over mutated pickles, determined by a seed.

    Args:
        seed: The seed.
        pickles: The pickles to mutate. Default: those of :func:`seeds`.
    """

    def __init__(self, seed: int, pickles: Sequence[bytes] = ()) -> None:
        self.random = random.Random(seed)
        self.seeds = pickles or seeds()
        self.cut = [opcodes_of(raw, frames=False) for raw in self.seeds]
        self.framed = [opcodes_of(raw, frames=True) for raw in self.seeds]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            pick = self.random.randrange(len(self.cut))
            yield self.mutated((self.framed if self.random.random() < 0.05 else self.cut)[pick])

    def mutated(self, opcodes: Sequence[bytes]) -> bytes:
        """Return a pickle with some of these opcodes changed.

        Args:
            opcodes: Opcodes with their arguments, at least two.
        """
        pieces = [*opcodes]
        kind = self.random.random()
        if kind < 0.85:
            for _ in range(self.random.choice((1, 2, 4, 8, 16))):
                self.random.choice(RESPELLINGS)(self, pieces)
        if kind > 0.7:
            for _ in range(self.random.choice((1, 1, 1, 2, 2, 3))):
                self.random.choice(MUTATIONS)(self, pieces)
        raw = b"".join(pieces)
        return self.flip(raw) if kind > 0.95 else raw

    # Respellings

    def values(self, pieces: list[bytes]) -> list[int]:
        """Return the indices of opcodes that push single values."""
        return [place for place, piece in enumerate(pieces) if value_of(piece) is not None]

    def respell(self, pieces: list[bytes]) -> None:
        """Spell a value, or an empty container, in another way."""
        places = [p for p, piece in enumerate(pieces) if piece in EMPTY or value_of(piece) is not None]
        if places:
            place = self.random.choice(places)
            if pieces[place] in EMPTY:
                pieces[place : place + 1] = EMPTY[pieces[place]]
            else:
                (value,) = value_of(pieces[place]) or (None,)
                pieces[place] = self.random.choice(spellings(value))

    def respell_all(self, pieces: list[bytes]) -> None:
        """Spell each occurrence of a value in the same other way, which keeps examples alike."""
        places = self.values(pieces)
        if places:
            old = pieces[self.random.choice(places)]
            (value,) = value_of(old) or (None,)
            new = self.random.choice(spellings(value))
            pieces[:] = [new if piece == old else piece for piece in pieces]

    def revalue(self, pieces: list[bytes]) -> None:
        """Change a value behind a key to another value."""
        places = [p for p in self.values(pieces) if self.follows_key(pieces, p)]
        if places:
            value = self.random.choice(VALUES)
            pieces[self.random.choice(places)] = self.random.choice(spellings(value))

    def follows_key(self, pieces: list[bytes], place: int) -> bool:
        before = place - 1
        while before > 0 and (pieces[before] == b"\x94" or pieces[before][:1] in PUTS):
            before -= 1
        return pieces[before][:1] in b"XV\x8c\x8dhjg" and pieces[place][:1] not in b"CB\x8e"

    def set_item(self, pieces: list[bytes]) -> None:
        """Set one more item of a dict that was just completed or made."""
        places = [p for p, piece in enumerate(pieces) if piece in (b"}", b"u", b"s")]
        if places:
            place = self.random.choice(places) + 1
            if pieces[place : place + 1] and (pieces[place] == b"\x94" or pieces[place][:1] in PUTS):
                place += 1
            key = self.random.choice([value for value in VALUES if isinstance(value, (str, int))])
            item = [self.random.choice(spellings(key))]
            item += [self.random.choice(spellings(self.random.choice(VALUES))), b"s"]
            pieces[place:place] = item

    def wrap(self, pieces: list[bytes]) -> None:
        """Wrap a value in a new list, dict or tuple."""
        places = [p for p in self.values(pieces) if self.follows_key(pieces, p)]
        if places:
            place = self.random.choice(places)
            value = pieces[place]
            pieces[place : place + 1] = self.random.choice(
                [
                    [b"]", value, b"a"],
                    [b"(", value, b"l"],
                    [b"(", value, value, b"t"],
                    [value, b"\x85"],
                    [value, value, b"\x86"],
                    [b"}", *spellings("deep")[:1], value, b"s"],
                    [b"(", *spellings("deep")[:1], value, b"d"],
                ]
            )

    def share(self, pieces: list[bytes]) -> None:
        """Refer to an object instead of writing it again, or write a text again instead of referring."""
        memo = Memoized(pieces)
        texts = [p for p, piece in enumerate(memo.pieces) if piece[:1] in b"XV\x8c\x8d"]
        if memo.gets and self.random.random() < 0.5:
            place = self.random.choice([*memo.gets])
            source = memo.pieces[memo.gets[place] - 1]
            if value_of(source) is not None:
                memo.pieces[place] = source
                del memo.gets[place]
        elif texts:
            place = self.random.choice(texts)
            alike = [put for put in memo.puts if put < place and memo.pieces[put - 1] == memo.pieces[place]]
            follows = place + 1 in memo.puts
            if alike and not follows:
                memo.gets[place] = self.random.choice(alike)
        pieces[:] = memo.rendered()

    def memoize(self, pieces: list[bytes]) -> None:
        """Give a value a memo number, or none to one that nothing refers to."""
        memo = Memoized(pieces)
        unused = [put for put in memo.puts if put not in memo.gets.values()]
        if unused and self.random.random() < 0.5:
            memo.drop(self.random.choice(unused))
        else:
            memo.add(self.random.choice(self.values(memo.pieces) or [1]) + 1)
        pieces[:] = memo.rendered()

    def renumber(self, pieces: list[bytes]) -> None:
        """Use explicit memo numbers with gaps, or implicit ones."""
        memo = Memoized(pieces)
        memo.explicit = not memo.explicit or self.random.random() < 0.5
        memo.gap = self.random.choice((1, 1, 2, 40, 70_000))
        memo.spelling = self.random.randrange(3)
        pieces[:] = memo.rendered()

    def frame(self, pieces: list[bytes]) -> None:
        """Put some opcodes into a frame of the right length."""
        if pieces[0][:1] == b"\x80" and not any(piece[:1] == b"\x95" for piece in pieces):
            start = self.random.randrange(1, len(pieces))
            stop = self.random.randrange(start, len(pieces)) + 1
            length = sum(map(len, pieces[start:stop]))
            pieces.insert(start, b"\x95" + struct.pack("<Q", length))

    def split(self, pieces: list[bytes]) -> None:
        """Append the items of a list in two batches."""
        places = [p for p, piece in enumerate(pieces) if piece in (b"u", b"t", b"\x87")]
        if places:
            place = self.random.choice(places) + 1
            if pieces[place : place + 1] and (pieces[place] == b"\x94" or pieces[place][:1] in PUTS):
                place += 1
            pieces[place:place] = [b"e", b"("]

    # Damage

    def at(self, pieces: list[bytes]) -> int:
        return self.random.randrange(len(pieces)) if pieces else 0

    def insert(self, pieces: list[bytes]) -> None:
        pieces.insert(self.at(pieces), self.random.choice(ALTERNATIVES))

    def change(self, pieces: list[bytes]) -> None:
        place = self.at(pieces)
        pieces[place : place + 1] = [self.random.choice(ALTERNATIVES)]

    def delete(self, pieces: list[bytes]) -> None:
        place = self.at(pieces)
        del pieces[place : place + self.random.choice((1, 1, 1, 2, 5))]

    def swap(self, pieces: list[bytes]) -> None:
        one = self.at(pieces)
        other = min(one + self.random.choice((1, 1, 2, 3, 8)), len(pieces) - 1)
        if pieces:
            pieces[one], pieces[other] = pieces[other], pieces[one]

    def repeat(self, pieces: list[bytes]) -> None:
        one = self.at(pieces)
        piece = pieces[one : one + self.random.choice((1, 2, 3, 10))]
        place = self.at(pieces) if self.random.random() < 0.5 else one
        pieces[place:place] = piece

    def splice(self, pieces: list[bytes]) -> None:
        other = self.random.choice(self.cut)
        one = self.at(other)
        place = self.at(pieces)
        pieces[place:place] = other[one : one + self.random.choice((1, 1, 2, 4))]

    def argument(self, pieces: list[bytes]) -> None:
        """Change a byte behind an opcode, mostly by one."""
        places = [place for place, piece in enumerate(pieces) if len(piece) > 1]
        if places:
            place = self.random.choice(places)
            piece = bytearray(pieces[place])
            at = self.random.randrange(1, len(piece))
            step = self.random.choice((1, 1, -1, 7, 128, self.random.randrange(256)))
            piece[at] = (piece[at] + step) % 256
            pieces[place] = bytes(piece)

    def refer(self, pieces: list[bytes]) -> None:
        """Put a reference to an early object in place of something or before it."""
        place = self.at(pieces)
        target = self.random.randrange(40)
        pieces[place : place + self.random.randrange(2)] = [b"h%c" % target]

    def everywhere(self, pieces: list[bytes]) -> None:
        """Change each of one kind of opcode alike, so that examples stay alike and the fast path is met."""
        if pieces:
            old = pieces[self.at(pieces)]
            new = self.random.choice([*ALTERNATIVES, b"", old * 2])
            pieces[:] = [new if piece == old else piece for piece in pieces]

    def flip(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        if changed:
            changed[self.random.randrange(len(changed))] = self.random.randrange(256)
        return bytes(changed)


class Memoized:
    """A pickle whose references name the place of the opcode that gave the number.

    Attributes:
        pieces: Opcodes with their arguments.
        puts: Places of opcodes that give a number.
        gets: Places of references, each with the place in ``puts`` that it refers to.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [*pieces]
        self.puts: set[int] = set()
        self.gets: dict[int, int] = {}
        self.explicit = any(piece[:1] in PUTS for piece in pieces)
        self.gap, self.spelling = 1, 0
        numbers: dict[int, int] = {}
        for place, piece in enumerate(pieces):
            if piece == b"\x94" or piece[:1] in PUTS:
                self.puts.add(place)
                numbers[len(numbers) if piece == b"\x94" else _number(piece)] = place
            elif piece[:1] in GETS and _number(piece) in numbers:
                self.gets[place] = numbers[_number(piece)]

    def drop(self, place: int) -> None:
        """Remove an opcode that assigns a memo number."""
        self._shift(place, -1)
        del self.pieces[place]

    def add(self, place: int) -> None:
        """Give a number to what the opcode before ``place`` pushes."""
        self._shift(place, 1)
        self.pieces.insert(place, b"\x94")
        self.puts.add(place)

    def _shift(self, place: int, step: int) -> None:
        self.puts = {put + step * (put >= place) for put in self.puts if step > 0 or put != place}
        self.gets = {
            get + step * (get >= place): put + step * (put >= place) for get, put in self.gets.items()
        }

    def rendered(self) -> list[bytes]:
        """Return the opcodes with numbers in ascending order; no frame, whose length would be wrong."""
        numbers = {
            put: count * (self.gap if self.explicit else 1) for count, put in enumerate(sorted(self.puts))
        }
        result = []
        for place, piece in enumerate(self.pieces):
            if place in numbers:
                piece = _numbered(b"qrp", numbers[place], self.spelling) if self.explicit else b"\x94"
            elif place in self.gets:
                piece = _numbered(b"hjg", numbers[self.gets[place]], self.spelling)
            if piece[:1] != b"\x95":
                result.append(piece)
        return result


def _number(piece: bytes) -> int:
    """Return the memo number in an opcode with its argument."""
    return int(piece[1:-1]) if piece[:1] in b"pg" else int.from_bytes(piece[1:], "little")


def _numbered(opcodes: bytes, number: int, spelling: int) -> bytes:
    """Return one of three opcodes with a memo number; the first has room for a byte."""
    if spelling == 0 and number < 256:
        return opcodes[:1] + bytes([number])
    return opcodes[2:] + b"%d\n" % number if spelling == 2 else opcodes[1:2] + struct.pack("<I", number)


EMPTY = {b"]": [b"(", b"l"], b"}": [b"(", b"d"], b")": [b"(", b"t"]}
"""Opcodes of empty containers, and the other spelling of each."""

RESPELLINGS: list[Callable[[Mutator, list[bytes]], None]] = [
    *(Mutator.respell, Mutator.respell, Mutator.respell_all, Mutator.respell_all, Mutator.revalue),
    *(Mutator.revalue, Mutator.set_item, Mutator.wrap, Mutator.share, Mutator.share, Mutator.memoize),
    *(Mutator.renumber, Mutator.frame, Mutator.split),
]

MUTATIONS: list[Callable[[Mutator, list[bytes]], None]] = [
    *(Mutator.insert, Mutator.change, Mutator.delete, Mutator.swap, Mutator.repeat),
    *(Mutator.splice, Mutator.argument, Mutator.argument, Mutator.refer, Mutator.everywhere),
]
