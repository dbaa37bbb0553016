"""Script that runs one rank, as torchrun would, and writes the batches that it received to a file.

``test_loader.py`` runs it as ``rank.py SHARDS FOLDER RANK WORLD_SIZE``.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.torch import LoaderDataset, TorchLoader

WORKERS = (0, 2)
EPOCHS = 2
SECONDS = 300


def make_loader(shards: str) -> Loader:
    return Loader(shards, batch_size=13, seed=5, fields=("position_id",))


def train(shards: str) -> dict[str, Any]:
    """Return the ids of each batch and the digests of each epoch, by kind of loader and number of workers."""
    runs: dict[str, Any] = {}
    for workers in WORKERS:
        loader = TorchLoader(make_loader(shards), num_workers=workers)
        epochs, digests = [], []
        for _ in range(EPOCHS):
            epochs.append([batch["position_id"].tolist() for batch in loader])
            digests.append(loader.epoch_digest)
        runs[f"loader {workers}"] = {"epochs": epochs, "digests": digests}
    dataset = LoaderDataset(make_loader(shards))
    batches = DataLoader(dataset, batch_size=None, num_workers=2)
    runs["dataset 2"] = {"epochs": [[b["position_id"].tolist() for b in batches] for _ in range(EPOCHS)]}
    return runs


def main() -> None:
    shards, folder, rank, world_size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    early, begun = TorchLoader(make_loader(shards), num_workers=2), TorchLoader(make_loader(shards))
    next(iter(begun))
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    runs = train(shards)
    count = torch.tensor([len(epoch) for epoch in runs["loader 2"]["epochs"]])
    most = count.clone()
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    runs["same number of batches"] = torch.equal(count, most)
    runs["early"] = [batch["position_id"].tolist() for batch in early]
    try:
        next(iter(begun))
    except ConfigError as error:
        runs["begun"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(runs))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
