"""Tables with invalid content and correct digests: every reader raises a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hexdata.convert import convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import HexdataError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader import Loader
from hexdata.report import write_report
from hexdata.show import read_game, read_position
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import run_query
from hexdata.verify import verify_store
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore

    from .conftest import Change, Edit, Rewrite

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*hexdata.duckdb was not written"),
    pytest.mark.usefixtures("no_charts"),
]
POSITIONS, GAMES = "positions/part-000000.parquet", "games/part-000000.parquet"
SOURCES, REJECTED = "sources/part-000000.parquet", "rejected/part-000000.parquet"


def query(store: Path, text: str) -> int:
    with run_query(store, text) as result:
        return sum(batch.num_rows for batch in result.batches)


def read_all(store: Path) -> None:
    for _ in Loader(store, batch_size=64):
        pass


READERS: dict[str, Callable[[Path, Path], object]] = {
    "sql": lambda store, _: [query(store, f"SELECT * FROM {table}") for table in ("positions", "games")],
    "show position": lambda store, _: read_position(store, 3),
    "show game": lambda store, _: read_game(store, 1),
    "report": lambda store, _: write_report(store),
    "export original": lambda store, _: export_pickles(store, PicklesOptions(order="original", workers=1)),
    "load": lambda store, _: read_all(store),
    "shuffle": lambda store, _: shuffle_store(store, ShuffleOptions(seed=8, buckets=3)),
    "export": lambda store, _: export_shards(store, ExportOptions(shard_size=96, block_size=32, workers=1)),
    "export shuffled": lambda store, _: export_pickles(store, PicklesOptions(order="shuffled", workers=1)),
    "convert": lambda store, games: convert_sources([games], store),
}


REFUSING = {
    "positions": ("shuffle", "export original"),
    "games": ("shuffle", "convert"),
    "sources": ("convert",),
}
"""Readers that refuse wrong columns, by table. Of the others, the plain run takes every third."""
SLOW = {"report", "load"}
"""Readers that read columns of positions with SQL only, or not at all."""


def without(name: str) -> Change:
    return lambda table: table.drop_columns([name])


def renamed(name: str, other: str) -> Change:
    return lambda table: table.rename_columns([other if n == name else n for n in table.column_names])


def typed(name: str, kind: pa.DataType) -> Change:
    """Change the type of a column, and keep values that the new type can represent."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        values = table[name].to_pylist()
        if pa.types.is_string(kind):
            values = [None if value is None else str(value) for value in values]
        elif not pa.types.is_null(kind):
            values = [None] * len(values) if not isinstance(values[0], int | float) else values
        else:
            values = [None] * len(values)
        return table.set_column(index, pa.field(name, kind), pa.array(values, kind))

    return change


def nulled(name: str) -> Change:
    """Make one value of a required column null, and the column nullable."""

    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        values = [None, *table[name].to_pylist()[1:]]
        kind = table.schema.field(index).type
        return table.set_column(index, pa.field(name, kind), pa.array(values, kind))

    return change


STRUCTURE: dict[str, tuple[str, Change]] = {
    "null board": (POSITIONS, nulled("board")),
    "null value": (POSITIONS, nulled("value")),
    "null position_id": (POSITIONS, nulled("position_id")),
    "no move": (POSITIONS, without("move")),
    "no game_id": (POSITIONS, without("game_id")),
    "no position_id": (POSITIONS, without("position_id")),
    "another name": (POSITIONS, renamed("value", "wert")),
    "value as text": (POSITIONS, typed("value", pa.string())),
    "move as double": (POSITIONS, typed("move", pa.float64())),
    "position_id as text": (POSITIONS, typed("position_id", pa.string())),
    "board as text": (POSITIONS, typed("board", pa.string())),
    "board as null": (POSITIONS, typed("board", pa.null())),
    "policy as text": (POSITIONS, typed("policy", pa.string())),
    "metadata as number": (POSITIONS, typed("metadata", pa.int64())),
    "winner as number": (POSITIONS, typed("winner", pa.int64())),
    "game_id as double": (POSITIONS, typed("game_id", pa.float64())),
    "null game_id": (GAMES, nulled("game_id")),
    "null split": (GAMES, nulled("split")),
    "no split": (GAMES, without("split")),
    "no moves": (GAMES, without("moves")),
    "moves as text": (GAMES, typed("moves", pa.string())),
    "game_hash as text": (GAMES, typed("game_hash", pa.string())),
    "split as number": (GAMES, typed("split", pa.int64())),
    "flags as text": (GAMES, typed("flags", pa.string())),
    "no name": (SOURCES, without("name")),
    "records as text": (SOURCES, typed("records", pa.string())),
    "no reason": (REJECTED, without("reason")),
    "record as text": (REJECTED, typed("record", pa.string())),
}


def outcomes(store: Path, games: Path, readers: Iterable[str]) -> dict[str, str]:
    """Run some readers on a store; return the message of each that raises."""
    found = {}
    for name in readers:
        read = READERS[name]
        try:
            read(store, games)
        except HexdataError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of generated games with all stages. Read-only: copy it."""
    folder = tmp_path_factory.mktemp("converted")
    make_legacy(folder / "legacy", DemoOptions(games=8, seed=3))
    store = folder / "store"
    convert_sources([folder / "legacy"], store)
    shuffle_store(store, ShuffleOptions(seed=7, buckets=3))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    return store


@pytest.fixture
def damaged(exported: Path, converted: Path, copy_store: CopyStore) -> Callable[[str], Path]:
    """Return ``damaged(name)``: a copy of a store that has a file of this name."""
    return lambda name: copy_store(converted if (converted / name).is_file() else exported)


@pytest.fixture
def games(tmp_path: Path) -> Path:
    """A file with one game to be converted into a store of small boards."""
    path = tmp_path / "more.txt"
    path.write_text("#13,a1b2c3d4\n", encoding="ascii")
    return path


@pytest.mark.parametrize("case", STRUCTURE)
def test_every_reader_names_wrong_columns(
    damaged: Callable[[str], Path], rewrite: Rewrite, games: Path, case: str
) -> None:
    name, change = STRUCTURE[case]
    store = damaged(name)
    rewrite(store, name, change)
    failed = {check.name: check.detail for check in verify_store(store).checks if not check.ok}
    assert name.split("/")[0] in json.dumps(failed)
    refusing = REFUSING.get(name.split("/")[0], ())
    readers = [reader for reader in READERS if reader not in SLOW]
    found = outcomes(
        store, games, readers if FULL else {*refusing, *readers[list(STRUCTURE).index(case) % 3 :: 3]}
    )
    for reader in refusing:
        assert name in found[reader], found


VALUES: dict[str, tuple[str, str, Any]] = {
    f"{column} {str(value)[:20]}": (name, column, value)
    for name, column, value in [
        (POSITIONS, "metadata", "{not JSON"),
        (POSITIONS, "metadata", "[" * 100_000),
        (POSITIONS, "metadata", "7"),
        (POSITIONS, "metadata", '{"hexdata:dialect": 3}'),
        (POSITIONS, "board", b"\xff" * 43),
        (POSITIONS, "move", 169),
        (POSITIONS, "move", 65535),
        (POSITIONS, "value", float("nan")),
        (POSITIONS, "value", -7.0),
        (POSITIONS, "player_to_move", 9),
        (POSITIONS, "value_sample_tier", 200),
        (POSITIONS, "policy", [{"cell": 0, "probability": -1.0}]),
        (POSITIONS, "policy", [{"cell": 169, "probability": 1.0}]),
        (POSITIONS, "policy", [{"cell": 4, "probability": 0.5}] * 2),
        (POSITIONS, "policy", [None]),
        (POSITIONS, "winner", "GREEN"),
        (POSITIONS, "position_id", 2**62),
        (POSITIONS, "position_id", 2**31),
        (POSITIONS, "position_id", -1),
        (POSITIONS, "game_id", 2**62),
        (POSITIONS, "game_id", -7),
        (POSITIONS, "position_in_game", 65535),
        (GAMES, "split", "bogus"),
        (GAMES, "moves", [1, 1, 1, 1]),
        (GAMES, "moves", [65535]),
        (GAMES, "moves", [None]),
        (GAMES, "flags", [None]),
        (GAMES, "flags", ["\x1b[31m"]),
        (GAMES, "winner", "GREEN"),
        (GAMES, "duplicate_of", -7),
        (GAMES, "first_player", 2),
        (GAMES, "source_id", 99),
        (GAMES, "source_id", -1),
        (GAMES, "positions", -1),
        (GAMES, "provenance", "bogus"),
        (GAMES, "total_positions", 65535),
        (GAMES, "game_id", 2**62),
        (SOURCES, "positions", -1),
        (SOURCES, "header", "{not JSON"),
        (SOURCES, "notes", "{not JSON"),
        (SOURCES, "sha256", "no digest"),
        (REJECTED, "source_id", 99),
        (REJECTED, "source_id", -1),
        (REJECTED, "record", -1),
    ]
}


@pytest.mark.parametrize("case", VALUES)
def test_invalid_values_raise_a_clear_error(
    damaged: Callable[[str], Path], rewrite: Rewrite, edit: Edit, games: Path, case: str
) -> None:
    name, column, value = VALUES[case]
    store = damaged(name)
    rewrite(store, name, lambda table: edit(table, column, 0, value))
    verify_store(store)
    readers = [reader for reader in READERS if name == GAMES or reader not in SLOW]
    outcomes(store, games, readers if FULL else readers[list(VALUES).index(case) % 3 :: 3])
