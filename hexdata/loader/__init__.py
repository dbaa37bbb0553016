"""Batches for training out of shards: exactly once an epoch over all ranks, resumable at any batch.

Reads shards through the webdataset library and NumPy; never writes, and never needs PyTorch.
"""

from hexdata.loader.loader import Loader

__all__ = ["Loader"]
