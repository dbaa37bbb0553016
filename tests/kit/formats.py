"""The formats of source files: files with a known number of records, and damage to each record.

A file is built from a list with an item for each record: None for a sound record, or a number that selects
its damage. Damage changes the bytes of its own record only, and never a separator of records.
"""

from __future__ import annotations

import copy
import gzip
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

__all__ = [
    "HOSTILE_TEXTS",
    "SOURCES",
    "Damages",
    "SourceKind",
    "damaged_text",
    "pickle_of",
    "some_example",
    "some_game",
]

Damages = Sequence[int | None]
"""For each record, None or the number of its damage."""

_BYTES: Final = b"!x9 [,;()]\\#:\0\xff"
"""Bytes that replace others in a text."""


@dataclass(frozen=True)
class SourceKind:
    """A kind of source file."""

    format: str
    """Name of the format in the registry of formats."""
    name: str
    """Name of the file."""
    unit: Literal["games", "positions"]
    """The records of the file."""
    write: Callable[[Damages, bytes], bytes]
    """Returns the file with these records, separated by a gap."""
    gaps: tuple[bytes, ...] = (b"",)
    """Texts that may stand between two records and belong to none."""


def damaged_text(text: bytes, number: int) -> bytes:
    """Return a text with one byte changed, replaced, removed or added."""
    number, mode = divmod(number, 4)
    number, at = divmod(number, len(text))
    other = _BYTES[number % len(_BYTES) :][:1]
    if mode == 0:
        other = bytes([text[at] ^ (1 << number % 8)])
    if other in (b"\n", b"\r"):
        other = b"?"
    return text[:at] + (b"" if mode == 2 else other) + text[at + (mode != 3) :]


def _text(*records: bytes) -> Callable[[Damages, bytes], bytes]:
    """Return a function that writes these texts, again and again."""

    def write(damages: Damages, gap: bytes) -> bytes:
        texts = [records[index % len(records)] for index in range(len(damages))]
        pairs = zip(texts, damages, strict=True)
        return gap.join(text if one is None else damaged_text(text, one) for text, one in pairs) + b"\n"

    return write


HOSTILE_TEXTS: Final = {
    "lone surrogate": "\ud800abc",
    "only a surrogate": "\udfff",
    "NUL": "a\0b",
    "control": "\x1b[31mred\x1b[0m",
    "line feed": "a\nb",
    "right to left": "\u202eabc",
    "no character": "\ufffe\uffff",
    "long": "x" * 100_000,
    "empty": "",
}
"""Texts that a pickle may contain and that files, tables, terminals or queries may refuse."""

# Pickles

N: Final = 5


def some_example(index: int) -> dict[str, Any]:
    """Return the position after ``index`` moves, row by row."""
    board = np.zeros((2, N * N), np.float32)
    ply = index % (N * N - 1)
    for move in range(ply):
        board[move % 2, move] = 1
    policy = np.zeros(N * N, np.float32)
    policy[ply] = 1
    return {"board": board.reshape(2, N, N), "policy": policy, "value": float(ply % 2), "metadata": {}}


_BAD_FIELDS: Final[tuple[tuple[str, Any], ...]] = (
    ("board", np.full((2, N, N), 0.5, np.float32)),
    ("board", np.ones((2, N, N), np.float32)),
    ("board", np.zeros((2, N, N + 1), np.float32)),
    ("board", None),
    ("board", [[0] * N] * N),
    ("policy", np.full(N * N, np.nan, np.float32)),
    ("policy", np.zeros(3, np.float32)),
    ("policy", "none"),
    ("value", 7.0),
    ("value", "red"),
    ("value", None),
    ("value", 10**30),
)
_BAD_METADATA: Final[tuple[dict[Any, Any], ...]] = (
    {"winner": "\ud800"},
    {"game_id": (1, -1)},
    {"game_id": (1,)},
    {"position_in_game": "first"},
    {"note": b"bytes"},
    {"note": "x" * 70_000},
    {7: 1},
)


def _damaged_example(example: dict[str, Any], number: int) -> Any:
    number %= len(_BAD_FIELDS) + len(_BAD_METADATA) + 3
    if number < len(_BAD_FIELDS):
        name, value = _BAD_FIELDS[number]
        return example | {name: value}
    number -= len(_BAD_FIELDS)
    if number < len(_BAD_METADATA):
        return example | {"metadata": _BAD_METADATA[number]}
    return (None, {key: value for key, value in example.items() if key != "value"}, "text")[
        number - len(_BAD_METADATA)
    ]


def _pickled(layout: str) -> Callable[[Damages, bytes], bytes]:
    def write(damages: Damages, gap: bytes) -> bytes:
        examples: list[Any] = []
        for index, number in enumerate(damages):
            example = some_example(index)
            if number is not None:
                example = copy.deepcopy(_damaged_example(example, number))  # examples share no arrays
            if layout == "tuples" and isinstance(example, dict):
                example = tuple(example.get(name) for name in ("board", "policy", "value"))
            examples.append(example)
        content: dict[str, Any] = {"examples": examples}
        if layout == "shuffled":
            content |= {"shuffling_stats": {"num_buckets": 1, "total_examples": len(examples)}}
        return pickle_of(content)

    return write


def pickle_of(content: dict[str, Any]) -> bytes:
    """Return a gzipped pickle."""
    return gzip.compress(pickle.dumps(content, 4), 1, mtime=0)


def some_game(number: int | None = None) -> dict[str, Any]:
    """Return a game of self-play, damaged if a number is given."""
    cells = [f"{column}{row}" for row in range(1, 4) for column in "ab"]
    texts = [f"#{N}," + "".join(cells[:ply]) for ply in range(len(cells) + 1)]
    game: dict[Any, Any] = {
        "moves": texts[:-1],
        "policies": [np.linspace(-1, 1, N * N, dtype=np.float32)] * len(cells),
        "values": [0.25] * len(cells),
        "winner": "red",
        "final_trmph": texts[-1],
    }
    if number is None:
        return game
    changes: tuple[Any, ...] = (
        *({key: None} for key in game),
        *({key: []} for key in game),
        *({key: "\ud800"} for key in game),
        {"final_trmph": f"#{N},a1a1"},
        {"moves": [0] * len(cells)},
        {"values": [float("nan")] * len(cells)},
        {"policies": ["x"] * len(cells)},
        {"note": "x" * 70_000},
    )
    choice = number % (len(changes) + 2)
    if choice < len(changes):
        return game | changes[choice]
    return None if choice == len(changes) else {"moves": []}  # type: ignore[return-value]


def _selfplay(damages: Damages, gap: bytes) -> bytes:
    return pickle_of({"games": [some_game(number) for number in damages]})


# KataHex


def _katahex(damages: Damages, gap: bytes) -> bytes:
    count, area = len(damages), N * N
    planes = np.zeros((count, 22, (area + 7) // 8), np.uint8)
    planes[:, 0] = np.packbits(np.ones(area, np.uint8))
    inputs = np.zeros((count, 19), np.float32)
    policy = np.ones((count, 2, area + 1), np.int16)
    targets = np.zeros((count, 64), np.float32)
    targets[:, [0, 16, 25, 26, 28, 33, 60, 63]] = 1, 1, 1, 1, 1, 1, 9, 1
    targets[:, 41] = np.arange(count) + 1
    for row, number in enumerate(damages):
        match None if number is None else number % 7:
            case 0:
                planes[row, 0] = 0x0F
            case 1:
                planes[row, 1:3, 0] = 0xFF
            case 2:
                inputs[row, 0] = 0.5
            case 3:
                policy[row, 0] = -1
            case 4:
                targets[row, :4] = 0
            case 5:
                targets[row, 0] = np.nan
            case 6:
                targets[row, 25] = -1
    file = io.BytesIO()
    np.savez_compressed(
        file,
        binaryInputNCHWPacked=planes,
        globalInputNC=inputs,
        policyTargetsNCMove=policy,
        globalTargetsNC=targets,
    )
    return file.getvalue()


_LINE_GAPS: Final = (
    b"\n",
    b"\r\n",
    b"\n\n",
    b"\n \t\n",
    b"\n# 13 games, by Ann\n",
    b"\n#\n",
    b"\n# seed: 3\n",
)

SOURCES: Final = {
    "trmph": SourceKind(
        "trmph", "a.trmph", "games", _text(b"#5,a1b2c3 r", b"#5,a2 1 # a short one"), _LINE_GAPS
    ),
    "trmph links": SourceKind(
        "trmph", "a.trmph", "games", _text(b"http://www.trmph.com/hex/board#5,a1b2c3 2"), _LINE_GAPS
    ),
    "hexworld": SourceKind(
        "hexworld",
        "a.hexworld",
        "games",
        _text(b"https://hexworld.org/board/#5c1,a1b2c3:rb", b"#5r9c1,a1:s:rw  # Ann"),
        _LINE_GAPS,
    ),
    "sgf": SourceKind(
        "sgf",
        "a.sgf",
        "games",
        _text(b"(;GM[11]SZ[5]RE[B+R];B[a1];W[b2])", b"(;FF[4]GM[11]SZ[5](;B[a1](;W[b2];B[resign])))"),
        (b"", b" ", b"\n", b"\r\n", b"\n\n", b"\nFrom: Ann, subject: our game\n"),
    ),
    "hsgf": SourceKind(
        "sgf",
        "a.hsgf",
        "games",
        _text(b"(;FF[4]EV[hex.a]PB[A]PW[B]SZ[11]RE[B];W[ak];B[ff];W[de];B[resign])"),
        (b"", b"\n", b"\r\n"),
    ),
    "dicts": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("dicts")),
    "tuples": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("tuples")),
    "shuffled": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("shuffled")),
    "selfplay": SourceKind("legacy", "a.pkl.gz", "games", _selfplay),
    "katahex": SourceKind("katahex", "a.npz", "positions", _katahex),
}
"""All kinds of source files, by a name for tests. Each built-in format has at least one."""
