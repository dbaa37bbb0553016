"""Training loader: batches from shards, every position once per epoch over all ranks, resumable at any batch.

Local shards are mapped into memory; others are read through the webdataset library. Only the shard cache is
written.
"""

from hexdata.loader.checkpoint import combine_digests
from hexdata.loader.dataset import PositionDataset
from hexdata.loader.loader import Loader
from hexdata.loader.mixture import Mixture

__all__ = ["Loader", "Mixture", "PositionDataset", "combine_digests"]
