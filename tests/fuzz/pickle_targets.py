"""Fuzz targets for pickles, compared with Python's own unpickler."""

from __future__ import annotations

import functools
import math
import pickle
import random
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from differential import (
    TooLargeError,
    compare_rows,
    load,
    number,
    ours,
    read_rows,
    theirs,
    typed,
)
from fuzz_target import (
    BOTH,
    NEITHER,
    STRICTER,
    DifferentError,
    Target,
    check_boards,
    files_in_memory,
    read_all,
    require,
)
from pickle_mutations import Mutator, opcodes_of, seeds

import hexdata.formats.legacy.games as games_module
import hexdata.formats.legacy.reader as reader_module
from hexdata.errors import FormatError
from hexdata.formats.legacy import SelfPlayGamesReader

__all__ = ["PickleRowsTarget", "PickleTarget", "SelfPlayTarget"]

WORDS = (
    *(b"cos\nsystem\n", b"\x8c\x08builtins\x8c\x04eval\x93", b"X\x08\x00\x00\x00examples", b"]", b"\x87R"),
    *(b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"u.", b"\x85R"),
    *(b"chex_ai.enums\nWinner\nK\x01\x85R", b"c_codecs\nencode\n", b"\x8e" + b"\xff" * 8, b"(" * 20),
    *(b"\x95\x04\x00\x00\x00\x00\x00\x00\x00", b"J\xff\xff\xff\xff", b"\x94h\x00", b"h\x01", b"\x80\x04"),
)
VALUES: tuple[object, ...] = (
    *(None, True, -3, 1 << 70, 0.1, "text", "\u0448", b"raw", bytearray(b"new"), [1, [2]], {"a": 1}, (1,)),
    *(np.float32(0.5), np.int64(3), np.arange(3, dtype="<i2"), np.ones((2, 2), ">f8"), np.dtype("<f4")),
)
_UNCHECKED = 16
"""Python reads every k-th pickle that hexdata refuses."""


class PickleTarget(Target):
    """The interpreter: each accepted pickle has the values and types that both unpicklers of Python read."""

    name = "pickle"
    words = WORDS

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.mutator = Mutator(0, self.seeds())
        self.refused = 0

    @staticmethod
    @functools.cache
    def _small() -> list[bytes]:
        found = []
        for protocol in range(6):
            found += [pickle.dumps({"examples": [], "a": value}, protocol) for value in VALUES]
        return found

    def seeds(self) -> list[bytes]:
        """Return pickles of one example, and of one value of each kind."""
        return [*self._small(), *seeds(1)]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change opcodes if the input consists of opcodes, and bytes otherwise."""
        opcodes = _opcodes(raw)
        if len(opcodes) < 2 or rng.random() < 0.2:
            return super().mutate(raw, rng)
        self.mutator.random = rng
        try:
            return self.mutator.mutated(opcodes)
        except (ValueError, IndexError, KeyError, OverflowError):  # of opcodes that hexdata refuses
            return super().mutate(raw, rng)

    def check(self, raw: bytes) -> str:
        try:
            examples, rest = ours(raw)
        except TooLargeError:
            return NEITHER
        except FormatError:
            self.refused += 1
            return NEITHER if self.refused % _UNCHECKED else _python_result(raw)
        for slow in (False, True):
            try:
                their_examples, their_rest, _ = theirs(raw, slow)
            except TooLargeError:
                return NEITHER
            except Exception as error:
                raise DifferentError(f"Python does not read what hexdata does: {error!r}") from error
            require((examples, rest) == (their_examples, their_rest), "Python reads other values")
        return BOTH


@functools.lru_cache(maxsize=4096)
def _opcodes(raw: bytes) -> tuple[bytes, ...]:
    try:
        return tuple(opcodes_of(raw, frames=False))
    except Exception:  # noqa: BLE001  # pickletools raises many kinds
        return ()


def _python_result(raw: bytes) -> str:
    """Return whether Python reads a dict of examples from a refused pickle.

    Python does not read arrays and dtypes, as NumPy crashes at some invalid states, and no bytearrays, as it
    allocates the length that is stated.
    """
    if b"numpy" in raw or b"\x96" in raw:
        return NEITHER
    try:
        top = load(raw)
    except Exception:  # noqa: BLE001
        return NEITHER
    return STRICTER if isinstance(top, dict) and isinstance(top.get("examples"), list) else NEITHER


class PickleRowsTarget(PickleTarget):
    """The reader: its fast path gives what the plain interpreter gives, and rows have Python's values."""

    name = "pickle-rows"
    max_len: ClassVar[int] = 4096

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(reader_module))

    def seeds(self) -> list[bytes]:
        """Return pickles of three examples, the fewest for which the fast path is used."""
        return seeds(3)

    def check(self, raw: bytes) -> str:
        self.file.content = raw
        path = Path("/file")
        plain, fast = read_rows(path, False), read_rows(path, True)
        require(
            plain == fast or fast[3] == "irregular-examples", "the fast path differs from the interpreter"
        )
        if plain[3]:
            return NEITHER
        try:
            listed = load(raw)["examples"]
        except Exception as error:
            raise DifferentError(f"Python does not read what hexdata does: {error!r}") from error
        compare_rows(plain[0], plain[1], listed)
        return BOTH


class SelfPlayTarget(PickleTarget):
    """Pickles of self-play games: moves, winners, policies and values as Python computes them."""

    name = "selfplay"
    words = (
        *WORDS,
        b"games",
        b"moves",
        b"#3,a1b2",
        b"winner",
        b"policies",
        b"values",
        b"final_trmph",
        b"red",
    )

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(games_module))

    def seeds(self) -> list[bytes]:
        """Return files of one or two games."""
        found = []
        for protocol in (0, 2, 4):
            for kind in range(4):
                games = [_game(kind + number) for number in range(1 + kind % 2)]
                content = {"games": games, "metadata": {"temperature": 0.5, "model_path": "['a', 'b']"}}
                found.append(pickle.dumps(content, protocol))
        return found

    def check(self, raw: bytes) -> str:
        self.file.content = raw
        header: list[dict[str, object]] = []

        def opened() -> SelfPlayGamesReader:
            header.clear()
            reader = SelfPlayGamesReader("/file")
            header.append(reader.header)
            return reader

        rows, rejected, code = read_all(opened)
        if code:
            return NEITHER
        try:
            games = load(raw)["games"]
        except Exception as error:
            raise DifferentError(f"Python does not read what hexdata does: {error!r}") from error
        by_number: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            by_number.setdefault(row["line_idx"], []).append(row)
        require(len(by_number) + len(rejected) == len(games), f"{len(games)} games in the file")
        for line, found in by_number.items():
            _compare_game(found, games[line - 1])
        return BOTH


def _game(kind: int) -> dict[str, Any]:
    moves = ["a1", "b2", "a2", "c1", "a3"][: 5 if kind % 3 == 0 else 3]
    policies = []
    for ply in range(len(moves)):
        policy = np.full(9, -1.5 if kind % 2 else 0.0, ("f4", "f8")[kind % 2])
        policy[ply + 3] = 2.5 if kind % 2 else 1.0
        policies.append(policy)
    return {
        "moves": ["#3," + "".join(moves[:ply]) for ply in range(len(moves))],
        "policies": policies,
        "values": [0.5, np.float32(-1.25), 3, 0.0, -0.25][: len(moves)],
        "winner": None if kind % 3 == 0 else ("red", "BLUE", 1)[kind % 3],
        "final_trmph": "http://www.trmph.com/hex/board#3," + "".join(moves),
        **({"zoo": [1, "a"]} if kind % 2 else {}),
    }


def _compare_game(rows: list[dict[str, Any]], game: dict[str, Any]) -> None:
    """Compare the rows of an accepted game with the dict that Python reads."""
    found = re.search(r"#([0-9]+),([a-z0-9]*)", game["final_trmph"])
    require(found, "a game without moves")
    assert found is not None
    size = int(found[1])
    cells = [
        (int(row) - 1) * size + ord(letter) - 97 for letter, row in re.findall("([a-z])([0-9]+)", found[2])
    ]
    require([row["move"] for row in rows] == [*cells, None], "other moves")
    check_boards(rows, size)
    stated = {"RED": 1, "R": 1, "2": 1, "BLUE": 0, "B": 0, "1": 0}.get(str(number(game["winner"])).upper())
    if game["winner"] is not None and not hasattr(game["winner"], "kind"):
        require({row["winner"] for row in rows} == {stated}, "another winner")
    policies = [np.asarray(policy, np.float64) for policy in game["policies"]]
    logits = any((policy < 0).any() for policy in policies)
    for ply, (row, policy) in enumerate(zip(rows, policies, strict=False)):
        dense = np.zeros(size * size)
        for entry in row["policy"] or ():
            dense[entry["cell"]] = entry["probability"]
        if row["policy"] is None:
            dense[row["move"]] = 1
        if logits:
            empty = np.array([cell not in cells[:ply] for cell in range(size * size)])
            powers = np.where(empty, np.exp(policy - policy[empty].max()), 0)
            policy = powers / powers.sum()
            value = number(game["values"][ply])
            chance = 1 / (1 + math.exp(-value)) if value > -700 else 0.0
            require(abs(row["root_value"] - chance) < 1e-9, "another root value")
        else:
            require(typed(row["root_value"]) is None, "a root value without a scale")
        require(np.allclose(dense, policy, atol=1e-6), f"another policy at ply {ply}")
