"""PyTorch's side of the loader: what workers cost, and packed against unpacked transfer to a device.

Batches of 1,024 with float32 boards (3, 13, 13), dense policies and values, as a training step wants them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hexdata.loader import Loader

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import (  # noqa: E402
    DeviceLoader,
    LoaderDataset,
    TorchLoader,
    expand_policy,
    to_device,
    unpack,
)

HERE = Path(__file__).parent
POSITIONS = 1_000_000
BATCH = 1_024
N = 13
CELLS = N * N
WORKERS = 2
ROUNDS = 5
CHANNELS = 64

Batches = Callable[[], Iterator[dict[str, Any]]]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of ``POSITIONS`` random positions."""
    path = tmp_path_factory.mktemp("positions")
    subprocess.run([sys.executable, str(HERE / "positions.py"), str(path), str(POSITIONS)], check=True)
    return path


def packed_loader(folder: Path) -> Loader:
    fields = ("board", "move", "value")
    return Loader(folder, batch_size=BATCH, planes=3, board="packed", fields=fields)


def whole_loader(folder: Path) -> Loader:
    return Loader(folder, batch_size=BATCH, planes=3)


def expand(batch: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Make of a packed batch what an unpacked one holds, on a device."""
    batch = to_device(batch, device)
    board = unpack(batch["board"], player_to_move=batch["player_to_move"])
    return {"board": board, "policy": expand_policy(batch["move"], CELLS), "value": batch["value"]}


SETTINGS: dict[str, tuple[float, Callable[[Path], Any]]] = {
    "one process, packed, unpacked by PyTorch": (0.5, lambda folder: TorchLoader(packed_loader(folder))),
    "packed": (0.4, lambda folder: TorchLoader(packed_loader(folder), num_workers=WORKERS)),
    "unpacked": (0.05, lambda folder: TorchLoader(whole_loader(folder), num_workers=WORKERS)),
    "packed, DataLoader": (
        0.2,
        lambda folder: DataLoader(
            LoaderDataset(packed_loader(folder)),
            batch_size=None,
            num_workers=WORKERS,
            persistent_workers=True,
        ),
    ),
}
"""Lowest rate of each setting relative to the loader alone. All processes share two cores."""


def count(batches: Any) -> None:
    rows = 0
    for batch in batches:
        whole = expand(batch) if "move" in batch else batch
        rows += len(whole["board"])
    assert rows == POSITIONS


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_against_the_loader_alone(folder, versus, name):
    floor, make = SETTINGS[name]
    ours, alone = make(folder), TorchLoader(whole_loader(folder))
    count(ours)  # starts the workers and fills the page cache
    assert versus(partial(count, ours), partial(count, alone), POSITIONS, ROUNDS) > floor


GAMES: dict[str, tuple[float, dict[str, Any]]] = {
    "float32": (0.05, {"planes": 3}),
    "float32, symmetries": (0.05, {"planes": 3, "symmetry": True}),
    "uint8": (0.05, {"planes": 3, "board": "uint8"}),
    "fill rows": (0.05, {"board": "fill", "fields": ("board", "value")}),
}
"""Options of a loader in games mode, and the lowest rate of a ``DeviceLoader`` relative to that loader."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Set the number of threads of PyTorch to one, as NumPy has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", GAMES)
def test_a_device_loader_on_the_cpu_against_the_loader_alone(store, versus, name):
    floor, options = GAMES[name]
    plain = Loader(store, mode="games", batch_size=BATCH, **options)
    ours = DeviceLoader(Loader(store, mode="games", batch_size=BATCH, **options), "cpu")

    def run(batches: Any) -> None:
        for _ in batches:
            pass

    run(plain)
    run(ours)
    assert versus(partial(run, ours), partial(run, plain), plain.positions, ROUNDS) > floor


@needs_cuda
@pytest.mark.parametrize("board", ["float16", "float32", "fill"])
def test_a_device_loader_against_packed_transfer(store, versus, board):
    options = {"mode": "games", "batch_size": BATCH}
    ours = DeviceLoader(Loader(store, board=board, **options), "cuda")
    packed = Loader(store, board="packed", fields=("board", "move", "value"), **options)
    rival = TorchLoader(packed, num_workers=WORKERS)

    def run_ours() -> None:
        for _ in ours:
            pass
        torch.cuda.synchronize()

    def run_rival() -> None:
        for batch in rival:
            arrived = to_device(batch, "cuda")
            unpack(arrived["board"])
            expand_policy(arrived["move"], CELLS)
        torch.cuda.synchronize()

    run_ours()
    run_rival()
    assert versus(run_ours, run_rival, packed.positions, ROUNDS) > 1


class Trainer:
    """A small residual network, trained on the device."""

    def __init__(self) -> None:
        convolution = partial(torch.nn.Conv2d, kernel_size=3, padding=1)
        layers = [convolution(3, CHANNELS), torch.nn.ReLU(), convolution(CHANNELS, CHANNELS), torch.nn.ReLU()]
        self._body = torch.nn.Sequential(*layers, torch.nn.Flatten()).cuda()
        self._head = torch.nn.Linear(CHANNELS * CELLS, CELLS + 1).cuda()
        parameters = [*self._body.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=1e-4)

    def step(self, batch: dict[str, Any]) -> None:
        answer = self._head(self._body(batch["board"]))
        loss = torch.nn.functional.cross_entropy(answer[:, :CELLS], batch["policy"])
        loss = loss + torch.nn.functional.mse_loss(answer[:, CELLS], batch["value"])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


@needs_cuda
@pytest.mark.parametrize("train", [False, True], ids=["alone", "beside training"])
@pytest.mark.parametrize("workers", [0, WORKERS])
def test_packed_against_unpacked_transfer(folder, versus, train, workers):
    trainer = Trainer()
    packed = TorchLoader(packed_loader(folder), num_workers=workers)
    whole = TorchLoader(whole_loader(folder), num_workers=workers)

    def run(batches: TorchLoader, on_device: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        for batch in batches:
            arrived = on_device(batch)
            if train:
                trainer.step(arrived)
        torch.cuda.synchronize()

    ours = partial(run, packed, partial(expand, device="cuda"))
    rival = partial(run, whole, partial(to_device, device="cuda"))
    ours()
    rival()
    assert versus(ours, rival, POSITIONS, ROUNDS) > 1
