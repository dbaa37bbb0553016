"""Conversion of batches to PyTorch tensors, and expansion of boards and policies on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hexdata.board import MAX_SIZE, MIN_SIZE, RED
from hexdata.checks import as_int, check_choice, check_count, unusable
from hexdata.schema import NO_MOVE, board_bytes, board_size_of
from hexdata.torch.arrays import unpack_bits

TensorBatch = dict[str, Tensor]
"""Tensors of one training step by field name; the first dimension is the batch size B."""

PIPE_BYTES: Final = 512 << 10
"""Size up to which a batch is sent from a worker through a pipe; larger batches use shared memory."""


def as_tensors(batch: Mapping[str, Any]) -> TensorBatch:
    """Return a batch as tensors that share the memory of its arrays.

    Integers of uint16 become int32, because PyTorch cannot add to tensors of uint16.
    """
    return {name: _as_tensor(f"batch[{name!r}]", array) for name, array in batch.items()}


class WorkerBatch(dict[str, Tensor]):
    """A batch in a worker process, unpickled in the main process as a plain dict of tensors.

    Batches up to ``PIPE_BYTES`` are pickled as bytes. PyTorch would place each tensor in shared memory, which
    takes some 300 µs for a tensor of any size.
    """

    # A DataLoader copies the batches of its workers; by __reduce__ the copy would be a plain dict.
    def __copy__(self) -> WorkerBatch:
        return WorkerBatch(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if sum(tensor.nbytes for tensor in self.values()) > PIPE_BYTES:
            return dict, (dict(self),)
        return as_tensors, ({name: tensor.numpy() for name, tensor in self.items()},)


def to_device(batch: Mapping[str, Any], device: torch.device | str | int | None) -> TensorBatch:
    """Return a batch on a device. From pinned memory the copy is asynchronous.

    Args:
        batch: Arrays or tensors by name.
        device: The device, its name or its index. None: the tensors stay where they are.

    Raises:
        ConfigError: ``batch`` is not a mapping of arrays or tensors, or ``device`` is invalid.
    """
    if not isinstance(batch, Mapping):
        raise unusable("batch", repr(batch)[:80], "a mapping of names to arrays or tensors")
    device = check_device(device)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in as_tensors(batch).items()}


def _as_tensor(name: str, value: Any) -> Tensor:
    """Return an argument as a tensor that shares its memory, or as int32 if it is an array of uint16.

    Raises:
        ConfigError: It is not an array or a tensor.
    """
    try:
        # PyTorch has neither addition nor index_select for tensors of uint16.
        is_uint16 = isinstance(value, np.ndarray) and value.dtype == np.uint16
        return torch.as_tensor(value.astype(np.int32) if is_uint16 else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unusable(name, repr(value)[:80], "an array or a tensor") from error


def check_device(device: Any) -> torch.device | None:
    """Return a device, given as a torch.device, its name or its index. None remains None.

    Raises:
        ConfigError: It is no device.
    """
    try:
        number = as_int(device)
        return None if device is None else torch.device(device if number is None else number)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        expected = "a torch.device, its name, its index, or None"
        raise unusable("device", f"{device!r}: {reason}", expected) from error


def _integers(name: str, value: Any, length: int | None = None) -> Tensor:
    """Return an argument with one integer per position as a tensor.

    Raises:
        ConfigError: It has another shape or dtype.
    """
    tensor = _as_tensor(name, value)
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != 1 or not is_integer or length not in (None, len(tensor)):
        expected = f"integers of shape ({'B' if length is None else length},)"
        raise unusable(name, f"{tensor.dtype} of shape {tuple(tensor.shape)}", expected)
    return tensor


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise unusable("dtype", repr(dtype), "a torch.dtype")


def unpack(
    packed: Tensor | npt.NDArray[np.uint8],
    board_size: int | None = None,
    *,
    player_to_move: Tensor | npt.NDArray[np.uint8] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Expand packed boards on a device. For n = 13, 43 bytes per position are transferred instead of 1,352.

    The result is equal to the boards of an unpacked batch.

    Args:
        packed: uint8 (B, ceil(2·n·n / 8)), the field ``board`` of ``Loader(…, board="packed")``.
        board_size: Board size n (default None: computed from the width of ``packed``).
        player_to_move: uint8 (B,), 0 blue, 1 red. If given, the result has a third plane, which is 1 if red
            is to move and 0 if blue is (default None: two planes).
        dtype: Dtype of the result (default float32).
        device: Device on which to expand (default None: that of ``packed``).

    Returns:
        Contiguous tensor (B, 2 or 3, n, n) with cells 0 or 1.

    Raises:
        ConfigError: ``packed`` does not contain boards of this size, or another argument is invalid.
    """
    _check_dtype(dtype)
    # Copied before it is expanded: packed boards have a thirtieth of the bytes of float32 boards.
    packed = _as_tensor("packed", packed).to(check_device(device), non_blocking=True)
    n = _board_size(packed, board_size)
    planes, cells = 2, unpack_bits(packed, 2 * n * n)
    if player_to_move is not None:
        player = _integers("player_to_move", player_to_move, len(packed)).to(packed.device, non_blocking=True)
        red_moves = (player == RED).to(torch.uint8).unsqueeze(1)
        planes, cells = 3, torch.cat([cells, red_moves.expand(-1, n * n)], dim=1)
    # The last byte may have bits beyond the last cell, so `cells` is a slice until it is copied.
    return cells.to(dtype).contiguous().view(len(packed), planes, n, n)


def _board_size(packed: Tensor, given: int | None) -> int:
    """Return the board size n of packed boards, whose width is ceil(2·n·n / 8), and check ``given``."""
    if given is not None:
        given = check_count("board_size", given, MIN_SIZE)
    width = packed.shape[-1] if packed.dim() else 0
    n = board_size_of(width)
    fits = board_bytes(n) == width and MIN_SIZE <= n <= MAX_SIZE and given in (None, n)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or not fits:
        expected = "uint8 (B, ceil(2·n·n / 8))" + ("" if given is None else f" for n = {given}")
        raise unusable("packed", f"{packed.dtype} of shape {tuple(packed.shape)}", expected)
    return n


def expand_policy(
    move: Tensor | npt.NDArray[np.uint16],
    cells: int,
    *,
    final_policy: Literal["zeros", "uniform"] = "zeros",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Convert moves to one-hot policies on a device.

    For n = 13, 2 bytes per position are transferred instead of 676. If the store has no dense policies, the
    result is equal to the field ``policy``.

    Args:
        move: uint16 (B,), the field ``move``; 65535 for no move.
        cells: Number of cells n·n.
        final_policy: Policy of positions without a move: "zeros", or "uniform" for 1 / cells everywhere
            (default "zeros").
        dtype: Dtype of the result (default float32).
        device: Device on which to expand (default None: that of ``move``).

    Returns:
        Tensor (B, cells).

    Raises:
        ConfigError: An argument is invalid. Moves that are not on the board are only detected on the CPU.
    """
    _check_dtype(dtype)
    cells = check_count("cells", cells, 1, MAX_SIZE**2)
    check_choice("final_policy", final_policy, ("zeros", "uniform"))
    move = _integers("move", move).to(check_device(device), non_blocking=True)
    policy = torch.zeros((len(move), cells), dtype=dtype, device=move.device)
    index = move.to(torch.int64).unsqueeze(1)
    has_move = index != NO_MOVE
    try:
        # Without a move, 0 is written to cell 0: no position is selected, so
        # no device has to wait for a number of rows.
        policy.scatter_(1, index.masked_fill(~has_move, 0), has_move.to(dtype))
    except RuntimeError as error:  # on the CPU: other devices do not wait for the check
        reason = str(error).partition("\n")[0]
        raise unusable("move", reason, f"cells below {cells}, or {NO_MOVE} for none") from error
    if final_policy == "uniform":
        policy.masked_fill_(~has_move, 1 / cells)
    return policy
