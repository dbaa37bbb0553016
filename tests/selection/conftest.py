"""Stores with duplicate, fragment and symmetric games, and a plain-Python reader of any store."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.schema import SPLITS, games_schema, positions_schema, sources_schema
from hexdata.selection import SelectionOptions, select
from hexdata.store import Store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from hexdata.store.session import duckdb_session

BOARD_SIZE = 3
SEED = 11


def random_games(seed, sources=3, games=60, shortest=1, longest=24):
    """Return random rows of the table games, with every kind of duplicate, within a source and across them.

    Games with equal hashes are symmetric images of one another.
    """
    rng, drawn, firsts = np.random.default_rng(seed), [], {}
    for i in range(games):
        name, image = int(rng.integers(0, games // 3)), int(rng.integers(0, 2))
        fragment, positions = rng.random() < 0.15, int(rng.integers(shortest, longest + 1))
        first_player, winner = int(rng.integers(0, 3)), int(rng.integers(0, 4))
        game = {
            "game_id": i,
            "source_id": i * sources // games,
            "winner": ("RED", "BLUE", "BLUE", None)[winner],
            "total_positions": positions,
            "positions": positions,
            "first_player": (None, 0, 1)[first_player],
            "moves": None if fragment else [name, image, 2, 3],
            "game_hash": hashlib.sha256(bytes([name])).digest()[:16],
            "split": SPLITS[(0, 0, 0, 1, 0, 2)[name % 6]],
            "provenance": "metadata",
            "flags": ["no-chain"] if i % 3 == 0 else [],
        }
        first = firsts.setdefault(name, i)
        drawn.append(game | {"duplicate_of": None if first == i else first})
    return drawn


def positions_of(first, game):
    """Return the rows of the positions of a game, in any order of their plies."""
    rng = np.random.default_rng(first)
    plies = rng.permutation(game["positions"]).tolist()
    return [
        {
            "position_id": first + i,
            "game_id": game["game_id"],
            "position_in_game": ply,
            "total_positions": game["positions"],
            "board": bytes([first % 256, i % 256, ply]),
            "value": float(game["winner"] == "RED"),
            "player_to_move": ply % 2,
            "value_sample_tier": (None, 0, 1, 2, 3, 3)[int(rng.integers(0, 6))],
            "winner": game["winner"],
        }
        for i, ply in enumerate(plies)
    ]


def write_store(path, games, loose=15):
    """Write a store of these games. Each source ends with ``loose`` positions without a game."""
    positions, sources = [], []
    for source in range(max((game["source_id"] for game in games), default=0) + 1):
        start, own = len(positions), [game for game in games if game["source_id"] == source]
        for game in (*own, {"game_id": None, "positions": loose, "winner": None}):
            positions += positions_of(len(positions), game)
        facts = {"source_id": source, "name": f"s{source}/games.trmph", "format": "made", "sha256": ""}
        facts |= {"positions": len(positions) - start, "games": len(own)}
        sources.append(facts | dict.fromkeys(("bytes", "records", "rejected"), 0))
    manifest = Manifest(board_size=BOARD_SIZE, counts={"positions": len(positions)})
    for name, rows, schema in (
        ("positions", positions, positions_schema(BOARD_SIZE)),
        ("games", games, games_schema()),
        ("sources", sources, sources_schema()),
    ):
        table, half = pa.Table.from_pylist(rows, schema), len(rows) // 2
        for part, piece in enumerate((table.slice(0, half), table.slice(half))):
            file = f"{name}/part-{part:06d}.parquet"
            manifest.files[file] = write_parquet(path / file, schema, [piece])
    manifest.save(path)
    return path


def read_rows(path):
    """Read the positions of a store in plain Python, each with its ``game``, ``source`` and ``split``."""
    store = Store.open(path)

    def rows(folder):
        return [row for file in store.files(folder) for row in pq.read_table(file).to_pylist()]

    games = {game["game_id"]: game for game in rows("games")}
    names = {source["source_id"]: source["name"] for source in rows("sources")}
    positions = rows("positions")
    for row in positions:
        row["game"] = games.get(row["game_id"])
        row["source"] = names[row["game"]["source_id"]] if row["game"] else None
        row["split"] = row["game"]["split"] if row["game"] else "train"
    return sorted(positions, key=lambda row: row["position_id"])


@pytest.fixture(scope="session")
def choice_store(tmp_path_factory):
    """A store of 60 games in three sources, with every kind of duplicate. Read only."""
    return write_store(tmp_path_factory.mktemp("choices") / "store", random_games(1))


@pytest.fixture(scope="session")
def choice_rows(choice_store):
    """The positions of ``choice_store``, read in plain Python."""
    return read_rows(choice_store)


@pytest.fixture(scope="session")
def con():
    with duckdb_session(memory=250_000_000, threads=2) as connection:
        yield connection


@pytest.fixture(scope="session")
def write_games(tmp_path_factory):
    """Return ``write_games(seed, **sizes)``: a store of random games in a new folder."""

    def write(seed, loose=15, **sizes):
        return write_store(tmp_path_factory.mktemp("games") / "store", random_games(seed, **sizes), loose)

    return write


@pytest.fixture(scope="session")
def read():
    """Return ``read(store)``: its positions in plain Python."""
    return read_rows


@pytest.fixture(scope="session")
def choose(con, tmp_path_factory):
    """Return ``choose(store, seed=SEED, buckets=None, **options)``, a selection with tables in a new folder.

    ``buckets`` is their number by split; each split has one by default.
    """

    def run(store, seed=SEED, buckets=None, **options):
        folder, counts = tmp_path_factory.mktemp("selection") / "tables", lambda rows: dict.fromkeys(rows, 1)
        count = (lambda _: buckets) if buckets else counts
        return select(Store.open(store), SelectionOptions(**options), seed, count, con, folder)

    return run


@pytest.fixture(scope="session")
def kept(con):
    """Return ``kept(selection)``: the selected ids by split, with checked counts."""

    def read_ids(selection):
        rows = con.sql(f"SELECT split, position_id FROM ({selection.sql})").fetchall()
        ids = {name: {p for split, p in rows if split == i} for i, name in enumerate(SPLITS)}
        assert sum(map(len, ids.values())) == len(rows), "a position occurs twice"
        assert list(selection.rows.items()) == [(name, len(some)) for name, some in ids.items() if some]
        return ids

    return read_ids


@pytest.fixture(scope="session")
def ids_by_split():
    """Return ``ids_by_split(rows)``, the expected result of ``kept`` for plain rows."""
    return lambda rows: {name: {r["position_id"] for r in rows if r["split"] == name} for name in SPLITS}


@pytest.fixture(scope="session")
def assign(con):
    """Return ``assign(selection)``: (split, bucket, key, id) of every row, in shuffled order."""

    def run(selection):
        query = f"SELECT split, bucket, sort_key, position_id FROM ({selection.sql}) ORDER BY ALL"
        return [(SPLITS[split], *rest) for split, *rest in con.sql(query).fetchall()]

    return run
