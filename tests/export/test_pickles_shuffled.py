"""Shuffled pickles: readable by legacy trainers. Export of pickles: resumable and reproducible."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError, StoreError
from hexdata.export.pickles import NO_TIME, PicklesOptions, export_pickles
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store
from tests.legacy_pickles import example, load_pickle, save_pickle, top_level

N = 5
ORIGINAL = PicklesOptions(order="original", workers=1, level=1)
SHUFFLED = PicklesOptions(order="shuffled", workers=1, level=1)


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


def test_pickles_contain_the_selected_positions(mixed_store, copy_store):
    store = copy_store(mixed_store)
    result = shuffle_store(store, ShuffleOptions(seed=5, buckets=2, threads=1, where="position_in_game < 2"))
    assert 0 < result.positions < 628
    assert export_pickles(store, SHUFFLED).positions == result.positions
    assert verify_store(store).ok
    assert export_pickles(store, ORIGINAL).positions == 628


def test_shuffled_pickles_have_the_legacy_layout(mixed_store, copy_store):
    store = copy_store(mixed_store)
    result = export_pickles(store, SHUFFLED)
    paths = sorted((store / "pickles" / "shuffled").rglob("*.pkl.gz"))
    buckets = Store.open(store).manifest.stages["shuffle"]["buckets"]
    assert [path.relative_to(store / "pickles" / "shuffled").as_posix() for path in paths] == [
        f"{split}/shuffled_{i:04d}.pkl.gz" for split in sorted(buckets) for i in range(buckets[split])
    ]
    assert result.positions == 160 + 300 + 18 + 150
    seen = {}
    for path in paths:
        content = load_pickle(path)
        stats = content["shuffling_stats"]
        assert list(stats) == ["num_buckets", "bucket_id", "total_examples", "shuffled_at", "source_files"]
        assert (stats["num_buckets"], stats["bucket_id"]) == (buckets[path.parent.name], int(path.name[9:13]))
        assert (stats["total_examples"], stats["shuffled_at"]) == (len(content["examples"]), NO_TIME)
        assert stats["source_files"] == [
            "in/dicts.pkl.gz", "in/lost.pkl.gz", "in/raw.trmph", "in/tuples.pkl.gz"]  # fmt: skip
        for item in content["examples"]:
            check_shuffled(item)
            metadata = item["metadata"]
            seen.setdefault((metadata["original_source"], metadata["game_id"]), []).append(
                (path.parent.name, metadata["position_in_game"], metadata["total_positions"])
            )
    check_games(seen)


def test_positions_without_a_winner_get_that_of_their_game(mixed_store, copy_store):
    """Tuples contain no winner, so their positions have none in the store, but their games have one."""
    store = Store.open(copy_store(mixed_store))
    positions, games = (pa.concat_tables(map(pq.read_table, store.files(t))) for t in ("positions", "games"))
    winners = dict(zip(games["game_id"].to_pylist(), games["winner"].to_pylist(), strict=True))
    rows = positions.filter(pc.is_null(positions["winner"].cast(pa.string()))).to_pylist()
    unnamed = [row for row in rows if row["game_id"] is not None]
    assert len(unnamed) == 300
    sources = pq.read_table(*store.files("sources")).to_pylist()
    (tuples,) = [row["source_id"] for row in sources if row["name"] == "in/tuples.pkl.gz"]
    assert {winners[row["game_id"]] for row in unnamed} <= {"BLUE", "RED"}
    export_pickles(store.path, SHUFFLED)
    paths = (store.path / "pickles" / "shuffled").rglob("*.pkl.gz")
    metadata = [item["metadata"] for path in paths for item in load_pickle(path)["examples"]]
    named = [(item["game_id"], item["winner"]) for item in metadata if item["game_id"] is not None]
    written = [winner for (source_id, _), winner in named if source_id == tuples]
    assert sorted(written) == sorted(winners[row["game_id"]] for row in unnamed)


def test_the_legacy_loader_finds_the_shuffled_files(mixed_store, copy_store):
    """It reads ``shuffled_*.pkl.gz`` only from folders that contain ``shuffling_progress.json``."""
    store = copy_store(mixed_store)
    export_pickles(store, SHUFFLED)
    manifest = Store.open(store).manifest
    found = []
    for folder in sorted((store / "pickles" / "shuffled").iterdir()):
        files = sorted(folder.glob("shuffled_*.pkl.gz"))
        content = json.loads((folder / "shuffling_progress.json").read_text())
        assert list(content) == [
            *("started_at", "last_updated", "processed_files", "completed_buckets", "current_phase", "stats"),
        ]  # fmt: skip
        assert (content["started_at"], content["current_phase"]) == (NO_TIME, "completed")
        assert content["completed_buckets"] == [int(path.name[9:13]) for path in files]
        stats = [load_pickle(path)["shuffling_stats"] for path in files]
        assert content["processed_files"] == stats[0]["source_files"]
        assert content["stats"] == {
            "files_processed": len(stats[0]["source_files"]),
            "total_examples": sum(one["total_examples"] for one in stats),
            "buckets_completed": len(files),
            "start_time": 0,
        }
        assert f"pickles/shuffled/{folder.name}/shuffling_progress.json" in manifest.files
        found += files
    assert len(found) == manifest.stages["pickles-shuffled"]["files"] == export_pickles(store, SHUFFLED).files


def test_an_export_without_progress_file_is_completed(mixed_store, copy_store):
    store = copy_store(mixed_store)
    export_pickles(store, SHUFFLED)
    name = "pickles/shuffled/train/shuffling_progress.json"
    with Store.open(store).writing("test"):
        manifest = Store.open(store).manifest
        del manifest.files[name]
        manifest.save(store)
    (store / name).unlink()
    assert not export_pickles(store, SHUFFLED).already_done
    assert (store / name).exists()
    assert export_pickles(store, SHUFFLED).already_done


METADATA = [
    *("game_id", "position_in_game", "total_positions", "value_sample_tier", "winner"),
    "original_source",
]


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
        source = {None: origin}.get(game_id, game_id and game_id[0])
        counts.setdefault((source, origin), []).append(game_id)
        if game_id is not None:
            assert len({split for split, _, _ in positions}) == 1
            total = positions[0][2]
            assert sorted(ply for _, ply, _ in positions) == list(range(total))
    known = [(0, "raw/x.trmph", 40), (2, "in/raw.trmph", 25), (3, "data/a.trmph", 30)]
    unknown = [("raw/0", "raw/0"), ("raw/1", "raw/1")]
    assert counts.keys() == {(source, origin) for source, origin, _ in known} | set(unknown)
    for source, origin, count in known:
        assert sorted(counts[source, origin]) == [(source, i) for i in range(1, count + 1)]


# The stage


@pytest.mark.parametrize("options", [ORIGINAL, SHUFFLED], ids=lambda o: o.order)
def test_bytes_do_not_depend_on_workers(mixed_store, copy_store, store_bytes, options):
    one, two = copy_store(mixed_store, "one"), copy_store(mixed_store, "two")
    first, second = export_pickles(one, options), export_pickles(two, replace(options, workers=2))
    assert first == second
    assert store_bytes(one) == store_bytes(two)
    assert export_pickles(one, options).already_done
    assert store_bytes(one) == store_bytes(two)


def test_the_manifest_accounts_for_every_file(mixed_store, copy_store, store_bytes):
    store = copy_store(mixed_store)
    for options in (ORIGINAL, SHUFFLED):
        result = export_pickles(store, options)
        manifest = Store.open(store).manifest
        lineage = manifest.stages[f"pickles-{options.order}"]
        assert lineage["positions"] == result.positions == manifest.counts["positions"]
        assert (lineage["rejected"], lineage["files"], lineage["order"]) == (0, result.files, options.order)
    found = {name: digest for name, digest in store_bytes(store).items() if name.startswith("pickles/")}
    assert found == {name: facts.sha256 for name, facts in manifest.files_in("pickles").items()}
    buckets = manifest.stages["shuffle"]["buckets"]
    assert len(found) == 4 + sum(buckets.values()) + len(buckets)  # and a progress file a split


class EnoughError(Exception):
    """Raised by the progress to end a run."""


class StopsAfter:
    def __init__(self, files):
        self.left = files

    def begin(self, stage, total, unit):
        pass

    def note(self, message):
        pass

    def advance(self, amount):
        self.left -= amount > 0
        if self.left < 0:
            raise EnoughError


@pytest.mark.parametrize("options", [ORIGINAL, SHUFFLED], ids=lambda o: o.order)
def test_an_interrupted_run_is_resumed(mixed_store, copy_store, store_bytes, options):
    whole, broken = copy_store(mixed_store, "whole"), copy_store(mixed_store, "broken")
    export_pickles(whole, options)
    with pytest.raises(EnoughError):
        export_pickles(broken, options, StopsAfter(1))
    left = sorted((broken / "pickles").rglob("*.pkl.gz"))
    assert len(left) == 2
    times = [path.stat().st_mtime_ns for path in left]
    assert export_pickles(broken, options).resumed == 2
    assert [path.stat().st_mtime_ns for path in left] == times
    assert store_bytes(whole) == store_bytes(broken)
    assert not (broken / ".work" / f"pickles-{options.order}").exists()


def test_a_store_with_new_sources_is_exported_again(mixed_store, copy_store, tmp_path):
    store = copy_store(mixed_store)
    before = export_pickles(store, ORIGINAL)
    export_pickles(store, SHUFFLED)
    save(tmp_path / "more" / "new.pkl.gz", games(3, file_idx=9))
    convert_sources([tmp_path / "more"], store, ConvertOptions(workers=1, val=0.2, test=0.2))
    after = export_pickles(store, ORIGINAL)
    assert (after.files, after.positions) == (before.files + 1, before.positions + 12)
    assert (store / "pickles" / "original" / "more" / "new.pkl.gz").exists()
    with pytest.raises(StoreError, match="older than the positions"):
        export_pickles(store, SHUFFLED)
    shuffle_store(store, ShuffleOptions(seed=6, buckets=1, threads=1))
    result = export_pickles(store, SHUFFLED)
    assert len(list((store / "pickles" / "shuffled").rglob("*.pkl.gz"))) == result.files == 3


def test_the_shuffled_order_requires_a_shuffle(tmp_path):
    save(tmp_path / "in" / "a.pkl.gz", games(2))
    convert_sources([tmp_path / "in"], tmp_path / "store", ConvertOptions(workers=1))
    with pytest.raises(StoreError, match="hexdata shuffle"):
        export_pickles(tmp_path / "store", SHUFFLED)


@pytest.mark.parametrize("wrong", [{"order": "sorted"}, {"workers": 0}, {"level": 0}])
def test_invalid_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values())))):
        PicklesOptions(**wrong)


def test_the_command_line(mixed_store, copy_store):
    store = copy_store(mixed_store)

    def export(*arguments):
        command = [sys.executable, "-m", "hexdata", "export", str(store), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = export("--format", "pickle", "--order", "original", "--workers", "1", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["order"], facts["files"], facts["positions"]) == ("original", 4, 628)
    wrong = export("--format", "csv")
    assert (wrong.returncode, "csv" in wrong.stderr) == (2, True)
