"""Batches for training out of packed positions: their fields, symmetries and value weights.

Every draw follows from (seed, epoch, position) alone. Reads no file, and never decides which rows come.
"""

from __future__ import annotations

from hexdata.batch.make import (
    DEFAULT_FIELDS,
    FIELDS,
    Batch,
    BatchOptions,
    BoardForm,
    FinalPolicy,
    make_batch,
    members_of,
)

__all__ = [
    "DEFAULT_FIELDS",
    "FIELDS",
    "Batch",
    "BatchOptions",
    "BoardForm",
    "FinalPolicy",
    "make_batch",
    "members_of",
]
