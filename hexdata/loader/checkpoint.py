"""Checkpoints of a loader: its position in an epoch, and the digest of the positions it delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_same_options, check_versions
from hexdata.errors import ConfigError, StoreError
from hexdata.loader.options import ARRAY, LoaderOptions, shard_range
from hexdata.order import ORDER_VERSION, derive_key, sort_key
from hexdata.strict_json import AtMost, Count, Matching, check_value

__all__ = [
    "STEP_SHIFT",
    "DataIdentity",
    "EpochDigest",
    "LoaderPosition",
    "check_state",
    "combine_digests",
    "digest_key",
    "make_state",
]

_STATE_VERSION: Final = 4
_OPTIONAL_KEYS: Final = ("dedup", "files", "shards", "weights", "where_changed", "first_where")
"""Keys of a state that are absent if their value is None."""
_MASK_64: Final = (1 << 64) - 1
STEP_SHIFT: Final = 36
"""Position ids occupy the lower bits: sums are unique for ids below 2^36 and steps below 2^28."""
_SUM_SIZE: Final = 1 << 16
"""Number of positions summed at once. Summing each batch would take a few per cent of the loader's time."""

_Name = Annotated[str, AtMost(128)]


@dataclass(frozen=True)
class LoaderPosition:
    """Position of a loader: the next batch of an epoch, and the digest of the batches before it."""

    epoch: int = 0
    batch: int = 0
    digest: int | None = 0
    """Sum of an ``EpochDigest``; None if other ranks delivered the batches, so that it is unknown."""


class DataIdentity(NamedTuple):
    """Identity of the positions that a loader delivers."""

    digest: str
    """Digest of the shards' manifest; in games mode, of the files of games and positions."""
    rows: str | None = None
    """Digest of the selected rows and their weights; None if all rows are selected."""
    files: list[int] | None = None
    """Numbers of files of games and of positions in games mode; otherwise None."""


@dataclass(frozen=True)
class _LoaderState:
    """The schema of a state."""

    version: int
    order_version: int
    digest: _Name
    rows: _Name | None
    split: _Name
    seed: int
    shuffle: bool
    mode: _Name
    global_batch: Count
    remainder: _Name
    where: str | None
    newest: Count | None
    final_policy_skip: bool
    streams: Annotated[list[Count], AtMost(2)] | None
    window: Count | None
    rank: Count
    world_size: Count
    epoch: Count
    batch: Count
    epoch_digest: Annotated[str, Matching("[0-9a-f]{16}", "16 hexadecimal digits")] | None
    files: Annotated[list[Count], AtMost(2)] | None = None
    shards: Annotated[list[Count], AtMost(2)] | None = None
    """The pair of ``LoaderOptions.shards``; absent from a state if all shards are read."""
    dedup: _Name | None = None
    weights: str | None = None
    where_changed: bool | None = None
    first_where: str | None = None


def make_state(
    options: LoaderOptions,
    data: DataIdentity,
    position: LoaderPosition,
    first_where: str | EllipsisType | None = ...,
) -> dict[str, Any]:
    """Return the state of a loader as a dict for JSON.

    Args:
        options: Options of the loader.
        data: Identity of its positions.
        position: Position of the loader.
        first_where: The condition ``where`` with which the loader was made (default ``...``: that of the
            options).
    """
    changed = first_where not in (..., options.where)
    state = {
        "version": _STATE_VERSION,
        "order_version": ORDER_VERSION,
        **data._asdict(),
        **_order_options(options),
        "rank": options.rank,
        "world_size": options.world_size,
        "epoch": position.epoch,
        "batch": position.batch,
        "epoch_digest": None if position.digest is None else format(position.digest, "016x"),
        "where_changed": True if changed else None,
        "first_where": first_where if changed else None,
    }
    return {name: value for name, value in state.items() if name not in _OPTIONAL_KEYS or value is not None}


def check_state(
    state: dict[str, Any],
    options: LoaderOptions,
    data: DataIdentity,
    steps: Callable[[int], int],
    older_digest: Callable[[Sequence[int]], str],
) -> LoaderPosition:
    """Return the position in a state, if a loader can resume at it.

    The rank and world size of the state may differ from those of the loader; the digest is then unknown. In
    games mode, positions may have been added to the store if the state was saved between two epochs.

    Args:
        state: State from :func:`make_state`.
        options: Options of the loader.
        data: Identity of its positions.
        steps: Returns the number of batches of an epoch.
        older_digest: Returns the digest of the first files of games and of positions, given their numbers.

    Raises:
        StoreError: The state belongs to other positions or another version of the order.
        ConfigError: The state belongs to a loader with other options, or it is not a state.
    """
    expected = make_state(options, data, LoaderPosition())
    if isinstance(state, dict) and {"version", "order_version"} <= state.keys():
        check_versions(state, expected)
    checked = check_value(_LoaderState, state, what="the state of the loader", error=ConfigError)
    state = {**dict.fromkeys(_OPTIONAL_KEYS), **state}
    expected = {**dict.fromkeys(_OPTIONAL_KEYS), **expected}
    different = [name for name in _order_options(options) if state[name] != expected[name]]
    has_grown = (
        options.mode == "games"
        and checked.batch == 0  # nothing of the epoch is delivered
        and checked.digest != data.digest
        and options.weights != ARRAY  # those of the added positions are new
        and checked.files is not None
        and len(checked.files) == len(data.files or ())
        and older_digest(checked.files) == checked.digest
    )
    if not has_grown:
        _check_positions(state, expected, options, different)
    check_same_options(state, expected, different, "loader")
    return _read_position(checked, options, steps(checked.epoch))


def where_of_state(state: Any, where: str | None, first_where: str | None) -> str | None:
    """Return the condition by which a loader selects positions in order to resume at a state.

    This is the condition of the state, if the loader was made with the same one as the loader that saved the
    state. Otherwise it is the condition of the loader, which :func:`check_state` compares with the state.

    Args:
        state: The state, which may be invalid.
        where: The condition of the loader.
        first_where: The condition with which the loader was made.
    """
    if not isinstance(state, dict) or not isinstance(state.get("where"), str | None):
        return where
    first = state.get("first_where") if state.get("where_changed") else state.get("where")
    return state.get("where") if first == first_where else where


def _check_positions(
    state: dict[str, Any], expected: dict[str, Any], options: LoaderOptions, different: Sequence[str]
) -> None:
    """Check that a state belongs to the same positions.

    A digest that differs because of another option is not checked: the option is the cause to report.

    Args:
        state: The state.
        expected: A state of the loader.
        options: Options of the loader.
        different: Names of the options that differ.

    Raises:
        StoreError: It does not.
    """
    data = "games" if options.mode == "games" else "shards"
    checks = []
    if "mode" not in different:
        checks.append(("digest", f"other {data}"))
    if not different:
        checks.append(("rows", f"other positions of these {data}, or to other weights"))
    for name, what in checks:
        if state[name] != expected[name]:
            raise StoreError(
                f"the state belongs to {what}",
                found=f"digest {state[name]}",
                expected=expected[name],
                hint=f"Resume on the {data} of that run, or start a new epoch: "
                f"set_epoch({state['epoch'] + (state['batch'] > 0)}).",
            )


def _order_options(options: LoaderOptions) -> dict[str, Any]:
    """Return the options that determine the order of batches; those of the other mode are None."""
    streams = options.mode == "stream"
    return {
        "split": options.split,
        "seed": options.seed,
        "shuffle": options.shuffle,
        "mode": options.mode,
        "global_batch": options.global_batch,
        "remainder": options.remainder,
        "where": options.where,
        "dedup": None if options.dedup == "none" else options.dedup,
        "newest": options.newest,
        "weights": options.weights,
        "final_policy_skip": options.batch.final_policy == "skip",
        "streams": list(options.streams) if streams else None,
        "window": options.window if streams else None,
        "shards": None if options.shards is None else list(shard_range(options.shards)),
    }


def _read_position(state: _LoaderState, options: LoaderOptions, steps: int) -> LoaderPosition:
    if state.batch > steps:
        raise ConfigError(
            "the state is beyond the end of its epoch",
            found=f"batch {state.batch} of epoch {state.epoch}",
            expected=f"at most batch {steps}",
        )
    if not state.batch:
        return LoaderPosition(state.epoch, 0, 0)
    is_of_rank = (state.rank, state.world_size) == (options.rank, options.world_size)
    digest = state.epoch_digest if is_of_rank else None
    return LoaderPosition(state.epoch, state.batch, None if digest is None else int(digest, 16))


def digest_key(manifest_digest: str, epoch: int) -> int:
    """Return the key of the sort keys that :class:`EpochDigest` adds up."""
    return derive_key(0, "digest", manifest_digest, epoch)


class EpochDigest:
    """Sum over the positions delivered in an epoch, equal for two runs that delivered the same at each step.

    The digest is the sum, mod 2^64, of ``sort_key(position_id + step · 2^36, key)`` with the key
    ``derive_key(0, "digest", manifest digest, epoch)``. It changes if a position is missing, repeated,
    replaced or delivered at another step, but not with the order within a step. Padding is not counted. The
    digests of all ranks or workers add up to that of a single process.

    Args:
        manifest_digest: Digest of the shards' manifest.
        epoch: The epoch.
        value: Sum to continue from (default 0).
    """

    def __init__(self, manifest_digest: str, epoch: int, value: int = 0) -> None:
        self._key = digest_key(manifest_digest, epoch)
        self._value = value
        self._device_sum: Any = None
        self._pending: list[npt.NDArray[np.uint64]] = []
        self._count = 0

    def add(self, step: int, position_ids: npt.NDArray[np.int64]) -> None:
        """Add the ids, int64 (B,), of positions delivered at a step."""
        self._pending.append(position_ids.astype(np.uint64) + np.uint64(step << STEP_SHIFT & _MASK_64))
        self._count += len(position_ids)
        if self._count >= _SUM_SIZE:
            self._sum()

    def add_sum(self, key_sum: Any) -> None:
        """Add the sum, mod 2^64, of the sort keys of positions delivered at a step.

        Args:
            key_sum: An integer, or a tensor with one int64, which stays on its device until the value of the
                digest is needed.
        """
        self._device_sum = key_sum if self._device_sum is None else self._device_sum + key_sum

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without tensors."""
        self._sum()
        return self.__dict__

    @property
    def value(self) -> int:
        """The sum of the positions added so far."""
        self._sum()
        return self._value

    def __str__(self) -> str:
        """Return the sum as 16 hexadecimal digits."""
        return format(self.value, "016x")

    def _sum(self) -> None:
        if self._pending:
            keys = sort_key(np.concatenate(self._pending), self._key)
            self._value = (self._value + int(keys.sum(dtype=np.uint64))) & _MASK_64
            self._pending, self._count = [], 0
        if self._device_sum is not None:
            self._value = (self._value + int(self._device_sum)) & _MASK_64
            self._device_sum = None


def combine_digests(digests: Iterable[str]) -> str:
    """Return the digest of an epoch over all ranks.

    Args:
        digests: ``epoch_digest`` of each rank, in any order.
    """
    return format(sum(int(digest, 16) for digest in digests) & _MASK_64, "016x")
