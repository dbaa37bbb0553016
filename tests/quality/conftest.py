"""Fixtures that write shuffled stores with given rows, order and buckets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from hexdata.order import ORDER_VERSION
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet

Arrange = Callable[..., Path]

SCHEMA = pa.schema(
    [
        pa.field("position_id", pa.int64(), nullable=False),
        pa.field("game_id", pa.int64()),
        pa.field("value", pa.float32(), nullable=False),
    ]
)
"""The columns that are measured."""


@pytest.fixture
def arrange(tmp_path: Path) -> Arrange:
    """Return ``arrange(games, values, order, bounds, choices={}, val=[])``: the path of a shuffled store.

    Row i of the input has position_id i, ``games[i]`` (-1 for none) and ``values[i]``; ``order`` lists the
    rows as they stand, cut into buckets at ``bounds``, and ``val`` those of each bucket of that split.
    """

    def write(
        games: npt.NDArray[np.int64],
        values: npt.NDArray[Any],
        order: npt.NDArray[np.int64],
        bounds: list[int],
        choices: dict[str, Any] | None = None,
        val: list[npt.NDArray[np.int64]] = [],  # noqa: B006
    ) -> Path:
        store = tmp_path / f"store-{sum(1 for _ in tmp_path.iterdir())}"
        manifest = Manifest(board_size=5, counts={"positions": len(games)})
        buckets = [("train", n, order[start:stop]) for n, (start, stop) in enumerate(pairwise(bounds))]
        buckets += [("val", n, rows) for n, rows in enumerate(val)]
        for split, number, rows in buckets:
            table = pa.table(
                [rows, pa.array(games[rows], mask=games[rows] < 0), values[rows].astype(np.float32)],
                schema=SCHEMA,
            )
            name = f"shuffled/{split}/bucket-{number:06d}.parquet"
            manifest.files[name] = write_parquet(store / name, SCHEMA, [table])
        manifest.stages["shuffle"] = {
            "seed": 5,
            "order_version": ORDER_VERSION,
            "positions": len(order),
            "rejected": 0,
            "splits": {"train": len(order)} | ({"val": sum(map(len, val))} if val else {}),
            "buckets": {"train": len(bounds) - 1} | ({"val": len(val)} if val else {}),
            "choices": choices or {},
            "left_out": {},
            "of": manifest.digest("games", "positions"),
        }
        manifest.save(store)
        return store

    return write
