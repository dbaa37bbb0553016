"""Training loader: every position once per epoch over all ranks, resumable at any batch.

Batches are made from the games of a converted store, which are held in memory; from local shards, which are
mapped into memory; or from other shards, which are read sequentially through the webdataset library.
"""

from hexdata.loader.checkpoint import combine_digests
from hexdata.loader.dataset import PositionDataset
from hexdata.loader.loader import Loader
from hexdata.loader.mixture import Mixture

__all__ = ["Loader", "Mixture", "PositionDataset", "combine_digests"]
