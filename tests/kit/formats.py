"""The formats of source files: files with a known number of records, and damage to each record.

A file is built from a list with an item for each record: None for a sound record, or a number that selects
its damage. Damage changes the bytes of its own record only, and never a separator of records.
"""

from __future__ import annotations

import collections
import copy
import gzip
import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

__all__ = [
    "EMPTY",
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
    sound: int = 1
    """Smallest number of sound records at the beginning, by which a file is recognized."""
    beside: Callable[[int], dict[str, bytes]] = lambda count: {}
    """Returns the files that belong to a file of this number of records, by name."""


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


def _in_utf_16(write: Callable[[Damages, bytes], bytes]) -> Callable[[Damages, bytes], bytes]:
    """Return a function that writes the same text in UTF-16, as editors of Windows do."""
    return lambda damages, gap: write(damages, gap).decode("latin-1").encode("utf-16")


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
            if layout == "searched" and isinstance(example, dict) and number is None:
                example |= {"policy_search_target": np.full(N * N, 1 / 32, np.float32)}
                example["metadata"] = {"policy_target_trainable": index % 3 > 0, "policy_move_code": None}
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


# PlayHex


def _playhex(damages: Damages, gap: bytes) -> bytes:
    """Return games on 3 x 3 that red wins: alternately by a chain after a swap, and by resignation."""
    changes: tuple[dict[str, Any], ...] = (
        {"boardsize": 2},
        {"boardsize": "3"},
        {"moves": None},
        {"moves": ["a1", 7]},
        {"moves": "a1 a1"},
        {"moves": "a1 d1"},
        {"moves": "a1 swap-sides"},
        {"moves": "swap-pieces a1"},
        {"moves": ""},
        {"winner": "nobody"},
        {"winner": None, "moves": "a1 b1"},
        {"winner": "blue", "outcome": "path"},
    )
    games: list[Any] = []
    for index, number in enumerate(damages):
        game: Any = {"id": f"{index}", "boardsize": 3, "winner": "red", "playerRed": "A\ud800"}
        game |= (
            {"moves": "b3 swap-pieces a1 b1 a2 c3 a3", "outcome": "path"},
            {"moves": ["a2", "b3"], "outcome": "resign"},
        )[index % 2]
        if number is not None:
            choice = number % (len(changes) + 1)
            game = 7 if choice == len(changes) else game | changes[choice]
        games.append(game)
    return json.dumps(games).encode()


# AlphaZero


def _alphazero(layout: str) -> Callable[[Damages, bytes], bytes]:
    """Return a function that writes the boards before each move of a game on 3 x 3, again and again.

    The first player plays a1, a2, a3 and wins, the second c1 and c2.
    """
    bad: tuple[Callable[[Any, Any, Any], Any], ...] = (
        lambda board, policy, value: (board + 7, policy, value),
        lambda board, policy, value: (board, policy - 1, value),
        lambda board, policy, value: (board, np.append(policy, 1), value),
        lambda board, policy, value: (board, policy * np.nan, value),
        lambda board, policy, value: (board, policy, 7.0),
        lambda board, policy, value: (board, policy, 0.5),
        lambda board, policy, value: (board[:2], policy, value),
        lambda board, policy, value: (np.zeros((5, 5)), policy, value),
        lambda board, policy, value: (board, "policy", value),
        lambda board, policy, value: "no record",
    )
    in_arrays = (0, 1, 3, 4, 5)  # without another shape or type

    def write(damages: Damages, gap: bytes) -> bytes:
        examples = []
        for index, number in enumerate(damages):
            ply = index % 5
            board = np.zeros(9)
            board[[0, 2, 3, 5][:ply]] = [1, -1, 1, -1][:ply]
            example: Any = (board.reshape(3, 3) * (-1) ** ply, np.full(9, 1 / 9, np.float32), (-1.0) ** ply)
            if number is not None:
                choices = in_arrays if layout == "arrays" else range(len(bad))
                example = bad[choices[number % len(choices)]](*example)
            examples.append(example)
        if layout == "arrays":
            file = io.BytesIO()
            boards, policies, values = map(np.array, zip(*examples, strict=True))
            np.savez_compressed(file, states=boards, policies=policies, values=values)
            return file.getvalue()
        if layout == "dicts":
            keys = ("state", "pi", "z")
            examples = [dict(zip(keys, each, strict=False)) for each in examples]
        content = [collections.deque(examples, 1000)] if layout == "deques" else examples
        return gzip.compress(pickle.dumps(content, 4), 1, mtime=0)

    return write


_LINE_GAPS: Final = (
    b"\n",
    b"\r\n",
    b"\n\n",
    b"\n \t\n",
    b"\n# 13 games, by Ann\n",
    b"\n#\n",
    b"\n# seed: 3\n",
)


def _sidecar(count: int) -> dict[str, bytes]:
    """Return the sidecar of the games of ``_text``: three moves, one move, three moves …"""
    records = []
    for index in range(count):
        codes = ("VCG", "C")[index % 2]
        mask = "".join("0" if code == "C" else "1" for code in codes)
        record = {"schema_version": 1, "game_index": index, "move_count": len(codes)}
        records.append(json.dumps(record | {"move_codes": codes, "policy_train_mask": mask}) + "\n")
    return {"a.provenance.jsonl": "".join(records).encode()}


def _games(
    name: str,
    *texts: str,
    gaps: tuple[bytes, ...] = _LINE_GAPS,
    encoding: str = "utf-8",
    beside: Callable[[int], dict[str, bytes]] = lambda count: {},
) -> SourceKind:
    """Return a file with these texts of games, again and again; the name shows its format."""
    write = _text(*(text.encode("latin-1" if encoding == "utf-16" else encoding) for text in texts))
    kind = name.partition(".")[2].replace("hsgf", "sgf")
    return SourceKind(
        kind, name, "games", _in_utf_16(write) if encoding == "utf-16" else write, gaps, 1, beside
    )


SOURCES: Final = {
    "trmph": _games("a.trmph", "#5,a1b2c3 r", "#5,a2 1 # a short one"),
    "trmph links": _games("a.trmph", "http://www.trmph.com/hex/board#5,a1b2c3 2"),
    "trmph copied": _games(
        "a.trmph", "1. <trmph.com/hex/board#5,a2b4> b", "#5,A1 B2, c3 white", "#5,a1b2c3 r"
    ),
    "trmph with a sidecar": _games("a.trmph", "#5,a1b2c3 r", "#5,a2 1 # a short one", beside=_sidecar),
    "trmph in UTF-16": _games("a.trmph", "#5,a1b2c3 r", "#5,a2 1 # \xe9", encoding="utf-16"),
    "trmph in Latin-1": _games(
        "a.trmph", "#5,a1b2c3 r # \xe9", "#5,a2 1", gaps=(b"\n", b"\n# \xe9\n"), encoding="latin-1"
    ),
    "hexworld": _games("a.hexworld", "https://hexworld.org/board/#5c1,a1b2c3:rb", "#5r9c1,a1:s:rw  # Ann"),
    "hexworld copied": _games(
        "a.hexworld", "Ann: <https://hexworld.org/board/#5c1,a1b2c3:rb>", "#5r9c1%2CA1%3Arw  # Ann"
    ),
    "moves": _games("games.moves", "a1 c1 a2 c2 a3", "a1b1a2b2a3"),
    "sgf": _games(
        "a.sgf",
        *("(;GM[11]SZ[5]RE[B+R];B[a1];W[b2])", "(;FF[4]GM[11]SZ[5](;B[a1](;W[b2];B[resign])))"),
        gaps=(b"", b" ", b"\n", b"\r\n", b"\n\n", b"\nFrom: Ann, subject: our game\n"),
    ),
    "sgf with swaps and words": _games(
        "a.sgf",
        "(;AP[HexGui:0.9]SZ[5]RE[White resigns];B[b1];W[a2]AE[b1];B[c3])",
        "(;GM[11]SZ[5]RE[0-1]PB[x;]];B[b1];W[pass];W[c3];B[resign])",
        "(;GM[11]SZ[5]RE[Ann won];B[b1];W[a2];B[c3];W[b1];B[resign])",
        "(;GM[11]SZ[5]AB[c3][d4]RE[W+R];W[a1];B[b2])",
        gaps=(b"", b"\n"),
    ),
    "sgf in GBK": _games(
        "a.sgf",
        "(;GM[11]SZ[5]CA[GBK]PB[\u5f20]PW[\u8a94\u4e57]RE[B+R];B[a1];W[b2])",
        "(;GM[11]SZ[5]CA[UTF-8]PB[\u4e57]EV[\u5f20]C[\u8a94]RE[W+R];B[a1];W[b2])",
        gaps=(b"", b"\n"),
        encoding="gbk",
    ),
    "sgf in UTF-16": _games(
        "a.sgf", "(;GM[11]SZ[11]PB[\xe9]RE[B+R];B[a1];W[b2])", gaps=(b"", b"\n"), encoding="utf-16"
    ),
    "hsgf": _games(
        "a.hsgf",
        "(;FF[4]EV[hex.a]PB[A]PW[B]SZ[11]RE[B];W[ak];B[ff];W[de];B[resign])",
        gaps=(b"", b"\n", b"\r\n"),
    ),
    "searched": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("searched")),
    "dicts": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("dicts")),
    "tuples": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("tuples")),
    "shuffled": SourceKind("legacy", "a.pkl.gz", "positions", _pickled("shuffled")),
    "selfplay": SourceKind("legacy", "a.pkl.gz", "games", _selfplay),
    "playhex": SourceKind("playhex", "playhex.json", "games", _playhex),
    "alphazero": SourceKind("alphazero", "a.pkl.gz", "positions", _alphazero("list"), sound=5),
    "alphazero dicts": SourceKind("alphazero", "a.pkl", "positions", _alphazero("dicts"), sound=5),
    "alphazero deques": SourceKind(
        "alphazero", "a.pth.tar.examples", "positions", _alphazero("deques"), sound=5
    ),
    "alphazero arrays": SourceKind("alphazero", "a.npz", "positions", _alphazero("arrays"), sound=5),
    "katahex": SourceKind("katahex", "a.npz", "positions", _katahex),
}
"""All kinds of source files, by a name for tests. Each built-in format has at least one."""


def _empty_files() -> dict[str, bytes]:
    """Return files without records, by name: those of each name pattern and each kind of emptiness."""
    names = sorted({kind.name for kind in SOURCES.values()} | {"a.pkl", "games.txt"})
    files: dict[str, bytes] = {}
    for name in names:
        files[f"zero/{name}"] = b""
        files[f"byte-order-mark/{name}"] = b"\xef\xbb\xbf"
        files[f"comments/{name}"] = b"# no game yet\n\n# none\n"
        files[f"blank/{name}"] = b"\n \n\r\n"
    files |= {
        f"{folder}-gzipped/{name.removesuffix('.gz')}.gz": gzip.compress(content, mtime=0)
        for folder, _, name, content in ((*path.partition("/"), content) for path, content in files.items())
        if ".npz" not in name
    }
    for key in ("examples", "games"):
        files[f"no-{key}/a.pkl.gz"] = pickle_of({key: []})
    for name in ("list", "tuple", "deque", "dict"):
        empty = {"list": [], "tuple": (), "deque": collections.deque(), "dict": {}}[name]
        files[f"empty-{name}/a.pkl"] = pickle.dumps(empty, 4)
        files[f"empty-{name}-2/a.pkl"] = pickle.dumps(empty, 2)
    files |= {"empty-list/playhex.json": b"[]", "empty-games/playhex.json": b'{"games": []}'}
    files["list-of-empty-deques/a.pkl"] = pickle.dumps([collections.deque()] * 2, 4)
    files["no-rows/a.npz"] = SOURCES["katahex"].write([], b"")
    file = io.BytesIO()
    np.savez(file)
    files["no-arrays/a.npz"] = file.getvalue()
    return files


EMPTY: Final = _empty_files()
"""Files that contain no records, by a path in a folder."""
