"""Shuffles with selection options, run by the library and the command line; and refused options."""

from __future__ import annotations

from dataclasses import fields

import pyarrow.parquet as pq
import pytest

from hexdata.errors import ConfigError
from hexdata.schema import SPLITS
from hexdata.selection import SelectionOptions
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store

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
        ({"dedup": "yes"}, "unknown dedup; found 'yes'; expected 'none' or 'exact' or 'symmetric'"),
        ({"assign": "ply"}, "unknown assign"),
        ({"per_game": 5, "per_game_by": "ply"}, "unknown per_game_by"),
        ({"per_game": 0}, "per_game cannot be used; found 0; expected an integer, at least 1"),
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
