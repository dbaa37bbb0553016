"""Groups of examples with the same layout, as columns. Values are not checked.

Examples that were read one by one are sorted into groups here. A run of similar examples becomes a group
directly. Both kinds of groups are validated by the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import Reason
from hexdata.formats.legacy import limits
from hexdata.formats.legacy.allowlist import PickledArray, kind_of
from hexdata.text import shortened

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

SEARCH_KEY: Final = "policy_search_target"
"""Key of the policy of a search. ``policy`` beside it is the move that was played."""
REQUIRED: Final = ("board", "policy", "value")
"""Required keys of an example, and the fields of a tuple in order."""
ARRAYS: Final = ("board", "policy", SEARCH_KEY)
_KNOWN: Final = frozenset([*REQUIRED, "player_to_move", "metadata", SEARCH_KEY])


# Layouts


class ArrayKind(NamedTuple):
    """The common properties of the arrays of a group."""

    dtype: str
    shape: tuple[int, ...]
    fortran: bool

    def __str__(self) -> str:
        return f"an array {self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class ExampleLayout:
    """The keys and array kinds shared by the examples of a group."""

    keys: tuple[str, ...] | None
    """Keys of the dict, in order; None for a tuple (board, policy, value). Keys that the legacy tool does not
    write have JSON values."""
    metadata_keys: tuple[str, ...] | None
    """Keys of the metadata, in order; None if there is no metadata."""
    kinds: tuple[ArrayKind | str | None, ...]
    """For each of ``ARRAYS``, the kind of the array; if the value is not an array, a description of it; None
    if the examples do not have this key."""

    @property
    def packed(self) -> dict[str, ArrayKind]:
        """The arrays of a valid shape, by key. Empty if the shape of the board is invalid."""
        board = self.kinds[0]
        if not isinstance(board, ArrayKind) or len(board.shape) != 3:
            return {}
        planes, n, columns = board.shape
        if planes != 2 or n != columns or not MIN_SIZE <= n <= MAX_SIZE:
            return {}
        policies = zip(ARRAYS[1:], self.kinds[1:], strict=True)
        valid = {k: kind for k, kind in policies if isinstance(kind, ArrayKind) and kind.shape == (n * n,)}
        return {"board": board} | valid


def layout_of(example: object) -> ExampleLayout | tuple[Reason, str]:
    """Return the layout of an example; or a reason code and the details if the layout is invalid."""
    if isinstance(example, tuple) and len(example) == 3:
        return ExampleLayout(None, None, (*map(_array_kind, example[:2]), None))
    if not isinstance(example, dict):
        found = f"a tuple of {len(example)}" if isinstance(example, tuple) else kind_of(example)
        return Reason.EXAMPLE_LAYOUT, f"found {found}; expected a dict, or a tuple (board, policy, value)"
    missing = [key for key in REQUIRED if key not in example]
    others = [key for key in example if key not in _KNOWN]
    if missing or not all(isinstance(key, str) for key in others):
        # Cut before they are shown, since a key may be of any length.
        keys = [key[:80] if isinstance(key, str) else key for key in [*example][:8]]
        return Reason.EXAMPLE_LAYOUT, f"missing keys {missing}; found {shortened(str(keys))}"
    metadata = example.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        return Reason.METADATA_TYPE, f"found {kind_of(metadata)}; expected a dict with texts as keys"
    count, size = len(metadata) + len(others), sum(map(len, metadata)) + sum(map(len, others))
    if count > limits.METADATA_KEYS or size > limits.METADATA_BYTES:
        return Reason.METADATA_SIZE, f"{count:,} keys of {size:,} characters"
    kinds = tuple(_array_kind(example[key]) if key in example else None for key in ARRAYS)
    return ExampleLayout(tuple(example), tuple(metadata) if "metadata" in example else None, kinds)


def _array_kind(value: object) -> ArrayKind | str:
    if isinstance(value, PickledArray) and value.dtype:
        return ArrayKind(value.dtype, value.shape, value.fortran)
    return kind_of(value)


# Columns


@dataclass(eq=False, slots=True)
class Column:
    """A value of each of n examples: that of row i is ``values[codes[i]]``."""

    codes: npt.NDArray[np.intp]
    values: Sequence[Any]

    @classmethod
    def of_numbers(cls, numbers: npt.NDArray[Any]) -> Column:
        """Return an array (n,) of integers or floats as a column. Values are equal if their bits are."""
        bits = numbers.view(f"u{numbers.itemsize}")
        if (bits == bits[0]).all():  # most columns are constant: skip the rest
            return cls(np.zeros(len(bits), np.intp), numbers[:1].tolist())
        if bits.max() < 1 << 10:  # most others are small integers: a table is faster than a sort
            is_used = np.bincount(bits) > 0
            distinct, codes = np.flatnonzero(is_used).astype(bits.dtype), (np.cumsum(is_used) - 1)[bits]
        else:
            distinct, codes = np.unique(bits, return_inverse=True)
        return cls(codes, distinct.view(numbers.dtype).tolist())

    @classmethod
    def zipped(cls, columns: Sequence[Column]) -> Column:
        """Return a column of tuples that combine the rows of several columns. Needs at least one column."""
        mixed = np.zeros_like(columns[0].codes)
        for column in columns:
            if len(column.values) > 1:
                # Codes are made dense for each column, as their products over many columns would overflow.
                mixed = np.unique(mixed * len(column.values) + column.codes, return_inverse=True)[1]
        rows = np.zeros(mixed.max() + 1, np.intp)
        rows[mixed[::-1]] = np.arange(len(mixed))[::-1]  # the first row of each combination is written last
        parts = [[column.values[code] for code in column.codes[rows].tolist()] for column in columns]
        return cls(mixed, list(zip(*parts, strict=True)))


# Arrays


ExampleArrays = dict[str, npt.NDArray[Any]]
"""Arrays of n examples, packed. Of boards: ``boards``, as of :func:`hexdata.board.pack_boards`, where a cell
is set if it is 1; ``invalid``, whether cells are neither 0 nor 1; and ``overlapping``, whether cells are blue
and red. Of policies: ``moves``, the first cell that is not zero; ``one_hot``, whether it is 1
and all others are 0; and ``dense``, the payloads of the k others, (k, bytes). Of the policies of a search:
``search``, their payloads, (n, bytes)."""


def pack_arrays(kinds: dict[str, ArrayKind], portions: Iterable[dict[str, UInt8Array]]) -> ExampleArrays:
    """Pack the arrays of the examples of one layout. Nothing is rejected: invalid cells are counted.

    Args:
        kinds: ``ExampleLayout.packed``.
        portions: Payloads of all examples, at least one, (m, bytes) by the keys of ``kinds``.
    """
    parts: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
    for portion in portions:
        for key, payload in portion.items():
            for name, part in _PACKERS[key](payload, kinds[key]).items():
                parts[name].append(part)
    return {name: np.concatenate(listed) for name, listed in parts.items()}


def _pack_boards(payload: UInt8Array, kind: ArrayKind) -> ExampleArrays:
    words, one = _words(payload, kind)
    stones = words == one
    invalid = overlapping = np.zeros(len(words), bool)
    # A test of all boards is faster than one of each, and nearly always passed.
    if np.count_nonzero(words) != np.count_nonzero(stones):
        invalid = ((words != 0) & ~stones).any(axis=1)
    cells = stones.shape[1] // 2
    both = stones[:, :cells] & stones[:, cells:]
    if both.any():
        overlapping = both.any(axis=1)
    boards = pack_boards(stones.reshape(-1, *kind.shape))
    return {"boards": boards, "invalid": invalid, "overlapping": overlapping}


def _pack_policies(payload: UInt8Array, kind: ArrayKind) -> ExampleArrays:
    words, one = _words(payload, kind)
    nonzero = words != 0
    moves = nonzero.argmax(axis=1)
    one_hot = words[np.arange(len(words)), moves] == one
    # If each policy has a 1 and there are no more cells than policies, all are one-hot: the usual case.
    if np.count_nonzero(nonzero) != len(words) or not one_hot.all():
        one_hot &= np.count_nonzero(nonzero, axis=1) == 1
    return {"moves": moves, "one_hot": one_hot, "dense": payload[~one_hot]}


_PACKERS: Final[dict[str, Callable[[UInt8Array, ArrayKind], ExampleArrays]]] = {
    "board": _pack_boards,
    "policy": _pack_policies,
    SEARCH_KEY: lambda payload, _: {"search": np.ascontiguousarray(payload)},
}


def _words(payload: UInt8Array, kind: ArrayKind) -> tuple[npt.NDArray[Any], Any]:
    """Return the bits of cells as unsigned integers (n, cells) in C order, and the bits of the number 1.

    Comparing bits distinguishes values that are equal as numbers: -0.0 from 0, and a bool of 2 from 1.
    """
    size = np.dtype(kind.dtype).itemsize
    words = np.ascontiguousarray(payload).view(f"u{size}")
    if kind.fortran:
        # In Fortran order, the bytes are those of the reversed shape in C order.
        axes = range(len(kind.shape), 0, -1)
        words = words.reshape(-1, *kind.shape[::-1]).transpose(0, *axes).reshape(len(words), -1)
    return words, np.ones(1, kind.dtype).view(f"u{size}")[0]


# Groups


@dataclass(slots=True)
class ExampleGroup:
    """n examples of one layout."""

    layout: ExampleLayout
    indices: Int64Array
    """Index of each example in its block, (n,), ascending."""
    arrays: ExampleArrays
    fields: dict[str, Column]
    """Columns of the other keys, except the metadata: ``value``, ``player_to_move``, and JSON values."""
    metadata: dict[str, Column]


def make_group(
    layout: ExampleLayout,
    indices: Int64Array,
    fields: dict[str, Any],
    portions: Iterable[dict[str, UInt8Array]],
) -> ExampleGroup:
    """Return a group of n examples.

    Args:
        layout: Their layout.
        indices: Index of each example in its block, (n,), ascending.
        fields: The fields of an example, with columns where examples differ.
        portions: As of :func:`pack_arrays`.
    """
    metadata = {key: _column(value, len(indices)) for key, value in fields.get("metadata", {}).items()}
    others = {
        key: _column(value, len(indices))
        for key, value in fields.items()
        if key not in ARRAYS and key != "metadata"
    }
    return ExampleGroup(layout, indices, pack_arrays(layout.packed, portions), others, metadata)


def _column(value: Any, count: int) -> Column:
    """Return a value of an example with columns as one column of ``count`` rows."""
    parts = [*value.values()] if isinstance(value, dict) else value
    if isinstance(value, Column) or not isinstance(value, dict | list | tuple) or not parts:
        return value if isinstance(value, Column) else Column(np.zeros(count, np.intp), [value])
    zipped = Column.zipped([_column(part, count) for part in parts])
    if isinstance(value, dict):
        return Column(zipped.codes, [dict(zip(value, row, strict=True)) for row in zipped.values])
    return Column(zipped.codes, [type(value)(row) for row in zipped.values])


def group_examples(
    items: Iterable[tuple[int, Any]],
    reject: Callable[[int, Reason, str], None],
    seen: set[int],
) -> Iterator[ExampleGroup]:
    """Sort examples into groups of one layout, and reject objects that are not examples.

    Args:
        items: Index in the block and content of each example.
        reject: Called with the index, a reason code and the details of a rejected example.
        seen: Hashes of the layouts of the file so far. Those of this block are added.

    Yields:
        The groups.

    Raises:
        FormatError: "limit-layouts".
    """
    members: dict[ExampleLayout, list[tuple[int, Any]]] = {}
    for index, example in items:
        layout = layout_of(example)
        if isinstance(layout, ExampleLayout):
            fields = example if layout.keys else dict(zip(REQUIRED, example, strict=True))
            members.setdefault(layout, []).append((index, fields))
        else:
            reject(index, *layout)
    seen.update(map(hash, members))
    limits.check_size(Reason.LIMIT_LAYOUTS, len(seen), limits.MOST_LAYOUTS)
    for layout, indexed in members.items():
        indices, examples = np.array([index for index, _ in indexed]), [fields for _, fields in indexed]
        codes = np.arange(len(examples))
        fields = {key: Column(codes, [each[key] for each in examples]) for key in layout.keys or REQUIRED}
        metadata = {
            key: Column(codes, [each["metadata"][key] for each in examples])
            for key in layout.metadata_keys or ()
        }
        portion = {}
        for key in layout.packed:
            payloads = b"".join([each[key].payload for each in examples])
            portion[key] = np.frombuffer(payloads, np.uint8).reshape(len(examples), -1)
        yield make_group(layout, indices, fields | {"metadata": metadata}, [portion])
