"""Dispersion: the figures of the queries are those of plain NumPy over the same files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import StoreError
from hexdata.quality import Dispersion, dispersion
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore

UNKNOWN = -1


def game_ids(paths: list[Path]) -> np.ndarray:
    column = pa.chunked_array([pq.read_table(path)["game_id"].combine_chunks() for path in paths])
    return column.fill_null(UNKNOWN).to_numpy()


def plain_dispersion(path: Path) -> Dispersion:
    """The same figures, as their docstring defines them."""
    store = Store.open(path)
    games = (
        pa.concat_tables([pq.read_table(p) for p in store.files("games")]) if store.files("games") else None
    )
    held_out = (
        [] if games is None else games.filter(pa.compute.field("split") != "train")["game_id"].to_pylist()
    )
    before = game_ids(store.files("positions"))
    before = before[~np.isin(before, held_out)]
    buckets = [game_ids([p]) for p in store.files("shuffled/train")]
    after = np.concatenate(buckets)
    shares = [
        (np.max(counts) / len(b), -i, len(counts)) for i, b in enumerate(buckets) if (counts := known(b))
    ]
    total = len(after)
    largest = max(shares, default=None)
    return Dispersion(
        largest_share=largest[0] if largest else None,
        games_in_bucket=largest[2] if largest else None,
        neighbours_before=neighbours(before),
        neighbours_after=neighbours(after),
        neighbours_expected=sum(n * (n - 1) for n in known(after)) / (total * (total - 1))
        if total > 1 and known(after)
        else None,
    )


def known(games: np.ndarray) -> list[int]:
    """Return how many positions each known game has."""
    return np.unique(games[games != UNKNOWN], return_counts=True)[1].tolist()


def neighbours(games: np.ndarray) -> float | None:
    same = (games[1:] == games[:-1]) & (games[1:] != UNKNOWN)
    return float(same.mean()) if len(same) else None


def same_figures(found: Dispersion, expected: Dispersion) -> bool:
    return vars(found) == {
        name: value if value is None else pytest.approx(value, rel=1e-12)
        for name, value in vars(expected).items()
    }


@pytest.mark.parametrize("buckets", [1, 3, 200])
@pytest.mark.parametrize("name", ["odd_store", "trmph_store"])
def test_figures_are_those_of_numpy(
    request: pytest.FixtureRequest, copy_store: CopyStore, name: str, buckets: int
) -> None:
    store = copy_store(request.getfixturevalue(name))
    shuffle_store(store, ShuffleOptions(seed=5, buckets=buckets))
    found = dispersion(store)
    assert same_figures(found, plain_dispersion(store))
    assert found.neighbours_before is not None
    assert found.neighbours_before > 0.5 > 10 * found.neighbours_expected


def without_games(store: Path) -> None:
    """Make every position one of no known game."""
    manifest = Manifest.load(store)
    for path in Store.open(store).files("positions"):
        table = pq.read_table(path)
        unknown = pa.nulls(table.num_rows, pa.int64())
        table = table.set_column(table.schema.get_field_index("game_id"), "game_id", unknown)
        name = path.relative_to(store.resolve()).as_posix()
        manifest.files[name] = write_parquet(path, table.schema, [table])
    for name in manifest.files_in("games"):
        del manifest.files[name]
        (store / name).unlink()
    manifest.save(store)


@pytest.mark.parametrize("buckets", [1, 4])
def test_without_games_there_is_nothing_to_measure(
    odd_store: Path, copy_store: CopyStore, buckets: int
) -> None:
    store = copy_store(odd_store)
    without_games(store)
    assert shuffle_store(store, ShuffleOptions(buckets=buckets)).splits == {"train": 900}
    found = dispersion(store)
    assert found == Dispersion(None, None, 0.0, 0.0, None)
    assert same_figures(found, plain_dispersion(store))


def test_one_position(tmp_path: Path, write_odd_store: WriteOddStore) -> None:
    store = write_odd_store(tmp_path / "store", 1, 1)
    shuffle_store(store)
    assert dispersion(store) == Dispersion(1.0, 1, None, None, None)


def test_a_store_that_is_not_shuffled_is_refused(odd_store: Path) -> None:
    with pytest.raises(StoreError, match="no shuffle stage"):
        dispersion(odd_store)
