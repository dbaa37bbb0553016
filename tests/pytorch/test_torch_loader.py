"""Tests of ``TorchLoader`` and ``LoaderDataset`` against plain loaders, with real worker processes."""

from __future__ import annotations

import copy
import gc
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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError, FormatError
from hexdata.loader import Loader, Mixture
from tests.kit.loaders import Steps, ids_of
from tests.pairs import FULL

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader, as_tensors  # noqa: E402
from hexdata.torch.shared import MAX_WORKERS, SharedEpochCounter, iteration_id  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
]

FIELDS = ("board", "policy", "move", "value", "policy_mask", "position_id")
IDS = ("position_id",)
STREAM = {"mode": "stream", "batch_size": 52, "streams": (4, 6), "window": 128}
TIMEOUT = 600
"""Seconds after which a process is assumed to hang."""


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the values twice, and the process that computed them."""
    return {**batch, "value": 2 * batch["value"], "process": np.full(len(batch["value"]), os.getpid())}


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("komi")


def make_loader(shards: Path, **options: Any) -> Loader:
    return Loader(shards, **{"batch_size": 100, "seed": 5, "fields": IDS, **options})


def make_mixture(shards: Path, **options: Any) -> Mixture:
    common: dict[str, Any] = {"fields": FIELDS, "symmetry": True}
    loaders = [
        Loader(shards, seed=1, weights="position_id % 3 / 2", **common),
        Loader(shards, split="val", shuffle=True, seed=2, **common),
    ]
    return Mixture(loaders, (3, 1), batch_size=200, seed=4, **options)


def epochs_of(shards: Path, epochs: int, **options: Any) -> list[Steps]:
    loader = make_loader(shards, **options)
    return [ids_of(loader) for _ in range(epochs)]


def data_loader(shards: Path, workers: int, **options: Any) -> Any:
    dataset = LoaderDataset(make_loader(shards))
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


# --- workers --------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "one batch in a message": lambda shards: make_loader(shards, fields=FIELDS, symmetry=True),
    "many batches in a message": lambda shards: make_loader(shards, batch_size=30, remainder="pad"),
    "stream": lambda shards: make_loader(shards, fields=FIELDS, **STREAM),
    "mixture": lambda shards: make_mixture(shards, transform=double),
}
"""Loaders without workers."""


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", PLAIN)
def test_batches_and_states_do_not_depend_on_the_workers(shards: Path, kind: str, workers: int) -> None:
    plain, loader = PLAIN[kind](shards), TorchLoader(PLAIN[kind](shards), num_workers=workers)
    processes = set()
    for epoch in range(2):
        assert (loader.epoch, loader.batch, len(loader)) == (epoch, 0, len(plain))
        for part in (2, None):  # the loop is left after two batches
            for batch, arrays in zip(islice(loader, part), islice(plain, part), strict=True):
                assert type(batch) is dict
                tensors = as_tensors(arrays)
                assert [*batch] == [*tensors]
                for name in set(batch) - {"process"}:
                    assert batch[name].dtype == tensors[name].dtype
                    assert batch[name].numpy().tobytes() == tensors[name].numpy().tobytes()
                processes |= {int(number) for number in batch.get("process", [])}
            assert loader.state_dict() == plain.state_dict()
        if kind != "mixture":
            assert loader.epoch_digest == plain.epoch_digest is not None
    assert loader.epoch_digest is None or kind != "mixture"
    if kind == "mixture":
        assert (processes == {os.getpid()}) if not workers else (len(processes) == workers)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (3, False), (3, True)])
def test_each_iteration_of_a_dataset_runs_the_next_epoch(
    shards: Path, workers: int, persistent: bool
) -> None:
    """The dataset of the main process is not iterated. The condition may change while workers run."""
    batches = data_loader(shards, workers, persistent_workers=persistent)
    dataset = batches.dataset
    assert len(batches) == len(dataset)
    epochs = epochs_of(shards, 8)
    assert [ids_of(batches) for _ in range(2)] == epochs[:2]
    dataset.set_epoch(6)
    assert [ids_of(batches) for _ in range(2)] == epochs[6:]
    for epoch, where in ((0, "position_in_game < 9"), (1, "move % 2 = 1"), (0, None)):
        dataset.set_epoch(epoch, where=where)
        assert [ids_of(batches), ids_of(batches)] == epochs_of(shards, epoch + 2, where=where)[epoch:]


def test_running_workers_and_devices_follow_another_condition(shards: Path) -> None:
    for loader in (TorchLoader(make_loader(shards), num_workers=2), DeviceLoader(make_loader(shards), "cpu")):
        assert ids_of(loader) == epochs_of(shards, 1)[0]
        for epoch, where in ((1, "position_in_game < 9"), (1, None)):
            loader.set_epoch(epoch, where=where)
            expected = epochs_of(shards, 2, where=where)[1]
            assert len(loader) == len(expected)
            assert ids_of(islice(loader, 2)) == expected[:2]
            resumed = TorchLoader(make_loader(shards))
            resumed.load_state_dict(loader.state_dict())
            assert ids_of(loader) == ids_of(resumed) == expected[2:]


def mapped_files(process: int | None) -> set[str]:
    """Return the names of the shared arrays that a process has mapped."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if "/hexdata-arrays-" in line}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("method", ["forkserver", "spawn"] if FULL else ["forkserver"])
def test_workers_that_are_not_forked_map_the_same_file(
    trmph_store: Path, temporary: Path, method: str
) -> None:
    loader = TorchLoader(make_loader(trmph_store), num_workers=2, multiprocessing_context=method)
    batches = iter(loader)
    got = ids_of(islice(batches, 4))
    (file,) = temporary.glob("hexdata-arrays-*")
    mapping = [child for child in multiprocessing.active_children() if mapped_files(child.pid) == {file.name}]
    assert len(mapping) == 2
    assert [[*got, *ids_of(batches)], ids_of(loader)] == epochs_of(trmph_store, 2)
    del batches, loader
    assert not file.exists()
    batches = data_loader(trmph_store, 2, multiprocessing_context=method, persistent_workers=True)
    assert [ids_of(batches) for _ in range(2)] == epochs_of(trmph_store, 2)


# --- resuming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("kept", [False, True])
def test_a_state_at_the_end_of_an_epoch_resumes_with_other_workers(
    shards: Path, before: int, after: int, kept: bool
) -> None:
    """Also if the iterator is kept, as PyTorch Lightning does."""
    loader = TorchLoader(make_loader(shards), num_workers=before)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
        state = loader.state_dict()
    if not kept:
        del batches
    assert (state["epoch"], state["batch"]) == (0, len(loader))
    resumed = TorchLoader(make_loader(shards), num_workers=after)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.epoch == 1
    assert ids_of(resumed) == epochs_of(shards, 2)[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 5, "last", None])
def test_torchdata_resumes_a_dataset(shards: Path, workers: int, stop: Any) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        dataset = LoaderDataset(make_loader(shards))
        return torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    epochs, batches = epochs_of(shards, 2), make()
    iterator = iter(batches)
    got = ids_of(islice(iterator, len(epochs[0]) if stop == "last" else stop))
    state = batches.state_dict()
    del iterator, batches
    resumed = make()
    resumed.load_state_dict(state)
    rest = ids_of(resumed)
    if stop == "last" and workers:  # torchdata first resumes the old epoch, which has no batches left
        assert rest == []
        rest = ids_of(resumed)
    assert [*got, *rest] == (epochs[0] + epochs[1] if stop in ("last", None) else epochs[0])


def test_a_dataset_with_workers_has_no_state(shards: Path) -> None:
    batches = data_loader(shards, 2)
    dataset = batches.dataset
    state = dataset.state_dict()
    list(batches)
    with pytest.raises(ConfigError, match=r"hexdata\.torch\.TorchLoader"):
        dataset.state_dict()
    dataset.load_state_dict({**state, "batch": 3, "epoch_digest": None})
    assert dataset.state_dict()["batch"] == 3
    assert ids_of(batches) == epochs_of(shards, 1)[0][3:]


# --- refusals and displays ------------------------------------------------------------------------------


def test_a_data_loader_of_a_loader_names_what_to_use(shards: Path) -> None:
    for made in (make_loader(shards), make_mixture(shards), TorchLoader(make_loader(shards))):
        with pytest.raises(ConfigError, match=r"hexdata\.torch\.TorchLoader"):
            next(iter(DataLoader(made, batch_size=4)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"hexdata\.torch\.TorchLoader"):
        next(iter(DataLoader(make_loader(shards), batch_size=None, num_workers=1)))  # type: ignore[arg-type]


def test_what_a_mixture_cannot_do_is_refused(shards: Path) -> None:
    mixture: Any = make_mixture(shards)
    for kind in (lambda given: DeviceLoader(given, "cpu"), LoaderDataset):
        with pytest.raises(ConfigError, match="loader cannot be used"):
            kind(mixture)
    with pytest.raises(ConfigError, match="a mixture keeps the conditions of its loaders"):
        TorchLoader(mixture).set_epoch(1, where="move = 1")
    with pytest.raises(ConfigError, match="loader cannot be used"):
        TorchLoader("store")  # type: ignore[arg-type]


# --- the epoch that workers agree on --------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 5).flatmap(lambda workers: st.permutations(range(workers))), min_size=1),
    st.data(),
)
def test_an_incomplete_iteration_takes_one_epoch(orders: list[list[int]], data: st.DataObject) -> None:
    """Any of its workers may have begun it, in any order; the next iteration has another epoch."""
    counter, latest = SharedEpochCounter(), -1
    counter.set(0, 0)
    for number, order in enumerate(orders):
        begun = order[: data.draw(st.integers(0, len(order)))]
        epochs = {counter.begin(worker, iteration_id(number))[0] for worker in begun}
        if begun:
            assert epochs == {latest + 1}
            latest += 1
    with pytest.raises(ConfigError, match="up to 1024"):
        counter.begin(MAX_WORKERS, 0)


# --- failures -------------------------------------------------------------------------------------------


def test_an_error_in_a_worker_is_raised_unchanged(shards: Path, tmp_path: Path) -> None:
    """After the batches before it, as without workers."""
    own = shutil.copytree(shards, tmp_path / "shards")
    path = own / "train-000002.tar"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"NUMPY", b"NUMPI"))
    options = {"mode": "stream", "shuffle": False, "window": 64, "batch_size": 30}
    batches = TorchLoader(make_loader(own, **options), num_workers=2)
    got: Steps = []
    with pytest.raises(FormatError) as caught:
        got.extend(batch["position_id"].tolist() for batch in batches)
    assert (caught.value.path, caught.value.code) == (str(path), "broken-shard")
    assert 1_024 - 128 - 30 < sum(map(len, got)) <= 1_024
    path.write_bytes(data)
    assert [*got, *ids_of(batches)] == epochs_of(own, 1, **options)[0]


def test_an_exception_in_a_transform_names_the_batch(shards: Path) -> None:
    loader = TorchLoader(make_loader(shards, transform=failing), num_workers=1)
    with pytest.raises(ConfigError, match=r"batch 0 of epoch 0.*KeyError: 'komi'"):
        next(iter(loader))


def living_in(group: int) -> Iterator[int]:
    """Yield the running processes of a process group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            yield int(path.parent.name)


def test_a_collected_loader_ends_its_workers_at_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a part of a cycle; PyTorch alone kills workers that do not end in time."""
    killed: list[str] = []
    terminate = multiprocessing.process.BaseProcess.terminate
    monkeypatch.setattr(
        multiprocessing.process.BaseProcess,
        "terminate",
        lambda process: (killed.append(process.name), terminate(process)),
    )
    # After this time, an idle worker looks by itself whether it should end.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 30.0)
    kept: dict[str, Any] = {"loader": TorchLoader(make_loader(shards), num_workers=2)}
    kept["cycle"] = kept
    before = multiprocessing.active_children()
    assert ids_of(kept["loader"])
    workers = [child for child in multiprocessing.active_children() if child not in before]
    # After this time, the main process kills a worker that has not ended.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 5.0)
    del kept
    gc.collect()
    assert [worker.is_alive() for worker in workers] == [False, False]
    assert killed == []


def test_a_copy_starts_its_own_workers(shards: Path) -> None:
    loader, epochs = TorchLoader(make_loader(shards), num_workers=2), epochs_of(shards, 3)
    early = copy.copy(loader)  # the loader within is the same
    assert [ids_of(loader), ids_of(early)] == epochs[:2]
    assert ids_of(pickle.loads(pickle.dumps(loader))) == ids_of(loader) == epochs[2]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("loader fork", "SIGINT"),
        ("loader forkserver", "SIGKILL"),
        *((form, "SIGKILL") for form in ("dataset fork", "loader fork", "loader spawn") if FULL),
    ],
)
def test_workers_end_with_the_main_process(shards: Path, form: str, name: str) -> None:
    """Also if it is killed while their messages, which are larger than a pipe, are not read."""
    command = [sys.executable, str(Path(__file__).with_name("train.py")), str(shards), *form.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as main:
        try:
            assert main.stdout is not None
            workers = {int(pid) for pid in main.stdout.readline().split()}
            assert len(workers) == 2
            time.sleep(0.5)  # for the workers to fill the pipe
            assert workers < set(living_in(main.pid))
            number = signal.Signals[name]
            (os.killpg if name == "SIGINT" else os.kill)(main.pid, number)
            assert main.wait(TIMEOUT) == -number
            deadline = time.monotonic() + TIMEOUT
            while (left := set(living_in(main.pid))) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert left == set()
        finally:
            for pid in living_in(main.pid):
                os.kill(pid, signal.SIGKILL)
