"""The games of a split on a device, and batches that are made there.

The batches equal those that ``hexdata.batch.make_batch`` makes of a ``GameTable``, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hexdata.batch import BatchOptions, required_members
from hexdata.board import RED, Symmetry, symmetry_table
from hexdata.errors import BudgetError
from hexdata.fill import POSITION_PLY, boards_to_fill, never_filled
from hexdata.loader.game_table import PACKED_PREFIX, GameTable
from hexdata.loader.row_filter import LOW_BITS, RowSubset
from hexdata.loader.row_policies import GROUP_SHIFT, RowPolicies
from hexdata.order import derive_key
from hexdata.schema import NO_MOVE, is_target
from hexdata.shards.blocks import POLICY_FIELDS, block_fields
from hexdata.torch.order import shift_right, sort_key
from hexdata.torch.tensors import TensorBatch

__all__ = ["DevicePositions", "DeviceSubset", "DeviceTable"]

Array = npt.NDArray[Any]

_FILLS: Final = frozenset(("board", "ply", "policy", "policy_mask", "move"))
"""Fields that need the fill rows."""
_POLICIES: Final = frozenset(("policy", "policy_mask"))
"""Fields that depend on which positions have a policy that is not one-hot."""
_COPY_BYTES: Final = 16 << 20
"""Approximate size of the pieces in which arrays are copied to the device."""
_NEVER_INT16: Final = int(np.iinfo(np.int16).max)
"""Number of a cell that is never filled in fill rows of int16, the form of uint16 on a device."""
_ENTRIES_AT_ONCE: Final = 32
"""Number of entries of each policy that are written together, which limits the memory for their indices."""
_UINT16: Final = (1 << 16) - 1
_DRAW_BITS: Final = 53
_ALL_TIERS: Final = 256
_TORCH_DTYPES: Final = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
_SIGNED: Final = {np.dtype(f"u{size}"): np.dtype(f"i{min(2 * size, 8)}") for size in (2, 4, 8)}
"""Dtype on the device of arrays whose unsigned dtype PyTorch does not fully support."""


class _Upload(NamedTuple):
    """An array to be copied to a device."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Iterable[Array]
    """Consecutive parts of the array, of any dtype that can be converted."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _upload_of(*arrays: Array, dtype: npt.DTypeLike | None = None) -> _Upload:
    """Return the upload of the concatenation of arrays.

    Args:
        arrays: The arrays, with equal shapes except for the first dimension.
        dtype: Dtype on the device (default None: that of the first array, or a signed one).
    """
    given = arrays[0].dtype if dtype is None else np.dtype(dtype)
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    pieces = (piece for array in arrays for piece in _pieces(array))
    return _Upload(shape, _SIGNED.get(given, given), pieces)


def _pieces(array: Array) -> Iterator[Array]:
    size = max(1, _COPY_BYTES // max(1, array.itemsize * math.prod(array.shape[1:])))
    for start in range(0, len(array), size):
        yield array[start : start + size]


def _copy_to(device: torch.device, uploads: dict[str, _Upload]) -> dict[str, Tensor]:
    """Copy arrays to a device.

    Raises:
        BudgetError: They do not fit into its memory.
    """
    needed = sum(upload.nbytes for upload in uploads.values())
    if device.type == "cuda":
        _check_memory(device, needed, torch.cuda.mem_get_info(device)[0])
    tensors = {}
    for name, upload in uploads.items():
        try:
            tensor = torch.empty(upload.shape, dtype=_TORCH_DTYPES[upload.dtype], device=device)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise _memory_error(device, needed, str(error).partition("\n")[0]) from error
        start = 0
        for piece in upload.pieces:
            # A copy, since tensors of read-only arrays give a warning.
            tensor[start : start + len(piece)] = torch.from_numpy(piece.astype(upload.dtype))
            start += len(piece)
        tensors[name] = tensor
    return tensors


def _check_memory(device: torch.device, needed: int, free: int) -> None:
    if needed > free:
        raise _memory_error(device, needed, f"{free // 10**6:,} MB free")


def _memory_error(device: torch.device, needed: int, found: str) -> BudgetError:
    return BudgetError(
        f"the games do not fit into the memory of {device}",
        found=found,
        expected=f"{-(-needed // 10**6):,} MB for the games, and memory for batches",
        hint="Use TorchLoader, which keeps the games in the memory of the host, or another device.",
    )


class DeviceSubset:
    """A ``RowSubset`` on a device.

    Args:
        subset: The subset. It takes two bytes per row on the device.
        device: The device.

    Raises:
        BudgetError: It does not fit into the memory of the device.
    """

    def __init__(self, subset: RowSubset, device: torch.device) -> None:
        arrays = {"low": _upload_of(subset.low.view(np.int16)), "starts": _upload_of(subset.starts)}
        tensors = _copy_to(device, arrays)
        self._low, self._starts = tensors["low"], tensors["starts"]

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows at indices of the subset, both int64 (B,)."""
        higher = torch.searchsorted(self._starts, indices, right=True) - 1
        low = self._low[indices].to(torch.int64) & ((1 << LOW_BITS) - 1)
        return (higher << LOW_BITS) + low


class DeviceTable:
    """The games and other positions of a ``GameTable`` on a device.

    Positions that belong to no game are stored as games of one position. Only the arrays that the batches
    need are copied.

    Args:
        games: The table.
        options: Contents of the batches.
        seed: Seed of the symmetries and value weights.
        device: The device.

    Attributes:
        nbytes: Size of the arrays on the device in bytes.

    Raises:
        BudgetError: The arrays do not fit into the memory of the device.
    """

    def __init__(self, games: GameTable, options: BatchOptions, seed: int, device: torch.device) -> None:
        self.board_size = games.board_size
        self.options = options
        self.seed = seed
        self.device = device
        self.games = len(games.arrays["fill"])
        self.packed = games.positions - games.game_rows
        stored = {*block_fields(1, with_policy=False), *filter(is_target, games.arrays), "fill"} - {"board"}
        if games.has_policies:
            stored.update(POLICY_FIELDS)
        self.members = frozenset(required_members(options, stored))
        self.largest_policy = RowPolicies(games.arrays).largest if games.has_policies else 0
        self.arrays = _copy_to(device, self._choose_arrays(games))
        self.nbytes = sum(tensor.nbytes for tensor in self.arrays.values())
        self.symmetries = torch.from_numpy(symmetry_table(self.board_size).astype(np.int32)).to(device)
        self.tier_limits = _tier_limits(options.tier_probability).to(device)
        stored_dtype = games.arrays["fill"].dtype
        self.never = never_filled(stored_dtype) if stored_dtype == np.uint8 else _NEVER_INT16

    def _choose_arrays(self, games: GameTable) -> dict[str, _Upload]:
        """Return what to copy: arrays of G + P games, of R + P positions, or of P positions, by name."""
        arrays, fields = games.arrays, {*self.options.delivered, *self.members, "position_id"}
        packed: dict[str, Array] = {
            name.removeprefix(PACKED_PREFIX): array
            for name, array in arrays.items()
            if name.startswith(PACKED_PREFIX)
        }
        starts = np.arange(games.game_rows + 1, games.positions + 1)
        uploads = {"starts": _upload_of(arrays["starts"], starts)}
        if fields & (_FILLS | {"player_to_move"}):
            uploads["first_player"] = _upload_of(arrays["first_player"], packed["player_to_move"])
        for name in ("game_id", "position_id", "value"):
            if name in fields:
                uploads[name] = _upload_of(arrays[name], packed[name])
        for name in ("position_id", "value"):
            if f"{name}_start" in arrays and name in fields:
                own = _upload_of(arrays[f"{name}_start"], np.full(self.packed, -1))
                uploads |= {f"{name}_start": own, f"{name}s": _upload_of(arrays[f"{name}s"])}
        if "value_sample_tier" in fields:
            uploads["tier"] = _upload_of(arrays["tier"], packed["value_sample_tier"])
        if fields & _FILLS:
            uploads["fill"] = self._upload_fill(arrays["fill"], packed)
        if self.packed:
            names = ("move", "position_in_game", "total_positions")
            uploads |= {f"packed.{name}": _upload_of(packed[name]) for name in names if name in fields}
        for name in filter(is_target, fields):
            uploads[name] = _upload_of(arrays[name], packed[name])
        if games.has_policies and fields & _POLICIES:
            uploads["policy_group"] = _upload_of(arrays["policy_group"])
            uploads["policy_offset"] = _upload_of(arrays["policy_offset"].view(np.int16))
        if games.has_policies and "policy" in fields:
            uploads["policy_cell"] = _upload_of(arrays["policy_cell"])
            uploads["policy_probability"] = _upload_of(arrays["policy_probability"])
        return uploads

    def _upload_fill(self, fill: Array, packed: dict[str, Array]) -> _Upload:
        """Return the upload of the fill rows of games, then of the packed positions; uint16 as int16."""
        narrow = fill.dtype == np.uint8

        def pieces() -> Iterator[Array]:
            yield from _pieces(fill)
            size = max(1, _COPY_BYTES // (fill.shape[1] * fill.itemsize))
            for start in range(0, self.packed, size):
                own = slice(start, start + size)
                yield boards_to_fill(packed["board"][own], packed["move"][own], self.board_size)

        shape = (len(fill) + self.packed, fill.shape[1])
        if narrow:
            return _Upload(shape, fill.dtype, pieces())
        assert never_filled(fill.dtype) > _NEVER_INT16
        return _Upload(shape, np.dtype(np.int16), (np.minimum(piece, _NEVER_INT16) for piece in pieces()))

    def positions(self, rows: Tensor, epoch: int) -> DevicePositions:
        """Return the positions of rows, int64 (B,), in an epoch. The rows are not checked."""
        return DevicePositions(self, rows, epoch)


class DevicePositions:
    """Positions of a ``DeviceTable``, whose fields are computed when they are first used.

    The properties named like the fields of a batch return the arrays of that field; see ``BatchOptions``.

    Args:
        table: The table.
        rows: Rows of the split, int64 (B,).
        epoch: The epoch, which determines symmetries and value weights.
    """

    def __init__(self, table: DeviceTable, rows: Tensor, epoch: int) -> None:
        self._table = table
        self._arrays = table.arrays
        self._rows = rows
        self._epoch = epoch
        self._n = table.board_size

    def batch(self) -> TensorBatch:
        """Return the fields ``options.delivered`` by name, in their order."""
        return {
            name: self._target(name) if is_target(name) else getattr(self, name)
            for name in self._table.options.delivered
        }

    # --- location -------------------------------------------------------------------------------------

    @cached_property
    def _games(self) -> Tensor:
        """Index of the game of each position, int64 (B,); packed positions follow the games."""
        return torch.searchsorted(self._arrays["starts"][1:], self._rows, right=True)

    @cached_property
    def _plies(self) -> Tensor:
        return self._rows - self._take("starts")

    @cached_property
    def _is_packed(self) -> Tensor:
        return self._games >= self._table.games

    @cached_property
    def _packed_index(self) -> Tensor:
        """Index among the packed positions, int64 (B,); 0 for positions of games."""
        return (self._games - self._table.games).clamp(min=0)

    def _take(self, name: str) -> Tensor:
        """Return the numbers of the games of the positions in an array."""
        return self._arrays[name].index_select(0, self._games)

    def _or_packed(self, name: str, of_games: Callable[[], Tensor]) -> Tensor:
        """Return a label as an integer tensor, read from an array for packed positions."""
        if not self._table.packed:
            return of_games()
        return torch.where(self._is_packed, self._arrays[f"packed.{name}"][self._packed_index], of_games())

    def _own_labels(self, name: str, otherwise: Tensor) -> Tensor:
        """Return the labels of games that have one for each position, and ``otherwise`` for the others."""
        if f"{name}_start" not in self._arrays:
            return otherwise
        starts, labels = self._take(f"{name}_start"), self._arrays[f"{name}s"]
        has_own = starts >= 0
        own = labels[torch.where(has_own, starts + self._plies, 0)]
        return torch.where(has_own, own.to(otherwise.dtype), otherwise)

    # --- symmetries -----------------------------------------------------------------------------------

    @cached_property
    def _symmetry(self) -> Tensor | None:
        """Number of the symmetry of each position, int64 (B,), or None if there are no symmetries."""
        if not self._table.options.symmetry:
            return None
        return shift_right(sort_key(self.position_id, self._key("augment")), 62)

    @cached_property
    def _swapped(self) -> Tensor | None:
        """True where the symmetry of a position swaps the colours, bool (B,), or None."""
        return None if self._symmetry is None else self._symmetry >= Symmetry.LONG_DIAGONAL

    def _key(self, purpose: str) -> int:
        return derive_key(self._table.seed, purpose, self._epoch)

    def _image(self, cells: Tensor) -> Tensor:
        """Return the images of boards (B, n·n), without a change of colours."""
        if self._symmetry is None or self._swapped is None:
            return cells
        boards = cells.view(-1, self._n, self._n)
        rotated = (self._symmetry & Symmetry.ROTATION).to(torch.bool)[:, None, None]
        boards = torch.where(rotated, boards.flip((1, 2)), boards)
        boards = torch.where(self._swapped[:, None, None], boards.transpose(1, 2), boards)
        return boards.reshape(cells.shape)

    # --- boards ---------------------------------------------------------------------------------------

    @cached_property
    def _fill(self) -> Tensor:
        """Stored fill rows (B, n·n)."""
        return self._take("fill")

    @cached_property
    def _fill_ply(self) -> Tensor:
        """Ply (B,) that belongs to the stored fill rows, in their dtype."""
        ply = self._plies + self._take("first_player")
        if self._table.packed:
            ply = ply.masked_fill(self._is_packed, POSITION_PLY)
        return ply.to(self._fill.dtype)

    @cached_property
    def _fill_image(self) -> Tensor:
        """Fill rows after the symmetry (B, n·n). Their plies and parities are those before a reflection."""
        return self._image(self._fill)

    @cached_property
    def _stones(self) -> tuple[Tensor, Tensor]:
        """Blue and red stones, bool (B, n·n) each."""
        occupied = self._fill_image < self._fill_ply[:, None]
        red = (self._fill_image & 1).to(torch.bool)
        if self._swapped is not None:
            red ^= self._swapped[:, None]
        red &= occupied
        return occupied ^ red, red

    @property
    def board(self) -> Tensor:
        """Boards in the form of the options."""
        form = self._table.options.board
        if form == "fill":
            return self._delivered_fill()
        if form == "packed":
            return _pack(torch.cat(self._stones, dim=1))
        planes = (len(self._rows), self._table.options.planes, self._n**2)
        boards = torch.empty(planes, dtype=getattr(torch, form), device=self._rows.device)
        for plane, stones in enumerate(self._stones):
            boards[:, plane] = stones
        if self._table.options.planes == 3:
            boards[:, 2] = (self.player_to_move == RED)[:, None]
        return boards.view(*planes[:2], self._n, self._n)

    def _delivered_fill(self) -> Tensor:
        fill = self._fill_image
        narrow = fill.dtype == torch.uint8
        if narrow and self._swapped is None:
            return fill
        never = fill == self._table.never
        if self._swapped is not None:
            fill = fill + (self._swapped[:, None] & ~never)
        return fill if narrow else fill.masked_fill(never, -1).view(torch.uint16)

    @property
    def ply(self) -> Tensor:
        """Ply that belongs to the delivered fill rows."""
        ply = self._fill_ply
        if self._swapped is not None:
            ply = ply + self._swapped
        return ply if ply.dtype == torch.uint8 else ply.view(torch.uint16)

    # --- policies -------------------------------------------------------------------------------------

    @cached_property
    def _moves(self) -> Tensor:
        """Next moves as int32 (B,); 65535 for none."""
        is_next = self._fill == self._fill_ply[:, None]
        cells = is_next.to(torch.uint8).argmax(dim=1).to(torch.int32)
        cells.masked_fill_(~is_next.any(dim=1), NO_MOVE)
        moves = self._or_packed("move", lambda: cells)
        if self._symmetry is None:
            return moves
        no_move = moves == NO_MOVE
        index = self._symmetry * self._n**2 + moves.masked_fill(no_move, 0)
        return self._table.symmetries.view(-1)[index].masked_fill(no_move, NO_MOVE)

    @property
    def move(self) -> Tensor:
        """Next moves."""
        return _to_uint16(self._moves)

    def _policy_starts(self, rows: Tensor) -> Tensor:
        offsets = self._arrays["policy_offset"].index_select(0, rows).to(torch.int64) & _UINT16
        return self._arrays["policy_group"].index_select(0, rows >> GROUP_SHIFT) + offsets

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor] | None:
        """First entry of the policy of each position and number of entries, both int64 (B,), or None."""
        if "policy_offset" not in self._arrays:
            return None
        starts = self._policy_starts(self._rows)
        return starts, self._policy_starts(self._rows + 1) - starts

    @property
    def policy(self) -> Tensor:
        """Policies."""
        if "move" in self._table.members and self._table.packed:
            cells = torch.arange(self._n**2, dtype=torch.int32, device=self._rows.device)
            policy = (cells == self._moves[:, None]).to(torch.float32)
        else:
            policy = (self._fill_image == self._fill_ply[:, None]).to(torch.float32)
        if self._entries is not None:
            policy = self._with_sparse(policy, *self._entries)
        if self._table.options.final_policy == "uniform":
            policy.masked_fill_(~self.policy_mask[:, None], 1 / self._n**2)
        return policy

    def _with_sparse(self, policy: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """Return the policies (B, n·n), replaced where positions have sparse ones.

        Unused entries are written to another column, since the host does not know the number of entries.
        """
        cells = self._n**2
        policy = torch.nn.functional.pad(policy.masked_fill((counts > 0)[:, None], 0), (0, 1))
        for first in range(0, self._table.largest_policy, _ENTRIES_AT_ONCE):
            last = min(first + _ENTRIES_AT_ONCE, self._table.largest_policy)
            numbers = torch.arange(first, last, device=counts.device)
            is_used = numbers < counts[:, None]
            entries = (starts[:, None] + numbers).masked_fill(~is_used, 0)
            found = self._arrays["policy_cell"][entries].to(torch.int64)
            if self._symmetry is not None:
                found = self._table.symmetries.view(-1)[self._symmetry[:, None] * cells + found]
            found = found.to(torch.int64).masked_fill(~is_used, cells)
            policy.scatter_(1, found, self._arrays["policy_probability"][entries])
        return policy[:, :cells].contiguous()

    @property
    def policy_mask(self) -> Tensor:
        """True for positions with a policy."""
        mask = self._moves != NO_MOVE
        return mask if self._entries is None else mask | (self._entries[1] > 0)

    # --- labels ---------------------------------------------------------------------------------------

    @cached_property
    def position_id(self) -> Tensor:
        """Position ids."""
        return self._take("position_id") + self._own_labels("position_id", self._plies)

    @property
    def game_id(self) -> Tensor:
        """Game ids."""
        return self._take("game_id")

    @property
    def value(self) -> Tensor:
        """Values."""
        value = self._own_labels("value", self._take("value"))
        return value if self._swapped is None else torch.where(self._swapped, 1 - value, value)

    def _target(self, name: str) -> Tensor:
        """Return an optional column of the store."""
        numbers = self._arrays[name][self._rows]
        if name == "root_value" and self._swapped is not None:
            return torch.where(self._swapped, 1 - numbers, numbers)
        return numbers

    @property
    def value_weight(self) -> Tensor:
        """Value weights. A draw is a multiple of 2^-53, so that it is compared as an integer."""
        if self._table.options.tier_probability is None:
            return torch.ones(len(self._rows), dtype=torch.float32, device=self._rows.device)
        limits = self._table.tier_limits[self.value_sample_tier.to(torch.int64)]
        draws = shift_right(sort_key(self.position_id, self._key("value")), 64 - _DRAW_BITS)
        return (draws < limits).to(torch.float32)

    @property
    def player_to_move(self) -> Tensor:
        """Players to move."""
        player = ((self._plies + self._take("first_player")) & 1).to(torch.uint8)
        return player if self._swapped is None else player ^ self._swapped.to(torch.uint8)

    @property
    def value_sample_tier(self) -> Tensor:
        """Value sample tiers."""
        return self._arrays["tier"][self._rows]

    @property
    def position_in_game(self) -> Tensor:
        """Plies of the positions in their games."""
        return _to_uint16(self._or_packed("position_in_game", lambda: self._plies))

    @property
    def total_positions(self) -> Tensor:
        """Numbers of positions of the games."""
        starts = self._arrays["starts"]
        lengths = starts[self._games + 1] - starts[self._games]
        return _to_uint16(self._or_packed("total_positions", lambda: lengths))


def _tier_limits(probabilities: Sequence[float] | None) -> Tensor:
    """Return the limit below which a draw of 53 bits gives weight 1, by tier: int64 (256,)."""
    limits = [math.ceil(probability * 2.0**_DRAW_BITS) for probability in probabilities or ()]
    return torch.tensor(limits + [1 << _DRAW_BITS] * (_ALL_TIERS - len(limits)))


def _pack(cells: Tensor) -> Tensor:
    """Return bool cells (B, k) as bits, uint8 (B, ceil(k / 8)), like ``np.packbits``."""
    bits = torch.nn.functional.pad(cells.view(torch.uint8), (0, -cells.shape[1] % 8))
    bits = bits.view(len(cells), bits.shape[1] // 8, 8)
    packed = bits[..., 0] << 7
    for bit in range(1, 8):
        packed |= bits[..., bit] << (7 - bit)
    return packed


def _to_uint16(numbers: Tensor) -> Tensor:
    """Return integers below 2^16 as uint16, which few operations of PyTorch support."""
    return numbers.to(torch.int16).view(torch.uint16)
