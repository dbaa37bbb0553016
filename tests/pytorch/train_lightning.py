"""Script that trains with PyTorch Lightning on two processes: ``train_lightning.py STORE FOLDER WAY``.

``test_ranks.py`` runs it, and Lightning runs it again for the second process. Each process writes the epoch
and the position ids of its batches to a file of the folder. The loader is made before the process group.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import distributed
from torch.utils.data import DataLoader

try:
    import torchvision  # noqa: F401 - torchmetrics imports it where it is installed
except (ImportError, RuntimeError):  # not installed, or built for another PyTorch
    for name in ("torchvision", "torchvision.models", "torchvision.transforms"):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])

import pytorch_lightning as lightning

from hexdata import Loader
from hexdata.torch import LoaderDataset, TorchLoader

EPOCHS = 2


class Recorder(lightning.LightningModule):
    """A minimal model that records its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps: list[tuple[int, list[int]]] = []

    def training_step(self, batch, number):
        self.steps.append((self.current_epoch, batch["position_id"].tolist()))
        return self.layer(batch["value"][:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Module(lightning.LightningDataModule):
    """A data module that makes its loader when it is made."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def main() -> None:
    store, folder, way = sys.argv[1:]
    options: dict[str, Any] = {"fields": ("value", "position_id"), "remainder": "short"}
    loader = Loader(store, mode="games", batch_size=64, seed=5, **options)
    batches: Any = Module(TorchLoader(loader, num_workers=2))
    if way == "DataLoader":
        batches = DataLoader(LoaderDataset(loader), batch_size=None, num_workers=2)
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
