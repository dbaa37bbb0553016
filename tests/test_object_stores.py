"""Commands on a store in an object store print the same results as on a disk, with few requests."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine import LOCAL, Engine
from hexdata.export import ExportOptions, export_shards
from hexdata.pipeline import load_config, run_config
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage import as_path
from hexdata.verify import VerifyOptions, check_round_trip, verify_store
from tests.kit.command_line import hexdata_run
from tests.object_store import ACCESS_KEY, SECRET_KEY


def put(folder, target):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (target / path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())


@pytest.fixture(scope="module")
def both(whole_store, trmph_store, object_store, tmp_path_factory):
    """The address of a store, of its sources and of a shard, on a disk and in a bucket."""
    object_store.fail()
    bucket = as_path(f"s3://test-{os.urandom(6).hex()}")
    bucket.fs.mkdir(bucket.path.strip("/"))
    put(whole_store, bucket / "store")
    put(trmph_store.parent / "games", bucket / "games")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEXDATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield [(whole_store, trmph_store.parent / "games"), (bucket / "store", bucket / "games")]


COMMANDS = {
    "verify": ("verify", "{0}", "--round-trip", "{1}"),
    "sql": (
        "sql",
        "{0}",
        "SELECT split, bucket, count(*), sum(value), max(rank) FROM shuffled GROUP BY ALL ORDER BY ALL",
    ),
    "named query": ("sql", "{0}", "@sources"),
    "position": ("show", "{0}", "17"),
    "game": ("show", "{0}", "--game", "3"),
    "shard": ("show", "{0}/shards/train-000001.tar:17"),
    "pickles, done": ("export", "{0}", "--format", "pickle", "--level", "1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_finds_the_same(both, name):
    disk, bucket = (hexdata_run(*(w.format(*place) for w in COMMANDS[name]), "--json") for place in both)
    assert (disk.status, disk.out, disk.err) == (0, bucket.out, bucket.err)
    assert json.loads(disk.out)


def test_a_store_may_be_a_whole_bucket(bucket, trmph_store):
    """Only the path of a bucket ends with a slash."""
    put(trmph_store, bucket)
    query, places = (
        "SELECT count(*), sum(value) FROM positions",
        (trmph_store, bucket, str(bucket).rstrip("/")),
    )
    found = [hexdata_run("sql", place, query) for place in places]
    assert found[0].status == 0
    assert {each.out for each in found} == {found[0].out}
    assert hexdata_run("verify", bucket, "--json").facts["ok"]
    wrong = [hexdata_run("sql", place, "FROM read_csv('a')").err for place in places]
    assert wrong[0] == wrong[1]
    refused = hexdata_run("sql", bucket, query, "--parquet", bucket / "a.parquet")
    assert "the output file must not be in the store" in refused.err


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "positions/part-000001.parquet": lambda path: path.unlink(),
    "games/part-000000.parquet": _cut,
    "positions/part-000000.parquet": _alter,
    "foreign": lambda path: path.write_bytes(b"1"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_names_what_is_damaged(bucket, trmph_store, copy_store, name):
    local, told = copy_store(trmph_store), []
    put(local, bucket / "store")
    for store in (local, bucket / "store"):
        DAMAGES[name](store / name.replace("foreign", "games/foreign"))
        ran = hexdata_run("verify", store, "--json")
        assert ran.status == 1
        told.append(json.loads(ran.out.replace(str(store), "STORE")))
    assert told[0] == told[1]
    (check,) = [check for check in told[0]["checks"] if not check["ok"]]
    assert name in check["detail"]


def test_a_config_runs_from_address_to_address(bucket, demo_trmph, tmp_path):
    demo_trmph(tmp_path / "games", games=12, files=2)
    put(tmp_path / "games", bucket / "games")
    manifests = []
    for place in (tmp_path, bucket):
        root, config = str(place).rstrip("/"), tmp_path / "config.toml"
        config.write_text(
            f'store = "{root}/store/"\n[convert]\ninputs = ["{root}/games"]\nworkers = 1\n'
            "[shuffle]\nbuckets = 2\nthreads = 1\n[export]\nworkers = 1\nshard_size = 256\nblock_size = 64\n"
            f'[verify]\nthreads = 1\nround_trip = ["{root}/games"]\n'
        )
        result = run_config(load_config(config))
        assert [stage.stage for stage in result.stages] == ["convert", "shuffle", "export", "verify"]
        assert {s.path for s in result.stages[:2]} == {f"{root}/store/positions", f"{root}/store/shuffled"}
        sizes = {s.stage: s.bytes for s in result.stages}
        manifests.append(((place / "store" / "manifest.json").read_bytes(), sizes))
    assert manifests[0] == manifests[1]
    for key in bucket.fs.find(bucket.path.strip("/")):
        content = bucket.fs.cat_file(key)
        assert not any(secret.encode() in content for secret in (ACCESS_KEY, SECRET_KEY)), key


class SharedWork(Engine):
    """The local engine as one that runs tasks on several machines."""

    remote, cores = True, 1


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        (LOCAL, {"convert": 48, "shuffle": 43, "export": 46, "verify": 142}),
        (SharedWork(), {"convert": 139, "shuffle": 59, "export": 56}),  # verify needs no engine
    ],
    ids=["local", "shared"],
)
def test_the_number_of_requests_of_each_stage(bucket, demo_trmph, tmp_path, object_store, engine, most):
    """Without those for the lock. `docs/object-stores.md` contains them."""
    demo_trmph(tmp_path / "games", games=60, files=2)
    put(tmp_path / "games", bucket / "games")
    store, games = bucket / "store", bucket / "games"
    object_store.requests()
    found = {}
    for stage, run in {
        "convert": lambda: convert_sources(games, store, ConvertOptions(workers=1), engine=engine),
        "shuffle": lambda: shuffle_store(store, ShuffleOptions(seed=5, buckets=3, threads=1), engine=engine),
        "export": lambda: export_shards(
            store, ExportOptions(shard_size=512, block_size=128, workers=1), engine=engine
        ),
        "verify": lambda: (verify_store(store, VerifyOptions(threads=1)), check_round_trip(store, games)),
    }.items():
        if stage not in most:
            continue
        run()
        requests = [one for one in object_store.requests() if not one[1].endswith("/.lock")]
        found[stage] = [one for one in requests if one[1].startswith(f"/{bucket.path.strip('/')}")]
    counts = {stage: len(requests) for stage, requests in found.items()}
    assert all(counts[stage] <= most[stage] for stage in counts), counts
    tables = Counter(path for method, path in found["shuffle"] if method == "HEAD" and "/selection/" in path)
    assert max(tables.values(), default=0) <= 3  # one upload and two sessions
