"""Script that trains with PyTorch Lightning: ``train_lightning.py SHARDS EPOCHS [WORKERS,PERSISTENT]...``.

``test_epochs.py`` runs it. For each way to load, it prints the epoch and the position ids of each step as one
line of JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import torch

try:
    import torchvision  # noqa: F401 - torchmetrics imports it where it is installed
except (ImportError, RuntimeError):  # not installed, or built for another PyTorch
    for name in ("torchvision", "torchvision.models", "torchvision.transforms"):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])

import pytorch_lightning as lightning

from hexdata.loader import Loader
from hexdata.torch import TorchLoader


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


def train(shards: str, epochs: int, workers: int, persistent: bool) -> None:
    plain = Loader(shards, batch_size=50, seed=5, fields=("value", "position_id"))
    loader = TorchLoader(plain, num_workers=workers, persistent_workers=persistent)
    model = Recorder()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    print(json.dumps(model.steps))


def main() -> None:
    for way in sys.argv[3:]:
        workers, persistent = map(int, way.split(","))
        train(sys.argv[1], int(sys.argv[2]), workers, bool(persistent))


if __name__ == "__main__":
    main()
