"""Tests of ``hexdata.torch`` with games mode: workers use the table of the main process, not copies."""

from __future__ import annotations

import json
import multiprocessing
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata.loader import Loader
from tests.pairs import FULL

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import LoaderDataset, TorchLoader  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # fork
]

FIELDS = ("board", "policy", "value", "position_id")
NOT_FORKED = "spawn" if FULL else "forkserver"
"""A start method whose workers receive the table by pickle. Each spawned worker imports PyTorch again."""


def make_loader(store: Path, **options: Any) -> Loader:
    return Loader(store, **{"batch_size": 50, "seed": 5, "fields": FIELDS, "symmetry": True, **options})


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["position_id"].tolist() for batch in batches]


def mapped_files(process: int) -> set[str]:
    """Return the names of the shared arrays that a process has mapped."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if "/hexdata-arrays-" in line}


@pytest.mark.parametrize("method", ["fork", "forkserver", *(["spawn"] if FULL else [])])
def test_workers_deliver_the_batches_of_the_loader(trmph_store: Path, temporary: Path, method: str) -> None:
    alone = make_loader(trmph_store)
    assert alone.options.mode == "games"
    loader = TorchLoader(make_loader(trmph_store), num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        for batch, arrays in zip(loader, alone, strict=True):
            for name, array in arrays.items():
                assert batch[name].numpy().tobytes() == array.tobytes()
        assert loader.epoch_digest == alone.epoch_digest is not None
    files = list(temporary.glob("hexdata-arrays-*"))
    assert len(files) == (0 if method == "fork" else 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_workers_that_are_not_forked_map_the_same_file(trmph_store: Path, temporary: Path) -> None:
    loader = TorchLoader(make_loader(trmph_store), num_workers=2, multiprocessing_context=NOT_FORKED)
    batches = iter(loader)
    for _ in islice(batches, 4):
        pass
    (file,) = temporary.glob("hexdata-arrays-*")
    assert loader.loader.games is not None
    assert file.stat().st_size >= sum(array.nbytes for array in loader.loader.games.arrays.values())
    workers = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
    mapping = [worker for worker in workers if mapped_files(worker) == {file.name}]
    assert len(mapping) == 2
    assert len(list(batches)) == len(loader) - 4
    del batches, loader
    assert not file.exists()


@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), (NOT_FORKED, True)])
def test_a_dataset_in_a_data_loader(
    trmph_store: Path, temporary: Path, method: str, persistent: bool
) -> None:
    alone = make_loader(trmph_store)
    epochs = [ids_of(alone) for _ in range(3)]
    batches = DataLoader(
        LoaderDataset(make_loader(trmph_store)),
        batch_size=None,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )
    assert [ids_of(batches) for _ in range(3)] == epochs


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_a_loader_resumes_with_any_number_of_workers(trmph_store: Path, before: int, after: int) -> None:
    alone = make_loader(trmph_store)
    epochs = [ids_of(alone) for _ in range(2)]
    loader = TorchLoader(make_loader(trmph_store), num_workers=before)
    got = ids_of(islice(loader, 7))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = TorchLoader(make_loader(trmph_store), num_workers=after)
    resumed.load_state_dict(state)
    assert got + ids_of(resumed) == epochs[0]
    assert ids_of(resumed) == epochs[1]
    ids_of(loader)
    assert ids_of(loader) == epochs[1]


def test_a_loader_continues_after_its_table_was_shared(trmph_store: Path, temporary: Path) -> None:
    """The workers of one start method follow those of another, within an epoch."""
    expected = ids_of(make_loader(trmph_store))
    loader = make_loader(trmph_store)
    got = ids_of(islice(loader, 3))
    for method in (NOT_FORKED, "fork"):
        workers = TorchLoader(loader, num_workers=2, multiprocessing_context=method)
        part = ids_of(islice(workers, 5))
        got += part
        loader.load_state_dict(workers.state_dict())
    assert got + ids_of(loader) == expected
    assert len(list(temporary.glob("hexdata-arrays-*"))) == 1
