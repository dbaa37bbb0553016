"""One loader in its own process, which runs an epoch on each command.

Run as a script: ``contestant.py NAME FOLDER`` reads one command per line from standard input. ``run``
delivers an epoch and prints its number of positions; ``check`` also prints checksums. Answers are JSON, one
per line. The caller measures the time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import BATCH, PEERS, WORKERS, RunEpoch
from positions import BATCH_OPTIONS, CELLS, RECORD, N, read_records

from hexdata.batch import make_batch
from hexdata.fill import fill_to_policy, fill_to_stones
from hexdata.loader import Loader
from hexdata.shards.blocks import block_to_policy


def from_memory(folder: Path) -> RunEpoch:
    """The reference: the same arrays from memory, in order, unpacked by the same function."""
    records = read_records(folder)
    columns = {name: records[name].copy() for name in RECORD.names or ()}

    def run(epoch: int) -> Iterator[Any]:
        for start in range(0, len(records), BATCH):
            block = {name: column[start : start + BATCH] for name, column in columns.items()}
            yield make_batch(block, BATCH_OPTIONS, N, seed=0, epoch=epoch)

    return run


def ours(folder: Path, **options: Any) -> RunEpoch:
    """The hexdata loader in one process."""
    loader = Loader(folder, **{"batch_size": BATCH, "planes": 3, **options})
    return lambda epoch: iter(loader)


FILL_ONLY = {"board": "fill", "planes": 2, "fields": ("board", "value")}


def of_games(folder: Path, **options: Any) -> RunEpoch:
    """Games mode in one process. The folder contains the store."""
    return ours(folder / "store", mode="games", **options)


OURS = {
    "memory": from_memory,
    "exact": partial(ours, mode="exact"),
    "stream": partial(ours, mode="stream"),
    "exact-of-store": lambda folder: ours(folder / "store", mode="exact"),
    "games": of_games,
    "games-uint8": partial(of_games, board="uint8"),
    "games-fill": partial(of_games, **FILL_ONLY),
    "games-fill-threads": partial(of_games, threads=WORKERS, **FILL_ONLY),
}


def count(batches: Iterator[Any]) -> dict[str, Any]:
    return {"positions": sum(len(batch["value"]) for batch in batches)}


def expand(batch: Any) -> Any:
    """Return a batch with boards and policies, made of fill rows or moves where it has none."""
    if "ply" in batch:
        board = fill_to_stones(batch["board"], batch["ply"]).reshape(-1, 2, N, N)
        return {**batch, "board": board, "policy": fill_to_policy(batch["board"], batch["ply"])}
    if "move" in batch:
        return {**batch, "policy": block_to_policy(batch, CELLS)}
    return batch


def add_up(batches: Iterator[Any]) -> dict[str, Any]:
    """Return checksums of the batches, which differ if a position is missing, repeated or wrong."""
    positions, shapes = 0, set()
    planes, policy, value = np.zeros((3, N, N)), np.zeros(CELLS), 0.0
    for batch in batches:
        whole = expand(batch)
        board, moves, values = (np.asarray(whole[name]) for name in ("board", "policy", "value"))
        planes = planes[: board.shape[1]]
        shapes.add((board.dtype.str, board.shape[1:], moves.dtype.str, moves.shape[1:], values.dtype.str))
        positions += len(values)
        planes += board.sum(axis=0, dtype=np.float32)  # exact, as float32 counts to 16 million
        policy += moves.sum(axis=0)
        value += float(values.sum(dtype=np.float64))
    return {
        "positions": positions,
        "planes": planes.tolist(),
        "policy": policy.tolist(),
        "value": value,
        "shapes": sorted(shapes),
    }


COMMANDS = {"run": count, "check": add_up}


def make(name: str, folder: Path, scratch: Path) -> RunEpoch:
    """Open a loader.

    Raises:
        ModuleNotFoundError: Its library is not installed.
    """
    if name in OURS:
        return OURS[name](folder)
    peer = PEERS[name]
    return peer.prepare(read_records(folder)[: peer.most], scratch)


def main(name: str, folder: Path) -> None:
    # Libraries print what they like: the answers keep the pipe to themselves.
    with os.fdopen(os.dup(1), "w") as answers, tempfile.TemporaryDirectory(dir=folder) as scratch:
        os.dup2(2, 1)

        def say(facts: dict[str, Any]) -> None:
            print(json.dumps(facts), file=answers, flush=True)

        try:
            run = make(name, folder, Path(scratch))
        except ModuleNotFoundError as error:
            say({"missing": error.name})
            return
        say({})
        for epoch, command in enumerate(sys.stdin):
            say(COMMANDS[command.strip()](run(epoch)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
