"""Stores with duplicate, fragment and symmetric games, and a plain-Python reader of any store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.schema import SPLITS, games_schema, positions_schema, sources_schema
from hexdata.selection import Selection, SelectionOptions, select
from hexdata.store import Store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session

BOARD_SIZE = 3
BOARD_BYTES = 3
SEED = 11

Row = dict[str, Any]
Choose = Callable[..., Selection]
Kept = Callable[[Selection], dict[str, set[int]]]
Assign = Callable[..., list[tuple[str, int, int, int]]]
WriteGames = Callable[..., Path]


@dataclass(frozen=True)
class Game:
    """One game of a synthetic store. Games with equal ``hash`` are symmetric images of one another."""

    source: int
    hash: int
    moves: tuple[int, ...] | None
    positions: int
    first_player: int | None = 0
    winner: str | None = "RED"


def random_games(
    seed: int, sources: int = 3, games: int = 60, shortest: int = 1, longest: int = 24, turns: bool = False
) -> list[Game]:
    """Return random games with every kind of duplicate, within a source and across sources."""
    rng = np.random.default_rng(seed)
    drawn = []
    for i in range(games):
        name = int(rng.integers(0, games // 3))
        image = int(rng.integers(0, 2))
        fragment = rng.random() < 0.15
        drawn.append(
            Game(
                source=i % sources if turns else i * sources // games,
                hash=name,
                moves=None if fragment else (name, image, 2, 3),
                positions=int(rng.integers(shortest, longest + 1)),
                first_player=(None, 0, 1)[int(rng.integers(0, 3))],
                winner=("RED", "BLUE", "BLUE", None)[int(rng.integers(0, 4))],
            )
        )
    return drawn


def write_store(path: Path, games: list[Game], loose: int = 15) -> Path:
    """Write a store of these games. Each source ends with ``loose`` positions without a game."""
    positions: list[Row] = []
    listed, sources = [], []
    for source in range(max((game.source for game in games), default=0) + 1):
        start = len(positions)
        own = [(i, game) for i, game in enumerate(games) if game.source == source]
        for game_id, game in own:
            positions += _positions_of(len(positions), game_id, game)
            first = next(i for i, other in enumerate(games) if other.hash == game.hash)
            listed.append(_listed(game_id, game, first))
        positions += _positions_of(len(positions), None, Game(source, 0, None, loose, winner=None))
        sources.append(
            {
                "source_id": source,
                "name": f"s{source}/games.trmph",
                "bytes": 0,
                "sha256": "",
                "format": "made",
            }
            | {"records": 0, "positions": len(positions) - start, "games": len(own), "rejected": 0}
        )
    tables = {
        "positions": pa.Table.from_pylist(positions, positions_schema(BOARD_SIZE)),
        "games": pa.Table.from_pylist(listed, games_schema()),
        "sources": pa.Table.from_pylist(sources, sources_schema()),
    }
    manifest = Manifest(board_size=BOARD_SIZE, counts={"positions": len(positions)})
    for name, table in tables.items():
        half = table.num_rows // 2
        for part, rows in enumerate((table.slice(0, half), table.slice(half))):
            file = f"{name}/part-{part:06d}.parquet"
            manifest.files[file] = write_parquet(path / file, table.schema, [rows])
    manifest.save(path)
    return path


def _positions_of(first: int, game_id: int | None, game: Game) -> list[Row]:
    rng = np.random.default_rng(first)
    plies = rng.permutation(game.positions).tolist()
    return [
        {
            "position_id": first + i,
            "game_id": game_id,
            "position_in_game": ply,
            "total_positions": game.positions,
            "board": bytes([first % 256, i % 256, ply]),
            "value": float(game.winner == "RED"),
            "player_to_move": ply % 2,
            "value_sample_tier": (None, 0, 1, 2, 3, 3)[int(rng.integers(0, 6))],
            "winner": game.winner,
        }
        for i, ply in enumerate(plies)
    ]


def _listed(game_id: int, game: Game, first: int) -> Row:
    return {
        "game_id": game_id,
        "source_id": game.source,
        "winner": game.winner,
        "total_positions": game.positions,
        "positions": game.positions,
        "first_player": game.first_player,
        "moves": None if game.moves is None else list(game.moves),
        "game_hash": hashlib.sha256(bytes([game.hash])).digest()[:16],
        "duplicate_of": None if first == game_id else first,
        "split": SPLITS[(0, 0, 0, 1, 0, 2)[game.hash % 6]],
        "provenance": "metadata",
        "flags": ["no-chain"] if game_id % 3 == 0 else [],
    }


def read_rows(path: Path) -> list[Row]:
    """Read the positions of a store in plain Python, each with its ``game``, ``source`` and ``split``."""
    store = Store.open(path)

    def rows(folder: str) -> list[Row]:
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
def choice_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 60 games in three sources, with every kind of duplicate. Read only."""
    return write_store(tmp_path_factory.mktemp("choices") / "store", random_games(1))


@pytest.fixture(scope="session")
def choice_rows(choice_store: Path) -> list[Row]:
    """The positions of ``choice_store``, read in plain Python."""
    return read_rows(choice_store)


@pytest.fixture(scope="session")
def con() -> Iterator[DuckDBPyConnection]:
    with duckdb_session(memory=250_000_000, threads=2) as connection:
        yield connection


@pytest.fixture(scope="session")
def write_games(tmp_path_factory: pytest.TempPathFactory) -> WriteGames:
    """Return ``write_games(seed, **sizes)``: a store of random games in a new folder."""

    def write(seed: int, loose: int = 15, **sizes: Any) -> Path:
        return write_store(tmp_path_factory.mktemp("games") / "store", random_games(seed, **sizes), loose)

    return write


@pytest.fixture(scope="session")
def read() -> Callable[[Path], list[Row]]:
    """Return ``read(store)``: its positions in plain Python."""
    return read_rows


@pytest.fixture(scope="session")
def choose(con: DuckDBPyConnection, tmp_path_factory: pytest.TempPathFactory) -> Choose:
    """Return ``choose(store, seed=SEED, **options)``, a selection with tables in a new folder."""

    def run(store: Path, seed: int = SEED, **options: Any) -> Selection:
        folder = tmp_path_factory.mktemp("selection") / "tables"
        return select(Store.open(store), SelectionOptions(**options), seed, con, folder)

    return run


@pytest.fixture(scope="session")
def kept(con: DuckDBPyConnection) -> Kept:
    """Return ``kept(selection)``: the selected ids by split, with checked counts."""

    def read_ids(selection: Selection) -> dict[str, set[int]]:
        rows = con.sql(f"SELECT split, position_id FROM ({selection.chosen_sql})").fetchall()
        ids = {name: {p for split, p in rows if split == i} for i, name in enumerate(SPLITS)}
        assert sum(map(len, ids.values())) == len(rows), "a position occurs twice"
        assert list(selection.rows.items()) == [(name, len(some)) for name, some in ids.items() if some]
        return ids

    return read_ids


@pytest.fixture(scope="session")
def ids_by_split() -> Callable[[list[Row]], dict[str, set[int]]]:
    """Return ``ids_by_split(rows)``, the expected result of ``kept`` for plain rows."""
    return lambda rows: {name: {r["position_id"] for r in rows if r["split"] == name} for name in SPLITS}


@pytest.fixture(scope="session")
def assign(con: DuckDBPyConnection, tmp_path_factory: pytest.TempPathFactory) -> Assign:
    """Return ``assign(selection, **buckets)``: (split, bucket, key, id) of every row, in shuffled order."""

    def run(selection: Selection, **buckets: int) -> list[tuple[str, int, int, int]]:
        placement = selection.assign_buckets(buckets, con, tmp_path_factory.mktemp("placement"))
        query = f"SELECT split, bucket, sort_key, position_id FROM ({placement}) ORDER BY ALL"
        return [(SPLITS[split], *rest) for split, *rest in con.sql(query).fetchall()]

    return run
