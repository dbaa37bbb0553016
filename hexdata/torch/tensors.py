"""Conversion of batches to PyTorch tensors, and expansion of boards and policies on a device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hexdata.batch import BatchOptions, BoardForm, make_batch
from hexdata.board import MAX_SIZE, MIN_SIZE, RED
from hexdata.checks import as_int, check_count
from hexdata.errors import ConfigError
from hexdata.schema import NO_MOVE, board_bytes, board_size_of
from hexdata.shards.blocks import block_to_policy

__all__ = [
    "PIPE_BYTES",
    "TensorBatch",
    "WorkerBatch",
    "as_tensors",
    "check_device",
    "expand_policy",
    "to_device",
    "unpack",
]

TensorBatch = dict[str, Tensor]
"""Tensors of one training step by field name; the first dimension is the batch size B."""

PIPE_BYTES: Final = 512 << 10
"""Size up to which a batch is sent from a worker through a pipe; larger batches use shared memory."""

_FORMS: Final[dict[torch.dtype, BoardForm]] = {torch.float32: "float32", torch.float16: "float16"}


def as_tensors(batch: Mapping[str, Any]) -> TensorBatch:
    """Return a batch as tensors that share the memory of its arrays."""
    return {name: torch.as_tensor(array) for name, array in batch.items()}


class WorkerBatch(dict[str, Tensor]):
    """A batch in a worker process, unpickled in the main process as a plain dict of tensors.

    Batches up to ``PIPE_BYTES`` are pickled as bytes. PyTorch would place each tensor in shared memory, which
    takes some 300 µs for a tensor of any size.
    """

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
    given: Any = batch
    if not isinstance(given, Mapping):
        expected = "a mapping of names to arrays or tensors"
        raise ConfigError("batch cannot be used", found=repr(batch)[:80], expected=expected)
    device = check_device(device)
    tensors = {name: _as_tensor(f"batch[{name!r}]", value) for name, value in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _as_tensor(name: str, value: Any) -> Tensor:
    """Return an argument as a tensor that shares its memory.

    Raises:
        ConfigError: It is not an array or a tensor.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "an array or a tensor"
        raise ConfigError(f"{name} cannot be used", found=repr(value)[:80], expected=expected) from error


def check_device(device: Any) -> torch.device | None:
    """Return a device, given as a torch.device, its name or its index. None remains None.

    Raises:
        ConfigError: It is no device.
    """
    if device is None or isinstance(device, torch.device):
        return device
    number = as_int(device)
    try:
        if isinstance(device, str) or number is not None:
            return torch.device(device if number is None else number)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "device cannot be used", found=f"{device!r}: {reason}", expected="a device of this machine"
        ) from error
    expected = "a torch.device, its name, its index, or None"
    raise ConfigError("device cannot be used", found=repr(device), expected=expected)


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ConfigError("dtype cannot be used", found=repr(dtype), expected="a torch.dtype")


def _check_row(name: str, tensor: Tensor, length: int | None = None) -> None:
    """Check that a tensor has one integer per position.

    Raises:
        ConfigError: It has another shape or dtype.
    """
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.dim() != 1 or not is_integer or length not in (None, len(tensor)):
        expected = f"integers of shape ({'B' if length is None else length},)"
        found = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ConfigError(f"{name} cannot be used", found=found, expected=expected)


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
    packed = _as_tensor("packed", packed).to(check_device(device), non_blocking=True)
    n = _board_size(packed, board_size)
    player = player_to_move
    if player is not None:
        player = _as_tensor("player_to_move", player).to(packed.device, non_blocking=True)
        _check_row("player_to_move", player, len(packed))
    if _can_use_numpy(packed):
        return _unpack_with_numpy(packed, n, player, dtype)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    cells = (packed.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : 2 * n * n]
    if player is not None:
        red_moves = (player == RED).to(torch.uint8).unsqueeze(1)
        cells = torch.cat([cells, red_moves.expand(-1, n * n)], dim=1)
    return cells.to(dtype).view(len(packed), 2 if player is None else 3, n, n)


def _can_use_numpy(tensor: Tensor) -> bool:
    """Return whether NumPy can expand a tensor. NumPy is faster, and starts no threads."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def _unpack_with_numpy(packed: Tensor, n: int, player: Tensor | None, dtype: torch.dtype) -> Tensor:
    block = {"board": packed.numpy()}
    if player is not None:
        block["player_to_move"] = player.numpy()
    options = _board_options(dtype, 1 + len(block))
    return torch.from_numpy(make_batch(block, options, n, seed=0, epoch=0)["board"]).to(dtype)


@functools.cache
def _board_options(dtype: torch.dtype, planes: int) -> BatchOptions:
    return BatchOptions(("board",), planes=planes, board=_FORMS.get(dtype, "uint8"))


def _board_size(packed: Tensor, given: int | None) -> int:
    """Return the board size n of packed boards, whose width is ceil(2·n·n / 8), and check ``given``."""
    if given is not None:
        given = check_count("board_size", given, MIN_SIZE)
    width = packed.shape[-1] if packed.dim() else 0
    n = board_size_of(width)
    fits = board_bytes(n) == width and MIN_SIZE <= n <= MAX_SIZE and given in (None, n)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or not fits:
        expected = "uint8 (B, ceil(2·n·n / 8))" + ("" if given is None else f" for n = {given}")
        raise ConfigError(
            "packed cannot be used",
            found=f"{packed.dtype} of shape {tuple(packed.shape)}",
            expected=expected,
            hint="Make the loader with board='packed'.",
        )
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
    cells = check_count("cells", cells, 1)
    if cells > MAX_SIZE**2:
        raise ConfigError("cells cannot be used", found=cells, expected=f"at most {MAX_SIZE**2}")
    if final_policy not in ("zeros", "uniform"):
        raise ConfigError("unknown final_policy", found=repr(final_policy), expected="'zeros' or 'uniform'")
    move = _as_tensor("move", move).to(check_device(device), non_blocking=True)
    _check_row("move", move)
    if _can_use_numpy(move):
        _check_moves(move.numpy(), cells)
        policy = torch.from_numpy(block_to_policy({"move": move.numpy()}, cells)).to(dtype)
    else:
        policy = torch.zeros((len(move), cells), dtype=dtype, device=move.device)
        index = move.to(torch.int64).unsqueeze(1)
        has_move = index != NO_MOVE
        policy.scatter_(1, index.masked_fill(~has_move, 0), has_move.to(dtype))
    if final_policy == "uniform":
        policy.masked_fill_((move.to(torch.int32) == NO_MOVE).unsqueeze(1), 1 / cells)
    return policy


def _check_moves(moves: npt.NDArray[Any], cells: int) -> None:
    wrong = ((moves < 0) | (moves >= cells)) & (moves != NO_MOVE)
    if wrong.any():
        expected = f"cells below {cells}, or {NO_MOVE} for none"
        raise ConfigError("move cannot be used", found=int(moves[wrong.argmax()]), expected=expected)
