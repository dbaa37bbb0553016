"""Shuffles with selection options, run by the library and the command line."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest

from hexdata.errors import ConfigError
from hexdata.schema import SPLITS
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store

SEED = 11
FIRST_ROW = re.compile(r"^\t\tfirst\t[0-9,]+\t", re.MULTILINE)
"""A row of the printed table with the means of the first positions of a group."""
OPTIONS = {
    "where, dedup, per game, balance": {
        "where": "len(flags) = 0",
        "dedup": "symmetric",
        "per_game": 12,
        "per_game_by": "tier",
        "balance_by": "winner",
    },
    "strata": {"stratify_by": "length", "dedup": "exact"},
    "games": {"assign": "game"},
}


def buckets_of(path):
    """Return (split, bucket, position ids in order) of every bucket file."""
    store = Store.open(path)
    return [
        (split, bucket, pq.read_table(file, columns=["position_id"])["position_id"].to_pylist())
        for split in SPLITS
        for bucket, file in enumerate(store.files(f"shuffled/{split}"))
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_buckets_contain_the_assigned_positions(name, choose, assign, trmph_store, copy_store, store_bytes):
    chosen = choose(trmph_store, **OPTIONS[name])
    made = {}
    for threads, memory in ((1, 1_000_000_000), (2, 600_000_000)):
        store = copy_store(trmph_store, f"store-{threads}")
        options = ShuffleOptions(**OPTIONS[name], seed=SEED, buckets=4, threads=threads, memory=memory)
        result = shuffle_store(store, options)
        made[threads] = store_bytes(store / "shuffled"), store_bytes(store)["manifest.json"]
    assert made[1] == made[2]
    assigned = assign(chosen, **result.buckets)
    assert buckets_of(store) == [
        (split, bucket, [i for at, number, _, i in assigned if (at, number) == (split, bucket)])
        for split, count in result.buckets.items()
        for bucket in range(count)
    ]
    assert (result.left_out, result.notes, result.balance) == (chosen.left_out, chosen.notes, chosen.balance)
    assert result.duplicates == chosen.duplicates
    stage = Store.open(store).manifest.stages["shuffle"]
    assert stage["choices"] == OPTIONS[name]
    assert stage["left_out"] == chosen.left_out
    total = Store.open(store).manifest.counts["positions"]
    assert total == stage["positions"] + stage["rejected"] + sum(stage["left_out"].values())


def test_different_options_replace_the_shuffle(trmph_store, copy_store):
    store = copy_store(trmph_store)
    assert shuffle_store(store, ShuffleOptions(per_game=5)).left_out["per_game"] > 0
    again = shuffle_store(store, ShuffleOptions(per_game=5))
    assert again.already_done
    assert (again.duplicates, again.balance) == (None, ())
    assert not shuffle_store(store, ShuffleOptions()).already_done
    assert Store.open(store).manifest.stages["shuffle"]["choices"] == {}


def test_a_refused_option_does_not_change_the_store(trmph_store, copy_store, store_bytes):
    store = copy_store(trmph_store)
    shuffle_store(store, ShuffleOptions(seed=3))
    before = store_bytes(store)
    for choices in ({"where": "value > 2"}, {"where": "random() < 1"}, {"balance_by": "winner::INTEGER"}):
        with pytest.raises(ConfigError):
            shuffle_store(store, ShuffleOptions(**choices))
    assert store_bytes(store) == before


def test_the_command_applies_the_options_and_shows_their_effect(trmph_store, copy_store, run_cli):
    store = copy_store(trmph_store)
    flags = [
        "--where",
        "total_positions > 5",
        "--dedup",
        "symmetric",
        "--per-game",
        "9",
        "--per-game-by",
        "tier",
    ]
    flags += ["--balance-by", "winner", "--stratify-by", "value", "--assign", "position", "--seed", str(SEED)]
    shown = run_cli("shuffle", store, *flags)
    assert shown.returncode == 0, shown.stderr
    for words in (
        "excluded by per_game: ",
        "duplicate games in the store: 0 exact",
        "all groups",
        "position in file",
    ):
        assert words in shown.stdout
    assert FIRST_ROW.search(shown.stdout)
    choices = Store.open(store).manifest.stages["shuffle"]["choices"]
    assert choices == {
        "where": "total_positions > 5",
        "dedup": "symmetric",
        "per_game": 9,
        "per_game_by": "tier",
        "balance_by": "winner",
        "stratify_by": "value",
    }
    facts = json.loads(run_cli("shuffle", store, "--balance-by", "source", "--json").stdout)
    assert {row["split"] for row in facts["balance"] if row["total"]} == set(facts["splits"])
    assert facts["duplicates"]["exact_games"] == 0
    assert sum(row["kept"] for row in facts["balance"] if not row["total"]) == facts["positions"]


def test_the_dry_run_and_the_log_contain_the_effect(trmph_store, copy_store, store_bytes, run_cli):
    store = copy_store(trmph_store)
    before = store_bytes(store)
    flags = ("--balance-by", "winner", "--per-game", "9")
    shown = run_cli("shuffle", store, *flags, "--dry-run")
    planned = json.loads(run_cli("shuffle", store, *flags, "--dry-run", "--json").stdout)
    assert store_bytes(store) == before
    made = run_cli("shuffle", store, *flags)
    for line in made.stdout.splitlines()[-8:]:
        assert line in shown.stdout, "excluded positions, duplicates and the table of groups"
    assert FIRST_ROW.search(shown.stdout)
    lines = (store / "logs" / "shuffle.log").read_text().splitlines()
    logged = json.loads(next(line for line in lines if " plan: " in line).partition(" plan: ")[2])
    for name in ("balance", "duplicates", "left_out"):
        assert planned[name] == logged[name]
        assert planned[name]


def test_a_config_run_shows_the_effect(trmph_store, copy_store, tmp_path, run_cli):
    config = tmp_path / "run.toml"
    store = copy_store(trmph_store)
    config.write_text(f"store = '{store}'\n[shuffle]\nbalance_by = 'winner'\nbuckets = 2\n")
    shown = run_cli("run", config).stdout
    assert "excluded by balance_by: " in shown
    assert FIRST_ROW.search(shown)


def test_names_of_groups_are_not_parsed_as_markup(trmph_store, copy_store, run_cli):
    """Brackets are markup for rich: an unmatched closing tag used to raise an error."""
    store = copy_store(trmph_store)
    for value in ("'[/red]'", "'[bold]'", "repeat('x', 500)"):
        shown = run_cli(
            "shuffle", store, "--balance-by", f"{value} || winner || chr(27)", "--where", "winner IS NOT NULL"
        )
        assert shown.returncode == 0, shown.stderr
        assert (value[1:-1] if "[" in value else "x" * 50) in shown.stdout
        assert "\x1b" not in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) < 180


def test_splits_are_listed_in_the_same_order(trmph_store, copy_store, run_cli):
    """The names in a manifest are sorted alphabetically."""
    store = copy_store(trmph_store)
    listed = [
        [line.split()[0] for line in run_cli("shuffle", store).stdout.splitlines() if line.startswith(SPLITS)]
        for _ in range(2)
    ]
    assert listed[0] == listed[1]
    assert listed[0] == [split for split in SPLITS if split in listed[0]]
    assert len(listed[0]) > 1


def test_the_command_explains_an_invalid_expression(trmph_store, copy_store, run_cli):
    failed = run_cli("shuffle", copy_store(trmph_store), "--where", "valeu = 1")
    assert failed.returncode == 2
    assert "where: no column 'valeu'; found valeu = 1; expected one of" in failed.stderr
    assert "Did you mean value?" in failed.stderr
    assert run_cli("shuffle", "STORE", "--assign", "ply").returncode == 2
