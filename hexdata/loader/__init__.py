"""Training loader: every position once per epoch over all ranks, resumable at any batch.

Batches are made from the games of a converted store or from shards, which are read into memory, or from
shards that are read sequentially.
"""

from hexdata.loader.checkpoint import combine_digests
from hexdata.loader.dataset import PositionDataset
from hexdata.loader.loader import Loader
from hexdata.loader.mixture import Mixture
from hexdata.loader.options import LoaderOptions, SplitOptions

__all__ = ["Loader", "LoaderOptions", "Mixture", "PositionDataset", "SplitOptions", "combine_digests"]
