"""Random access to the positions of a split, as exact and games mode need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hexdata.shards.blocks import Block

__all__ = ["GatheredRows", "RowSource"]


class GatheredRows(Protocol):
    """Rows that were read together."""

    def take(self, start: int, stop: int) -> Block:
        """Return rows [start, stop), in the order in which they were requested."""


class RowSource(Protocol):
    """Random access to the positions of a split: mapped shards, or a table of games."""

    positions: int

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the optional columns, which only some stores have, sorted."""

    def bytes_per_row(self, members: Sequence[str]) -> int:
        """Return the approximate size of these members of one row in bytes."""

    def wait_until_ready(self) -> None:
        """Wait until rows are checked and can be gathered at full speed; called before they are read."""

    def gather(self, rows: npt.NDArray[np.int64], members: Sequence[str]) -> GatheredRows:
        """Return members of rows (B,), in any order; a row may repeat."""

    def take(self, rows: npt.NDArray[np.int64], members: Sequence[str]) -> Block:
        """Return members of rows (B,) as one block, in the order given."""

    def scan(self, members: Sequence[str]) -> Iterator[Block]:
        """Yield labels of all rows in order, and ``policy_row``, the rows with a dense policy.

        Optional columns have the dtypes of shards, and the numbers of ``null_of`` for null.
        """
