"""Selection of positions: each filter alone and combined, compared with plain definitions."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key

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


# per_game


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
