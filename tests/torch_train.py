"""Trains for ever with two workers, until somebody stops it: ``torch_train.py SHARDS``.

Called by test_torch as a script of its own. Prints the ids of its workers once batches come.
"""

from __future__ import annotations

import multiprocessing
import sys

from hexdata.loader import Loader
from hexdata.torch import TorchLoader


def main() -> None:
    loader = TorchLoader(Loader(sys.argv[1], batch_size=4), num_workers=2)
    workers: list[int] = []
    while True:
        for _ in loader:
            if not workers:
                workers = [child.pid or 0 for child in multiprocessing.active_children()]
                print(*workers, flush=True)


if __name__ == "__main__":
    main()
