"""The operations of PyTorch for ``hexdata.arrays``, the seeded order, and the copy of a table to a device.

Unsigned 64-bit numbers are int64 tensors with the same bits: sums and products wrap, and a logical right
shift is an arithmetic one whose upper bits are masked.

Integers of 16 bits are stored as int16 with the bits of uint16, and become int32 when they are taken, since
PyTorch can hardly compute with uint16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hexdata.arrays import Arrays
from hexdata.board import Symmetry
from hexdata.errors import BudgetError
from hexdata.order import MIX_LAST_SHIFT, MIX_STEPS, Permutation, permutation_rounds, sort_subkeys

_LOWEST: Final = -(1 << 63)
_PASSES: Final = 4
"""Number of times that an accelerator repeats the rounds before the host asks how many elements remain."""
_COPY_BYTES: Final = 16 << 20
"""Approximate size of the pieces in which arrays are copied to the device."""
_STORED: Final[dict[Any, np.dtype[Any]]] = {
    np.dtype(np.int16): np.dtype(np.int32),
    np.dtype(np.uint16): np.dtype(np.int16),
    np.dtype(np.uint32): np.dtype(np.int64),
    np.dtype(np.uint64): np.dtype(np.int64),
    np.dtype(np.float64): np.dtype(np.float32),
}
"""Dtype on the device of arrays whose dtype PyTorch does not support, or that batches have as float32."""
_WIDER: Final = {"uint16": torch.int32, "uint32": torch.int64}
_UINT16: Final = (1 << 16) - 1


class TorchArrays(Arrays):
    """Operations on tensors of a device; see ``Arrays``.

    Args:
        device: The device.
    """

    xp = torch

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":  # each operation takes some microseconds to start
            self.rows_at_once, self.batch_rows = 1 << 20, 1 << 16
        self._constants: dict[tuple[int, ...], Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of tensors for a NumPy dtype."""
        dtype: torch.dtype = _WIDER.get(name) or getattr(torch, name)
        return dtype

    def constant(self, numbers: tuple[int, ...]) -> Tensor:
        """Return numbers that many calls use, int64. They are copied to the device once."""
        if numbers not in self._constants:
            self._constants[numbers] = torch.tensor(numbers, device=self.device)
        return self._constants[numbers]

    def take(self, array: Tensor, rows: Tensor) -> Tensor:
        """Return rows (B,) of a tensor."""
        # int16 here always holds the bits of uint16, whose upper half is
        # negative until it is widened and masked.
        taken = array.index_select(0, rows)
        return taken.to(torch.int32) & _UINT16 if taken.dtype == torch.int16 else taken

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        """Return a tensor with another dtype; without a copy if possible."""
        # Both have one byte per number with the same bits.
        if dtype == "uint8" and array.dtype == torch.bool:
            return array.view(torch.uint8)
        return array.to(self.dtype(dtype))

    def cast_cells(self, cells: Tensor, dtype: str) -> Tensor:
        """Return uint8 cells, 0 or 1, with another dtype."""
        return cells.to(self.dtype(dtype))

    def nonzero(self, mask: Tensor) -> Tensor:
        """Return the indices at which a mask (B,) is true."""
        return torch.nonzero(mask).view(-1)

    def merge(
        self, rows: Tensor, start: int, takes: Sequence[Callable[[Tensor], dict[str, Any]]]
    ) -> dict[str, Any]:
        """Return the members of two kinds of rows as one block; see ``Arrays.merge``.

        Both functions are called for all rows, so that the host need not wait for the numbers of each kind.
        """
        first, second = takes[0](rows.clamp(max=start - 1)), takes[1]((rows - start).clamp(min=0))
        is_first = rows < start
        return {
            name: torch.where(is_first.view(-1, *[1] * (values.dim() - 1)), values, second[name])
            for name, values in first.items()
        }

    def repeat(self, array: Tensor, counts: Tensor) -> Tensor:
        """Return a tensor with each element repeated as often as ``counts`` says."""
        return torch.repeat_interleave(array, counts)

    def draw_bits(self, ids: Tensor, key: int, bits: int) -> Tensor:
        """Return the highest bits of the sort keys of ids (B,), at most 63 of them, as int64."""
        return shift_right(sort_key(ids, key), 64 - bits)

    def image(self, boards: Tensor, symmetries: Tensor, n: int) -> Tensor:
        """Return the images of boards (B, …, n·n) under a symmetry for each, without a change of colours.

        All images are computed and selected from, because the host does not know the symmetries.
        """
        images = boards.reshape(*boards.shape[:-1], n, n)
        shape = (-1, *[1] * (images.dim() - 1))
        rotated = (symmetries & Symmetry.ROTATION).to(torch.bool).view(shape)
        images = torch.where(rotated, images.flip((-2, -1)), images)
        swapped = (symmetries >= Symmetry.LONG_DIAGONAL).view(shape)
        return torch.where(swapped, images.transpose(-1, -2), images).reshape(boards.shape)

    def symmetry_table(self, n: int) -> Tensor:
        """Return ``board.symmetry_table(n)`` with all symmetries one after the other, int32 (4·n·n,)."""
        # int32 like the moves that it replaces: with int64, xp.where would widen both.
        return self.constant(tuple(super().symmetry_table(n).tolist())).to(torch.int32)

    def unpack(self, packed: Tensor, cells: int) -> Tensor:
        """Return packed bits as uint8 (B, cells)."""
        return unpack_bits(packed, cells)

    def pack(self, cells: Tensor) -> Tensor:
        """Return cells (B, k), 0 or 1, as bits, uint8 (B, ceil(k / 8))."""
        # PyTorch has no packbits: eight columns of bits are combined by shifts, the first one highest.
        bits = torch.nn.functional.pad(cells, (0, -cells.shape[1] % 8))
        bits = bits.view(len(cells), bits.shape[1] // 8, 8)
        packed = bits[..., 0] << 7
        for bit in range(1, 8):
            packed |= bits[..., bit] << (7 - bit)
        return packed

    def permutation(self, n: int, key: int) -> Permutation | DevicePermutation:
        """Return ``hexdata.order.Permutation(n, key)`` on the device."""
        return DevicePermutation(n, key, self.device)

    def put_all(self, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        """Copy the arrays of a table to the device, in pieces.

        Raises:
            BudgetError: They do not fit into its memory.
        """
        dtypes: dict[str, np.dtype[Any]] = {
            name: _STORED.get(array.dtype, array.dtype) for name, array in arrays.items()
        }
        # The sizes on the device, where some dtypes are wider or narrower than on the host.
        needed = sum(array.size * dtypes[name].itemsize for name, array in arrays.items())
        tensors = {}
        try:
            # Before the first copy, so that a split that does not fit is refused at once.
            if self.device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(self.device)[0]):
                raise RuntimeError(f"{free // 10**6:,} MB free of its memory")
            for name, array in arrays.items():
                dtype = dtypes[name]
                tensor = tensors[name] = self.empty(array.shape, self.dtype(dtype.name))
                # In pieces, so that the host never holds a converted copy of a whole array.
                size = max(1, _COPY_BYTES * len(array) // max(1, array.nbytes))
                for start in range(0, len(array), size):
                    piece = array[start : start + size]
                    with np.errstate(over="ignore"):  # a larger number is infinite in float32
                        copied = piece.view(dtype) if dtype == np.int16 else piece.astype(dtype)
                    # A copy, since tensors of read-only arrays give a warning.
                    tensor[start : start + len(piece)] = torch.from_numpy(copied.copy())
        except RuntimeError as error:
            # The error raised above and those of PyTorch for full memory
            # name it; others are faults of another kind.
            if "memory" not in str(error):
                raise
            raise BudgetError(
                f"the positions do not fit into the memory of {self.device}",
                found=str(error).partition("\n")[0],
                expected=f"{-(-needed // 10**6):,} MB for the positions, and memory for batches",
                hint="Use TorchLoader, which keeps the positions in the memory of the host.",
            ) from error
        return tensors


def unpack_bits(packed: Tensor, cells: int) -> Tensor:
    """Return packed bits (B, ceil(cells / 8)) as uint8 (B, cells)."""
    # Boards are packed as by np.packbits, the highest bit of a byte first.
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :cells]


# --- the seeded order ---------------------------------------------------------------------------------


def sort_key(ids: Tensor, key: int) -> Tensor:
    """Return the sort keys of ids, as ``hexdata.order.sort_key`` does.

    Args:
        ids: int64 tensor of any shape.
        key: Key from ``hexdata.order.derive_key``.

    Returns:
        int64 tensor of the same shape and device, with the bits of the uint64 keys.
    """
    keys = [_signed(word) for word in sort_subkeys(key)]
    x = ids ^ keys[0]
    for (shift, multiplier), subkey in zip(MIX_STEPS, keys[1:], strict=True):
        x ^= shift_right(x, shift)
        x *= _signed(multiplier)
        x ^= subkey
    x ^= shift_right(x, MIX_LAST_SHIFT)
    return x


def shift_right(x: Tensor, shift: int) -> Tensor:
    """Return the bits of an int64 tensor shifted right by 1 to 63, with zeros at the top."""
    # int64 is shifted with copies of its sign bit, which the mask removes.
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    """Return the signed 64-bit integer with the bits of an unsigned one."""
    return word - (1 << 64) if word >> 63 else word


class DevicePermutation:
    """The permutation ``hexdata.order.Permutation(n, key)`` on a device.

    Args:
        n: Length, from 0 to 2^62.
        key: Key from ``hexdata.order.derive_key``.
        device: The device.
    """

    def __init__(self, n: int, key: int, device: torch.device) -> None:
        self._n = n
        self._rounds = permutation_rounds(n, key)
        # Short permutations are defined as a sort of all keys.
        if self._rounds is None:
            # With the highest bit inverted, signed numbers have the order of the unsigned ones.
            keys = sort_key(torch.arange(n, device=device), key) ^ _LOWEST
            self._order = torch.argsort(keys)
            return
        # The rounds work modulo a power of two, so 32 bits give the
        # same lower bits as 64, in half the memory.
        self._dtype = torch.int32 if n < 1 << 31 else torch.int64
        # On a CPU the number of remaining elements is known at once, and further passes would be wasted.
        self._passes = 1 if device.type == "cpu" else _PASSES

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the elements at indices.

        Args:
            indices: int64 tensor of any shape, each in [0, n), which is not checked.

        Returns:
            int64 tensor of the same shape.
        """
        if self._rounds is None:
            return self._order[indices]
        values = self._mix(indices.to(self._dtype, copy=True).view(-1))
        # The rounds permute a power of two: elements from n on are mixed again until they are below n.
        outside = torch.nonzero(values >= self._n).view(-1)
        while len(outside):
            walked = self._mix(values.index_select(0, outside))
            for _ in range(self._passes - 1):
                # All are mixed, since selecting those that remain would make the host wait for their number.
                walked = torch.where(walked >= self._n, self._mix(walked.clone()), walked)
            values.index_copy_(0, outside, walked)
            outside = outside.index_select(0, torch.nonzero(walked >= self._n).view(-1))
        return values.to(torch.int64).view(indices.shape)

    def _mix(self, x: Tensor) -> Tensor:
        """Mix ``x``, below 2^b, in place and return it. Its sign bit is 0, so its shifts are logical."""
        assert self._rounds is not None
        for odd, addend in self._rounds.factors:
            factor = x << 1
            factor += odd
            x *= factor
            x += addend
            x &= self._rounds.mask
            x ^= x >> self._rounds.shift
        return x
