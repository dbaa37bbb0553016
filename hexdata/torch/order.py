"""The seeded order of ``hexdata.order`` as tensors, computed on a device.

Unsigned 64-bit numbers are int64 tensors with the same bits: sums and products wrap, and a logical right
shift is an arithmetic one whose upper bits are masked.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hexdata.order import MIX_LAST_SHIFT, MIX_STEPS, permutation_rounds, sort_subkeys

__all__ = ["DevicePermutation", "shift_right", "sort_key"]

_LOWEST: Final = -(1 << 63)
_PASSES: Final = 4
"""Number of times that an accelerator repeats the rounds before the host asks how many elements remain."""


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
        if self._rounds is None:
            # With the highest bit inverted, signed numbers have the order of the unsigned ones.
            keys = sort_key(torch.arange(n, device=device), key) ^ _LOWEST
            self._order = torch.argsort(keys)
            return
        self._dtype = torch.int32 if n < 1 << 31 else torch.int64
        self._passes = 1 if device.type == "cpu" else _PASSES

    def take(self, indices: Tensor) -> Tensor:
        """Return the elements at indices.

        Args:
            indices: int64 tensor of any shape, each in [0, n), which is not checked.

        Returns:
            int64 tensor of the same shape.
        """
        if self._rounds is None:
            return self._order[indices]
        values = self._mix(indices.to(self._dtype, copy=True).view(-1))
        outside = torch.nonzero(values >= self._n).view(-1)
        while len(outside):
            walked = self._mix(values.index_select(0, outside))
            for _ in range(self._passes - 1):
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
