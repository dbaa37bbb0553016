"""Weights of positions: the number of times that each epoch delivers each position.

A position of weight w is delivered floor(w) or ceil(w) times per epoch. ``docs/order.md`` defines which: it
is a systematic sample along the seeded order of the position ids, from an offset that advances by the golden
ratio with each epoch. Any epoch can be computed directly.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import BudgetError, ConfigError
from hexdata.loader.options import ARRAY
from hexdata.loader.row_filter import OpenStore, RowSubset, evaluate_labels
from hexdata.loader.row_source import RowSource
from hexdata.order import derive_key, sort_key
from hexdata.pool import available_memory
from hexdata.units import format_bytes

__all__ = [
    "WEIGHT_UNIT",
    "RealisedWeights",
    "RowWeights",
    "WeightedRows",
    "Weights",
    "align_weights",
    "weights_text",
]

Int64Array = npt.NDArray[np.int64]
Weights = str | npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike]
"""Weights as given: an SQL expression, one weight for each row, or a pair of position ids and weights."""
RowWeights = str | npt.NDArray[Any]
"""An SQL expression, or one number for each row of a split (N,)."""

_UNIT_BITS: Final = 32
WEIGHT_UNIT: Final = 1 << _UNIT_BITS
"""Weights are multiples of 1 / WEIGHT_UNIT."""
_MASK: Final = WEIGHT_UNIT - 1
_GOLDEN_STEP: Final = 0x9E3779B9
"""2^32 divided by the golden ratio, made odd: what the offset advances by with each epoch."""
_LARGEST: Final = 65_535
"""Largest weight."""
_CHUNK: Final = 1 << 18
"""Number of rows that are processed together."""
_SORTED_ROWS: Final = 1 << 22
"""Approximate number of sort keys that are sorted together."""
_NO_BUCKET: Final = 65_535
_ITEM_BYTES: Final = 2
_MEMORY_SHARE: Final = 0.8


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


def weights_text(given: Weights | None) -> str | None:
    """Return the weights as options and states record them: the expression, or "array" for arrays."""
    return given if given is None or isinstance(given, str) else ARRAY


def align_weights(source: RowSource, given: Weights) -> RowWeights:
    """Return an SQL expression unchanged, and arrays as one number for each row of a split.

    Args:
        source: The rows of the split.
        given: An SQL expression over the columns of a position and its game; or one weight for each row (N,);
            or a pair of position ids and weights, both (M,), in any order. Ids that are not in the split are
            not used, and rows whose ids are missing get NaN.

    Raises:
        ConfigError: The arrays have another shape or dtype, or contain an id twice.
    """
    if isinstance(given, str):
        return given
    if not (isinstance(given, tuple) and len(given) == 2 and hasattr(given[0], "__len__")):
        array = _as_array("weights", given, "iufb")
        if array.shape != (source.positions,):
            raise ConfigError(
                "weights have another length",
                found=array.shape,
                expected=f"({source.positions},), one weight for each position of the split in stored order",
                hint="Give a pair (position_ids, weights) to name the positions.",
            )
        return array.copy()
    ids = _as_array("the position ids of weights", given[0], "iu")
    array = _as_array("weights", given[1], "iufb")
    if array.shape != ids.shape:
        raise ConfigError(
            "weights have another length", found=array.shape, expected=f"{ids.shape}, one for each id"
        )
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeated):
        raise ConfigError("weights contain a position twice", record=f"position {ordered[repeated[0]]}")
    aligned = np.full(source.positions, np.nan, array.dtype if array.dtype.kind == "f" else np.float64)
    start = 0
    for block in source.scan(("position_id",)):
        wanted = block["position_id"]
        found = np.searchsorted(ordered, wanted)
        rows = np.flatnonzero(ordered.take(found, mode="clip") == wanted) if len(ordered) else found[:0]
        aligned[start + rows] = array[order[found[rows]]]
        start += len(wanted)
    return aligned


def _values(
    source: RowSource, weights: RowWeights, subset: RowSubset | None, open_store: OpenStore | None
) -> Iterator[npt.NDArray[np.float64]]:
    """Yield the weights of the selected rows in order, some rows at a time, not checked."""
    if isinstance(weights, str):
        yield from evaluate_labels(source, "weights", weights, open_store, subset)
        return
    count = len(weights) if subset is None else len(subset)
    for start in range(0, count, _CHUNK):
        indices = np.arange(start, min(start + _CHUNK, count))
        yield weights[indices if subset is None else subset.rows(indices)].astype(np.float64)


def _as_array(name: str, given: Any, kinds: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(given)
    except ValueError:  # nested sequences of different lengths
        array = np.empty((0, 0), object)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ConfigError(
            f"{name} cannot be used",
            found=f"{type(given).__name__}: {array.dtype} of shape {array.shape}",
            expected="integers of one dimension" if kinds == "iu" else "numbers of one dimension",
        )
    return array


class WeightedRows:
    """The rows of each epoch, given the weights of the selected rows.

    Args:
        source: The rows of the split.
        subset: The selected rows; None for all rows.
        weights: The weights, of which only those of the selected rows are used.
        seed: Seed of the loader.
        open_store: Opens the store of the games (default None: there is none).

    Attributes:
        unit_sum: Sum of the weights of the selected rows, in units of 2^-32.
        digest: SHA-256 of the weights of the selected rows, as 64 hexadecimal digits.

    Raises:
        ConfigError: A weight is missing, negative, not finite or above 65,535, or the expression is invalid,
            or the weights add up to less than one.
        BudgetError: The positions of an epoch do not fit into memory.
    """

    def __init__(
        self,
        source: RowSource,
        subset: RowSubset | None,
        weights: RowWeights,
        seed: int,
        open_store: OpenStore | None = None,
    ) -> None:
        self._subset = subset
        self._read(source, weights, open_store)
        self._start = derive_key(seed, "weights", "start") >> _UNIT_BITS
        whole_sum = int(self._whole.sum(dtype=np.int64))
        fractions = 0 if self._fraction is None else int(self._fraction.sum(dtype=np.uint64))
        self.unit_sum = (whole_sum << _UNIT_BITS) + fractions
        if not self.smallest_size:
            raise ConfigError(
                "the weights select no position",
                found=f"weights of {len(self._whole):,} positions that add up to {self.weight_sum:g}",
                expected="a sum of at least 1",
            )
        needed, memory = _ITEM_BYTES * (self.smallest_size + 1), int(available_memory() * _MEMORY_SHARE)
        if needed > memory:
            raise BudgetError(
                "the positions of an epoch do not fit into memory",
                found=f"weights that add up to {self.weight_sum:,.0f}, which take {format_bytes(needed)}",
                expected=f"at most {format_bytes(memory)}",
                hint="Divide all weights by the same number.",
            )
        self._phase = self._find_phases(source, derive_key(seed, "weights"))

    def _read(self, source: RowSource, weights: RowWeights, open_store: OpenStore | None) -> None:
        """Set the integer parts of the weights, the rests in units of 2^-32, and the digest of both."""
        count = source.positions if self._subset is None else len(self._subset)
        whole, fraction = np.empty(count, np.uint16), np.empty(count, np.uint32)
        start = 0
        for values in _values(source, weights, self._subset, open_store):
            stop = start + len(values)
            valid = (values >= 0) & (values <= _LARGEST)
            if not valid.all():
                index = int(valid.argmin())
                raise self._error(source, start + index, float(values[index]), isinstance(weights, str))
            lower = np.floor(values)
            units = np.rint((values - lower) * WEIGHT_UNIT).astype(np.uint64)
            whole[start:stop] = lower + (units >> np.uint64(_UNIT_BITS))
            fraction[start:stop] = units & np.uint64(_MASK)
            start = stop
        narrow = whole.max(initial=0) <= np.iinfo(np.uint8).max
        self._whole: npt.NDArray[Any] = whole.astype(np.uint8) if narrow else whole
        self._fraction = fraction if fraction.any() else None
        digest = hashlib.sha256(whole.astype("<u2", copy=False).data)
        digest.update(fraction.astype("<u4", copy=False).data)
        self.digest = digest.hexdigest()

    def _error(self, source: RowSource, index: int, found: float, is_expression: bool) -> ConfigError:
        (position,) = source.take(self._rows(np.array([index])), ("position_id",))["position_id"].tolist()
        hint, text = None, repr(found)
        if found != found:  # NaN
            text = "null or nan" if is_expression else "none or nan"
            hint = "Use coalesce(…, 1) for unknown numbers." if is_expression else None
        elif is_expression and found > _LARGEST:
            hint = f"Use least(…, {_LARGEST}), or divide all weights by the same number."
        return ConfigError(
            "a weight cannot be used",
            record=f"position {position}",
            found=text,
            expected=f"a number from 0 to {_LARGEST:,}; 0 leaves a position out",
            hint=hint,
        )

    def _rows(self, indices: Int64Array) -> Int64Array:
        return indices if self._subset is None else self._subset.rows(indices)

    @property
    def weight_sum(self) -> float:
        """Sum of the weights of the selected rows."""
        return self.unit_sum / WEIGHT_UNIT

    @property
    def smallest_size(self) -> int:
        """The smallest number of positions that an epoch can have."""
        return self.unit_sum >> _UNIT_BITS

    def size(self, epoch: int) -> int:
        """Return the number of positions of an epoch, counting each repetition."""
        return (self.unit_sum + self._offset(epoch)) >> _UNIT_BITS

    def first(self, epoch: int) -> int:
        """Return the number of positions of all epochs before ``epoch``."""
        whole, rest = divmod(self.unit_sum, WEIGHT_UNIT)
        # An epoch has one position more than ``whole`` if its offset and ``rest`` exceed the unit.
        ends = _sum_of_quotients(epoch, WEIGHT_UNIT, _GOLDEN_STEP, self._start + rest)
        return epoch * whole + ends - _sum_of_quotients(epoch, WEIGHT_UNIT, _GOLDEN_STEP, self._start)

    def rows(self, epoch: int) -> RowSubset:
        """Return the rows of an epoch in stored order, each as often as it is delivered."""
        return RowSubset(map(self._rows, self._numbers(epoch)))

    def indices(self, epoch: int) -> Int64Array:
        """Return the indices among the selected rows, ascending, each as often as it is delivered."""
        return np.concatenate([np.empty(0, np.int64), *self._numbers(epoch)])

    def realised(self, epoch: int) -> RealisedWeights:
        """Return what the weights amount to in an epoch."""
        size = self.size(epoch)
        positions = sum(int(np.count_nonzero(counts)) for _, counts in self._counts(epoch))
        return RealisedWeights(epoch, self.weight_sum, size, positions, size / self.weight_sum)

    def _offset(self, epoch: int) -> int:
        """Return where the systematic sampling of an epoch begins, in units of 2^-32."""
        return (self._start + epoch * _GOLDEN_STEP) & _MASK

    def _counts(self, epoch: int) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield, for some rows at a time, the index of the first and how often each is delivered."""
        offset = np.uint32(self._offset(epoch))
        for start in range(0, len(self._whole), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            counts = self._whole[chunk].astype(np.uint32)
            if self._fraction is not None and self._phase is not None:
                before = self._phase[chunk] + offset  # mod 2^32
                counts += before + self._fraction[chunk] < before  # the sum exceeds 2^32
            yield start, counts

    def _numbers(self, epoch: int) -> Iterator[Int64Array]:
        """Yield the indices of an epoch in order, up to some 2^18 + 65,536 at a time."""
        for start, counts in self._counts(epoch):
            ends = np.cumsum(counts, dtype=np.int64)
            cuts = np.searchsorted(ends, np.arange(_CHUNK, int(ends[-1]), _CHUNK)).tolist()
            for first, stop in itertools.pairwise([0, *cuts, len(counts)]):
                yield np.repeat(np.arange(start + first, start + stop), counts[first:stop])

    def _find_phases(self, source: RowSource, key: int) -> npt.NDArray[np.uint32] | None:
        """Return the sum, mod 2^32, of the fractions before each row in the order of the sort keys.

        The order is sorted in ranges of keys, so that it takes little memory.
        """
        fraction = self._fraction
        if fraction is None:
            return None
        buckets = min(_NO_BUCKET, -(-int(np.count_nonzero(fraction)) // _SORTED_ROWS))
        bucket = np.full(len(fraction), _NO_BUCKET, np.uint16)
        for start in range(0, len(fraction), _CHUNK):
            chosen = np.flatnonzero(fraction[start : start + _CHUNK]) + start
            high = self._keys(source, chosen, key) >> np.uint64(_UNIT_BITS)
            bucket[chosen] = high * np.uint64(buckets) >> np.uint64(_UNIT_BITS)
        phase = np.zeros(len(fraction), np.uint32)
        total = np.uint64(0)
        for number in range(buckets):
            chosen = np.flatnonzero(bucket == number)
            ordered = chosen[np.argsort(self._keys(source, chosen, key), kind="stable")]
            units = fraction[ordered].astype(np.uint64)
            ends = np.cumsum(units) + total
            phase[ordered] = (ends - units) & np.uint64(_MASK)
            total = ends[-1] & np.uint64(_MASK) if len(ends) else total
        return phase

    def _keys(self, source: RowSource, chosen: Int64Array, key: int) -> npt.NDArray[np.uint64]:
        return sort_key(source.take(self._rows(chosen), ("position_id",))["position_id"], key)


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
