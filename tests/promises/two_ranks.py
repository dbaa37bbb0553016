"""Trains with scripts of the documents on two ranks, and resumes each: ``two_ranks.py NAME=PACKAGE…``.

Writes what each script ``NAME.py`` delivers on each rank, in two epochs, to ``NAME.RANK.json``: position ids,
or the digests of the epochs. The ranks are forks of one process, which imports the frameworks once, and find
each other through a file.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

STOP, STEPS = 7, 16
"""Steps before the interruption, and of two epochs of the demo."""


def lightning(train: Callable[..., Any]) -> Any:
    return train(devices=2, max_steps=STOP) + train(f"step={STOP}.ckpt", devices=2, max_epochs=2)


def accelerate(train: Callable[..., Any]) -> Any:
    return train(STOP) + train(STEPS - STOP, resume=True)


def ddp(train: Callable[..., Any]) -> Any:
    return [train(1), train(2)]


def run(rank: int, names: Iterable[str]) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    group: dict[str, Any] = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{Path('group').resolve()}", **group)
    for name in names:
        found = globals()[name](runpy.run_path(f"{name}.py")["train"])
        Path(f"{name}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


def main(packages: dict[str, str]) -> int:
    torch.set_num_threads(1)
    for package in packages.values():
        importlib.import_module(package)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, packages)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    sys.exit(main(dict(argument.split("=") for argument in sys.argv[1:])))
