"""Selection of positions: each filter alone and combined, compared with plain definitions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key
from hexdata.schema import SPLITS
from hexdata.selection import SelectionOptions, dedup, select
from hexdata.store import Store
from hexdata.store.session import duckdb_session

SEED = 11


@pytest.fixture(scope="module", autouse=True)
def small_slices():
    """Process the games of a small store in many slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "SLICE_ROWS", 50)
        yield


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
    key = derive_key(seed, "per-game")
    tier = {
        row["position_id"]: 99 if row["value_sample_tier"] is None else row["value_sample_tier"]
        for row in rows
    }
    of_game = defaultdict(list)
    for row in rows:
        if row["game_id"] is not None:
            of_game[row["game_id"]].append(row["position_id"])
    kept = set()
    for ids in of_game.values():
        kept |= set(
            sorted(ids, key=lambda i: (tier[i] if by == "tier" else 0, int(sort_key(i, key))))[:limit]
        )
    return [row for row in rows if row["game_id"] is None or row["position_id"] in kept]


# No options


def test_without_options_all_positions_are_selected(choose, kept, choice_store, choice_rows, ids_by_split):
    found = choose(choice_store)
    assert kept(found) == ids_by_split(choice_rows)
    assert (found.left_out, found.notes, found.balance) == ({}, (), ())


def test_the_rows_have_the_columns_of_positions_and_split(con, choose, choice_store):
    for options in ({}, {"where": "len(flags) = 0", "dedup": "exact", "per_game": 2, "balance_by": "source"}):
        found = con.sql(choose(choice_store, **options).chosen_sql)
        plain = con.sql(f"FROM read_parquet('{choice_store}/positions/*.parquet')")
        assert found.columns == [*plain.columns, "split"]
        assert found.types == [*plain.types, "UTINYINT"]


def test_duplicates_of_a_converted_store_are_counted(choose, kept, demo_trmph, tmp_path, read, ids_by_split):
    """The counts agree with ``duplicate_of`` and the flags of a store converted in two runs."""
    demo_trmph(tmp_path / "a", games=30, files=2)
    (again,) = demo_trmph(tmp_path / "b", games=12, files=1)
    again.write_text(again.read_text() + again.read_text() + mirrored(again.read_text().splitlines()[:3]))
    for name in ("a", "b"):
        convert_sources([tmp_path / name], tmp_path / "store", ConvertOptions(workers=1, val=0.3))
    rows = read(tmp_path / "store")
    copies = {row["game_id"]: row["game"] for row in rows if row["game"]["duplicate_of"] is not None}
    exact = {game for game, facts in copies.items() if "duplicate-exact" in facts["flags"]}
    assert (len(copies), len(exact)) == (27, 24)
    found = {kind: choose(tmp_path / "store", dedup=kind) for kind in ("exact", "symmetric")}
    assert found["exact"].duplicates == found["symmetric"].duplicates
    assert found["exact"].duplicates.exact_games == len(exact)
    assert found["exact"].duplicates.symmetric_games == len(copies)
    for kind, left in (("exact", exact), ("symmetric", copies.keys())):
        assert kept(found[kind]) == ids_by_split([row for row in rows if row["game_id"] not in left])


def mirrored(lines):
    """Return TRMPH lines of size 7 with every move rotated by 180 degrees."""
    turned = []
    for line in lines:
        board, moves, winner = re.fullmatch(r"(#7,)((?:[a-g][1-7])+)( .*)", line).groups()
        cells = [
            f"{chr(ord('a') + ord('g') - ord(c))}{8 - int(r)}"
            for c, r in re.findall(r"([a-g])([1-7])", moves)
        ]
        turned.append(f"{board}{''.join(cells)}{winner}\n")
    return "".join(turned)


def test_a_store_without_games_is_accepted(choose, kept, tmp_path, write_odd_store):
    path = write_odd_store(tmp_path / "store", 90, 3)
    store = Store.open(path)
    store.manifest.files = {n: f for n, f in store.manifest.files.items() if not n.startswith("games/")}
    store.manifest.save(path)
    found = choose(path, where="source IS NULL AND value >= 0", dedup="symmetric")
    assert found.rows == {"train": 90}


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


def test_only_the_tables_in_use_are_joined(choose, choice_store):
    files = len(Store.open(choice_store).manifest.files_in("games"))
    for text, joins in (("value = 1", 0), ("source_id = 1", 0), ("source > 's0'", 0), ("len(flags) = 0", 1)):
        found = choose(choice_store, where=text).chosen_sql
        assert found.count("games/") == files * joins
        assert found.count("held-out") == 1
        assert found.count("source-runs") == text.startswith("source")


def test_sources_are_found_when_their_games_alternate(choose, kept, write_games, read, ids_by_split):
    """The games of a source need not have consecutive ids: here each game differs in source from the last."""
    store = write_games(6, games=30, turns=True)
    rows = read(store)
    for source in range(3):
        expected = [row for row in rows if row["game"] and row["game"]["source_id"] == source]
        assert kept(choose(store, where=f"source_id = {source}")) == ids_by_split(expected)
        assert kept(choose(store, where=f"source = 's{source}/games.trmph'")) == ids_by_split(expected)


def test_a_condition_without_matches_is_an_error(choose, choice_store):
    with pytest.raises(ConfigError, match="where removes all positions"):
        choose(choice_store, where="value > 2")


@pytest.mark.parametrize("text", ["value", "NULL", "value_sample_tier", "winner"])
def test_where_must_be_a_condition(text, choose, choice_store):
    with pytest.raises(ConfigError, match="where is not a condition"):
        choose(choice_store, where=text)


@pytest.mark.parametrize("choice", ["where", "balance_by", "stratify_by"])
def test_a_cast_that_fails_names_the_expression(choice, choose, assign, choice_store):
    text = "source::INTEGER = 1"
    with pytest.raises(ConfigError, match=f"{choice} fails for a position.*try_cast") as caught:
        assign(choose(choice_store, **{choice: text}), train=2, val=1, test=1)
    assert caught.value.found == text


# dedup


@pytest.mark.parametrize("kind", ["exact", "symmetric"])
def test_dedup_keeps_the_first_of_each_game(kind, choose, kept, choice_store, choice_rows, ids_by_split):
    expected = expected_dedup(choice_rows, kind)
    found = choose(choice_store, dedup=kind)
    assert kept(found) == ids_by_split(expected)
    assert found.left_out == {"dedup": len(choice_rows) - len(expected)}
    assert found.left_out["dedup"] > 0


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


def test_dedup_compares_the_remaining_games(choose, kept, choice_store, choice_rows, ids_by_split):
    """If ``where`` removes the first of several equal games, the next one is kept."""
    left = [row for row in choice_rows if row["source"] == "s2/games.trmph"]
    for kind in ("exact", "symmetric"):
        expected = expected_dedup(left, kind)
        assert {row["game_id"] for row in expected} - {
            row["game_id"] for row in expected_dedup(choice_rows, kind)
        }
        assert kept(choose(choice_store, where="source LIKE 's2/%'", dedup=kind)) == ids_by_split(expected)


def test_a_note_counts_fragments_that_exact_cannot_detect(choose, choice_store, choice_rows):
    exact, symmetric = expected_dedup(choice_rows, "exact"), expected_dedup(choice_rows, "symmetric")
    gone = {row["game_id"] for row in exact} - {row["game_id"] for row in symmetric}
    fragments = {r["game_id"] for r in choice_rows if r["game_id"] in gone and r["game"]["moves"] is None}
    (note,) = choose(choice_store, dedup="exact").notes
    assert note.startswith(f"dedup exact cannot detect {len(fragments)} duplicates that are fragments")
    assert choose(choice_store, dedup="symmetric").notes == ()


# per_game


@pytest.mark.parametrize("by", ["key", "tier"])
@pytest.mark.parametrize("limit", [1, 5, 24, 1000])
def test_per_game_keeps_the_first_by_key(limit, by, choose, kept, choice_store, choice_rows, ids_by_split):
    expected = expected_per_game(choice_rows, limit, by, SEED)
    found = choose(choice_store, per_game=limit, per_game_by=by)
    assert kept(found) == ids_by_split(expected)
    assert found.left_out == {"per_game": len(choice_rows) - len(expected)}
    assert max(Counter(row["game_id"] for row in expected if row["game_id"] is not None).values()) <= limit
    assert found.notes == ("per_game does not limit the 45 positions without a game",)


def test_per_game_takes_low_tiers_first(choose, kept, choice_store, choice_rows):
    ids = set().union(*kept(choose(choice_store, per_game=4, per_game_by="tier")).values())
    for game in {row["game_id"] for row in choice_rows} - {None}:
        rows = [row for row in choice_rows if row["game_id"] == game]
        tiers = {
            taken: [r["value_sample_tier"] for r in rows if (r["position_id"] in ids) is taken]
            for taken in (True, False)
        }
        ranks = {taken: [99 if tier is None else tier for tier in found] for taken, found in tiers.items()}
        assert max(ranks[True]) <= min(ranks[False], default=99)


def test_per_game_does_not_depend_on_the_ply(choose, kept, write_games, read):
    """Every ply is kept equally often, within 5 standard deviations."""
    store = write_games(5, games=400, shortest=10, longest=10, loose=0)
    ids = set().union(*kept(choose(store, per_game=5)).values())
    kept_plies = Counter(row["position_in_game"] for row in read(store) if row["position_id"] in ids)
    assert sum(kept_plies.values()) == 5 * 400
    assert all(abs(kept_plies[ply] - 200) < 5 * (400 / 4) ** 0.5 for ply in range(10))


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


def test_threads_and_memory_do_not_change_the_result(choice_store, tmp_path):
    """The lookup tables are equal byte for byte, and so are the rows."""
    asked = SelectionOptions(where="value_sample_tier >= 0", dedup="exact", per_game=7, balance_by="winner")
    found = []
    for threads, memory in ((1, 40_000_000), (2, 250_000_000), (4, 60_000_000)):
        folder = tmp_path / f"tables-{threads}"
        with duckdb_session(memory=memory, threads=threads) as con:
            chosen = select(Store.open(choice_store), asked, SEED, con, folder)
            rows = con.sql(f"SELECT position_id FROM ({chosen.chosen_sql}) ORDER BY ALL").fetchall()
        tables = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        found.append((rows, tables, chosen.rows, chosen.left_out, chosen.balance, chosen.notes))
    assert found[0] == found[1] == found[2]
    assert set(SPLITS) >= found[0][2].keys()
