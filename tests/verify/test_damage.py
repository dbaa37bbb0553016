"""Damaged files and invalid tables: verify names them and the remedy, and readers raise clear errors."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import HexdataError, StoreLockedError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.info import store_info
from hexdata.loader import Loader
from hexdata.report import write_report
from hexdata.show import read_game, read_position
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import run_query
from hexdata.store import Store
from hexdata.store.integrity import rebuild_commands
from hexdata.verify import verify_store
from tests.pairs import FULL
from tests.verify.altered import Altered, Change, failures, with_cell, with_column

if TYPE_CHECKING:
    from tests.conftest import CopyStore

DAMAGES: list[Callable[[bytes, int], bytes | None]] = [
    lambda data, at: data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :],
    lambda data, at: data[:at],
    lambda data, _: data + b"x",
    lambda data, at: data[:at] + bytes(byte ^ 255 for byte in data[at : at + 4096]) + data[at + 4096 :],
    lambda *_: None,
]
"""A flipped bit, a file that ends early, a longer one, a changed page, and a missing file."""


def test_damage_is_reported_with_a_command(whole_store: Path, copy_store: CopyStore) -> None:
    """Of a file of each folder alone, and of all these files together."""
    store, damages = copy_store(whole_store), cycle(DAMAGES)
    opened = Store.open(store)
    of_folders = {"/".join(name.split("/")[:2]): name for name in sorted(opened.manifest.files)}
    names = list({name.split("/")[0]: name for name in of_folders.values()}.values())
    assert len(names) == 7

    def damage(name: str) -> bytes:
        data = (store / name).read_bytes()
        changed = next(damages)(data, random.Random(name).randrange(len(data)))
        (store / name).unlink()
        if changed is not None:
            (store / name).write_bytes(changed)
        return data

    for name in names:
        data = damage(name)
        found = failures(store)
        assert list(found) == ["files"]
        assert found["files"].startswith(f"{store / name}: ")
        assert f"`{rebuild_commands(opened, [name])[0]}`" in found["files"]
        (store / name).write_bytes(data)
    for name in names:
        damage(name)
    (message,) = failures(store).values()
    assert f"{len(names)} files are damaged" in message
    for name in names:
        assert str(store / name) in message
        assert rebuild_commands(opened, [name])[0] in message


def test_a_store_that_is_being_written_is_not_checked(whole_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(whole_store)
    shutil.rmtree(store / "shuffled")
    with (
        Store.open(store).writing("shuffle"),
        pytest.raises(StoreLockedError, match=rf"process {os.getpid()} \(shuffle\)"),
    ):
        verify_store(store)
    assert not verify_store(store).ok  # nobody writes any more: it is damage


# --- tables with invalid content and correct digests ----------------------------------------------------

POSITIONS, GAMES, SOURCES, REJECTED = (
    f"{name}/part-000000.parquet" for name in ("positions", "games", "sources", "rejected")
)


def query(store: Path, table: str) -> None:
    with run_query(store, f"SELECT * FROM {table}") as result:
        assert list(result.batches)


def convert_more(store: Path) -> None:
    (store.parent / "more.trmph").write_text("#7,a1b2c3 b\n")
    convert_sources([store.parent / "more.trmph"], store, ConvertOptions(workers=1, val=0.15, test=0.1))


READERS: dict[str, Callable[[Path], object]] = {
    "sql positions": lambda store: query(store, "positions"),
    "sql games": lambda store: query(store, "games"),
    "show position": lambda store: read_position(store, 3),
    "show game": lambda store: read_game(store, 1),
    "export original": lambda store: export_pickles(
        store, PicklesOptions(order="original", level=2, workers=1)
    ),
    "shuffle": lambda store: shuffle_store(store, ShuffleOptions(seed=8, buckets=3, threads=1)),
    "export": lambda store: export_shards(store, ExportOptions(shard_size=96, block_size=32, workers=1)),
    "export shuffled": lambda store: export_pickles(store, PicklesOptions(level=2, workers=1)),
    "convert": convert_more,
    "info": store_info,
    "report": write_report,
    "load": lambda store: list(Loader(store, batch_size=64)),
}
SLOW = ("report", "load")
"""Readers that run only with ``HEXDATA_TESTS=full``: they read columns of positions with SQL, or shards."""
REFUSING = {
    "positions": ("shuffle", "export original", "info"),
    "games": ("shuffle", "convert", "info"),
    "sources": ("convert", "info"),
    "rejected": ("info",),
}
"""Readers that refuse wrong columns, by table."""


def retyped(name: str, kind: pa.DataType) -> Change:
    def change(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index(name)
        text = None if kind == pa.null() else "text"
        return rows.set_column(index, pa.field(name, kind), pa.array([text] * len(rows), kind))

    return change


def nulled(name: str) -> Change:
    def change(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index(name)
        nullable = rows.schema.set(index, rows.schema.field(index).with_nullable(True))
        return with_column(rows.cast(nullable), name, [None, *rows[name].to_pylist()[1:]])

    return change


STRUCTURES: list[tuple[str, Change]] = [
    (POSITIONS, nulled("board")),
    (POSITIONS, lambda rows: rows.drop_columns(["move"])),
    (POSITIONS, lambda rows: rows.rename_columns({"value": "wert"})),
    (POSITIONS, retyped("policy", pa.string())),
    (GAMES, nulled("positions")),
    (GAMES, lambda rows: rows.drop_columns(["moves"])),
    (GAMES, retyped("moves", pa.null())),
    (SOURCES, retyped("records", pa.string())),
    (REJECTED, lambda rows: rows.drop_columns(["reason"])),
]
VALUES: list[tuple[str, str, Any]] = [
    (POSITIONS, "move", 65535),
    (POSITIONS, "value", float("nan")),
    (POSITIONS, "policy", [{"cell": 169, "probability": 1.0}]),
    (POSITIONS, "position_id", 2**62),
    (POSITIONS, "game_id", -7),
    (GAMES, "split", "bogus"),
    (GAMES, "moves", [None]),
    (GAMES, "source_id", 99),
    (GAMES, "positions", -1),
    (SOURCES, "header", "{not JSON"),
    (SOURCES, "sha256", "no digest"),
    (REJECTED, "record", -1),
]


@pytest.mark.filterwarnings("ignore:.*hexdata.duckdb was not written")
@pytest.mark.parametrize("number", range(len(STRUCTURES) + len(VALUES)))
def test_every_reader_of_an_invalid_table_succeeds_or_raises_a_clear_error(
    whole_store: Path, copy_store: CopyStore, number: int
) -> None:
    store, refusing = copy_store(whole_store), ()
    if number < len(STRUCTURES):
        name, change = STRUCTURES[number]
        Altered(store).table(name, change)
        table = name.split("/")[0]
        refusing = REFUSING[table]
        assert any(table in detail for detail in failures(store).values())
    else:
        name, column, value = VALUES[number - len(STRUCTURES)]
        Altered(store).table(name, lambda rows: with_cell(rows, column, 0, value))
    readers = [reader for reader in READERS if FULL or reader not in SLOW]
    for reader in readers if FULL else {*refusing, *readers[number % 5 :: 5]}:
        message = ""
        try:
            READERS[reader](store)
        except HexdataError as error:
            message = str(error)
        assert reader not in refusing or name in message
