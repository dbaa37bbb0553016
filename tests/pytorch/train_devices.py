"""Script that trains with PyTorch Lightning on two processes: ``train_devices.py STORE FOLDER WAY``.

``test_ranks.py`` runs it, and Lightning runs it again for the second process. Each process writes the
position ids of its batches to a file of the folder. The loaders are made before there is a process group.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import distributed
from torch.utils.data import DataLoader

from hexdata import Loader
from hexdata.torch import LoaderDataset, TorchLoader
from tests.pytorch.train_lightning import Recorder

EPOCHS = 2


def make_batches(store: str, way: str) -> Any:
    loader = Loader(store, mode="games", batch_size=32, seed=5, fields=("value", "position_id"))
    if way == "DataLoader":
        return DataLoader(LoaderDataset(loader), batch_size=None, num_workers=2)
    return TorchLoader(loader, num_workers=2)


class Module(lightning.LightningDataModule):
    """A data module that makes its loader when it is made."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.loader = make_batches(store, "TorchLoader")

    def train_dataloader(self) -> TorchLoader:
        return self.loader


def main() -> None:
    store, folder, way = sys.argv[1:]
    batches = Module(store) if way == "DataModule" else make_batches(store, way)  # a module has a TorchLoader
    assert not distributed.is_initialized()
    model = Recorder()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, batches)
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(model.steps), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
