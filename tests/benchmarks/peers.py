"""The other loaders. Each stores the same records in its own format and shuffles them in its own way.

Each is set up as its documentation recommends, then as fast as we could make it; the docstrings say what was
tried. Libraries are imported on first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from positions import RECORD, Records, unpack, unpack_all

from hexdata.batch import Batch

BATCH = 1_024
WORKERS = 2

RunEpoch = Callable[[int], Iterator[Any]]
"""A function that returns the batches of ``board``, ``policy`` and ``value`` of an epoch, numbered from 0."""


@dataclass(frozen=True)
class Peer:
    """A loader: ``prepare(records, folder)`` writes its files into an empty folder.

    ``most`` limits the number of records of slow loaders, which would take minutes.
    """

    prepare: Callable[[Records, Path], RunEpoch]
    most: int


def _in_batches(items: Iterator[bytes]) -> Iterator[Batch]:
    """Collate single records, for a library whose own batching is slower."""
    batch: list[bytes] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield unpack_all(batch)
            batch = []
    if batch:
        yield unpack_all(batch)


def litdata(records: Records, folder: Path) -> RunEpoch:
    """LitData: one record per item as bytes, default shuffle (chunks, windows of 256, items in them).

    Items of tokens and other windows are slower; a full shuffle within a chunk is 50 times slower. Items of
    whole blocks would be fast, but would be shuffled as blocks. Its StreamingDataLoader has the same rate.
    """
    from litdata import StreamingDataset
    from litdata.streaming.cache import Cache

    logging.getLogger("litdata").setLevel(logging.ERROR)
    cache = Cache(str(folder), chunk_size=1 << 16)
    for index, record in enumerate(records):
        cache[index] = record.tobytes()
    cache.done()
    cache.merge()
    dataset = StreamingDataset(str(folder), shuffle=True)
    return lambda epoch: _in_batches(iter(dataset))


def datasets_map(records: Records, folder: Path) -> RunEpoch:
    """Hugging Face map-style: records as one column of 50 bytes, read as Arrow tables by permuted indices.

    One column per field takes twice as long, the format "numpy" three times, ``shuffle().iter()`` twice.
    """
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    _save_dataset(records, folder)
    dataset = datasets.Dataset.load_from_disk(str(folder)).with_format("arrow")

    def taken(table: pa.Table) -> Batch:
        column = pa.concat_arrays(table["record"].chunks)
        return unpack(column.flatten().to_numpy().view(RECORD))

    def run(epoch: int) -> Iterator[Batch]:
        order = np.random.default_rng(epoch).permutation(len(dataset))
        return (taken(dataset[order[start : start + BATCH]]) for start in range(0, len(order), BATCH))

    return run


def datasets_stream(records: Records, folder: Path) -> RunEpoch:
    """Hugging Face streaming: shards in a new order and a buffer of 10,000, which yields single examples."""
    import datasets

    datasets.disable_progress_bars()
    _save_dataset(records, folder)
    dataset = datasets.Dataset.load_from_disk(str(folder))
    stream = dataset.to_iterable_dataset(num_shards=16).shuffle(seed=1, buffer_size=10_000)
    stream = stream.with_format("arrow")

    def run(epoch: int) -> Iterator[Batch]:
        stream.set_epoch(epoch)
        for table in stream.iter(BATCH):
            column = table["record"].combine_chunks()
            yield unpack(column.flatten().to_numpy().view(RECORD))

    return run


def _save_dataset(records: Records, folder: Path) -> None:
    import pyarrow as pa
    from datasets import Dataset

    flat = pa.array(np.frombuffer(records.tobytes(), np.uint8))
    column = pa.FixedSizeListArray.from_arrays(flat, RECORD.itemsize)
    Dataset(pa.table({"record": column})).save_to_disk(str(folder))


def webdataset(records: Records, folder: Path) -> RunEpoch:
    """webdataset: one record per sample, stock pipeline (shuffled shards, then a buffer of 5,000)."""
    import webdataset as wds

    with wds.ShardWriter(f"{folder}/%06d.tar", maxcount=5_000, verbose=0) as writer:
        for index, record in enumerate(records):
            writer.write({"__key__": f"{index:09d}", "record.bin": record.tobytes()})
    urls = sorted(map(str, folder.glob("*.tar")))
    samples = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(5_000)
    pipeline = samples.to_tuple("record.bin").batched(
        BATCH, collation_fn=lambda items: unpack_all([item for (item,) in items])
    )
    return lambda epoch: iter(pipeline)


def mosaic(records: Records, folder: Path) -> RunEpoch:
    """MosaicML Streaming with records as bytes and its fastest shuffle (py1s), batched here.

    It has one canonical node, because with 64 it would repeat positions until all have equally many.
    """
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    with MDSWriter(out=str(folder), columns={"record": "bytes"}) as writer:
        for record in records:
            writer.write({"record": record.tobytes()})
    dataset = StreamingDataset(
        local=str(folder), shuffle=True, shuffle_algo="py1s", num_canonical_nodes=1, batch_size=BATCH
    )
    return lambda epoch: _in_batches(sample["record"] for sample in dataset)


def grain(records: Records, folder: Path) -> RunEpoch:
    """Grain: it shuffles and batches indices; the records of a batch are read at once from a mapped array.

    Single records as elements are slower, and so are its reading threads.
    """
    import grain

    mapped = _map(records, folder)
    reading = grain.ReadOptions(num_threads=0)

    def run(epoch: int) -> Iterator[Batch]:
        order = grain.MapDataset.range(len(mapped)).shuffle(seed=epoch).batch(BATCH, batch_fn=list)
        return iter(order.map(lambda indices: unpack(mapped.take(indices))).to_iter_dataset(reading))

    return run


def torch_items(records: Records, folder: Path) -> RunEpoch:
    """A torch DataLoader over a map-style dataset of records in a mapped array, with two workers."""
    return _data_loader(_Items(_map(records, folder)), WORKERS)


def torch_batches(records: Records, folder: Path) -> RunEpoch:
    """The same with a dataset that reads a batch at once (``__getitems__``)."""
    return _data_loader(_Batches(_map(records, folder)), WORKERS)


def torch_batches_alone(records: Records, folder: Path) -> RunEpoch:
    """The same without workers: the fastest of all peers, which a good engineer writes in an afternoon."""
    return _data_loader(_Batches(_map(records, folder)), 0)


def _map(records: Records, folder: Path) -> Records:
    np.save(folder / "records.npy", records.view(np.uint8).reshape(-1, RECORD.itemsize))
    mapped: Records = np.load(folder / "records.npy", mmap_mode="r").view(RECORD)[:, 0]
    return mapped


@dataclass(frozen=True)
class _Items:
    records: Records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> bytes:
        return self.records[index].tobytes()


@dataclass(frozen=True)
class _Batches:
    records: Records

    def __len__(self) -> int:
        return len(self.records)

    def __getitems__(self, indices: list[int]) -> Batch:
        return unpack(self.records.take(indices))


def _to_tensors(batch: Batch | list[bytes]) -> dict[str, Any]:
    """Collate records; only tensors pass from a worker to the main process through shared memory."""
    import torch

    arrays = batch if isinstance(batch, dict) else unpack_all(batch)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _data_loader(dataset: _Items | _Batches, workers: int) -> RunEpoch:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        dataset,  # type: ignore[arg-type]
        BATCH,
        shuffle=True,
        num_workers=workers,
        collate_fn=_to_tensors,
        persistent_workers=workers > 0,
    )
    return lambda epoch: iter(loader)


PEERS = {
    "litdata": Peer(litdata, 1_000_000),
    "datasets": Peer(datasets_map, 1_000_000),
    "datasets-streaming": Peer(datasets_stream, 20_000),
    "webdataset": Peer(webdataset, 20_000),
    "mosaicml-streaming": Peer(mosaic, 20_000),
    "grain": Peer(grain, 100_000),
    "torch-items": Peer(torch_items, 200_000),
    "torch-batches": Peer(torch_batches, 1_000_000),
    "torch-batches-alone": Peer(torch_batches_alone, 1_000_000),
}
