"""Results of the named queries agree with direct counts over the store's files."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata.board import cell_name
from hexdata.schema import SPLITS
from hexdata.sql import named_query, open_catalog
from hexdata.store import Store


def ask(store: Path, name: str) -> list[dict[str, Any]]:
    with open_catalog(store, memory=500_000_000) as con:
        rows: list[dict[str, Any]] = con.sql(named_query(name)).to_arrow_table().to_pylist()
    return rows


def rows_of(store: Path, folder: str) -> list[dict[str, Any]]:
    return list(itertools.chain.from_iterable(tables(store, folder)))


def tables(store: Path, folder: str) -> list[list[dict[str, Any]]]:
    return [pq.read_table(path).to_pylist() for path in Store.open(store).files(folder)]


def same_games(rows: list[dict[str, Any]]) -> tuple[int, float]:
    """Return the adjacent pairs of one game, and the probability that a random pair is of one game."""
    ids = [row["game_id"] for row in rows]
    found = sum(a == b and a is not None for a, b in itertools.pairwise(ids))
    sizes = Counter(i for i in ids if i is not None).values()
    return found, sum(n * (n - 1) for n in sizes) / (len(ids) * (len(ids) - 1))


@pytest.mark.parametrize("kind", ["converted", "shuffled", "odd-shuffled"])
def test_neighbours(stores: dict[str, Path], kind: str) -> None:
    orders = {"input": rows_of(stores[kind], "positions")}
    orders |= {split: rows_of(stores[kind], f"shuffled/{split}") for split in SPLITS}
    found = ask(stores[kind], "neighbours")
    assert [row["rows"] for row in found] == [name for name, rows in orders.items() if rows]
    for row in found:
        rows = orders[row["rows"]]
        same, chance = same_games(rows)
        pairs = len(rows) - 1
        assert (row["pairs"], row["same_game"], row["share"]) == (pairs, same, same / pairs)
        assert row["share_expected"] == pytest.approx(chance)
        assert row["same_game_expected"] == pytest.approx(pairs * chance)
    assert found[0]["share"] > 0.5


@pytest.mark.parametrize("kind", ["shuffled", "odd-shuffled"])
def test_dispersion(stores: dict[str, Path], kind: str) -> None:
    """A row without a game counts as a game of one row."""
    found = {(row["split"], row["bucket"]): row for row in ask(stores[kind], "dispersion")}
    expected = {}
    rng = np.random.default_rng(1)
    for split in SPLITS:
        buckets = [
            [row["game_id"] if row["game_id"] is not None else -1 - row["position_id"] for row in rows]
            for rows in tables(stores[kind], f"shuffled/{split}")
        ]
        everything = np.concatenate(buckets)
        for number, ids in enumerate(buckets):
            expected[split, number] = (len(ids), len(set(ids)), max(Counter(ids).values()))
            drawn = [Counter(rng.permutation(everything)[: len(ids)].tolist()) for _ in range(200)]
            row = found[split, number]
            games = [len(counts) for counts in drawn]
            largest = [max(counts.values()) / len(ids) for counts in drawn]
            for values, mean, slack in (
                (games, row["games_expected"], 0.051),
                (largest, row["largest_share_expected"], 0.1 * np.mean(largest)),
            ):
                assert abs(np.mean(values) - mean) < slack + 5 * np.std(values) / math.sqrt(200)
    assert len(expected) >= 3
    got = {key: (r["positions"], r["games"], r["largest_share"]) for key, r in found.items()}
    assert got == {key: (n, games, round(top / n, 8)) for key, (n, games, top) in expected.items()}
    assert list(found) == list(expected)


def test_values(stores: dict[str, Path]) -> None:
    """The range is the one of sample means without replacement, as in many random draws."""
    rng = np.random.default_rng(2)
    found = ask(stores["odd-shuffled"], "values")
    for row in found:
        buckets = [
            [r["value"] for r in t] for t in tables(stores["odd-shuffled"], f"shuffled/{row['split']}")
        ]
        whole, own = np.concatenate(buckets), buckets[row["bucket"]]
        means = [rng.permutation(whole)[: len(own)].mean() for _ in range(2_000)]
        assert row["positions"] == len(own)
        assert row["value_mean"] == pytest.approx(np.mean(own), abs=1e-5)
        assert row["split_mean"] == pytest.approx(whole.mean(), abs=1e-5)
        deviation = (row["high"] - row["low"]) / 2 / 1.96
        assert deviation == pytest.approx(np.std(means), rel=0.1, abs=1e-9)
        if deviation:
            assert row["deviations"] == pytest.approx((np.mean(own) - whole.mean()) / deviation, abs=0.01)
    assert [(row["split"], row["bucket"]) for row in found][:3] == [("train", 0), ("train", 1), ("train", 2)]


def test_openings(stores: dict[str, Path]) -> None:
    games = [g for g in rows_of(stores["converted"], "games") if len(g["moves"] or []) >= 3]
    names = [" ".join(cell_name(move, 7) for move in game["moves"][:3]) for game in games]
    counts = Counter(names)
    found = ask(stores["converted"], "openings")
    order = sorted(counts, key=lambda name: (-counts[name], name))[:20]
    assert [row["opening"] for row in found] == order
    for row in found:
        won = [
            game["winner"] == "BLUE"
            for game, name in zip(games, names, strict=True)
            if name == row["opening"]
        ]
        assert (row["games"], row["share"]) == (len(won), round(len(won) / len(games), 6))
        assert row["blue_won"] == round(sum(won) / len(won), 4)
