"""The seeded order: every random choice as a pure function of (seed, purpose, identity).

Never reads a file, a clock or a global generator. Each function here exists so that a result can be
named by its seed: the same on every machine, for every number of threads, buckets and workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final, TypeVar, overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "ORDER_VERSION",
    "Permutation",
    "balanced_take",
    "bucket_bounds",
    "derive_key",
    "shuffle_indices",
    "sort_key",
    "sort_key_sql",
    "sort_subkeys",
    "uniform_draw",
]

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Item = TypeVar("Item")

ORDER_VERSION: Final = 1
"""Version of every constant below. Stored in each manifest; changing a constant raises it."""

_WORD: Final = (1 << 64) - 1

# splitmix64's output function (Steele, Lea & Flood 2014) with the shifts and multipliers of David
# Stafford's variant 13: each is (shift right and xor, multiply). A last shift ends the mixing.
_MIX_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MIX_LAST_SHIFT: Final = 31
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, made odd: the increment of splitmix64."""


def derive_key(seed: int, *purpose: str | int) -> int:
    """Return the 64-bit key of one purpose under one seed.

    The key is the first 8 bytes, big-endian, of SHA-256 over a canonical text of the order version,
    the seed and the purpose, so that (42, "epoch", 1) and (43, "epoch", 0) are unrelated, which
    adding seed and epoch would not give.

    Raises:
        TypeError: if the seed is not an integer, or a part of the purpose is neither text nor integer.
    """
    if not _is_integer(seed):
        raise TypeError(f"a seed is an integer, not {type(seed).__name__}: {seed!r}")
    for part in purpose:
        if not (_is_integer(part) or isinstance(part, str)):
            raise TypeError(f"a purpose is integers and text, not {type(part).__name__}: {part!r}")
    text = f"hexdata order {ORDER_VERSION} " + json.dumps([seed, *purpose], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _mix(value: int) -> int:
    """One splitmix64 output, on a Python integer."""
    for shift, multiplier in _MIX_STEPS:
        value = ((value ^ (value >> shift)) * multiplier) & _WORD
    return value ^ (value >> _MIX_LAST_SHIFT)


def _subkeys(key: int, count: int) -> list[int]:
    """Expand a 64-bit key into ``count`` words: the splitmix64 stream that starts at the key."""
    return [_mix((key + _GOLDEN_GAMMA * (i + 1)) & _WORD) for i in range(count)]


def sort_key(ids: npt.ArrayLike, key: int) -> UInt64Array:
    """Map identities to 64-bit sort keys; a bijection on 64 bits, so distinct identities never tie.

    Args:
        ids: integers, any shape; read as unsigned 64-bit.
        key: from :func:`derive_key`.

    Returns:
        uint64 array of the same shape. The seeded order of ids is ascending order of these.

    Raises:
        TypeError: if the ids are not integers (floats would lose low bits and tie).

    Each step (xor with a subkey, xor with a right shift, multiplication by an odd constant mod 2^64)
    can be undone, hence the bijection. :func:`sort_key_sql` is the same function as DuckDB SQL.
    """
    values = np.asarray(ids)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"identities are integers, not {values.dtype}")
    keys = sort_subkeys(key)
    x = values.astype(np.uint64)  # a copy: the steps below work in place
    x ^= np.uint64(keys[0])
    for (shift, multiplier), subkey in zip(_MIX_STEPS, keys[1:], strict=True):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(multiplier)
        x ^= np.uint64(subkey)
    x ^= x >> np.uint64(_MIX_LAST_SHIFT)
    return x


def sort_subkeys(key: int) -> list[int]:
    """Return the three 64-bit words into which :func:`sort_key` expands a key."""
    return _subkeys(key, len(_MIX_STEPS) + 1)


def sort_key_sql(column: str, key: int | Sequence[str]) -> str:
    """Return a DuckDB SQL expression (UBIGINT) equal to :func:`sort_key` of ``column``.

    Products are formed in UHUGEINT, where two 64-bit factors cannot overflow, and cut to 64 bits.
    DuckDB finds the repeated subexpressions, so each is computed once. Negative ids are an error.

    Args:
        column: an expression for the identity.
        key: from :func:`derive_key`; or, where it differs from row to row, the three UBIGINT columns that
            hold its :func:`sort_subkeys`.
    """
    keys = sort_subkeys(key) if isinstance(key, int) else key
    x = f"xor(({column})::UBIGINT, {keys[0]}::UBIGINT)"
    for (shift, multiplier), subkey in zip(_MIX_STEPS, keys[1:], strict=True):
        x = f"xor({x}, {x} >> {shift})"
        x = f"(({x})::UHUGEINT * {multiplier}::UHUGEINT & {_WORD}::UHUGEINT)::UBIGINT"
        x = f"xor({x}, {subkey}::UBIGINT)"
    return f"xor({x}, {x} >> {_MIX_LAST_SHIFT})"


def balanced_take(groups: Mapping[str, Sized | int], seed: int) -> dict[str, Int64Array]:
    """Cut every group to the size of the smallest, by seeded uniform choice and never from the head.

    What is kept of a group are its elements of lowest ``sort_key(index, derive_key(seed, "balance", name))``.
    So it depends on the other groups only through how many are kept, and of a smaller cut it is a part of
    that of a larger one. ``hexdata shuffle --balance-by`` makes the same choice, of position ids.

    Args:
        groups: sequences, or only their lengths, by name: the blocks of tokens of several domains, say.
        seed: any integer.

    Returns:
        For each group the indices that are kept, ascending: int64 of shape (length of the smallest,).

    Raises:
        ValueError: a length is negative.
    """
    sizes = {name: group if isinstance(group, int) else len(group) for name, group in groups.items()}
    kept = min(sizes.values(), default=0)
    if kept < 0:
        raise ValueError(f"a group cannot have {kept} elements")
    return {name: _lowest(kept, size, derive_key(seed, "balance", name)) for name, size in sizes.items()}


def _lowest(count: int, size: int, key: int) -> Int64Array:
    """Return, ascending, those ``count`` of the indices 0 … size - 1 whose sort keys are lowest."""
    if count == size:
        return np.arange(size, dtype=np.int64)
    keys = sort_key(np.arange(size, dtype=np.uint64), key)
    return np.sort(np.argpartition(keys, count)[:count]).astype(np.int64)


def bucket_bounds(buckets: int) -> list[int]:
    """Cut the 64-bit key space into equal ranges: bucket i holds keys in [bounds[i], bounds[i + 1]).

    Returns ``buckets + 1`` Python integers, the first 0 and the last 2^64. Read one after the other,
    buckets are the global order, whatever their number.
    """
    if buckets < 1:
        raise ValueError(f"need at least one bucket, got {buckets}")
    return [(i << 64) // buckets for i in range(buckets)] + [1 << 64]


def uniform_draw(ids: npt.ArrayLike, key: int) -> npt.NDArray[np.float64]:
    """Return one float64 in [0, 1) for each identity: its draw under ``key``, 53 bits of it."""
    return (sort_key(ids, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_SMALL: Final = 1 << 16
"""Up to this length a permutation is sorted out in full: the rounds would have too few bits to mix well."""

_ROUNDS: Final = 6


class Permutation:
    """A seeded bijection on [0, n) that is never written out: element i costs O(1) time and memory.

    ``Permutation(n, key)[i]`` is what stands at place i; i may be an integer or an array of any shape.

    From n = 65,537 on it mixes b = ceil(log2 n) bits by ``_ROUNDS`` rounds of x <- x·(2x + odd) + addend
    mod 2^b, both keyed, then x <- x xor (x >> b/2), and walks the cycle until it is below n ("cycle
    walking": Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), fewer than two steps on
    average. Smaller ones sort their keys once (at most 512 kB).

    The quadratic step is RC6's (Rivest et al. 1998). It is a bijection, as x·(2x + a) - y·(2y + a) =
    (x - y)·(2(x + y) + a) and the last factor is odd. A multiplication by a keyed odd number alone has
    weak keys: with six rounds of it, one key in 250 left a visible pattern at n = 2^17.
    """

    def __init__(self, n: int, key: int) -> None:
        """Make the permutation of [0, n) that ``key`` names.

        Raises:
            ValueError: if n is negative or above 2^62.
        """
        if not 0 <= n <= 1 << 62:
            raise ValueError(f"a permutation needs a length between 0 and 2^62, got {n}")
        self.n = n
        self.key = key
        self._order: Int64Array | None = None
        if n <= _SMALL:
            self._order = np.argsort(sort_key(np.arange(n, dtype=np.uint64), key)).astype(np.int64)
            return
        bits = (n - 1).bit_length()
        self._dtype = np.dtype(np.uint32 if bits <= 32 else np.uint64)
        word = self._dtype.type
        mask = (1 << bits) - 1
        subkeys = iter(_subkeys(key, 2 * _ROUNDS))
        self._rounds = [(word(next(subkeys) & mask | 1), word(next(subkeys) & mask)) for _ in range(_ROUNDS)]
        self._mask = word(mask)
        self._shift = word((bits + 1) // 2)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, key={self.key:#018x})"

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: npt.NDArray[Any]) -> Int64Array: ...
    def __getitem__(self, place: int | npt.NDArray[Any]) -> int | Int64Array:
        """Return the element(s) at ``place``: an int, or int64 of the shape of the array given.

        Raises:
            IndexError: if a place is outside [0, n).
            TypeError: if places are not integers.
        """
        places = np.asarray(place)
        if places.dtype.kind not in "iu":
            raise TypeError(f"places are integers, not {places.dtype}")
        if places.size and not (int(places.min()) >= 0 and int(places.max()) < self.n):
            raise IndexError(f"place outside the {self.n} elements of the permutation")
        result = self._order[places] if self._order is not None else self._walk(places)
        return int(result) if isinstance(place, (int, np.integer)) else result

    def slice(self, start: int, stop: int) -> Int64Array:
        """Return the elements at places start…stop-1 as int64 of shape (stop - start,)."""
        return self[np.arange(start, stop, dtype=np.int64)]

    def _walk(self, places: npt.NDArray[Any]) -> Int64Array:
        values = self._mix(places.astype(self._dtype).reshape(-1))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            walked = self._mix(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.n]
        return values.astype(np.int64).reshape(places.shape)

    def _mix(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Mix ``x`` in place and return it."""
        one = self._dtype.type(1)
        for odd, addend in self._rounds:
            factor = x << one
            factor += odd
            x *= factor
            x += addend
            x &= self._mask
            x ^= x >> self._shift
        return x


@overload
def shuffle_indices(
    indices: npt.NDArray[Any], seed: int, epoch: int = 0, enabled: bool = True
) -> npt.NDArray[Any]: ...
@overload
def shuffle_indices(
    indices: Sequence[Item], seed: int, epoch: int = 0, enabled: bool = True
) -> list[Item]: ...
def shuffle_indices(
    indices: Sequence[Item] | npt.NDArray[Any], seed: int, epoch: int = 0, enabled: bool = True
) -> list[Item] | npt.NDArray[Any]:
    """Return the indices in the order of (seed, epoch): the small form for any loader.

    Args:
        indices: the dataset's indices, a sequence or a one-dimensional array; left as it is.
        seed: any integer. The same seed and epoch give the same order, on every machine and rank.
        epoch: another epoch, another order, unrelated to that of another seed.
        enabled: False gives the order of the input, for validation and test sets.

    Returns:
        A new array for an array, a new list for any other sequence.
    """
    if not enabled:
        return indices.copy() if isinstance(indices, np.ndarray) else list(indices)
    order = Permutation(len(indices), derive_key(seed, "epoch", epoch)).slice(0, len(indices))
    if isinstance(indices, np.ndarray):
        return indices[order]
    return [indices[int(i)] for i in order]
