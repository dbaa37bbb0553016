"""Selection of positions: each filter alone and combined, compared with plain definitions; whole shuffles."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key
from hexdata.schema import SPLITS
from hexdata.selection import SelectionOptions
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store

# Plain definitions


def expected_dedup(rows, kind):
    first = {}
    for row in rows:
        if (name := identity(row["game"], kind)) is not None:
            first[name] = min(first.get(name, row["game_id"]), row["game_id"])
    return [r for r in rows if first.get(identity(r["game"], kind), r["game_id"]) == r["game_id"]]


def identity(game, kind):
    """Return a value that is equal for duplicate games."""
    if game is None or (kind == "exact" and game["moves"] is None):
        return None
    if kind == "exact":
        return (game["first_player"] or 0, *game["moves"])
    return game["game_hash"]


def expected_per_game(rows, limit, by, seed):
    key, of_game = derive_key(seed, "per-game"), defaultdict(list)

    def rank(row):
        tier = 99 if row["value_sample_tier"] is None else row["value_sample_tier"]
        return tier if by == "tier" else 0, int(sort_key(row["position_id"], key))

    for row in rows:
        of_game[row["game_id"]].append(row)
    loose = {row["position_id"] for row in of_game.pop(None, [])}
    kept = {row["position_id"] for own in of_game.values() for row in sorted(own, key=rank)[:limit]}
    return [row for row in rows if row["position_id"] in loose | kept]


# where

WHERE = {
    "value_sample_tier <= 1": lambda r: r["value_sample_tier"] is not None and r["value_sample_tier"] <= 1,
    "NOT value_sample_tier <= 1": lambda r: r["value_sample_tier"] is not None and r["value_sample_tier"] > 1,
    "source = 's1/games.trmph'": lambda r: r["source"] == "s1/games.trmph",
    "source IS NULL": lambda r: r["game"] is None,
    "winner = 'RED' AND value = 1": lambda r: r["winner"] == "RED",
    "moves IS NULL": lambda r: r["game"] is None or r["game"]["moves"] is None,
    "list_contains(flags, 'no-chain')": lambda r: r["game"] is not None and "no-chain" in r["game"]["flags"],
    "split = 'val'": lambda r: r["split"] == "val",
    "SPLIT <> 'train' OR Source_ID = 0": lambda r: (
        r["split"] != "train" or (r["game"] is not None and r["game"]["source_id"] == 0)
    ),
    "game_positions > 10": lambda r: r["game"] is not None and r["game"]["positions"] > 10,
    "first_player = 1 -- red began": lambda r: r["game"] is not None and r["game"]["first_player"] == 1,
}


@pytest.mark.parametrize("text", WHERE)
def test_where_keeps_positions_for_which_it_is_true(
    text, choose, kept, choice_store, choice_rows, ids_by_split
):
    expected = [row for row in choice_rows if WHERE[text](row)]
    found = choose(choice_store, where=text)
    assert kept(found) == ids_by_split(expected)
    assert found.left_out == {"where": len(choice_rows) - len(expected)}


def test_where_accepts_every_column_of_positions_and_games(con, choose, choice_store):
    columns = con.sql(f"FROM read_parquet('{choice_store}/positions/*.parquet')").columns
    columns += con.sql(f"FROM read_parquet('{choice_store}/games/*.parquet')").columns
    known = sorted({*columns, "source", "game_positions"} - {"positions"})
    text = " AND ".join(f"({column} IS NULL OR {column.upper()} = {column})" for column in known)
    assert choose(choice_store, where=text).left_out == {"where": 0}
    with pytest.raises(ConfigError, match="no column 'positions'"):
        choose(choice_store, where="positions > 0")


def test_what_is_no_condition_or_fails_is_refused(choose, choice_store):
    for text in ("value", "NULL", "value_sample_tier", "winner"):
        with pytest.raises(ConfigError, match="where is not a condition"):
            choose(choice_store, where=text)
    text = "source::INTEGER = 1"
    for choice in ("where", "balance_by", "stratify_by"):
        with pytest.raises(ConfigError, match=f"{choice} fails for a position.*try_cast") as caught:
            choose(choice_store, **{choice: text})
        assert caught.value.found == text


# dedup


def test_the_duplicate_count_ignores_the_options(choose, choice_store, choice_rows):
    for options in ({}, {"where": "source_id = 1"}, {"dedup": "symmetric"}):
        found = choose(choice_store, **options).duplicates
        for kind, counts in (
            ("exact", (found.exact_games, found.exact_positions)),
            ("symmetric", (found.symmetric_games, found.symmetric_positions)),
        ):
            left = expected_dedup(choice_rows, kind)
            games_left = {row["game_id"] for row in choice_rows} - {row["game_id"] for row in left}
            assert counts == (len(games_left), len(choice_rows) - len(left))


# Combinations


@settings(max_examples=10)
@given(
    st.integers(0, 10_000),
    st.sampled_from([None, "split = 'val'", "value_sample_tier <= 1"]),
    st.sampled_from(["none", "exact", "symmetric"]),
    st.sampled_from([None, 1, 3, 10]),
    st.sampled_from(["key", "tier"]),
)
def test_filters_are_applied_in_order(
    choose, kept, write_games, read, ids_by_split, seed, where, dedup, limit, by
):
    store = write_games(seed, games=30)
    rows = read(store)
    steps = {}
    asked = {"dedup": dedup}
    if where:
        asked["where"] = where
        steps["where"] = [row for row in rows if WHERE[where](row)]
    if dedup != "none":
        steps["dedup"] = expected_dedup(steps.get("where", rows), dedup)
    if limit:
        asked |= {"per_game": limit, "per_game_by": by}
        steps["per_game"] = expected_per_game(list(steps.values())[-1] if steps else rows, limit, by, seed)
    left = list(steps.values())[-1] if steps else rows
    found = choose(store, seed=seed, **asked)
    assert kept(found) == ids_by_split(left)
    sizes = [len(rows), *map(len, steps.values())]
    assert found.left_out == dict(zip(steps, [a - b for a, b in pairwise(sizes)], strict=True))


# Whole shuffles

SEED = 11
FILTERS = {"where": "len(flags) = 0", "dedup": "symmetric", "per_game": 12, "per_game_by": "tier"}
OPTIONS = {
    "where, dedup, per game, balance": {**FILTERS, "balance_by": "winner"},
    "strata": {"stratify_by": "length", "dedup": "exact"},
    "games": {"assign": "game"},
}


def test_every_option_is_tested_below():
    tested = {option for options in OPTIONS.values() for option in options}
    assert {field.name for field in fields(SelectionOptions)} == tested, "an option is not in OPTIONS"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"per_game_by": "tier"}, "per_game_by tier needs per_game"),
        *(({"where": text}, "SQL expression") for text in ("", "source = 'a\0b'", "source = '\udcff'")),
        ({"balance_by": " \t\n"}, "must be an SQL expression"),
        ({"stratify_by": "value", "assign": "game"}, "cannot be combined with assign game"),
    ],
)
def test_invalid_options_are_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        SelectionOptions(**asked)


@pytest.mark.parametrize("name", OPTIONS)
def test_buckets_contain_the_assigned_positions(name, choose, assign, trmph_store, copy_store, store_bytes):
    made = []
    for threads, memory in ((1, 1_000_000_000), (2, 600_000_000)):
        path = copy_store(trmph_store, f"store-{threads}")
        options = ShuffleOptions(**OPTIONS[name], seed=SEED, buckets=4, threads=threads, memory=memory)
        result = shuffle_store(path, options)
        made.append((store_bytes(path / "shuffled"), store_bytes(path)["manifest.json"]))
    assert made[0] == made[1]
    chosen = choose(trmph_store, buckets=result.buckets, **OPTIONS[name])
    assigned, store = assign(chosen), Store.open(path)
    for split in SPLITS:
        for bucket, file in enumerate(store.files(f"shuffled/{split}")):
            found = pq.read_table(file, columns=["position_id"])["position_id"].to_pylist()
            assert found == [i for at, number, _, i in assigned if (at, number) == (split, bucket)]
    for fact in ("left_out", "notes", "balance", "duplicates"):
        assert getattr(result, fact) == getattr(chosen, fact)
    stage = store.manifest.stages["shuffle"]
    assert (stage["choices"], stage["left_out"]) == (OPTIONS[name], chosen.left_out)
    accounted = stage["positions"] + stage["rejected"] + sum(stage["left_out"].values())
    assert store.manifest.counts["positions"] == accounted


def test_a_refused_option_does_not_change_the_store(shuffled_store, copy_store, store_bytes):
    store = copy_store(shuffled_store)
    for choices in ({"where": "value > 2"}, {"where": "random() < 1"}, {"balance_by": "winner::INTEGER"}):
        with pytest.raises(ConfigError):
            shuffle_store(store, ShuffleOptions(**choices))
    assert store_bytes(store) == store_bytes(shuffled_store)
