"""PyTorch's side of the loader: tensors, DataLoader workers, ranks, and boards unpacked on the device.

The only file that imports torch. Never reads a shard and never decides an order: ``Loader`` does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from multiprocessing import get_all_start_methods
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hexdata.batch import BatchOptions, BoardForm, make_batch
from hexdata.board import MAX_SIZE, MIN_SIZE, RED
from hexdata.checks import as_int, check_choice, check_count
from hexdata.errors import ConfigError, HexdataError
from hexdata.formats.shards import block_to_policy
from hexdata.loader import Loader
from hexdata.loader.parent_watch import end_with_parent
from hexdata.loader.turns import TURNS_SIZE, Turns, mark_of
from hexdata.schema import NO_MOVE, board_bytes, board_size_of

__all__ = [
    "LoaderDataset",
    "TensorBatch",
    "TorchLoader",
    "as_tensors",
    "expand_policy",
    "to_device",
    "unpack",
]

TensorBatch = dict[str, Tensor]
"""The tensors of one training step, each with the batch as its leading dimension."""

_FORMS: Final[dict[torch.dtype, BoardForm]] = {torch.float32: "float32", torch.float16: "float16"}
_PIPE_BYTES: Final = 512 << 10
_MOST_STEPS: Final = 16


def as_tensors(batch: Mapping[str, Any]) -> TensorBatch:
    """Return a batch as tensors on the memory of its arrays: nothing is copied."""
    return {name: torch.as_tensor(array) for name, array in batch.items()}


class _Travelling(dict[str, Tensor]):
    """A batch in a worker, which arrives in the main process as a plain dict of tensors.

    A small one travels as bytes: a tensor in shared memory, which is PyTorch's way, costs some 300 µs to
    hand over, however small it is.
    """

    def __copy__(self) -> _Travelling:
        return _Travelling(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if sum(tensor.nbytes for tensor in self.values()) > _PIPE_BYTES:
            return dict, (dict(self),)
        return as_tensors, ({name: tensor.numpy() for name, tensor in self.items()},)


def to_device(batch: Mapping[str, Any], device: torch.device | str | int | None) -> TensorBatch:
    """Return a batch, of arrays or tensors, on a device.

    From pinned memory the copy runs beside what the device computes, and this returns at once.

    Raises:
        ConfigError: it is no batch, or there is no such device.
    """
    given: Any = batch
    if not isinstance(given, Mapping):
        expected = "a mapping of names to arrays or tensors"
        raise ConfigError("batch cannot be used", found=repr(batch)[:80], expected=expected)
    device = _check_device(device)
    tensors = {name: _as_tensor(f"batch[{name!r}]", value) for name, value in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _as_tensor(name: str, value: Any) -> Tensor:
    """Return an argument as a tensor on its memory.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "an array or a tensor"
        raise ConfigError(f"{name} cannot be used", found=repr(value)[:80], expected=expected) from error


def _check_device(device: Any) -> torch.device | None:
    if device is None or isinstance(device, torch.device):
        return device
    number = as_int(device)
    try:
        if isinstance(device, str) or number is not None:
            return torch.device(device if number is None else number)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            "device cannot be used", found=repr(device), expected=f"another: {reason}"
        ) from error
    expected = "a torch.device, its name, its number, or None"
    raise ConfigError("device cannot be used", found=repr(device), expected=expected)


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ConfigError("dtype cannot be used", found=repr(dtype), expected="a torch.dtype")


def _check_row(name: str, tensor: Tensor, length: int | None = None) -> None:
    """Check that a tensor has one integer per position.

    Raises:
        ConfigError: it has not.
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
    """Expand packed boards on a device: 43 bytes a position cross the bus at n = 13, and not 1,352.

    Bit for bit what ``board.unpack_boards`` and an unpacked batch hold.

    Args:
        packed: uint8 (B, ceil(2·n·n / 8)), the field ``board`` of ``Loader(…, board="packed")``.
        board_size: n; None reads it off the width, of which each n has its own.
        player_to_move: uint8 (B,), 0 blue, 1 red. If given there is a third plane, of ones where red is
            to move and of zeros where blue is.
        dtype: of the result.
        device: where to expand; None leaves ``packed`` where it is.

    Returns:
        (B, 2 or 3, n, n) of that dtype, cells 0 or 1, contiguous.

    Raises:
        ConfigError: ``packed`` cannot be boards, or not of that size; or another argument cannot be used.
    """
    _check_dtype(dtype)
    packed = _as_tensor("packed", packed).to(_check_device(device), non_blocking=True)
    n = _board_size(packed, board_size)
    player = player_to_move
    if player is not None:
        player = _as_tensor("player_to_move", player).to(packed.device, non_blocking=True)
        _check_row("player_to_move", player, len(packed))
    if _is_here(packed):
        return _unpack_here(packed, n, player, dtype)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    cells = (packed.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : 2 * n * n]
    if player is not None:
        red_moves = (player == RED).to(torch.uint8).unsqueeze(1)
        cells = torch.cat([cells, red_moves.expand(-1, n * n)], dim=1)
    return cells.to(dtype).view(len(packed), 2 if player is None else 3, n, n)


def _is_here(tensor: Tensor) -> bool:
    """Whether NumPy can take over: it is faster, and runs no threads beside those of the workers."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def _unpack_here(packed: Tensor, n: int, player: Tensor | None, dtype: torch.dtype) -> Tensor:
    block = {"board": packed.numpy()}
    if player is not None:
        block["player_to_move"] = player.numpy()
    options = _board_options(dtype, 1 + len(block))
    return torch.from_numpy(make_batch(block, options, n, seed=0, epoch=0)["board"]).to(dtype)


@functools.cache
def _board_options(dtype: torch.dtype, planes: int) -> BatchOptions:
    return BatchOptions(("board",), planes=planes, board=_FORMS.get(dtype, "uint8"))


def _board_size(packed: Tensor, asked: int | None) -> int:
    """Return n, for which ceil(2·n·n / 8) is the width of a packed board."""
    if asked is not None:
        asked = check_count("board_size", asked, MIN_SIZE)
    width = packed.shape[-1] if packed.dim() else 0
    n = board_size_of(width)
    fits = board_bytes(n) == width and MIN_SIZE <= n <= MAX_SIZE and asked in (None, n)
    if packed.dtype != torch.uint8 or packed.dim() != 2 or not fits:
        expected = "uint8 (B, ceil(2·n·n / 8))" + ("" if asked is None else f" for n = {asked}")
        raise ConfigError(
            "these are not packed boards",
            found=f"{packed.dtype} of shape {tuple(packed.shape)}",
            expected=expected,
            hint="Ask the loader for board='packed'.",
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
    """Make one-hot policies of moves on a device: 2 bytes a position cross the bus, and not 676.

    What the field ``policy`` holds where the store has no dense policies.

    Args:
        move: uint16 (B,), the field ``move``; 65535 where there is none.
        cells: n·n.
        final_policy: what positions without a move get: zeros, or 1 / cells everywhere.
        dtype: of the result.
        device: where to expand; None leaves ``move`` where it is.

    Returns:
        (B, cells) of that dtype.

    Raises:
        ConfigError: there is no such ``final_policy``, or another argument cannot be used. Moves that are not
            on the board are found on the CPU alone.
    """
    _check_dtype(dtype)
    cells = check_count("cells", cells, 1)
    if cells > MAX_SIZE**2:
        raise ConfigError("cells cannot be used", found=cells, expected=f"at most {MAX_SIZE**2}")
    if final_policy not in ("zeros", "uniform"):
        raise ConfigError("unknown final_policy", found=repr(final_policy), expected="'zeros' or 'uniform'")
    move = _as_tensor("move", move).to(_check_device(device), non_blocking=True)
    _check_row("move", move)
    if _is_here(move):
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


def _of_this_rank(loader: Loader, rank: int | None, world_size: int | None) -> Loader:
    """Return the loader of this rank: the one asked for, the loader's own, or torch.distributed's."""
    given: Any = loader
    if not isinstance(given, Loader):
        hint = "Make one first, as in TorchLoader(Loader(store))."
        raise ConfigError("loader cannot be used", found=repr(loader), expected="a hexdata.Loader", hint=hint)
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together", found=f"{rank} and {world_size}")
    if rank is not None and world_size is not None:
        return loader.for_rank(rank, world_size)
    if loader.options.world_size == 1 and _world_size() > 1:
        return loader.for_rank(dist.get_rank(), dist.get_world_size())
    return loader


def _world_size() -> int:
    """Return the ranks of torch.distributed; 1 where it is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_alone(loader: Loader, asked: int | None) -> None:
    """See that a loader is alone because it was made so, and not because it was made too early.

    Raises:
        ConfigError: torch.distributed was initialised later: every rank would get everything.
    """
    if asked is None and loader.options.world_size == 1 and _world_size() > 1:
        raise ConfigError(
            "torch.distributed was initialised after the loader was made",
            found="a loader of 1 rank",
            expected=_world_size(),
            hint="Call init_process_group first, or give rank and world_size.",
        )


class LoaderDataset(IterableDataset[TensorBatch]):
    """A ``Loader`` as PyTorch's IterableDataset of whole batches, for a DataLoader of one's own.

    ``DataLoader(LoaderDataset(loader), batch_size=None, num_workers=2)`` delivers the batches of the
    loader in the order of their steps, whatever the number of workers. Each iteration runs the next
    epoch. With torchdata's StatefulDataLoader a loop can be stopped and resumed at any batch, with the
    same number of workers. ``TorchLoader`` is faster, and knows which batches were delivered.

    Args:
        loader: the loader; where it stands is where the first iteration starts. It is not changed.
        rank, world_size: this process among those that train together. None: those of the loader or, if
            it has but one rank, those of torch.distributed.

    Raises:
        ConfigError: only one of rank and world_size is given, or they have no meaning.
    """

    def __init__(self, loader: Loader, *, rank: int | None = None, world_size: int | None = None) -> None:
        own = _of_this_rank(loader, rank, world_size)
        self.loader = own.for_rank(own.options.rank, own.options.world_size)
        self._asked = world_size
        self._words = torch.empty(TURNS_SIZE, dtype=torch.int64).share_memory_()
        self._iterations = 0
        self._stand_at(self.loader.epoch, self.loader.batch)

    @property
    def _turns(self) -> Turns:
        return Turns(self._words.numpy())

    def _stand_at(self, epoch: int, step: int) -> None:
        """Let the next iteration start there: of all workers or, in a worker, of this one."""
        self._next = epoch, step
        self._ran = -1
        self._resumes = get_worker_info() is not None
        if not self._resumes:
            self._turns.set(epoch, step)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, over all workers."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration run ``epoch`` from its first batch, in workers that run already too."""
        self.loader.set_epoch(epoch)
        self._stand_at(epoch, 0)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Run an epoch: all of it, or in a worker this worker's part.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
            ConfigError: torch.distributed was initialised after the dataset was made.
        """
        info = get_worker_info()
        worker, workers, seed = (0, 1, 0) if info is None else (info.id, info.num_workers, info.seed)
        if info is None:
            _check_alone(self.loader, self._asked)
        else:
            end_with_parent()
        self._iterations += 1
        mark = mark_of(seed - worker, workers, self._iterations)
        ended = False
        if self._resumes:
            self._turns.note(worker, mark, self._next[0])
        else:
            epoch, step = self._turns.take(worker, mark)
            self._next = epoch, step + worker
            ended = 0 < len(self) == step
        self._resumes, self._ran = False, self._next[0]
        return self._run_next(worker, workers, mark) if ended else self._run(*self._next, workers)

    def _run_next(self, worker: int, workers: int, mark: int) -> Iterator[TensorBatch]:
        """Run the next epoch, counted only once a batch is asked for: some make iterators and drop them."""
        epoch = self._next[0] + 1
        self._turns.note(worker, mark, epoch)
        self._next, self._ran = (epoch, worker), epoch
        yield from self._run(*self._next, workers)

    def _run(self, epoch: int, first: int, workers: int) -> Iterator[TensorBatch]:
        if first >= len(self):
            return
        self.loader.set_epoch(epoch, first)
        for delivery in self.loader.deliveries(first % workers, workers):
            self._next = epoch, delivery.step + workers
            batch = as_tensors(delivery.batch)
            yield batch if get_worker_info() is None else _Travelling(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a ``Loader`` that goes on after the batch this process yielded last.

        In a worker: with that worker's next batch, as StatefulDataLoader wants it.

        Raises:
            ConfigError: workers have run, and which of their batches were delivered is not known here.
        """
        if get_worker_info() is None and self._turns.latest > self._ran:
            raise ConfigError(
                "a dataset does not know which batches its workers delivered",
                hint="Use hexdata.torch.TorchLoader, or torchdata's StatefulDataLoader.",
            )
        epoch, step = self._next
        self.loader.set_epoch(epoch, min(step, len(self)))
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a state, as ``Loader.load_state_dict`` does."""
        self.loader.load_state_dict(state)
        # At the end of an epoch the loader is in the next one, but other workers may have batches left.
        self._stand_at(state["epoch"], state["batch"])


@dataclass(frozen=True)
class _Parcel:
    """A batch on its way from a worker; see ``loader.Delivery``."""

    step: int
    position_ids: npt.NDArray[np.int64]
    batch: TensorBatch

    def pin_memory(self) -> _Parcel:
        """Return it in pinned memory; a DataLoader calls this in a thread of its own."""
        return replace(self, batch={name: tensor.pin_memory() for name, tensor in self.batch.items()})


_Message = list[_Parcel | HexdataError]
"""Steps of one worker, in their order, each ``num_workers`` after the one before; an error ends them."""


class _Messages(IterableDataset[_Message]):
    """What the workers of a ``TorchLoader`` run; the main process alone says from where."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._place = torch.zeros(2, dtype=torch.int64).share_memory_()

    def start_at(self, epoch: int, step: int) -> None:
        """Let the next iteration start there, in workers that run already too."""
        self._place.copy_(torch.tensor([epoch, step]))

    def __iter__(self) -> Iterator[_Message]:
        info = get_worker_info()
        assert info is not None
        end_with_parent()
        parcels = self._parcels(info.id, info.num_workers)
        for parcel in parcels:
            steps = 1
            if isinstance(parcel, _Parcel):
                steps = _steps_a_message(parcel.batch, self._loader.options.batch_size)
            yield [parcel, *islice(parcels, steps - 1)]

    def _parcels(self, worker: int, workers: int) -> Iterator[_Parcel | HexdataError]:
        """Yield the batches; an error travels as an object, since a DataLoader would keep its text alone."""
        try:
            epoch, step = self._place.tolist()
            self._loader.set_epoch(epoch, step)
            # Messages are asked for from worker 0 on, so worker 0 has the first step, wherever that is.
            for delivery in self._loader.deliveries((step + worker) % workers, workers):
                yield _Parcel(delivery.step, delivery.position_ids, _Travelling(as_tensors(delivery.batch)))
        except HexdataError as error:
            yield error


def _steps_a_message(batch: TensorBatch, batch_size: int) -> int:
    """Return how many such batches travel in one message: a message costs some 100 µs, whatever it holds."""
    row = sum(tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in batch.values())
    return max(1, min(_MOST_STEPS, _PIPE_BYTES // (row * batch_size)))


class TorchLoader:
    """A ``Loader`` that works in DataLoader workers, pins memory, and delivers dicts of tensors.

    It stands where its loader stands and is used like it: iterating runs the epoch to its end, from the
    next batch on that was not delivered, then advances ``epoch``; after the last batch of an epoch it runs
    the next one, also for a loop that takes exactly ``len(loader)`` batches. Batches that workers have
    prepared but nobody was given come again. The batches and their order do not depend on the number of
    workers, and a state resumes with another number of them and, at the same global batch, of ranks.

    Args:
        loader: the loader; from here on iterate this one in its place.
        num_workers: processes that prepare batches; 0 prepares them in this one.
        rank, world_size: this process among those that train together. None: those of the loader or, if
            it has but one rank, those of torch.distributed.
        pin_memory: deliver in pinned memory, for ``to_device``; None: if there is a CUDA device.
        prefetch_factor: messages that each worker prepares ahead: of one batch, or of up to 16 small ones.
        persistent_workers: keep the workers from one epoch to the next.
        multiprocessing_context: how workers start: "fork", "spawn", "forkserver"; None: Python's default.

    Attributes:
        loader: the loader of this rank.

    Raises:
        ConfigError: an option has no meaning.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int = 4,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
    ) -> None:
        num_workers = check_count("num_workers", num_workers, 0)
        prefetch_factor = check_count("prefetch_factor", prefetch_factor, 1)
        for name, value in (("pin_memory", pin_memory), ("persistent_workers", persistent_workers)):
            if not (isinstance(value, bool) or (value is None and name == "pin_memory")):
                raise ConfigError(f"{name} cannot be used", found=repr(value), expected="True or False")
        if multiprocessing_context is not None:
            check_choice("multiprocessing_context", multiprocessing_context, get_all_start_methods())
        self.loader = _of_this_rank(loader, rank, world_size)
        self._asked = world_size
        self._num_workers = num_workers
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        if num_workers:
            self._messages = _Messages(self.loader)
            self._batches = DataLoader(
                self._messages,
                batch_size=None,
                num_workers=num_workers,
                collate_fn=list,  # it would look into the messages
                pin_memory=self._pin_memory,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                multiprocessing_context=multiprocessing_context,
            )

    @property
    def epoch(self) -> int:
        """The epoch that iterating runs, counted from 0."""
        return self.loader.epoch

    @property
    def epoch_digest(self) -> str | None:
        """The digest of what this rank got in the epoch that ended last; see ``Loader.epoch_digest``."""
        return self.loader.epoch_digest

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch`` from its first batch."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, JSON-able: the batches delivered count, and no others."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, also of other numbers of ranks and workers; see ``Loader.load_state_dict``."""
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        """Return the batches of a whole epoch, the same for every rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[TensorBatch]:
        """Deliver the rest of the epoch, or all of the next one if nothing is left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
            ConfigError: the loader was sent elsewhere while iterating, or torch.distributed was
                initialised after it was made.
            RuntimeError: a worker died.
        """
        _check_alone(self.loader, self._asked)
        with self.loader.iteration() as epoch:
            for parcel in self._parcels():
                self.loader.record(parcel.step, parcel.position_ids)
                yield parcel.batch
                if self.loader.epoch != epoch:
                    raise ConfigError("the epoch was changed while iterating", hint="Start a new iteration.")
            if self.loader.batch != len(self):
                raise HexdataError("the workers ended early", found=self.loader.batch, expected=len(self))

    def _parcels(self) -> Iterator[_Parcel]:
        if not self._num_workers:
            for delivery in self.loader.deliveries():
                parcel = _Parcel(delivery.step, delivery.position_ids, as_tensors(delivery.batch))
                yield parcel.pin_memory() if self._pin_memory else parcel
            return
        self._messages.start_at(self.loader.epoch, self.loader.batch)
        yield from _in_order(iter(self._batches), self._num_workers)


def _in_order(messages: Iterator[_Message], workers: int) -> Iterator[_Parcel]:
    """Yield by step what comes in messages, one a worker in turn: worker w has every ``workers``-th step."""
    while turn := list(islice(messages, workers)):
        for parcel in chain.from_iterable(zip_longest(*turn)):
            if isinstance(parcel, HexdataError):
                raise parcel
            if parcel is not None:
                yield parcel
