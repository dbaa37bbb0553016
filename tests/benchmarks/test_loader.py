"""The training loader against unpacking the same arrays in order, from memory."""

from __future__ import annotations

import numpy as np

from hexdata.formats.shards import read_blocks
from hexdata.loader import Loader
from hexdata.loader.batch import unpack

BATCH = 1_024
LEAST_RATIO = 0.05


def test_loader_against_memory(shards, versus):
    loader = Loader(shards, batch_size=BATCH, window_shards=4)
    n = loader.manifest.board_size
    blocks = [block for path in sorted((shards / "shards").glob("train-*")) for _, block in read_blocks(path)]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in ("board", "move", "value")}
    positions = len(columns["move"])

    def load():
        assert sum(len(batch["value"]) for batch in loader) == positions

    def from_memory():
        for start in range(0, positions, BATCH):
            rows = {name: column[start : start + BATCH] for name, column in columns.items()}
            unpack(rows, ("board", "policy", "value"), n)

    assert versus(load, from_memory, positions, rounds=3) > LEAST_RATIO
