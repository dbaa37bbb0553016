"""Seeded order: every random choice is a pure function of seed, purpose and id.

A result depends on its seed only. It is the same on every machine and for any number of threads, buckets and
workers.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

__all__ = [
    "MIX_LAST_SHIFT",
    "MIX_STEPS",
    "ORDER_VERSION",
    "Permutation",
    "PermutationRounds",
    "balanced_take",
    "derive_key",
    "permutation_rounds",
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
"""Version of the constants below, recorded in every manifest. Increase it when a constant changes."""

_WORD: Final = (1 << 64) - 1

MIX_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Steps of splitmix64's output function (Steele, Lea & Flood 2014), with the constants of David Stafford's
variant 13. Each step is (shift right and xor, multiply)."""
MIX_LAST_SHIFT: Final = 31
"""Shift right and xor after the steps."""
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, made odd: the increment of splitmix64."""


def derive_key(seed: int, *purpose: str | int) -> int:
    """Return the 64-bit key for a purpose under a seed.

    The key is the first 8 bytes, big-endian, of SHA-256 over a canonical text of order version, seed and
    purpose. Keys of different arguments are unrelated, for example those of (42, "epoch", 1) and (43,
    "epoch", 0).

    Args:
        seed: Any integer.
        *purpose: Texts and integers that name the purpose.

    Raises:
        TypeError: The seed is not an integer, or a part of the purpose is neither text nor an integer.
    """
    parts: list[str | int] = [_integer("a seed must be an integer", seed)]
    for part in purpose:
        is_text = isinstance(part, str)
        parts.append(str(part) if is_text else _integer("a purpose must be integers and text", part))
    # JSON escapes all characters outside ASCII, so every language can compute the same bytes.
    text = f"hexdata order {ORDER_VERSION} " + json.dumps(parts, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big")


def _integer(what: str, value: Any) -> int:
    """Return an integer, Python's or NumPy's, as Python's.

    Raises:
        TypeError: It is a bool or no integer; ``what`` begins the message.
    """
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what}, not {type(value).__name__}: {value!r}")


def _mix(value: int) -> int:
    """Return the splitmix64 output for a Python integer."""
    for shift, multiplier in MIX_STEPS:
        value = ((value ^ (value >> shift)) * multiplier) & _WORD
    return value ^ (value >> MIX_LAST_SHIFT)


def _subkeys(key: int, count: int) -> list[int]:
    """Return the first ``count`` words of the splitmix64 stream that starts at the key."""
    return [_mix((key + _GOLDEN_GAMMA * (i + 1)) & _WORD) for i in range(count)]


def sort_key(ids: npt.ArrayLike, key: int) -> UInt64Array:
    """Return the 64-bit sort keys of ids. The function is a bijection, so different ids have different keys.

    Each step (xor with a subkey, xor with a right shift, multiplication by an odd constant mod 2^64)
    can be undone, hence the bijection. :func:`sort_key_sql` is the same function as DuckDB SQL.

    Args:
        ids: Integers of any shape, converted to unsigned 64-bit.
        key: Key from :func:`derive_key`.

    Returns:
        uint64 array of the same shape. The seeded order of ids is the ascending order of their sort keys.

    Raises:
        TypeError: The ids are not integers. Floats would lose low bits.
    """
    values = np.asarray(ids)
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, not {values.dtype}")
    keys = sort_subkeys(key)
    x = values.astype(np.uint64)  # a copy: the steps below work in place
    x ^= np.uint64(keys[0])
    for (shift, multiplier), subkey in zip(MIX_STEPS, keys[1:], strict=True):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(multiplier)
        x ^= np.uint64(subkey)
    x ^= x >> np.uint64(MIX_LAST_SHIFT)
    return x


def sort_subkeys(key: int) -> list[int]:
    """Return the three 64-bit words that :func:`sort_key` derives from a key."""
    return _subkeys(key, len(MIX_STEPS) + 1)


def sort_key_sql(column: str, key: int | Sequence[str]) -> str:
    """Return a DuckDB SQL expression (UBIGINT) equal to :func:`sort_key` of ``column``.

    Products are computed as UHUGEINT, which cannot overflow, and reduced to 64 bits. DuckDB computes repeated
    subexpressions once. Negative ids are an error.

    Args:
        column: SQL expression of the id.
        key: Key from :func:`derive_key`, or, if the key differs between rows, the names of three UBIGINT
            columns with its :func:`sort_subkeys`.
    """
    keys = sort_subkeys(key) if isinstance(key, int) else key
    x = f"xor(({column})::UBIGINT, {keys[0]}::UBIGINT)"
    for (shift, multiplier), subkey in zip(MIX_STEPS, keys[1:], strict=True):
        x = f"xor({x}, {x} >> {shift})"
        x = f"(({x})::UHUGEINT * {multiplier}::UHUGEINT & {_WORD}::UHUGEINT)::UBIGINT"
        x = f"xor({x}, {subkey}::UBIGINT)"
    return f"xor({x}, {x} >> {MIX_LAST_SHIFT})"


def balanced_take(groups: Mapping[str, Sized | int], seed: int) -> dict[str, Int64Array]:
    """Select as many elements of every group as the smallest group has, by a seeded uniform choice.

    The elements with the lowest ``sort_key(index, derive_key(seed, "balance", name))`` are selected. The
    selection from a group depends on the other groups only through the number of elements, and a smaller
    selection is a subset of a larger one. ``hexdata shuffle --balance-by`` makes the same choice of position
    ids.

    Args:
        groups: Sequences or their lengths, by name.
        seed: Any integer.

    Returns:
        Selected indices of each group by name, ascending: int64 of shape (length of the smallest group,).

    Raises:
        ValueError: A length is negative.
    """
    sizes = {
        name: len(group) if isinstance(group, Sized) else _integer("a group is a sequence or a length", group)
        for name, group in groups.items()
    }
    kept = min(sizes.values(), default=0)
    if kept < 0:
        raise ValueError(f"a group cannot have {kept} elements")
    return {name: _lowest(kept, size, derive_key(seed, "balance", name)) for name, size in sizes.items()}


def _lowest(count: int, size: int, key: int) -> Int64Array:
    """Return the ``count`` indices below ``size`` with the lowest sort keys, ascending."""
    if count == size:
        return np.arange(size, dtype=np.int64)
    keys = sort_key(np.arange(size, dtype=np.uint64), key)
    # Keys are distinct, so it is certain which are the lowest, whatever the algorithm.
    return np.sort(np.argpartition(keys, count)[:count]).astype(np.int64)


def uniform_draw(ids: npt.ArrayLike, key: int) -> npt.NDArray[np.float64]:
    """Return a uniform draw in [0, 1) for each id under ``key``: float64 with 53 random bits."""
    # A double holds 53 bits exactly. With all 64, the largest keys would be rounded to 1.
    return (sort_key(ids, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_SMALL: Final = 1 << 16
"""Up to this length, a permutation is computed by sorting, because few bits are not mixed well by rounds."""

# A part of the order, as is ``_SMALL``: another number needs another ORDER_VERSION.
_ROUNDS: Final = 6


class PermutationRounds(NamedTuple):
    """Constants of the rounds of a :class:`Permutation` of more than 65,536 elements."""

    factors: tuple[tuple[int, int], ...]
    """The odd number and the addend of each round."""
    mask: int
    """2^b - 1."""
    shift: int
    """The right shift at the end of each round."""


def permutation_rounds(n: int, key: int) -> PermutationRounds | None:
    """Return the constants of the rounds of ``Permutation(n, key)``, or None if it sorts keys.

    Args:
        n: Length of the permutation, from 0 to 2^62.
        key: Key from :func:`derive_key`.
    """
    if n <= _SMALL:
        return None
    bits = (n - 1).bit_length()
    mask = (1 << bits) - 1
    subkeys = iter(_subkeys(key, 2 * _ROUNDS))
    factors = tuple((next(subkeys) & mask | 1, next(subkeys) & mask) for _ in range(_ROUNDS))
    return PermutationRounds(factors, mask, (bits + 1) // 2)


class Permutation:
    """A seeded permutation of [0, n) that is not stored: each element takes O(1) time and memory.

    ``Permutation(n, key)[i]`` is the element at index i, where i is an integer or an integer array:

        order = Permutation(1_000_000, derive_key(42, "epoch", 0))
        order[0]            # the first element
        order.slice(0, 10)  # the first ten elements, int64 (10,)

    For n > 65,536, b = ceil(log2 n) bits are mixed by ``_ROUNDS`` rounds of x <- x·(2x + odd) + addend mod
    2^b with keyed constants, followed by x <- x xor (x >> b/2). The rounds are repeated until the result is
    below n ("cycle walking": Black & Rogaway 2002, "Ciphers with arbitrary finite domains"), fewer than two
    times on average. Smaller permutations are computed by sorting keys once (at most 512 kB).

    The quadratic step is from RC6 (Rivest et al. 1998). It is a bijection, because x·(2x + a) - y·(2y + a) =
    (x - y)·(2(x + y) + a) and the last factor is odd. Multiplication by a keyed odd number alone has weak
    keys: with six such rounds, one key in 250 left a visible pattern at n = 2^17.
    """

    def __init__(self, n: int, key: int) -> None:
        """Create the permutation of [0, n) for a key.

        Args:
            n: Length, from 0 to 2^62.
            key: Key from :func:`derive_key`.

        Raises:
            ValueError: n is negative or above 2^62.
        """
        n = _integer("a permutation needs an integer length", n)
        key = _integer("the key of a permutation must be an integer", key)
        if not 0 <= n <= 1 << 62:
            raise ValueError(f"the length of a permutation must be between 0 and 2^62, got {n}")
        self.n = n
        self.key = key
        self._order: Int64Array | None = None
        rounds = permutation_rounds(n, key)
        if rounds is None:
            self._order = np.argsort(sort_key(np.arange(n, dtype=np.uint64), key)).astype(np.int64)
            return
        # Sums and products may overflow: reduced modulo the word or not, they have the same lowest b bits.
        self._dtype = np.dtype(np.uint32 if rounds.mask < 1 << 32 else np.uint64)
        word = self._dtype.type
        self._rounds = [(word(odd), word(addend)) for odd, addend in rounds.factors]
        self._mask = word(rounds.mask)
        self._shift = word(rounds.shift)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Permutation(n={self.n}, key={self.key:#018x})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: npt.NDArray[Any]) -> Int64Array: ...
    def __getitem__(self, index: int | npt.NDArray[Any]) -> int | Int64Array:
        """Return the element(s) at ``index``: an int, or int64 of the shape of the array given.

        Raises:
            IndexError: An index is outside [0, n).
            TypeError: The indices are not integers.
        """
        indices = np.asarray(index)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, not {indices.dtype}")
        # Negative indices too: NumPy would count them from the end, but the rounds would not.
        if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < self.n):
            raise IndexError(f"index outside the {self.n} elements of the permutation")
        result = self._order[indices] if self._order is not None else self._walk(indices)
        return int(result) if isinstance(index, (int, np.integer)) else result

    def slice(self, start: int, stop: int) -> Int64Array:
        """Return the elements at indices start … stop - 1, int64 of shape (stop - start,)."""
        return self[np.arange(start, stop, dtype=np.int64)]

    def _walk(self, indices: npt.NDArray[Any]) -> Int64Array:
        values = self._mix(indices.astype(self._dtype).reshape(-1))
        # This ends: the rounds are a bijection, and the cycle of an index returns to it, which is below n.
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            walked = self._mix(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.n]
        return values.astype(np.int64).reshape(indices.shape)

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
    """Return indices in the seeded order of an epoch, for use in any data loader.

    Args:
        indices: Indices of the dataset, a sequence or a one-dimensional array. It is not modified.
        seed: Any integer. The same seed and epoch give the same order on every machine and rank.
        epoch: Epoch number; each epoch has an unrelated order. Default 0.
        enabled: False keeps the given order, for validation and test sets. Default True.

    Returns:
        A new array for an array, a new list for any other sequence.
    """
    if not isinstance(indices, Sized):
        raise TypeError(f"indices must be a sequence or an array, not {type(indices).__name__}")
    epoch = _integer("epoch must be an integer", epoch)
    if epoch < 0:
        raise ValueError(f"epoch must be at least 0, found {epoch}")
    if not enabled:
        return indices.copy() if isinstance(indices, np.ndarray) else list(indices)
    order = Permutation(len(indices), derive_key(seed, "epoch", epoch)).slice(0, len(indices))
    if isinstance(indices, np.ndarray):
        return indices[order]
    # Sequences of other libraries may refuse NumPy's integers.
    return [indices[int(i)] for i in order]
