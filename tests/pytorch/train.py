"""Script that iterates with two workers until it is stopped: ``train.py SHARDS [FORM START]``.

FORM is "loader" for a TorchLoader, or "dataset" for a DataLoader of a LoaderDataset, whose messages are
larger than a pipe. START is the start method of the workers.

``test_loader.py`` runs the script, which prints the process ids of its workers after the first batch.
"""

from __future__ import annotations

import multiprocessing
import sys

from torch.utils.data import DataLoader

from hexdata.loader import Loader
from hexdata.torch import LoaderDataset, TorchLoader


def main() -> None:
    form, start = sys.argv[2:] or ("loader", None)
    if form == "dataset":
        dataset = LoaderDataset(Loader(sys.argv[1], batch_size=400, fields=("board",)))
        options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": start}
        loader = DataLoader(dataset, batch_size=None, **options)
    else:
        plain = Loader(sys.argv[1], batch_size=4)
        loader = TorchLoader(plain, num_workers=2, multiprocessing_context=start)
    workers: list[int] = []
    while True:
        for _ in loader:
            if not workers:
                workers = [child.pid or 0 for child in multiprocessing.active_children()]
                print(*workers, flush=True)


if __name__ == "__main__":
    main()
