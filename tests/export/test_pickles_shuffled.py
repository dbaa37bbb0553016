"""Shuffled pickles: readable by legacy trainers. Export of pickles: resumable and reproducible."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import StoreError
from hexdata.export.pickles import NO_TIME, export_pickles
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.kit.whole import ORIGINAL, SHUFFLED
from tests.legacy_pickles import example, load_pickle, save_pickle, top_level

N = 5
SOURCES = [f"in/{name}" for name in ("dicts.pkl.gz", "lost.pkl.gz", "raw.trmph", "tuples.pkl.gz")]
METADATA = [
    "game_id",
    "position_in_game",
    "total_positions",
    "value_sample_tier",
    "winner",
    "original_source",
]


def games(count, total=4, file_idx=0, **changes):
    return [
        example(game, ply, total, player_to_move=..., **{"game_id": (file_idx, game)} | changes)
        for game in range(1, count + 1)
        for ply in range(total)
    ]


def save(path, examples, **header):
    save_pickle(path, top_level(examples, **header))


@pytest.fixture(scope="module")
def mixed_store(tmp_path_factory):
    """A shuffled store of dicts, tuples of the other value convention, raw games and unknown games."""
    folder = tmp_path_factory.mktemp("mixed")
    save(folder / "in" / "dicts.pkl.gz", games(40, source_file="raw/x.trmph"), source_file="raw/x.trmph")
    save(folder / "in" / "tuples.pkl.gz", [(e["board"], e["policy"], 1.0) for e in games(30, total=10)])
    lost = [e for i in range(2) for e in games(3, game_id=None, original_source=f"raw/{i}")]
    lost = [e for e in lost if e["board"].any()]  # without their beginnings, nothing tells games apart
    random.Random(1).shuffle(lost)
    save(folder / "in" / "lost.pkl.gz", lost, source_file=3, shuffling_stats={"num_buckets": 1})
    lines = [(np.array([0, 1, 5, 6, i % 18 + 7], np.uint16), i % 2) for i in range(25)]
    write_trmph(folder / "in" / "raw.trmph", lines, N)
    options = ConvertOptions(workers=1, val=0.2, test=0.2, value_convention="blue-is-0")
    convert_sources([folder / "in"], folder / "store", options)
    shuffle_store(folder / "store", ShuffleOptions(seed=5, buckets=3, threads=1))
    return folder / "store"


@pytest.fixture(scope="module")
def exported(mixed_store, tmp_path_factory):
    """The folder of the shuffled pickles of a copy of the store."""
    import shutil

    store = shutil.copytree(mixed_store, tmp_path_factory.mktemp("exported") / "store")
    assert export_pickles(store, SHUFFLED).positions == 160 + 300 + 18 + 150
    return store / "pickles" / "shuffled"


def test_shuffled_pickles_have_the_legacy_layout(exported):
    paths = sorted(exported.rglob("*.pkl.gz"))
    buckets = Store.open(exported.parents[1]).manifest.stages["shuffle"]["buckets"]
    names = [f"{split}/shuffled_{i:04d}.pkl.gz" for split in sorted(buckets) for i in range(buckets[split])]
    assert [path.relative_to(exported).as_posix() for path in paths] == names
    seen = {}
    for path in paths:
        content, split = load_pickle(path), path.parent.name
        facts = {"num_buckets": buckets[split], "bucket_id": int(path.name[9:13])}
        facts |= {"total_examples": len(content["examples"]), "shuffled_at": NO_TIME}
        facts["source_files"] = SOURCES
        assert list(content["shuffling_stats"].items()) == list(facts.items())
        for item in content["examples"]:
            check_shuffled(item)
            metadata = item["metadata"]
            seen.setdefault((metadata["original_source"], metadata["game_id"]), []).append(
                (split, metadata["position_in_game"], metadata["total_positions"])
            )
    check_games(seen)


def check_shuffled(item):
    assert list(item) == ["board", "policy", "value", "player_to_move", "metadata"]
    assert (item["board"].dtype, item["board"].shape) == (np.dtype("f4"), (2, N, N))
    assert item["policy"] is None or (item["policy"].dtype, item["policy"].sum()) == (np.dtype("f4"), 1)
    metadata = item["metadata"]
    assert list(metadata) == METADATA
    assert {type(item["value"]), type(item["player_to_move"]), type(metadata["winner"])} == {float, int, str}
    assert item["value"] == {"BLUE": 0.0, "RED": 1.0}[metadata["winner"]]
    assert item["player_to_move"] == int(item["board"].sum()) % 2


def check_games(seen):
    """Check that every known game has a unique id and all of its positions, in one split."""
    counts = {}
    for (origin, game_id), positions in seen.items():
        source = origin if game_id is None else game_id[0]
        counts.setdefault((source, origin), []).append(game_id)
        if game_id is not None:
            assert len({split for split, _, _ in positions}) == 1
            assert sorted(ply for _, ply, _ in positions) == list(range(positions[0][2]))
    known = {(0, "raw/x.trmph"): 40, (2, "in/raw.trmph"): 25, (3, "data/a.trmph"): 30}
    assert counts.keys() == {*known, ("raw/0", "raw/0"), ("raw/1", "raw/1")}
    for (source, origin), count in known.items():
        assert sorted(counts[source, origin]) == [(source, i) for i in range(1, count + 1)]


def test_the_legacy_loader_finds_the_shuffled_files(exported):
    """It reads ``shuffled_*.pkl.gz`` only from folders that contain ``shuffling_progress.json``."""
    manifest, found = Store.open(exported.parents[1]).manifest, 0
    for folder in sorted(exported.iterdir()):
        files = sorted(folder.glob("shuffled_*.pkl.gz"))
        stats = [load_pickle(path)["shuffling_stats"] for path in files]
        names, total = stats[0]["source_files"], sum(one["total_examples"] for one in stats)
        counts = {"files_processed": len(names), "total_examples": total, "buckets_completed": len(files)}
        assert json.loads((folder / "shuffling_progress.json").read_text()) == {
            "started_at": NO_TIME,
            "last_updated": NO_TIME,
            "processed_files": names,
            "completed_buckets": list(range(len(files))),
            "current_phase": "completed",
            "stats": {**counts, "start_time": 0},
        }
        assert f"pickles/shuffled/{folder.name}/shuffling_progress.json" in manifest.files
        found += len(files)
    assert found == manifest.stages["pickles-shuffled"]["files"]


# The stage


def test_bytes_do_not_depend_on_workers(mixed_store, exported, copy_store, store_bytes):
    store, two = copy_store(mixed_store), replace(SHUFFLED, workers=2)
    export_pickles(store, two)
    assert store_bytes(store) == store_bytes(exported.parents[1])
    assert export_pickles(store, two).already_done
    assert store_bytes(store) == store_bytes(exported.parents[1])


def test_a_store_with_new_sources_is_exported_again(exported, copy_store, store_bytes, tmp_path):
    store = copy_store(exported.parents[1])
    before = export_pickles(store, replace(ORIGINAL, workers=2))
    pickles = store_bytes(store / "pickles" / "original")
    save(tmp_path / "more" / "new.pkl.gz", games(3, file_idx=9))
    convert_sources([tmp_path / "more"], store, ConvertOptions(workers=1, val=0.2, test=0.2))
    after = export_pickles(store, ORIGINAL)
    assert (after.files, after.positions) == (before.files + 1, before.positions + 12)
    assert store_bytes(store / "pickles" / "original").items() > pickles.items()
    assert (store / "pickles" / "original" / "more" / "new.pkl.gz").exists()
    with pytest.raises(StoreError, match="older than the positions"):
        export_pickles(store, SHUFFLED)
    shuffle_store(store, ShuffleOptions(seed=6, buckets=1, threads=1))
    result = export_pickles(store, SHUFFLED)
    assert len(list((store / "pickles" / "shuffled").rglob("*.pkl.gz"))) == result.files == 3
