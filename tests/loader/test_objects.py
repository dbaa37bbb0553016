"""Tests of loaders that read from an S3 server, which can be told to fail."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.cli import main
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError, ConfigError, HexdataError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader, Mixture, PositionDataset
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore
    from tests.shard_folder import MakeShards, ShardFolder

STREAM: dict[str, Any] = {"batch_size": 12, "streams": (2, 2), "window": 24}
TIMEOUT = 60.0
"""Seconds after which a process is assumed to hang."""

Upload = Callable[[Path], str]


@pytest.fixture
def upload(bucket: UPath) -> Upload:
    """Return a function that uploads a folder of shards and returns the address of the store."""

    def put(folder: Path) -> str:
        for path in folder.iterdir():
            (bucket / "store" / "shards" / path.name).write_bytes(path.read_bytes())
        return f"{str(bucket).rstrip('/')}/store"

    return put


def assert_same(ours: Any, theirs: Any) -> None:
    """Check that batches are equal, byte by byte."""
    for batch, other in zip(ours, theirs, strict=True):
        assert batch.keys() == other.keys()
        for name, array in batch.items():
            assert array.tobytes() == other[name].tobytes(), name


def shard_reads(store: ObjectStore) -> Counter[str]:
    """Return the number of reads of each shard since the last call."""
    return Counter(
        path.rpartition("/")[2]
        for method, path in store.requests()
        if method == "GET" and path.endswith(".tar")
    )


def test_credentials_appear_nowhere(upload: Upload, shards: ShardFolder) -> None:
    loader = Loader(upload(shards.path), **STREAM)
    next(iter(loader))
    texts = [pickle.dumps(loader), repr(loader.__dict__).encode(), json.dumps(loader.state_dict()).encode()]
    with pytest.raises(HexdataError) as caught:
        Loader("s3://no-such-bucket/store")
    texts += [str(caught.value).encode(), repr(caught.value).encode(), pickle.dumps(caught.value)]
    for text in texts:
        assert ACCESS_KEY.encode() not in text
        assert SECRET_KEY.encode() not in text


# --- stream mode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"cache": None}, {"prefetch": 0}, {"prefetch": 3}, {}, {"cache_size": 30_000}],
    ids=["no cache", "no prefetch", "prefetch 3", "defaults", "small cache"],
)
def test_batches_equal_those_of_local_shards(
    upload: Upload, shards: ShardFolder, options: dict[str, Any]
) -> None:
    """For two epochs, in stored order, and for two ranks with two workers each."""
    address = upload(shards.path)
    ours, theirs = Loader(address, **STREAM, **options), Loader(shards.path, mode="stream", **STREAM)
    for _ in range(2):
        assert_same(ours, theirs)
    assert ours.epoch_digest == theirs.epoch_digest
    assert_same(
        Loader(address, split="val", **STREAM, **options),
        Loader(shards.path, split="val", mode="stream", **STREAM),
    )
    for rank, worker in itertools.product(range(2), range(2)):
        ranked = {**STREAM, "rank": rank, "world_size": 2}
        ours, theirs = Loader(address, **ranked, **options), Loader(shards.path, mode="stream", **ranked)
        assert_same(ours.batches(worker, 2), theirs.batches(worker, 2))


def test_states_of_local_and_remote_loaders_are_interchangeable(upload: Upload, shards: ShardFolder) -> None:
    locations = [upload(shards.path), str(shards.path)]
    whole = list(Loader(shards.path, mode="stream", **STREAM))
    for step, (one, other) in itertools.product(range(0, len(whole), 5), (locations, locations[::-1])):
        loader = Loader(one, mode="stream", **STREAM)
        for _ in itertools.islice(loader, step):
            pass
        resumed = Loader(other, mode="stream", **STREAM)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert_same(resumed, whole[step:])


def test_each_shard_is_read_once(upload: Upload, shards: ShardFolder, object_store: ObjectStore) -> None:
    address = upload(shards.path)
    names = {entry.name for entry in shards.shards["train"]}
    loader = Loader(address, **STREAM)
    object_store.requests()
    list(loader)
    assert shard_reads(object_store) == dict.fromkeys(names, 1)
    list(loader)
    list(Loader(f"{address}/shards", mode="exact"))  # from the same cache
    assert shard_reads(object_store) == {}


def test_resuming_without_a_cache_reads_only_the_rest(
    make_shards: MakeShards, upload: Upload, object_store: ObjectStore
) -> None:
    folder = make_shards(train=64)  # four shards of two blocks of 8
    loader = Loader(upload(folder.path), shuffle=False, batch_size=8, window=8, cache=None)
    loader.set_epoch(0, 5)
    object_store.requests()
    assert len(list(loader)) == 3
    assert shard_reads(object_store) == {"train-000002.tar": 1, "train-000003.tar": 2}


def test_an_epoch_survives_server_errors(
    upload: Upload, shards: ShardFolder, object_store: ObjectStore
) -> None:
    faults = [
        Fault("GET", "tar", cut=3000, count=2),
        Fault("HEAD", "tar", status=500, count=2),
        Fault("GET", "manifest", cut=100),
        Fault("GET", "tar", delay=0.1),
    ]
    address = upload(shards.path)
    for options in ({}, {"cache": None}):
        object_store.fail(*faults)
        assert_same(Loader(address, **STREAM, **options), Loader(shards.path, mode="stream", **STREAM))


def count_without_failing(address: str, **options: Any) -> tuple[int, dict[str, int]]:
    """Return the number of positions delivered in an epoch, and the positions skipped by shard."""
    loader = Loader(address, on_error="skip", **options)
    return sum(len(batch["value"]) for batch in loader), loader.skipped


@pytest.mark.parametrize("options", [{}, {"cache": None}, {"mode": "exact"}], ids=["cache", "none", "exact"])
def test_a_damaged_shard_is_an_error_or_skipped(
    make_shards: MakeShards, upload: Upload, bucket: UPath, options: dict[str, Any]
) -> None:
    folder = make_shards(train=64)
    address = upload(folder.path)
    name = folder.shards["train"][1].name
    shard = bucket / "store" / "shards" / name
    chosen = {"batch_size": 8, "streams": (2, 2), **options}
    data = shard.read_bytes()
    for change, reason in ((data[:-512], "truncated or altered"), (None, "missing")):
        if change is None:
            shard.unlink()
        else:
            shard.write_bytes(change)
        with pytest.raises(StoreError, match=rf"s3://.*{name}: the shard is {reason}"):
            list(Loader(address, **chosen))
        with pytest.warns(UserWarning, match=rf"skipped a shard: .*{name}"):
            assert count_without_failing(address, **chosen) == (48, {name: 16})


def test_shards_with_other_bytes_are_refused(make_shards: MakeShards, upload: Upload, bucket: UPath) -> None:
    """Digests are checked when a shard is fetched, and again with ``check="digests"``."""
    folder = make_shards(train=64)
    address = upload(folder.path)
    name = folder.shards["train"][1].name
    shard = bucket / "store" / "shards" / name
    data = shard.read_bytes()
    shard.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    for mode in ("stream", "exact"):
        with pytest.raises(StoreError, match=rf"{name}: the shard is truncated or altered; found SHA-256"):
            list(Loader(address, mode=mode))
    shard.write_bytes(data)
    cache = Path(os.environ["HEXDATA_CACHE"]) / "shards"
    for mode in ("stream", "exact"):
        ours, theirs = Loader(address, mode=mode), Loader(folder.path, mode=mode)
        assert_same(ours, theirs)
        copy = cache / f"{folder.shards['train'][1].sha256}.tar"
        copy.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
        assert_same(Loader(address, mode=mode, check="digests"), Loader(folder.path, mode=mode))
        assert copy.read_bytes() == data


def prefetch_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hexdata-prefetch")]


def test_threads_end_with_their_iteration(upload: Upload, shards: ShardFolder) -> None:
    """The iteration is closed, left, completed or ends with an error."""
    loader = Loader(upload(shards.path), **STREAM)
    batches = iter(loader)
    next(batches)
    assert prefetch_threads()
    batches.close()  # type: ignore[attr-defined]
    assert prefetch_threads() == []
    for _ in itertools.islice(loader, 2):
        assert prefetch_threads()
    assert prefetch_threads() == []
    list(loader)
    assert prefetch_threads() == []
    batches = iter(loader)
    next(batches)
    loader.set_epoch(5)
    with pytest.raises(ConfigError, match="changed while iterating"):
        next(batches)
    assert prefetch_threads() == []


ENDLESS = """
import sys
from hexdata.loader import Loader
loader = Loader(sys.argv[1], batch_size=12, streams=(2, 2), window=24)
while True:
    for batch in loader:
        print("batch", flush=True)
"""


def interrupt(process: subprocess.Popen[str]) -> str:
    """Interrupt a process until it ends, and return its errors. Python ignores interrupts in destructors."""
    for _ in range(int(TIMEOUT // 10)):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    raise AssertionError("the process did not end")


def test_an_interrupt_ends_a_loop(upload: Upload, shards: ShardFolder) -> None:
    command = [sys.executable, "-c", ENDLESS, upload(shards.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "batch\n"
            errors = interrupt(process)
        finally:
            process.kill()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors


# --- exact mode -----------------------------------------------------------------------------------------


class RecordingProgress:
    """A progress that records its calls."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None, str]] = []
        self.done = 0

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        self.stages.append((stage, total, unit))

    def advance(self, amount: int) -> None:
        self.done += amount

    def note(self, message: str) -> None:
        raise AssertionError(message)


def test_exact_mode_maps_copies(upload: Upload, make_shards: MakeShards, object_store: ObjectStore) -> None:
    folder = make_shards(train=134, val=20, dense=True)
    address, progress = upload(folder.path), RecordingProgress()
    object_store.requests()
    loader = Loader(address, mode="exact", batch_size=12, progress=progress)
    assert shard_reads(object_store) == {entry.name: 1 for entry in folder.shards["train"]}
    size = sum(entry.bytes for entry in folder.shards["train"])
    assert (progress.stages, progress.done) == ([("fetch", size, "bytes")], size)
    for _ in range(2):
        assert_same(loader, Loader(folder.path, batch_size=12)) if not loader.epoch else list(loader)
    chosen: dict[str, Any] = {"batch_size": 12, "where": "position_in_game < 5", "newest": 6}
    assert_same(Loader(address, mode="exact", **chosen), Loader(folder.path, **chosen))
    assert shard_reads(object_store) == {}


def test_a_cache_that_is_too_small_is_refused_before_downloads(
    upload: Upload, shards: ShardFolder, object_store: ObjectStore
) -> None:
    address = upload(shards.path)
    sizes = [entry.bytes for entry in shards.shards["train"]]
    object_store.requests()
    with pytest.raises(BudgetError, match=rf"than the shards of the split; found .*least {sum(sizes):,}\."):
        Loader(address, mode="exact", cache_size=sum(sizes) - 1)
    with pytest.raises(
        BudgetError, match=rf"smaller than a shard; .*at least {max(sizes):,}\. Raise cache_s"
    ):
        Loader(address, cache_size=max(sizes) - 1)
    assert shard_reads(object_store) == {}
    assert Loader(address, mode="exact", cache_size=sum(sizes)).positions == 134
    assert Loader(address, mode="exact", cache_size="1GB").positions == 134


def test_exact_mode_requires_a_cache(upload: Upload, shards: ShardFolder) -> None:
    address = upload(shards.path)
    for cache in (None, False):
        with pytest.raises(ConfigError, match=r"maps shards into memory; .*Give a folder as cache"):
            Loader(address, mode="exact", cache=cache)
    with pytest.raises(ConfigError, match="shards in a local folder need no cache"):
        Loader(shards.path, cache="somewhere")
    piped = f"pipe:cat {shards.path}/{{name}}"
    with pytest.raises(ConfigError, match="maps shards into memory"):
        Loader(piped, mode="exact")


def test_shards_from_a_command_can_be_cached(shards: ShardFolder, tmp_path: Path) -> None:
    piped = f"pipe:cat {shards.path}/{{name}}"
    for mode in ("stream", "exact"):
        ours = Loader(piped, mode=mode, cache=tmp_path / "copies", **STREAM)
        assert_same(ours, Loader(shards.path, mode=mode, **STREAM))
    assert len(list((tmp_path / "copies").glob("*.tar"))) == len(shards.shards["train"])


RANK = """
import sys
from hexdata.loader import Loader
rank = int(sys.argv[2])
loader = Loader(sys.argv[1], mode="exact", batch_size=6, rank=rank, world_size=2, fields=("position_id",))
print(" ".join(str(i) for batch in loader for i in batch["position_id"]), flush=True)
"""


def test_ranks_on_one_machine_fetch_each_shard_once(
    upload: Upload, shards: ShardFolder, object_store: ObjectStore
) -> None:
    address = upload(shards.path)
    object_store.requests()
    command = [sys.executable, "-c", RANK, address]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        found = [process.communicate(timeout=TIMEOUT)[0].split() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert shard_reads(object_store) == {entry.name: 1 for entry in shards.shards["train"]}
    for rank, ids in enumerate(found):
        loader = Loader(shards.path, batch_size=6, rank=rank, world_size=2, fields=("position_id",))
        assert [int(i) for i in ids] == [i for batch in loader for i in batch["position_id"].tolist()]


def test_a_pickled_loader_opens_the_cached_copies(
    upload: Upload, shards: ShardFolder, object_store: ObjectStore
) -> None:
    """Missing copies are fetched again."""
    loader = Loader(upload(shards.path), mode="exact", batch_size=12)
    text = pickle.dumps(loader)
    object_store.requests()
    assert_same(pickle.loads(text), Loader(shards.path, batch_size=12))
    assert shard_reads(object_store) == {}
    missing = shards.shards["train"][3]
    (Path(os.environ["HEXDATA_CACHE"]) / "shards" / f"{missing.sha256}.tar").unlink()
    assert_same(pickle.loads(text), Loader(shards.path, batch_size=12))
    assert shard_reads(object_store) == {missing.name: 1}


# --- other loaders and the command line -----------------------------------------------------------------


def test_every_kind_of_loader_accepts_an_address(upload: Upload, shards: ShardFolder) -> None:
    address = upload(shards.path)
    ours, theirs = PositionDataset(address, "val"), PositionDataset(shards.path, "val")
    assert_same([ours.batch(range(20))], [theirs.batch(range(20))])
    mixed = [
        Mixture(
            [Loader(location, mode="exact"), Loader(location, split="val", mode="exact")],
            [3, 1],
            batch_size=8,
        )
        for location in (address, str(shards.path))
    ]
    assert_same(*mixed)
    for mode in ("stream", "exact"):
        progress = RecordingProgress()
        options = LoadOptions(batch_size=16, mode=mode, prefetch=1)  # type: ignore[arg-type]
        result = run_loader_trial(address, options, progress)
        assert result.epochs[0].digest == run_loader_trial(str(shards.path), options).epochs[0].digest
        assert [stage for stage, _, _ in progress.stages][-1] == "epoch 0"


@pytest.fixture
def store(tmp_path: Path, demo_trmph: Any) -> Path:
    """Return an exported store of 30 games."""
    demo_trmph(tmp_path / "games", games=30, files=1)
    convert_sources([tmp_path / "games"], tmp_path / "whole", ConvertOptions(workers=1))
    shuffle_store(tmp_path / "whole", ShuffleOptions(threads=1))
    export_shards(tmp_path / "whole", ExportOptions(workers=1, shard_size=512, block_size=64))
    return tmp_path / "whole"


def test_a_remote_store_is_opened_like_a_local_one(store: Path, bucket: UPath) -> None:
    """A store without shards is read as games, and one with an outdated export gives a warning."""
    address = f"{str(bucket).rstrip('/')}/a/whole"
    manifest = bucket / "a" / "whole" / "manifest.json"
    content = json.loads((store / "manifest.json").read_text())
    del content["digest"]  # manifests of earlier releases have no digest
    lineage = content["stages"].pop("export")
    manifest.write_text(json.dumps(content))
    with pytest.raises(StoreError, match=r"a/whole: this store has no export stage yet"):
        Loader(address, mode="stream")
    for path in sorted(store.glob("*/part-*.parquet")):
        (bucket / "a" / "whole" / path.relative_to(store).as_posix()).write_bytes(path.read_bytes())
    remote = Loader(address)
    assert remote.options.mode == "games"
    assert_same(remote, Loader(store, mode="games"))
    for path in (store / "shards").iterdir():
        (bucket / "a" / "whole" / "shards" / path.name).write_bytes(path.read_bytes())
    manifest.write_bytes((store / "manifest.json").read_bytes())
    assert_same(Loader(address, mode="exact"), Loader(store))
    content["stages"]["export"] = {**lineage, "of": "0" * 64}
    manifest.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="the export stage is older"):
        Loader(address)


def test_torch_workers_share_the_cache(
    upload: Upload, shards: ShardFolder, object_store: ObjectStore
) -> None:
    """With spawn, since forked workers would inherit the connections of threads."""
    pytest.importorskip("torch")
    from hexdata.torch import TorchLoader

    address = upload(shards.path)
    object_store.requests()
    ours = TorchLoader(Loader(address, **STREAM), num_workers=2, multiprocessing_context="spawn")
    for batch, other in zip(ours, Loader(shards.path, mode="stream", **STREAM), strict=True):
        assert all(np.array_equal(batch[name].numpy(), other[name]) for name in other)
    assert max(shard_reads(object_store).values()) == 1


def test_the_command_uses_a_cache(
    upload: Upload,
    shards: ShardFolder,
    object_store: ObjectStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, copies = upload(shards.path), tmp_path / "copies"

    def run(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["hexdata", "load", address, *map(str, arguments)])
        with contextlib.suppress(SystemExit):
            main()
        captured = capsys.readouterr()
        return captured.out + captured.err

    object_store.requests()
    output = run("--mode", "exact", "--cache", copies, "--cache-size", "1MB", "--json")
    assert json.loads(output)["positions"] == 134
    assert len(list(copies.glob("*.tar"))) == len(shard_reads(object_store)) == 9
    assert (
        json.loads(run("--cache", copies, "--prefetch", 2, "--batch-size", 64, "--json"))["mode"] == "stream"
    )
    assert shard_reads(object_store) == {}
    assert json.loads(run("--no-cache", "--batch-size", 64, "--json"))["positions"] == 134
    assert len(shard_reads(object_store)) == 9
    assert not Path(os.environ["HEXDATA_CACHE"], "shards").exists()
    assert "cannot be used together" in run("--no-cache", "--cache", copies)
    assert "the shard cache is smaller than a shard" in run("--cache-size", "1kB")
