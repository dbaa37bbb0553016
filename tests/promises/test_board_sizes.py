"""Files with boards of several sizes: every format converts one size, and messages propose what works."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from hexdata import ConvertOptions, convert_sources
from hexdata.cli import app
from hexdata.errors import InputError, RejectRateError
from hexdata.verify import check_round_trip
from tests.kit.formats import pickle_of
from tests.legacy_pickles import example

SIZES = (4, 5, 5, 4, 5)
"""Board size of each game of a mixed file; the games have two moves."""
PLIES = 3


def _lines(text: str) -> Callable[[Sequence[int]], bytes]:
    return lambda sizes: "".join(text.format(n=n) + "\n" for n in sizes).encode()


def _examples(sizes: Sequence[int]) -> list[dict[str, Any]]:
    return [example(g, ply, PLIES, n=n) for g, n in enumerate(sizes, start=1) for ply in range(PLIES)]


def _tuples(sizes: Sequence[int]) -> bytes:
    examples = [(e["board"], e["policy"], 1.0 - e["value"]) for e in _examples(sizes)]
    return pickle_of({"examples": examples})


def _selfplay(sizes: Sequence[int]) -> bytes:
    games = [
        {
            "moves": [f"#{n},", f"#{n},a1"],
            "policies": [np.linspace(-1, 1, n * n, dtype=np.float32) for _ in range(2)],
            "values": [0.25, 0.5],
            "winner": "blue",
            "final_trmph": f"#{n},a1b1",
        }
        for n in sizes
    ]
    return pickle_of({"games": games})


FORMATS: dict[str, tuple[str, Callable[[Sequence[int]], bytes]]] = {
    "trmph": ("a.trmph", _lines("#{n},a1b1 b")),
    "hexworld": ("a.hexworld", lambda sizes: _lines("https://hexworld.org/board/#{n},a1b1:rb")([*sizes, 40])),
    "sgf": ("a.sgf", _lines("(;GM[11]SZ[{n}]RE[B+R];B[a1];W[b1])")),
    "dicts": ("a.pkl.gz", lambda sizes: pickle_of({"examples": _examples(sizes)})),
    "tuples": ("a.pkl.gz", _tuples),
    "shuffled": (
        "a.pkl.gz",
        lambda sizes: pickle_of({"examples": _examples(sizes)[::-1], "shuffling_stats": {}}),
    ),
    "selfplay": ("a.pkl.gz", _selfplay),
}


def write(folder: Path, name: str, sizes: Sequence[int]) -> Path:
    file, content = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(content(sizes))
    return folder / file


def positions_of(store: Path) -> tuple[int, int]:
    """Return the board size of a store and the number of its positions."""
    manifest = json.loads((store / "manifest.json").read_text())
    return manifest["board_size"], sum(pq.read_metadata(p).num_rows for p in store.glob("positions/*"))


def run(command: str) -> None:
    """Run a command that a message proposes."""
    program, *arguments = shlex.split(command)
    assert program == "hexdata"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("name", "stored"), [*((name, None) for name in FORMATS), ("sgf", 5)])
def test_the_proposed_commands_convert_every_size(tmp_path: Path, name: str, stored: int | None) -> None:
    store = tmp_path / "store"
    given: dict[str, Any] = {"workers": 1, "value_convention": "blue-is-0"}
    if stored:
        write(tmp_path / "first", "trmph", [stored])
        convert_sources(tmp_path / "first", store, ConvertOptions(**given))
    path = write(tmp_path / "in", name, SIZES)
    with pytest.raises((RejectRateError, InputError)) as caught:
        convert_sources(path, store, ConvertOptions(**given))
    assert "grep" not in str(caught.value)
    assert len(caught.value.commands) == len(set(SIZES))
    for command in caught.value.commands:
        run(command)
    for size in set(SIZES):
        own = store if size == stored else tmp_path / f"store-{size}x{size}"
        before = PLIES if size == stored else 0
        assert positions_of(own) == (size, before + PLIES * SIZES.count(size))
        assert set(pq.read_table(own / "rejected")["reason"].to_pylist()) == {"board-size"}
    (trip,) = check_round_trip(tmp_path / f"store-{SIZES[0]}x{SIZES[0]}", [path])
    assert trip.ok


def test_files_without_the_size_are_skipped(tmp_path: Path) -> None:
    for folder, sizes in (("a", [4]), ("b", [5, 6]), ("c", [6, 6, 4]), ("d", [6])):
        write(tmp_path / "in" / folder, "sgf", sizes)
    (tmp_path / "in" / "d" / "a.sgf").write_bytes(b"(;GM[11]SZ[6]RE[B+R];B[a1];W[b1])(;GM[11]SZ[6];B[")
    options = ConvertOptions(workers=1, board_size=5, max_reject_rate=1)
    result = convert_sources(tmp_path / "in", tmp_path / "store", options)
    assert result.skipped_files == {"in/a/a.sgf": "board-size: 4 x 4", "in/c/a.sgf": "board-size: 6 x 6"}
    # The size of the damaged game is unknown, so its file is not left out.
    assert (result.sources, result.positions) == (2, PLIES)
    assert result.reasons == {"board-size": 2, "sgf-syntax": 1}


REJECTED: dict[str, tuple[str, bytes]] = {
    "a.trmph": ("repeated-move", b"#5,a1a1 b\n#6,a1b1 b\n"),
    "a.hexworld": (
        "no-winner",
        b"https://hexworld.org/board/#5,a1b1\nhttps://hexworld.org/board/#6,a1b1:rb\n",
    ),
    "a.sgf": ("no-winner", b"(;GM[11]SZ[5];B[a1];W[b1])(;GM[11]SZ[6]RE[B+R];B[a1];W[b1])"),
    "a.moves": ("no-winner", b"a1 b2 c3 d4\n"),
    "a.pkl.gz": (
        "value-range",
        pickle_of({"examples": [example(1, 0, 1, n=5) | {"value": 1.5}, example(2, 0, 1, n=6)]}),
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_file_whose_records_of_the_size_are_all_rejected_is_reported(tmp_path: Path, name: str) -> None:
    reason, content = REJECTED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RejectRateError, match=rf"1 of 1 record \(100.00%\).*\n.*{reason}") as caught:
        convert_sources(tmp_path / name, tmp_path / "strict", ConvertOptions(workers=1, board_size=5))
    assert "board-size" not in str(caught.value)
    options = ConvertOptions(workers=1, board_size=5, max_reject_rate=1)
    reasons = convert_sources(tmp_path / name, tmp_path / "store", options).reasons
    assert reasons.pop(reason) == 1
    assert set(reasons) <= {"board-size"}


def test_a_file_that_grows_keeps_its_size(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "trmph", [5, 6])
    options = ConvertOptions(workers=1, board_size=5)
    convert_sources(path, tmp_path / "store", options)
    write(tmp_path / "in", "trmph", [5, 6, 6, 5, 5])
    convert_sources(path, tmp_path / "store", options)
    assert positions_of(tmp_path / "store") == (5, 3 * PLIES)
    assert [each.ok for each in check_round_trip(tmp_path / "store", [path])] == [True, True]
