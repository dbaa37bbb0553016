"""Operations in which NumPy and PyTorch differ, so that the same lines make batches of arrays and of tensors.

Both libraries share indexing, arithmetic, and the functions of ``Arrays.xp`` that are called with positional
arguments. ``hexdata.torch.arrays`` has the operations of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hexdata.board import SYMMETRIES, Symmetry, cast_cells, swaps_colours, symmetry_table
from hexdata.order import Permutation, sort_key


class Arrays:
    """Operations on NumPy arrays, and the interface of those on tensors.

    Unsigned integers of 16 bits have more bits as tensors, since PyTorch can hardly compute with them.
    """

    xp: Any = np
    """The module of the library."""
    device: Any = "cpu"
    rows_at_once = 1 << 16
    """Number of positions whose rows are found together. NumPy also takes these positions together."""
    batch_rows = 1 << 10
    """Number of positions whose batches are made together: few enough for the CPU cache, and for the heap."""

    def dtype(self, name: str) -> Any:
        """Return the library's dtype for results of this NumPy dtype."""
        return np.dtype(name)

    def constant(self, numbers: tuple[int, ...]) -> Any:
        """Return numbers that many calls use, int64."""
        return np.array(numbers)

    def take(self, array: Any, rows: Any) -> Any:
        """Return rows (B,) of an array."""
        # take is faster than indexing for whole rows.
        return array.take(rows, axis=0)

    def cast(self, array: Any, dtype: str) -> Any:
        """Return an array with another dtype; without a copy if possible."""
        if array.dtype == np.bool_:
            array = array.view(np.uint8)  # NumPy casts these in less time
        return array.astype(dtype, copy=False)

    def cast_cells(self, cells: Any, dtype: str) -> Any:
        """Return uint8 cells, 0 or 1, with another dtype."""
        return cast_cells(cells, dtype)

    def arange(self, start: int, stop: int, step: int = 1) -> Any:
        """Return integers of 64 bits."""
        return self.xp.arange(start, stop, step, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array whose contents are not set."""
        return self.xp.empty(shape, dtype=dtype, device=self.device)

    def full(self, shape: tuple[int, ...], number: float, dtype: str) -> Any:
        """Return an array of equal numbers."""
        return self.xp.full(shape, number, dtype=self.dtype(dtype), device=self.device)

    def nonzero(self, mask: Any) -> Any:
        """Return the indices at which a mask (B,) is true."""
        return np.flatnonzero(mask)

    def merge(
        self, rows: Any, start: int, takes: Sequence[Callable[[Any], dict[str, Any]]]
    ) -> dict[str, Any]:
        """Return the members of two kinds of rows as one block.

        Args:
            rows: The rows (B,), of which those from ``start`` on are of the second kind.
            start: First row of the second kind.
            takes: For each kind, the function that returns the members of its rows, which begin at 0.
        """
        merged: dict[str, Any] = {}
        for take, chosen, first in zip(takes, (rows < start, rows >= start), (0, start), strict=True):
            # Each kind is taken separately: a host knows how many rows there are of each.
            indices = np.flatnonzero(chosen)
            for name, values in take(rows[indices] - first).items():
                if name not in merged:
                    merged[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
                merged[name][indices] = values
        return merged

    def repeat(self, array: Any, counts: Any) -> Any:
        """Return an array with each element repeated as often as ``counts`` says."""
        return np.repeat(array, counts)

    def ranges(self, starts: Any, lengths: Any) -> Any:
        """Return the concatenated ranges [start, start + length)."""
        ends = self.xp.cumsum(lengths, 0)
        total = int(ends[-1]) if len(ends) else 0
        # Count from 0 through all ranges, and shift each range to its start: no loop, also on a device.
        return self.arange(0, total) + self.repeat(starts - (ends - lengths), lengths)

    def draw_bits(self, ids: Any, key: int, bits: int) -> Any:
        """Return the highest bits of the sort keys of ids (B,), at most 63 of them, as int64."""
        return (sort_key(ids, key) >> np.uint64(64 - bits)).view(np.int64)

    def image(self, boards: Any, symmetries: Any, n: int) -> Any:
        """Return the images of boards (B, …, n·n) under a symmetry for each, without a change of colours.

        The boards of each symmetry are copied into a contiguous array before they are written back, which is
        faster than writing a transposed view to scattered rows.
        """
        images = boards.copy().reshape(*boards.shape[:-1], n, n)
        for symmetry in SYMMETRIES[1:]:
            rows = np.flatnonzero(symmetries == symmetry)
            own = images.take(rows, axis=0)
            if symmetry & Symmetry.ROTATION:
                own = own[..., ::-1, ::-1]
            if swaps_colours(symmetry):
                own = own.swapaxes(-1, -2)
            images[rows] = np.ascontiguousarray(own)
        return images.reshape(boards.shape)

    def symmetry_table(self, n: int) -> Any:
        """Return ``board.symmetry_table(n)`` with all symmetries one after the other, (4·n·n,)."""
        # Flat, so that symmetry and cell are one index: symmetry · n · n + cell.
        return symmetry_table(n).reshape(-1)

    def unpack(self, packed: Any, cells: int) -> Any:
        """Return packed bits as uint8 (B, cells)."""
        return np.unpackbits(packed, axis=1, count=cells)

    def pack(self, cells: Any) -> Any:
        """Return cells (B, k), 0 or 1, as bits, uint8 (B, ceil(k / 8))."""
        return np.packbits(cells, axis=1)

    def permutation(self, n: int, key: int) -> Any:
        """Return ``order.Permutation(n, key)``, which is indexed by arrays of the library."""
        return Permutation(n, key)

    def put_all(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a table as arrays of the library."""
        return arrays


NUMPY: Final = Arrays()
"""The operations of NumPy."""
