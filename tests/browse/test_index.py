"""The index: the tree of openings, the positions of games, and when it is built."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.board import PASS, Symmetry, symmetry_table
from hexdata.browse.index import GAME, NONE, index_folder, open_index
from hexdata.browse.openings import DEPTH, END, UNKNOWN, Openings, write_openings
from hexdata.browse.reasons import FLAG_TEXTS
from hexdata.errors import StoreError
from hexdata.games.findings import Flag
from hexdata.progress import SILENT
from hexdata.store import Store
from hexdata.store.parquet import read_parquet, write_parquet

N = 4


def random_games(count: int, rng: np.random.Generator) -> list[tuple[int, int, list[int] | None]]:
    """Return (first player, winner, moves) of games on few cells, so that positions repeat."""
    games: list[tuple[int, int, list[int] | None]] = []
    for game in range(count):
        moves = rng.permutation(6)[: rng.integers(0, 6)].tolist()
        if game % 7 == 3 and moves:
            moves[-1] = PASS
        games.append((game % 2, int(rng.integers(-1, 2)), None if game % 11 == 5 else moves))
    return games


def tree_of(games: list[tuple[int, int, list[int] | None]], path: Path) -> Openings:
    rows = np.zeros(len(games), GAME)
    plies = [np.full(len(games), END, np.uint16) for _ in range(DEPTH)]
    for game, (first, winner, moves) in enumerate(games):
        rows[game]["first_player"], rows[game]["winner"] = first, winner
        for ply in range(DEPTH):
            plies[ply][game] = UNKNOWN if moves is None else [*moves, *[END] * DEPTH][ply]
    starts = write_openings(path, rows, plies, N, SILENT)
    return Openings(np.load(path), starts, N)


def normal(first: int, moves: list[int], symmetry: Symmetry) -> list[int]:
    """Return the moves in an image in which blue begins: the given one, or its reflection."""
    used = symmetry ^ (Symmetry.LONG_DIAGONAL if first else Symmetry.IDENTITY)
    return [move if move == PASS else int(symmetry_table(N)[used, move]) for move in moves]


def stones(moves: list[int]) -> tuple[int, frozenset[int], frozenset[int]]:
    played = list(enumerate(moves))
    blue, red = (frozenset(m for ply, m in played if ply % 2 == colour and m != PASS) for colour in (0, 1))
    return len(moves), blue, red


def test_the_tree_counts_positions_up_to_symmetry(tmp_path: Path) -> None:
    games = random_games(120, np.random.default_rng(4))
    tree = tree_of(games, tmp_path / "tree.npy")
    checked = 0
    for _, (first, _, moves) in enumerate(games):
        if moves is None:
            continue
        for ply in range(len(moves) + 1):
            path = normal(first, moves[:ply], Symmetry.IDENTITY)
            games_here: Counter[int | None] = Counter()
            won: Counter[tuple[int | None, int]] = Counter()
            for first_too, winner, others in games:
                if others is None or len(others) < ply:
                    continue
                for symmetry in (Symmetry.IDENTITY, Symmetry.ROTATION):
                    image = normal(first_too, others, symmetry)
                    if stones(image[:ply]) == stones(path):
                        turned = normal(0, path, Symmetry.ROTATION)
                        following = image[ply] if len(image) > ply else None
                        if stones(turned) == stones(path) and following is not None and following != PASS:
                            following = min(following, int(symmetry_table(N)[Symmetry.ROTATION, following]))
                        games_here[following] += 1
                        won[following, winner ^ first_too if winner >= 0 else -1] += 1
                        break
            found = tree.branches(path)
            if games_here.total() == 1:
                assert found == []
                continue
            checked += 1
            assert {branch.move: branch.games for branch in found} == dict(games_here)
            for branch in found:
                assert (branch.blue, branch.red) == (won[branch.move, 0], won[branch.move, 1])
    assert checked > 100


def test_no_games_give_an_empty_tree(tmp_path: Path) -> None:
    assert tree_of([], tmp_path / "tree.npy").branches([]) == []


def scatter(store: Store) -> None:
    """Write the positions of a store in another order."""
    (path,) = store.files("positions")[:1]
    table = read_parquet(path, store_columns(path))
    order = np.random.default_rng(1).permutation(len(table))
    mixed = table.take(order).set_column(
        0, table.schema.field("position_id"), table["position_id"].combine_chunks()
    )
    name = path.relative_to(store.path.resolve()).as_posix()
    store.manifest.files[name] = write_parquet(path, mixed.schema, [mixed])
    store.manifest.save(store.path)


def store_columns(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    return list(pq.read_schema(path).names)


@pytest.mark.parametrize(
    ("scattered", "rows"),
    [(False, 50), (True, 16_000_000), (True, 50), (True, 1)],
    ids=["together", "scattered", "scattered, in groups", "scattered, one by one"],
)
def test_the_positions_of_a_game_are_found(
    browsed_store: Path, copy_store, scattered: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexdata.browse.index._SCATTERED_ROWS", rows)
    monkeypatch.setattr("hexdata.browse.index._SORTED_GAMES", 2)
    store = Store.open(copy_store(browsed_store))
    if scattered:
        scatter(store)
    index = open_index(store, SILENT)
    tables = [
        read_parquet(path, ["position_id", "game_id", "position_in_game"])
        for path in store.files("positions")
    ]
    found = [row for table in tables for row in table.to_pylist()]
    for game in range(len(index.games)):
        own = sorted((r["position_in_game"], r["position_id"]) for r in found if r["game_id"] == game)
        assert index.position_ids(game).tolist() == [number for _, number in own]
    assert bool(len(index.scattered)) == scattered
    assert (index.games["first_row"] == NONE).any() == scattered


def test_the_index_is_built_once_for_each_content(
    browsed_store: Path, copy_store, browse_cache: Path
) -> None:
    folder = copy_store(browsed_store)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    store = Store.open(folder)
    open_index(store, SILENT)
    made = index_folder(store)
    stamp = (made / "games.npy").stat().st_mtime_ns
    open_index(store, SILENT)
    assert (made / "games.npy").stat().st_mtime_ns == stamp
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert made.is_relative_to(browse_cache)

    scatter(store)
    open_index(store, SILENT)
    assert index_folder(store) != made
    assert not made.exists()


@pytest.mark.parametrize("damage", ["cut", "missing", "list", "flipped", "flipped list"])
def test_a_damaged_index_is_built_again(browsed_store: Path, damage: str) -> None:
    store = Store.open(browsed_store)
    index = open_index(store, SILENT)
    expected = str((index.games.tolist(), index.reasons))
    file = index_folder(store) / ("index.json" if "list" in damage else "games.npy")
    content = file.read_bytes()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "flipped":
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "list":
        file.write_text(json.dumps({"files": []}))
    else:
        file.write_bytes(content.replace(b'"reasons": {"', b'"reasons": {"b'))
    assert not file.exists() or file.read_bytes() != content
    again = open_index(store, SILENT)
    assert str((again.games.tolist(), again.reasons)) == expected
    assert file.read_bytes() == content


@pytest.mark.parametrize("table", ["games", "positions", "rejected"])
def test_no_index_is_made_from_a_damaged_table(browsed_store: Path, copy_store, table: str) -> None:
    """It would be kept after the table is restored."""
    store = Store.open(copy_store(browsed_store))
    path = next(path for path in store.files(table))
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(StoreError, match="the file was altered"):
        open_index(store, SILENT)
    assert not index_folder(store).exists()


def test_every_flag_has_a_meaning() -> None:
    assert sorted(FLAG_TEXTS) == [str(flag.name).lower().replace("_", "-") for flag in Flag]


@pytest.mark.parametrize(
    ("table", "column", "value", "message"),
    [
        (
            "games",
            "flags",
            [f"flag {number}" for number in range(65)],
            "too many different flags; expected 64 at most",
        ),
        ("games", "positions", 10**9, "game 0 has another number of positions.*hexdata verify"),
        ("games", "positions", -5, "game 0 has another number of positions.*hexdata verify"),
        ("positions", "game_id", 10**9, "a game that the store does not have.*hexdata verify"),
        ("positions", "game_id", -3, "a game that the store does not have.*hexdata verify"),
    ],
)
def test_tables_that_contradict_each_other_are_refused(
    browsed_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    column: str,
    value: object,
    message: str,
) -> None:
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "cache"))
    path = shutil.copytree(browsed_store, tmp_path / "store")
    manifest = Store.open(path).manifest
    for name in manifest.files_in(table):
        rows = pq.ParquetFile(path / name).read()
        index = rows.schema.get_field_index(column)
        field = rows.schema.field(index)
        values = pa.array([value, *rows.column(index).to_pylist()[1:]], field.type)
        changed = rows.set_column(index, field, values)
        manifest.files[name] = write_parquet(path / name, changed.schema, [changed])
    manifest.save(path)
    with pytest.raises(StoreError, match=message):
        open_index(Store.open(path), SILENT)
