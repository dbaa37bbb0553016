"""Batches for training out of shards: exactly once an epoch over all ranks, resumable at any batch.

Maps local shards into memory, or streams them through the webdataset library; never writes, and never
needs PyTorch outside its one file.
"""

from hexdata.loader.checkpoint import combine_digests
from hexdata.loader.dataset import PositionDataset
from hexdata.loader.loader import Loader
from hexdata.loader.mixture import Mixture

__all__ = ["Loader", "Mixture", "PositionDataset", "combine_digests"]
