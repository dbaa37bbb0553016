"""Small Parquet files that decode to gigabytes: every reader of a store stays below 1 GB of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats.trmph import write_trmph
from hexdata.store.files import FileFacts, digest_file
from hexdata.store.manifest import Manifest
from tests.demo_games import demo_games
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
LIMIT = 1_000_000_000
POSITIONS, GAMES, SOURCES = (f"{table}/part-000000.parquet" for table in ("positions", "games", "sources"))

COMMANDS = {
    "show": ["show", "{store}", "3"],
    "show a game": ["show", "{store}", "--game", "1"],
    "verify": ["verify", "{store}"],
    "export": ["export", "{store}", "--format", "pickle", "--order", "original"],
    "sql": ["sql", "{store}", "SELECT sum(len(metadata)) FROM positions"],
    "report": ["report", "{store}", "--output", "{folder}/report.html"],
    "load": ["load", "{store}", "--mode", "games"],
    "shuffle": ["shuffle", "{store}"],
    "export of the shuffle": ["export", "{store}", "--format", "pickle", "--order", "shuffled"],
}


class Bomb(NamedTuple):
    """A column of a file of a store in which many rows have the same value.

    Attributes:
        file: Name of the file.
        column: Name of the column.
        value: Returns the value of these rows.
        encoded: Whether the file holds the value once, in a dictionary. Otherwise compression hides it.
        commands: Names of the commands that read the column.
        rows: Number of rows with the value. The others keep theirs.
    """

    file: str
    column: str
    value: Callable[[], object]
    encoded: bool
    commands: tuple[str, ...]
    rows: int = 1_000_000


def json_of(length: int) -> str:
    """Return an object in JSON with a text of a length."""
    return f'{{"a":"{"x" * length}"}}'


BOMBS = {
    "long metadata": Bomb(POSITIONS, "metadata", lambda: json_of(30_000), True, tuple(COMMANDS)),
    "not in a dictionary": Bomb(
        POSITIONS, "metadata", lambda: json_of(30_000), False, ("show", "verify", "export")
    ),
    "one text of 100 MB": Bomb(
        POSITIONS, "metadata", lambda: json_of(100_000_000), True, ("show", "verify", "export"), 1
    ),
    "long policies": Bomb(
        POSITIONS,
        "policy",
        lambda: [{"cell": 0, "probability": 0.0}] * 1_000,
        True,
        ("show", "verify", "export", "load"),
    ),
    "long moves": Bomb(GAMES, "moves", lambda: [0] * 60_000, True, ("show a game", "verify", "load")),
    "long origins": Bomb(GAMES, "origin", lambda: "x" * 400_000, True, ("show a game", "report", "shuffle")),
    "a header of 250 MB": Bomb(SOURCES, "header", lambda: json_of(250_000_000), True, ("verify", "export")),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted store of 73,000 positions of 4,500 games. Read-only."""
    folder = tmp_path_factory.mktemp("plain")
    write_trmph(folder / "a.trmph", demo_games(4_500, 1, 5), 5)
    convert_sources([folder / "a.trmph"], folder / "store", ConvertOptions(workers=1))
    return folder / "store"


def attack(store: Path, bomb: Bomb) -> None:
    """Give rows of a column the value of a bomb, with a manifest that agrees."""
    path, value = store / bomb.file, bomb.value()
    table = pq.read_table(path)
    index = table.schema.get_field_index(bomb.column)
    options = {"compression": "zstd", "use_dictionary": bomb.encoded, "write_statistics": False}
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        step = min(bomb.rows, max(1, 50_000_000 // len(str(value))))
        for start in range(0, table.num_rows, step):
            if start >= bomb.rows:
                writer.write_table(table.slice(start))
                break
            (rows,) = table.slice(start, step).combine_chunks().to_batches()
            values = pa.array([value], table.schema.field(index).type)
            column = values.take(pa.array(np.zeros(rows.num_rows, np.int32)))
            writer.write_batch(rows.set_column(index, table.schema.field(index), column), 1 << 16)
    manifest = Manifest.load(store)
    manifest.files[bomb.file] = FileFacts(table.num_rows, *digest_file(path))
    manifest.save(store)


RUN = """
import atexit, pathlib, re, resource, sys
from hexdata.__main__ import run

@atexit.register
def write_memory():
    own = int(re.search(r"VmHWM:\\s*([0-9]+)", pathlib.Path("/proc/self/status").read_text())[1])
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    pathlib.Path("memory").write_text(str(max(own, children) * 1024))

run()
"""
"""Runs a command and writes the largest memory of its processes, in bytes."""


def measure(folder: Path, arguments: list[str]) -> tuple[int, str]:
    """Run a command and return the largest memory of its processes in bytes, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    return int((folder / "memory").read_text()), done.stdout + done.stderr


@pytest.mark.parametrize("name", BOMBS if FULL else ["long policies", "a header of 250 MB"])
def test_memory_is_bounded_whatever_a_store_repeats(
    plain: Path, copy_store: CopyStore, tmp_path: Path, name: str
) -> None:
    bomb, store = BOMBS[name], copy_store(plain)
    attack(store, bomb)
    assert (store / bomb.file).stat().st_size < 8_000_000
    found = {}
    for command in bomb.commands if FULL else bomb.commands[:1]:
        arguments = [part.format(store=store, folder=tmp_path) for part in COMMANDS[command]]
        used, printed = measure(tmp_path, arguments)
        assert "Traceback" not in printed, (command, printed)
        found[command] = used
    assert {command: used for command, used in found.items() if used > LIMIT} == {}
