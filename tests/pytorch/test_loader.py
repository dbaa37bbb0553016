"""Tests of ``hexdata.torch`` against a plain ``Loader``, with real worker processes and ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError, FormatError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader, Mixture
from hexdata.loader.checkpoint import combine_digests
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.pairs import FULL

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import (  # noqa: E402
    LoaderDataset,
    TorchLoader,
    as_tensors,
    expand_policy,
    to_device,
    unpack,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # fork
]

HERE = Path(__file__).parent
BOARD_SIZE = 7
CELLS = BOARD_SIZE * BOARD_SIZE
FIELDS = ("board", "policy", "move", "value", "player_to_move", "policy_mask", "position_id")
TIMEOUT = 600
"""Seconds after which a process is assumed to hang."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def shards(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of 256 with some 2,000 positions. Do not modify them."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("torch") / "store")
    shuffle_store(store, ShuffleOptions(seed=3, threads=1))
    export_shards(store, ExportOptions(shard_size=256, block_size=64, workers=1))
    return store / "shards"


@pytest.fixture
def own_shards(shards: Path, tmp_path: Path) -> Path:
    """Return a copy of the shards that a test may modify."""
    return Path(shutil.copytree(shards, tmp_path / "shards"))


def make_loader(shards: Path, **options: Any) -> Loader:
    return Loader(shards, **{"batch_size": 50, "seed": 5, "fields": FIELDS, **options})


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["position_id"].tolist() for batch in batches]


def epochs_of(shards: Path, epochs: int, **options: Any) -> list[list[list[int]]]:
    """Return the ids of each batch of each epoch, delivered by a plain ``Loader``."""
    loader = make_loader(shards, **options)
    return [ids_of(loader) for _ in range(epochs)]


def data_loader(dataset: LoaderDataset, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


# --- tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", ["zeros", "uniform"])
@pytest.mark.parametrize("board", ["float32", "float16", "uint8"])
def test_an_expanded_batch_equals_the_unpacked_one(shards, board, final):
    options = {"planes": 3, "final_policy": final, "symmetry": True}
    packed = make_loader(shards, board="packed", **options)
    finals = 0
    for batch, whole in zip(packed, make_loader(shards, board=board, **options), strict=True):
        finals += np.count_nonzero(~whole["policy_mask"])
        boards = unpack(batch["board"], player_to_move=batch["player_to_move"], dtype=getattr(torch, board))
        assert boards.numpy().tobytes() == whole["board"].tobytes()
        policy = expand_policy(batch["move"], CELLS, final_policy=final)
        assert policy.numpy().tobytes() == whole["policy"].tobytes()
    assert finals > 20


def test_tensors_share_the_memory_of_the_arrays(shards):
    batch = next(iter(make_loader(shards)))
    for tensors in (as_tensors(batch), to_device(batch, "cpu")):
        assert [*tensors] == [*batch]
        assert all(tensors[name].data_ptr() == array.ctypes.data for name, array in batch.items())


@needs_cuda
def test_pinned_batches_are_expanded_on_the_device(shards):
    options = {"board": "packed", "planes": 3}
    packed = TorchLoader(make_loader(shards, **options), num_workers=2)
    for batch, whole in zip(packed, make_loader(shards, planes=3), strict=True):
        assert all(tensor.is_pinned() for tensor in batch.values())
        batch = to_device(batch, "cuda")
        boards = unpack(batch["board"], player_to_move=batch["player_to_move"])
        assert boards.cpu().numpy().tobytes() == whole["board"].tobytes()
        assert expand_policy(batch["move"], CELLS).cpu().numpy().tobytes() == whole["policy"].tobytes()


# --- workers --------------------------------------------------------------------------------------------


STREAM = {"mode": "stream", "batch_size": 52, "streams": (4, 6), "window": 128}


@pytest.mark.parametrize(
    "options", [{}, {"board": "packed", "fields": FIELDS[:1]}, {"remainder": "pad"}, STREAM]
)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_batches_do_not_depend_on_the_number_of_workers(shards, workers, options):
    alone = make_loader(shards, **options)
    loader = TorchLoader(make_loader(shards, **options), num_workers=workers)
    assert len(loader) == len(alone) > 20
    for epoch in range(2):
        assert loader.epoch == epoch
        for batch, arrays in zip(loader, alone, strict=True):
            assert type(batch) is dict
            assert [*batch] == [*arrays]
            for name, tensor in batch.items():
                array = arrays[name]
                assert tensor.numpy().dtype == array.dtype
                assert np.array_equal(tensor.numpy(), array)
        assert loader.epoch_digest == alone.epoch_digest is not None


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
@pytest.mark.parametrize("options", [{"board": "packed"}, {"remainder": "drop"}])
def test_batches_in_messages_keep_their_order(shards, batch_size, options):
    loader = TorchLoader(make_loader(shards, batch_size=batch_size, **options), num_workers=3)
    assert ids_of(loader) == epochs_of(shards, 1, batch_size=batch_size, **options)[0]


def test_large_batches_use_shared_memory(shards):
    """Batches above 512 KiB are not sent as bytes."""
    loader = make_loader(shards, batch_size=1000, planes=3)
    arrays = next(iter(make_loader(shards, batch_size=1000, planes=3)))
    assert sum(array.nbytes for array in arrays.values()) > 512 << 10
    for batches in (TorchLoader(loader, num_workers=2), data_loader(LoaderDataset(loader), 2)):
        batch = next(iter(batches))
        assert all(np.array_equal(batch[name].numpy(), array) for name, array in arrays.items())
        assert all(tensor.is_shared() for tensor in batch.values())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_each_iteration_of_a_dataset_runs_the_next_epoch(shards, workers, persistent):
    """The dataset of the main process is not iterated."""
    if persistent and not workers:
        pytest.skip("there are no workers to keep")
    dataset = LoaderDataset(make_loader(shards))
    batches = data_loader(dataset, workers, persistent_workers=persistent)
    assert len(batches) == len(dataset)
    epochs = epochs_of(shards, 8)
    assert [ids_of(batches) for _ in range(3)] == epochs[:3]
    dataset.set_epoch(6)
    assert [ids_of(batches) for _ in range(2)] == epochs[6:]
    dataset.set_epoch(0)
    assert ids_of(batches) == epochs[0]


def test_a_dataset_continues_with_another_number_of_workers(shards):
    dataset = LoaderDataset(make_loader(shards))
    assert [ids_of(data_loader(dataset, workers)) for workers in (2, 0, 3, 1)] == epochs_of(shards, 4)


def test_the_loop_after_an_incomplete_one_runs_the_next_epoch(shards):
    """A dataset has no record of the delivered batches."""
    batches = data_loader(LoaderDataset(make_loader(shards)), 2, persistent_workers=True)
    epochs = epochs_of(shards, 2)
    first = ids_of(islice(batches, 3))
    assert first == epochs[0][:3]
    assert ids_of(batches) == epochs[1]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_may_be_spawned(shards, method):
    """The shared memory must then be sent to the workers."""
    epochs = epochs_of(shards, 2)
    options = {"multiprocessing_context": method}
    persistent = method == "spawn" and not FULL  # starts its workers once
    loader = TorchLoader(make_loader(shards), num_workers=2, persistent_workers=persistent, **options)
    assert [ids_of(loader) for _ in range(2)] == epochs
    if method == "forkserver" or FULL:
        dataset = LoaderDataset(make_loader(shards))
        batches = data_loader(dataset, 2, persistent_workers=True, **options)
        assert [ids_of(batches) for _ in range(2)] == epochs


def test_a_dataset_can_be_pickled(shards):
    dataset = LoaderDataset(make_loader(shards))
    first = ids_of(dataset)
    copy = pickle.loads(pickle.dumps(dataset))
    assert [first, ids_of(copy)] == epochs_of(shards, 2)


# --- resuming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("stop", [0, 5, 17])
def test_a_loader_resumes_with_any_number_of_workers(shards, before, after, stop):
    """Batches that workers prepared but did not deliver are delivered after resuming."""
    loader = TorchLoader(make_loader(shards), num_workers=before)
    loader.set_epoch(1)
    got = ids_of(islice(loader, stop))
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["batch"]) == (1, stop)
    resumed = TorchLoader(make_loader(shards), num_workers=after)
    resumed.load_state_dict(state)
    alone = make_loader(shards)
    alone.set_epoch(1)
    assert got + ids_of(resumed) == ids_of(alone)
    assert resumed.epoch_digest == alone.epoch_digest
    assert ids_of(resumed) == ids_of(alone)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_next_loop_continues(shards, persistent):
    loader = TorchLoader(make_loader(shards), num_workers=2, persistent_workers=persistent)
    got = []
    for batch in loader:
        got.append(batch["position_id"].tolist())
        if len(got) == 4:
            break
    got += ids_of(islice(loader, 3))
    assert got + ids_of(loader) == epochs_of(shards, 1)[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_changing_the_epoch_during_an_iteration_is_an_error(shards, workers):
    loader = TorchLoader(make_loader(shards), num_workers=workers)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(5)
    with pytest.raises(ConfigError, match="changed while iterating"):
        next(batches)
    assert loader.epoch == 5


def test_a_state_of_two_ranks_resumes_on_one(shards):
    """Two ranks with two workers, then one rank with three, with the same global batch."""
    alone = make_loader(shards, batch_size=60)
    ranks = [
        TorchLoader(make_loader(shards, batch_size=30), num_workers=2, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    stopped = [ids_of(islice(rank, 6)) for rank in ranks]
    whole = ids_of(alone)
    assert [one + other for one, other in zip(*stopped, strict=True)] == whole[:6]
    for rank in ranks:
        resumed = TorchLoader(make_loader(shards, batch_size=60), num_workers=3)
        resumed.load_state_dict(rank.state_dict())
        assert ids_of(resumed) == whole[6:]
        assert resumed.epoch_digest is None  # the other rank received a part of the epoch
        assert ids_of(resumed) == ids_of(alone)
        assert resumed.epoch_digest == alone.epoch_digest
        alone.set_epoch(1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("stop", [0, 1, 5, None])
def test_torchdata_resumes_a_dataset(shards, workers, stop):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        dataset = LoaderDataset(make_loader(shards))
        return torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    batches = make()
    iterator = iter(batches)
    got = ids_of(islice(iterator, stop))
    state = batches.state_dict()
    del iterator, batches
    resumed = make()
    resumed.load_state_dict(state)
    epochs = epochs_of(shards, 2)
    if stop is None:  # at the end of the epoch the next one begins
        assert [got, ids_of(resumed)] == epochs
    else:
        assert [(got + ids_of(resumed)), ids_of(resumed)] == epochs


def test_a_dataset_with_workers_has_no_state(shards):
    dataset = LoaderDataset(make_loader(shards))
    state = dataset.state_dict()
    for _ in data_loader(dataset, 2):
        pass
    with pytest.raises(ConfigError, match=r"has no record of .* Use hexdata\.torch\.TorchLoader"):
        dataset.state_dict()
    dataset.load_state_dict({**state, "batch": 3, "epoch_digest": None})
    assert dataset.state_dict()["batch"] == 3
    assert ids_of(data_loader(dataset, 2)) == epochs_of(shards, 1)[0][3:]


# --- a DataLoader of one's own --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    "make",
    [
        make_loader,
        lambda shards: Mixture([make_loader(shards)], weights=(1,), batch_size=10),
        lambda shards: TorchLoader(make_loader(shards)),
    ],
    ids=["Loader", "Mixture", "TorchLoader"],
)
def test_a_data_loader_of_a_loader_names_what_to_use(shards, make, batch_size, workers):
    batches = DataLoader(make(shards), batch_size=batch_size, num_workers=workers)
    with pytest.raises(ConfigError, match=r"hexdata\.torch\.TorchLoader"):
        next(iter(batches))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [None, True, False])
def test_without_cuda_nothing_is_pinned(shards, monkeypatch, workers, pin_memory):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loader = TorchLoader(make_loader(shards), num_workers=workers, pin_memory=pin_memory)
    assert ids_of(loader) == epochs_of(shards, 1)[0]


# --- ranks ----------------------------------------------------------------------------------------------


def run_ranks(shards: Path, folder: Path, world_size: int) -> list[dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, str(HERE / "rank.py"), str(shards), str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world_size)], stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3] if FULL else [2])
def test_ranks_of_torch_distributed_divide_every_epoch(shards, tmp_path, world_size):
    """The loaders take their ranks from the process group."""
    ranks = run_ranks(shards, tmp_path / "ranks", world_size)
    alone = Loader(shards, batch_size=13 * world_size, seed=5, fields=("position_id",))
    epochs, digests = [], []
    for _ in range(2):
        epochs.append(ids_of(alone))
        digests.append(alone.epoch_digest)
    assert len(set(chain(*epochs[0]))) == alone.positions
    for form in ("loader 0", "loader 2", "dataset 2"):
        for number, epoch in enumerate(epochs):
            by_rank = [rank[form]["epochs"][number] for rank in ranks]
            assert [[*chain(*parts)] for parts in zip(*by_rank, strict=True)] == epoch
            if form != "dataset 2":
                parts = [rank[form]["digests"][number] for rank in ranks]
                assert combine_digests(parts) == digests[number]
    for rank in ranks:
        assert rank["same number of batches"]
        assert rank["early"] == rank["loader 0"]["epochs"][0]  # made before the process group
        assert rank["begun"].startswith("torch.distributed was initialised after the first iteration")


def test_explicit_ranks_override_those_of_the_loader(shards):
    loader = make_loader(shards, rank=1, world_size=2)
    for torch_form in (TorchLoader, LoaderDataset):
        assert torch_form(loader).loader.options.rank == 1
        options = torch_form(loader, rank=2, world_size=3).loader.options
        assert (options.rank, options.world_size) == (2, 3)
        with pytest.raises(ConfigError, match="must be given together"):
            torch_form(loader, rank=0)
        with pytest.raises(ConfigError, match="rank must be below world_size"):
            torch_form(loader, rank=2, world_size=2)


def test_a_dataset_does_not_modify_its_loader(shards):
    loader = make_loader(shards)
    loader.set_epoch(1, 4)
    dataset = LoaderDataset(loader)
    assert ids_of(dataset) == epochs_of(shards, 2)[1][4:]
    dataset.set_epoch(3)
    assert (loader.epoch, loader.batch) == (1, 4)


# --- failures -------------------------------------------------------------------------------------------


def test_an_error_in_a_worker_is_raised_unchanged(own_shards):
    """After the batches before it, as without workers."""
    path = own_shards / "train-000002.tar"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"NUMPY", b"NUMPI"))
    options = {"mode": "stream", "shuffle": False, "window": 64, "batch_size": 30}
    batches = TorchLoader(make_loader(own_shards, **options), num_workers=2)
    got, errors = [], []
    try:
        for batch in batches:
            got += batch["position_id"].tolist()
    except FormatError as error:
        errors.append(error)
    assert [(error.path, error.code) for error in errors] == [(str(path), "broken-shard")]
    path.write_bytes(data)
    whole = [*chain(*epochs_of(own_shards, 1, **options)[0])]
    assert got == whole[: len(got)]
    assert 512 - 64 - 30 < len(got) <= 512
    assert [*got, *chain(*ids_of(batches))] == whole


def test_an_error_in_your_own_data_loader_names_the_shard(own_shards):
    path = own_shards / "train-000002.tar"
    path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPI"))
    dataset = LoaderDataset(make_loader(own_shards))
    with pytest.raises(
        StoreError, match=r"worker process (?s:.)*train-000002\.tar: .*altered; found SHA-256"
    ):
        ids_of(data_loader(dataset, 2))


def test_a_killed_worker_is_an_error(shards):
    others = set(multiprocessing.active_children())
    batches = iter(TorchLoader(make_loader(shards, batch_size=2), num_workers=2))
    next(batches)
    workers = [child for child in multiprocessing.active_children() if child not in others]
    assert len(workers) == 2

    def kill_and_continue() -> None:
        os.kill(workers[1].pid or 0, signal.SIGKILL)
        ids_of(batches)

    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed by signal|exited unexpectedly)"):
        kill_and_continue()


def living_in(group: int) -> Iterator[int]:
    """Yield the running processes of a process group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            yield int(path.parent.name)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("kill", ["killpg", "kill"] if FULL else ["killpg"])
def test_an_interrupt_ends_the_workers(shards, kill):
    command = [sys.executable, str(HERE / "train.py"), str(shards)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as main:
        try:
            assert main.stdout is not None
            workers = {int(pid) for pid in main.stdout.readline().split()}
            assert workers < set(living_in(main.pid))
            assert len(workers) == 2
            getattr(os, kill)(main.pid, signal.SIGINT)
            _, errors = main.communicate(timeout=TIMEOUT)
            assert "KeyboardInterrupt" in errors
            assert main.returncode == -signal.SIGINT
            assert list(living_in(main.pid)) == []
        finally:
            for pid in living_in(main.pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((form, "SIGKILL") for form in ("dataset fork", "loader forkserver")),
        *((form, "SIGKILL") for form in ("loader fork", "loader spawn") if FULL),
        ("loader fork", "SIGTERM"),
    ],
)
def test_workers_end_with_a_killed_main_process(shards, form, name):
    """Their messages are larger than a pipe, and are not read any more."""
    command = [sys.executable, str(HERE / "train.py"), str(shards), *form.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as main:
        try:
            assert main.stdout is not None
            workers = {int(pid) for pid in main.stdout.readline().split()}
            assert len(workers) == 2
            time.sleep(1)  # for the workers to fill the pipe
            assert workers < set(living_in(main.pid))
            number = signal.Signals[name]
            main.send_signal(number)
            assert main.wait(TIMEOUT) == -number
            deadline = time.monotonic() + 60
            while (left := set(living_in(main.pid))) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left == set()
        finally:
            for pid in living_in(main.pid):
                os.kill(pid, signal.SIGKILL)
