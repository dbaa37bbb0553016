"""Weights of positions: the number of times that each epoch delivers each position.

A position of weight w is delivered floor(w) or ceil(w) times per epoch. ``docs/order.md`` defines which: a
systematic sample along the seeded order of the position ids gives the number of times in each cycle of eight
epochs, and three halvings, in which pairs of positions are exchanged at random, the epochs. Any epoch can be
computed directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.checks import unusable
from hexdata.errors import ConfigError
from hexdata.loader.game_table import GameTable
from hexdata.loader.options import Weights
from hexdata.loader.row_filter import Rows, evaluate_labels, join_rows
from hexdata.loader.shared_arrays import require_memory
from hexdata.order import derive_key, sort_key

Int64Array = npt.NDArray[np.int64]

# Integers make the counts exact and equal on every machine; sums of floats depend on their order.
_UNIT_BITS: Final = 32
WEIGHT_UNIT: Final = 1 << _UNIT_BITS
"""Weights are multiples of 1 / WEIGHT_UNIT."""
_MASK: Final = WEIGHT_UNIT - 1
_GOLDEN_STEP: Final = 0x9E3779B9
"""2^32 divided by the golden ratio, made odd: what the offset advances by with each cycle."""
# Part of the order: another number changes which positions an epoch delivers.
_HALVINGS: Final = 3
_CYCLE: Final = 1 << _HALVINGS
"""Number of epochs in a cycle. In longer ones, the counts of a position are less even."""
# The integer part then fits into 16 bits.
_LARGEST: Final = 65_535
"""Largest weight."""
# Sums of 8 fractions of 32 bits over a chunk stay below 2^51, far from the limit of 64 bits.
_CHUNK: Final = 1 << 16
"""Number of rows that are processed together."""
# Keys and order of a bucket take 8 bytes each, some 64 MB together.
_SORTED_ROWS: Final = 1 << 22
"""Approximate number of sort keys that are sorted together."""
# Marks rows without a fraction, which never take part in a draw; buckets are the numbers below.
_NO_BUCKET: Final = 65_535
_ITEM_BYTES: Final = 4


@dataclass(frozen=True)
class RealisedWeights:
    """What the weights of a loader amount to in one epoch, over all ranks."""

    epoch: int
    """The epoch."""
    weight_sum: float
    """Sum of the weights of all selected positions."""
    delivered: int
    """Number of positions of the epoch, counting each repetition: within one of ``weight_sum``."""
    positions: int
    """Number of different positions of the epoch."""
    ratio: float
    """``delivered / weight_sum``."""


def _values(
    source: GameTable, given: Weights, subset: Rows | None
) -> Iterator[tuple[slice, npt.NDArray[np.float64]]]:
    """Yield the weights of the selected rows, not checked, some at a time, and which of these rows they are.

    Rows whose ids are missing from pairs of ids and weights get NaN.

    Raises:
        ConfigError: Arrays have another shape or dtype, or contain an id twice, or the expression is invalid.
    """
    if isinstance(given, str):
        yield from evaluate_labels(source, "weights", given, subset)
        return
    given_any: Any = given
    # A tuple of two plain numbers is one weight each for a split of two positions.
    is_pair = isinstance(given, tuple) and len(given) == 2 and hasattr(given[0], "__len__")
    array = _as_array("weights", given_any[1] if is_pair else given, "iufb")
    ids = (
        _as_array("the position ids of weights", given_any[0], "iu")
        if is_pair
        else np.arange(source.positions)
    )
    if array.shape != ids.shape:
        expected = f"{ids.shape}, one for each position{' id' if is_pair else ' in stored order, or a pair'}"
        raise ConfigError("weights have another length", found=array.shape, expected=expected)
    order = np.argsort(ids, kind="stable") if is_pair else ids
    ordered = ids[order]
    if len(repeated := np.flatnonzero(ordered[1:] == ordered[:-1])):
        raise ConfigError("weights contain a position twice", record=f"position {ordered[repeated[0]]}")
    count = source.positions if subset is None else len(subset)
    for start in range(0, count, _CHUNK):
        own = slice(start, min(start + _CHUNK, count))
        rows = np.arange(start, own.stop)
        rows = rows if subset is None else subset[rows]
        wanted = source.take(rows, ("position_id",))["position_id"] if is_pair else rows
        values = np.full(len(rows), np.nan)
        # Ids may be missing, in which case searchsorted gives a neighbour, and its weight stays NaN.
        found = np.searchsorted(ordered, wanted)
        known = np.flatnonzero(ordered.take(found, mode="clip") == wanted) if len(ordered) else found[:0]
        values[known] = array[order[found[known]]]
        yield own, values


def _as_array(name: str, given: Any, kinds: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(given)
    except ValueError:  # nested sequences of different lengths
        array = np.empty((0, 0), object)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        expected = "integers of one dimension" if kinds == "iu" else "numbers of one dimension"
        raise unusable(name, f"{type(given).__name__}: {array.dtype} of shape {array.shape}", expected)
    return array


class WeightedRows:
    """The rows of each epoch, given the weights of the selected rows.

    Args:
        source: The rows of the split.
        subset: The selected rows; None for all rows.
        weights: The weights, as given. Of arrays, only those of the selected rows are used.
        seed: Seed of the loader.

    Attributes:
        unit_sum: Sum of the weights of the selected rows, in units of 2^-32.
        digest: SHA-256 of the weights of the selected rows, as 64 hexadecimal digits.

    Raises:
        ConfigError: A weight is missing, negative, not finite or above 65,535, or the expression is invalid,
            or the weights add up to less than one.
        BudgetError: The positions of an epoch do not fit into memory.
    """

    def __init__(self, source: GameTable, subset: Rows | None, weights: Weights, seed: int) -> None:
        self._subset, self._positions, self._seed = subset, source.positions, seed
        # A weight of 2.25 has the integer part 2 and the fraction 2^30.
        self._whole, self._fraction = self._split_weights(source, weights)
        # In a fixed byte order, so that equal weights have equal digests on every machine.
        digest = hashlib.sha256(self._whole.astype("<u2", copy=False).data)
        digest.update(self._fraction.astype("<u4", copy=False).data)
        self.digest = digest.hexdigest()
        self._whole_sum = int(self._whole.sum(dtype=np.int64))
        self._fraction_sum = int(self._fraction.sum(dtype=np.uint64))
        self.unit_sum = (self._whole_sum << _UNIT_BITS) + self._fraction_sum
        # An epoch delivers this number of positions, or one more.
        shortest_epoch = self.unit_sum >> _UNIT_BITS
        if not shortest_epoch:  # some epochs would deliver nothing
            found = f"{len(self._whole):,} weights that add up to {self.weight_sum:g}"
            raise ConfigError("the weights select no position", found=found, expected="a sum of at least 1")
        reason = f"the positions of an epoch do not fit into memory: {self.weight_sum:,.0f} in all"
        # Large weights multiply the length of an epoch, whose row numbers are held in memory.
        require_memory(_ITEM_BYTES * (shortest_epoch + 1), reason, "Divide all weights by the same number.")
        # A random start of the systematic sample, so that each position is drawn with its exact probability.
        self._start = derive_key(seed, "weights", "start") >> _UNIT_BITS
        self._order = self._find_order(source, derive_key(seed, "weights"))

    def _split_weights(
        self, source: GameTable, weights: Weights
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint32]]:
        """Return the integer parts of the weights of the selected rows, and the rests in units of 2^-32."""
        count = source.positions if self._subset is None else len(self._subset)
        whole, fraction = np.empty(count, np.uint16), np.empty(count, np.uint32)
        for own, values in _values(source, weights, self._subset):
            valid = (values >= 0) & (values <= _LARGEST)
            if not valid.all():
                index = int(valid.argmin())
                row = self._rows(np.array([own.start + index]))
                ids, found = source.take(row, ("position_id",))["position_id"], float(values[index])
                raise ConfigError(
                    "a weight cannot be used",
                    record=f"position {ids[0]}",
                    found="null or nan" if found != found else repr(found),
                    expected=f"a number from 0 to {_LARGEST:,}; 0 leaves a position out",
                    hint=f"In SQL, use coalesce(…, 1) and least(…, {_LARGEST}).",
                )
            lower = np.floor(values)
            # A fraction just below 1 may be rounded up to a whole unit, which is carried below.
            units = np.rint((values - lower) * WEIGHT_UNIT).astype(np.uint64)
            whole[own] = lower + (units >> np.uint64(_UNIT_BITS))
            fraction[own] = units & np.uint64(_MASK)
        # Most weights are small, and one number is kept per selected position.
        return whole.astype(np.uint8) if whole.max(initial=0) < 256 else whole, fraction

    def _rows(self, indices: Int64Array) -> npt.NDArray[Any]:
        return indices if self._subset is None else self._subset[indices]

    @property
    def weight_sum(self) -> float:
        """Sum of the weights of the selected rows."""
        return self.unit_sum / WEIGHT_UNIT

    def size(self, epoch: int) -> int:
        """Return the number of positions of an epoch, counting each repetition."""
        cycle, slot = divmod(epoch, _CYCLE)
        drawn = (self._offset(cycle) + _CYCLE * self._fraction_sum) >> _UNIT_BITS
        # Halving a sum needs no single position: pairs split evenly, and the key decides about an odd one.
        for is_second, key in self._halvings(cycle, slot):
            drawn = (drawn + (key & 1 ^ is_second)) >> 1
        return self._whole_sum + drawn

    def first(self, epoch: int) -> int:
        """Return the number of positions of all epochs before ``epoch``."""
        cycles, rest = divmod(epoch, _CYCLE)
        # The sum of a cycle is a difference of two floors, so whole cycles add up in closed form.
        ends = _sum_of_quotients(cycles, WEIGHT_UNIT, _GOLDEN_STEP, self._start + _CYCLE * self._fraction_sum)
        drawn = ends - _sum_of_quotients(cycles, WEIGHT_UNIT, _GOLDEN_STEP, self._start)
        own = sum(self.size(each) for each in range(epoch - rest, epoch))
        return cycles * _CYCLE * self._whole_sum + drawn + own

    def rows(self, epoch: int) -> Rows:
        """Return the rows of an epoch in stored order, each as often as it is delivered."""
        return join_rows(map(self._rows, self._numbers(epoch)), self._positions)

    def indices(self, epoch: int) -> Int64Array:
        """Return the indices among the selected rows, ascending, each as often as it is delivered."""
        return np.concatenate([np.empty(0, np.int64), *self._numbers(epoch)])

    def realised(self, epoch: int) -> RealisedWeights:
        """Return what the weights amount to in an epoch."""
        size = self.size(epoch)
        positions = sum(int(np.count_nonzero(counts)) for _, counts in self._counts(epoch))
        return RealisedWeights(epoch, self.weight_sum, size, positions, size / self.weight_sum)

    def _offset(self, cycle: int) -> int:
        """Return where the systematic sample of a cycle begins, in units of 2^-32."""
        return (self._start + cycle * _GOLDEN_STEP) & _MASK

    def _halvings(self, cycle: int, slot: int) -> Iterator[tuple[int, int]]:
        """Yield, for each halving that leads to an epoch of a cycle, the half (0 or 1) and the key."""
        node = 1
        for level in reversed(range(_HALVINGS)):
            half = slot >> level & 1
            yield half, derive_key(self._seed, "weights", cycle, node)
            node = 2 * node + half

    def _drawn(self, epoch: int) -> npt.NDArray[np.bool_]:
        """Return which of the selected rows an epoch delivers once more than ``floor(weight)``."""
        drawn = np.zeros(len(self._whole), np.bool_)
        cycle, slot = divmod(epoch, _CYCLE)
        counts = np.empty(len(self._order), np.uint8)
        # Draw a whole cycle along the seeded order: a position is drawn
        # each time the running sum passes a unit.
        before = np.uint64(self._offset(cycle))
        for start in range(0, len(counts), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            units = self._fraction[self._order[chunk]].astype(np.uint64) * np.uint64(_CYCLE)
            ends = np.cumsum(units) + before
            counts[chunk] = (ends >> np.uint64(_UNIT_BITS)) - ((ends - units) >> np.uint64(_UNIT_BITS))
            # Only the fraction is carried on, so that sums never overflow.
            before = ends[-1] & np.uint64(_MASK)
        # Then halve the counts three times, towards the half that contains this epoch.
        for half, key in self._halvings(cycle, slot):
            _take_half(counts, half, key)
        drawn[self._order[counts > 0]] = True
        return drawn

    def _counts(self, epoch: int) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield, for some rows at a time, the index of the first and how often each is delivered."""
        drawn = self._drawn(epoch)
        for start in range(0, len(self._whole), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            yield start, self._whole[chunk].astype(np.uint32) + drawn[chunk]

    def _numbers(self, epoch: int) -> Iterator[Int64Array]:
        """Yield the indices of an epoch in order, some at a time."""
        for start, counts in self._counts(epoch):
            yield np.repeat(np.arange(start, start + len(counts)), counts)

    def _find_order(self, source: GameTable, key: int) -> npt.NDArray[Any]:
        """Return the indices of the rows whose weights have fractions, in the order of their sort keys.

        They are sorted in ranges of keys, so that it takes little memory.
        """
        fraction = self._fraction
        count = int(np.count_nonzero(fraction))
        buckets = min(_NO_BUCKET, -(-count // _SORTED_ROWS))
        # First pass: the range of keys that each row falls into, 2 bytes per row instead of an 8-byte key.
        bucket = np.full(len(fraction), _NO_BUCKET, np.uint16)
        for start in range(0, len(fraction), _CHUNK):
            chosen = np.flatnonzero(fraction[start : start + _CHUNK]) + start
            high = self._keys(source, chosen, key) >> np.uint64(_UNIT_BITS)
            bucket[chosen] = high * np.uint64(buckets) >> np.uint64(_UNIT_BITS)
        order = np.empty(count, np.uint32 if len(fraction) <= WEIGHT_UNIT else np.int64)
        start = 0
        # Second pass: sort one range after the other, which computes its keys again.
        for number in range(buckets):
            chosen = np.flatnonzero(bucket == number)
            ordered = chosen[np.argsort(self._keys(source, chosen, key), kind="stable")]
            order[start : start + len(chosen)] = ordered
            start += len(chosen)
        return order

    def _keys(self, source: GameTable, chosen: Int64Array, key: int) -> npt.NDArray[np.uint64]:
        return sort_key(source.take(self._rows(chosen), ("position_id",))["position_id"], key)


def _take_half(counts: npt.NDArray[np.uint8], half: int, key: int) -> None:
    """Halve the counts of positions in place: an odd count is rounded up in one half and down in the other.

    Of each two successive odd counts, one is rounded up in the first half, the other one in the second, so
    that the sum is halved too. The key decides which, and also about a last one that has no other.

    Args:
        counts: Counts in a range of epochs, in the order of the draw.
        half: 0 for the first half of these epochs, 1 for the second.
        key: Key of the range.
    """
    total, rank = int(np.count_nonzero(counts & 1)), 0
    for start in range(0, len(counts), _CHUNK):
        chunk = counts[start : start + _CHUNK]
        odd = np.flatnonzero(chunk & 1)
        ranks = np.arange(rank, rank + len(odd), dtype=np.uint64)
        in_first = (ranks & np.uint64(1)) ^ sort_key(ranks >> np.uint64(1), key) >> np.uint64(63)
        rank += len(odd)
        # The last odd count of all has no partner in its pair.
        if len(odd) and rank == total and total % 2:
            in_first[-1] = key & 1
        chunk[odd] += in_first.astype(np.uint8) ^ half
        chunk >>= 1


def _sum_of_quotients(count: int, divisor: int, step: int, start: int) -> int:
    """Return the sum of ``(start + i * step) // divisor`` over i from 0 to ``count - 1``.

    The whole parts of ``step`` and ``start`` are added in closed form. What remains counts the points below a
    line, which is the same sum with ``step`` and ``divisor`` exchanged, as in Euclid's algorithm.
    """
    total = 0
    while count:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        count, start = divmod(count * step + start, divisor)
        divisor, step = step, divisor
    return total
