"""Measurements of batches that are made on a GPU, printed as lines of JSON.

``python -m tests.benchmarks.device_gpu`` takes about five minutes on a machine with a CUDA device.
``python -m tests.benchmarks.device_gpu --tiny --device cpu`` runs every part in seconds, with sizes that
measure nothing, as a test of this script.

1. Equality: ``DeviceLoader`` against ``Loader``, bit for bit, in games and in exact mode.
2. Positions per second with policies and symmetry, as float16 and bfloat16, at several batch sizes, and the
   largest memory.
3. A residual network: the share of a step that waits for data, with ``DeviceLoader``, with ``TorchLoader``
   and its workers, with gzipped pickles that workers read, and with batches that are on the device already.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hexdata import ConvertOptions, ExportOptions, Loader, ShuffleOptions
from hexdata.convert import convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.export import export_shards
from hexdata.shuffle import shuffle_store
from hexdata.torch import DeviceLoader, TorchLoader, to_device

FIELDS = ("board", "policy", "value")


def make_store(folder: Path, games: int) -> Path:
    """Write a store with shards of a demo."""
    make_legacy(folder / "in", DemoOptions(games))
    store = folder / "store"
    convert_sources([folder / "in"], store, ConvertOptions(val=0, test=0))
    shuffle_store(store, ShuffleOptions(seed=1))
    export_shards(store, ExportOptions())
    return store


def say(part: str, **facts: Any) -> None:
    """Print a measurement."""
    print(json.dumps({"part": part, **facts}), flush=True)


def wait(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(store: Path, device: torch.device, batches: int) -> None:
    """Compare batches of both modes in several options."""
    for mode, options in itertools.product(
        ("games", "exact"),
        ({"planes": 3}, {"symmetry": True}, {"board": "float16", "symmetry": True}, {"board": "packed"}),
    ):
        given: dict[str, Any] = {"mode": mode, "batch_size": 1024, "seed": 5, **options}
        pairs = zip(DeviceLoader(Loader(store, **given), device), Loader(store, **given), strict=False)
        for ours, plain in itertools.islice(pairs, batches):
            for name, array in plain.items():
                assert ours[name].cpu().numpy().tobytes() == array.tobytes(), (given, name)
        say("equal", mode=mode, options=options)


def rates(store: Path, device: torch.device, sizes: tuple[int, ...], seconds: float) -> None:
    """Measure positions per second."""
    for mode, dtype, size in itertools.product(("games", "exact"), (torch.float16, torch.bfloat16), sizes):
        board = "float16" if dtype == torch.float16 else "uint8"
        loader = DeviceLoader(
            Loader(store, mode=mode, batch_size=size, fields=FIELDS, symmetry=True, board=board), device
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        delivered, start = 0, 0.0
        for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
            batch["board"].to(dtype)
            if number == 3:  # after the first batches
                wait(device)
                start = time.perf_counter()
            if number > 3:
                delivered += len(batch["value"])
                if number % 16 == 0:
                    wait(device)
                    if time.perf_counter() - start > seconds:
                        break
        wait(device)
        rate = delivered / (time.perf_counter() - start)
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        say("rate", mode=mode, dtype=str(dtype), batch=size, millions=round(rate / 1e6, 2), bytes=memory)


class Block(nn.Module):
    """A residual block with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)) for _ in range(2)]
        self.layers = nn.Sequential(*layers[0], nn.ReLU(), *layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


def make_net(blocks: int, channels: int) -> nn.Module:
    """Return a network from boards to policies and values."""
    return nn.Sequential(
        nn.Conv2d(2, channels, 3, padding=1),
        *(Block(channels) for _ in range(blocks)),
        nn.Conv2d(channels, 2, 1),
        nn.Flatten(),
        nn.Linear(2 * 169, 170),
    )


def train(source: Iterator[Any], net: nn.Module, device: torch.device, steps: int) -> float:
    """Train on batches of tensors and return the seconds per step."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    start = 0.0
    for step in range(steps + 5):
        batch = to_device(next(source), device)
        if step == 5:
            wait(device)
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            out = net(batch["board"])
            loss = nn.functional.cross_entropy(out[:, :169], batch["policy"])
            loss = loss + nn.functional.binary_cross_entropy_with_logits(out[:, 169], batch["value"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    wait(device)
    return (time.perf_counter() - start) / steps


class Pickles(IterableDataset[dict[str, torch.Tensor]]):
    """Gzipped pickles of examples, which workers share by files and read from the first to the last."""

    def __init__(self, folder: Path, loader: Loader, files: int) -> None:
        folder.mkdir()
        for number, batch in enumerate(itertools.islice(loader, files)):
            rows = zip(*(batch[name] for name in FIELDS), strict=True)
            examples = [dict(zip(FIELDS, row, strict=True)) for row in rows]
            with gzip.open(folder / f"shuffled_{number:04}.pkl.gz", "wb", 6) as file:
                pickle.dump({"examples": examples}, file)
        self.folder = folder

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for path in sorted(self.folder.iterdir())[first::step]:
            with gzip.open(path) as file:
                for example in pickle.load(file)["examples"]:
                    yield {name: torch.as_tensor(value) for name, value in example.items()}


def waits(store: Path, device: torch.device, size: int, steps: int, blocks: int, channels: int) -> None:
    """Compare steps with those on batches that are on the device already."""
    net = make_net(blocks, channels).to(device)

    def loader() -> Loader:
        return Loader(store, mode="games", batch_size=size, fields=FIELDS, symmetry=True)

    ready = list(itertools.islice(DeviceLoader(loader(), device), 4))
    base = train(itertools.cycle(ready), net, device, steps)
    say("step", loader="ready batches", milliseconds=round(1000 * base, 3))
    for name, made in (
        ("DeviceLoader", DeviceLoader(loader(), device)),
        ("TorchLoader, 4 workers", TorchLoader(loader(), num_workers=4)),
        ("TorchLoader, no workers", TorchLoader(loader())),
        (
            "pickles, 4 workers",
            DataLoader(Pickles(store / "pickles", loader(), max(8, steps // 3)), size, num_workers=4),
        ),
    ):
        endless = itertools.chain.from_iterable(itertools.repeat(made))
        seconds = train(endless, net, device, steps)
        waiting = max(0.0, 1 - base / seconds)
        say("step", loader=name, milliseconds=round(1000 * seconds, 3), waiting=round(waiting, 4))


def main(arguments: list[str] | None = None) -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store = make_store(Path(folder), 60 if given.tiny else 200_000)
        say(
            "store", positions=len(Loader(store, batch_size=1)), seconds=round(time.perf_counter() - start, 1)
        )
        compare(store, device, 2 if given.tiny else 50)
        sizes = (64,) if given.tiny else (1_024, 8_192, 65_536)
        rates(store, device, sizes, 0.01 if given.tiny else 5.0)
        if given.tiny:
            waits(store, device, 16, 2, 1, 4)
        else:
            waits(store, device, 1_024, 300, 10, 128)


if __name__ == "__main__":
    main()
