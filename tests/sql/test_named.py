"""Results of the named queries agree with direct counts over the store's files."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata.board import cell_name
from hexdata.schema import SPLITS
from hexdata.sql import named_queries, named_query, open_catalog
from hexdata.sql.run import check_query
from hexdata.store import Store
from tests.sql.conftest import ask

Row = dict[str, Any]


@functools.cache
def tables(store: Path, folder: str) -> list[list[Row]]:
    """Return the rows of each file of a folder."""
    return [pq.read_table(path).to_pylist() for path in Store.open(store).files(folder)]


def rows_of(store: Path, folder: str) -> list[Row]:
    return list(itertools.chain.from_iterable(tables(store, folder)))


def test_every_named_query_runs_at_every_stage(any_store: Path) -> None:
    with open_catalog(any_store, memory=500_000_000) as con:
        for name, answers in named_queries().items():
            check_query(con, named_query(name))
            result = con.sql(named_query(name))
            assert len(set(result.columns)) == len(result.columns) > 1, name
            assert len(result.fetchall()) < 1_000, name
            assert len(answers) > 20, name
            assert answers.endswith("."), name


COUNTS: dict[str, tuple[str, str, str, Callable[[Row], Iterable[Any]]]] = {
    "lengths": ("positions", "games", "games", lambda game: [game["positions"]]),
    "tiers": ("tier", "positions", "positions", lambda row: [row["value_sample_tier"]]),
    "flags": ("flag", "games", "games", lambda game: game["flags"] or ()),
    "rejects": ("reason", "records", "rejected", lambda row: [row["reason"]]),
    "first_moves": ("move", "games", "games", lambda game: (game["moves"] or ())[:1]),
    "opening_cells": ("move", "games", "games", lambda game: (game["moves"] or ())[:10]),
    "duplicates": (
        "split",
        "games",
        "games",
        lambda g: [g["split"]] if g["duplicate_of"] is not None else [],
    ),
    "splits": ("split", "games", "games", lambda game: [game["split"]]),
}
"""Queries that count: the column of the key, of the number, the table, and the keys of one of its rows."""


@pytest.mark.parametrize("kind", ["exported", "odd-shuffled"])
def test_counts_are_those_of_the_files(stores: dict[str, Path], kind: str) -> None:
    store = stores[kind]
    for name, (key, number, folder, counted) in COUNTS.items():
        found = {row[key]: row[number] for row in ask(store, f"@{name}")}
        assert found == Counter(each for row in rows_of(store, folder) for each in counted(row)), name
    games = rows_of(store, "games")
    for row in ask(store, "@splits"):
        own, buckets = (
            [g for g in games if g["split"] == row["split"]],
            tables(store, f"shuffled/{row['split']}"),
        )
        assert row["positions"] == sum(game["positions"] for game in own)
        assert row["duplicates"] == sum(game["duplicate_of"] is not None for game in own)
        assert (row["buckets"], row["shuffled"]) == (len(buckets), sum(map(len, buckets)))
    for row in ask(store, "@opening_cells"):
        assert row["cell"] == cell_name(row["move"], 7)
    assert [row["name"] for row in ask(store, "@sources")] == [
        row["name"] for row in rows_of(store, "sources")
    ]


def same_games(rows: list[Row]) -> tuple[int, float]:
    """Return the adjacent pairs of one game, and the probability that a random pair is of one game."""
    ids = [row["game_id"] for row in rows]
    found = sum(a == b and a is not None for a, b in itertools.pairwise(ids))
    sizes = Counter(i for i in ids if i is not None).values()
    return found, sum(n * (n - 1) for n in sizes) / (len(ids) * (len(ids) - 1))


@pytest.mark.parametrize("kind", ["converted", "exported", "odd-shuffled"])
def test_neighbours(stores: dict[str, Path], kind: str) -> None:
    orders = {"input": rows_of(stores[kind], "positions")}
    orders |= {split: rows_of(stores[kind], f"shuffled/{split}") for split in SPLITS}
    found = ask(stores[kind], "@neighbours")
    assert [row["rows"] for row in found] == [name for name, rows in orders.items() if rows]
    for row in found:
        rows = orders[row["rows"]]
        same, chance = same_games(rows)
        pairs = len(rows) - 1
        assert (row["pairs"], row["same_game"], row["share"]) == (pairs, same, same / pairs)
        assert row["share_expected"] == pytest.approx(chance)
        assert row["same_game_expected"] == pytest.approx(pairs * chance)
    assert found[0]["share"] > 0.5


@pytest.mark.parametrize("kind", ["exported", "odd-shuffled"])
def test_dispersion(stores: dict[str, Path], kind: str) -> None:
    """A row without a game counts as a game of one row. What is expected is the mean of random draws."""
    found = {(row["split"], row["bucket"]): row for row in ask(stores[kind], "@dispersion")}
    expected, rng = {}, np.random.default_rng(1)
    for split in SPLITS:
        buckets = [
            [row["game_id"] if row["game_id"] is not None else -1 - row["position_id"] for row in rows]
            for rows in tables(stores[kind], f"shuffled/{split}")
        ]
        everything = np.concatenate(buckets)
        for number, ids in enumerate(buckets):
            expected[split, number] = (
                len(ids),
                len(set(ids)),
                round(max(Counter(ids).values()) / len(ids), 8),
            )
            row = found[split, number]
            drawn = [Counter(rng.permutation(everything)[: len(ids)].tolist()) for _ in range(200)]
            games, largest = [len(c) for c in drawn], [max(c.values()) / len(ids) for c in drawn]
            for values, mean, slack in (
                (games, row["games_expected"], 0.051),
                (largest, row["expected_share"], 0.1 * np.mean(largest)),
            ):
                assert abs(np.mean(values) - mean) < slack + 5 * np.std(values) / math.sqrt(200)
    assert {key: (r["positions"], r["games"], r["largest_share"]) for key, r in found.items()} == expected
    assert list(found) == list(expected)


def test_values(stores: dict[str, Path]) -> None:
    """The range is the one of sample means without replacement, as in many random draws."""
    store, rng = stores["odd-shuffled"], np.random.default_rng(2)
    found = ask(store, "@values")
    for row in found:
        buckets = [[r["value"] for r in rows] for rows in tables(store, f"shuffled/{row['split']}")]
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
    games = [game for game in rows_of(stores["converted"], "games") if len(game["moves"] or []) >= 3]
    won = defaultdict(list)
    for game in games:
        won[" ".join(cell_name(move, 7) for move in game["moves"][:3])].append(game["winner"] == "BLUE")
    found = ask(stores["converted"], "@openings")
    assert [row["opening"] for row in found] == sorted(won, key=lambda name: (-len(won[name]), name))[:20]
    for row in found:
        by_blue, share = won[row["opening"]], round(len(won[row["opening"]]) / len(games), 6)
        assert (row["games"], row["share"]) == (len(by_blue), share)
        assert row["blue_won"] == round(sum(by_blue) / len(by_blue), 4)
