"""Conversion of packed positions into training batches: fields, symmetries and value weights.

Every random draw depends only on seed, epoch and position id.
"""

from __future__ import annotations

from hexdata.batch.make import (
    DEFAULT_FIELDS,
    FIELDS,
    Batch,
    BatchOptions,
    BoardForm,
    FinalPolicy,
    check_stored_fields,
    make_batch,
    required_members,
)

__all__ = [
    "DEFAULT_FIELDS",
    "FIELDS",
    "Batch",
    "BatchOptions",
    "BoardForm",
    "FinalPolicy",
    "check_stored_fields",
    "make_batch",
    "required_members",
]
