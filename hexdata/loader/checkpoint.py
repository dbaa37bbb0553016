"""Checkpoints of a loader: its position in an epoch, and the digest of the positions it delivered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_same_options, check_versions
from hexdata.errors import ConfigError, StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.order import ORDER_VERSION, derive_key, sort_key
from hexdata.strict_json import AtMost, Count, Matching, check_value

__all__ = ["EpochDigest", "LoaderPosition", "check_state", "combine_digests", "make_state"]

_STATE_VERSION: Final = 3
_Name = Annotated[str, AtMost(128)]


@dataclass(frozen=True)
class LoaderPosition:
    """Where a loader stands: the next batch of an epoch, and the digest of those before it.

    ``digest`` is None where it cannot be known, as other ranks delivered them.
    """

    epoch: int = 0
    batch: int = 0
    digest: int | None = 0


@dataclass(frozen=True)
class _State:
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


def make_state(
    options: LoaderOptions, shards: str, rows: str | None, position: LoaderPosition
) -> dict[str, Any]:
    """Return the JSON-able state of a loader.

    Args:
        options: of the loader.
        shards: the manifest's digest.
        rows: the digest of the rows that take part; None for all.
        position: where it stands.

    Rank and world size bind the digest alone: with the same global batch the rest is the same for any.
    """
    return {
        "version": _STATE_VERSION,
        "order_version": ORDER_VERSION,
        "digest": shards,
        "rows": rows,
        **_order_options(options),
        "rank": options.rank,
        "world_size": options.world_size,
        "epoch": position.epoch,
        "batch": position.batch,
        "epoch_digest": None if position.digest is None else format(position.digest, "016x"),
    }


def check_state(
    state: dict[str, Any], options: LoaderOptions, shards: str, rows: str | None, steps: int
) -> LoaderPosition:
    """Return the place of a state that such a loader can go on from; ``steps`` are those of its epochs.

    Raises:
        StoreError: if it was taken on other shards, on other rows of them, or under another version of
            the order.
        ConfigError: if it was taken with other options, which the message names, or is no state.
    """
    expected = make_state(options, shards, rows, LoaderPosition())
    if isinstance(state, dict) and {"version", "order_version"} <= state.keys():
        check_versions(state, expected)
    checked = check_value(_State, state, what="the state of the loader", error=ConfigError)
    other = [name for name in _order_options(options) if state[name] != expected[name]]
    for name, what in (("digest", "other shards"), ("rows", "other positions of these shards")):
        if state[name] != expected[name] and not (name == "rows" and other):
            raise StoreError(
                f"the state was taken on {what}",
                found=f"digest {state[name]}",
                expected=expected[name],
                hint="Resume on the shards of that run, or start a new epoch.",
            )
    check_same_options(state, expected, other, "loader")
    return _read_position(checked, options, steps)


def _order_options(options: LoaderOptions) -> dict[str, Any]:
    """Return the options that the order of the batches hangs on; None for those of the other mode."""
    streams = options.mode == "stream"
    return {
        "split": options.split,
        "seed": options.seed,
        "shuffle": options.shuffle,
        "mode": options.mode,
        "global_batch": options.global_batch,
        "remainder": options.remainder,
        "where": options.where,
        "newest": options.newest,
        "final_policy_skip": options.batch.final_policy == "skip",
        "streams": list(options.streams) if streams else None,
        "window": options.window if streams else None,
    }


def _read_position(state: _State, options: LoaderOptions, steps: int) -> LoaderPosition:
    if state.batch > steps:
        found = f"batch {state.batch} of epoch {state.epoch}"
        raise ConfigError("the state stands nowhere", found=found, expected=f"at most batch {steps}")
    if not state.batch:
        return LoaderPosition(state.epoch, 0, 0)
    is_of_rank = (state.rank, state.world_size) == (options.rank, options.world_size)
    known = state.epoch_digest if is_of_rank else None
    return LoaderPosition(state.epoch, state.batch, None if known is None else int(known, 16))


_MASK_64: Final = (1 << 64) - 1
_STEP_SHIFT: Final = 36
"""Below it stands the position: ids under 69 billion and steps under 268 million never meet."""
_SUM_SIZE: Final = 1 << 16
"""Positions that are summed at once: a call for each batch would take some per cent of the loader's time."""


class EpochDigest:
    """Sums, mod 2^64, ``sort_key(position_id + step · 2^36, key)`` over the positions delivered.

    The key is ``derive_key(0, "digest", manifest digest, epoch)``. A position that is missing, repeated,
    exchanged for another or moved to another step changes the sum; the order within a step, which ranks
    and workers share out among them, does not. Padding does not count.
    """

    def __init__(self, shards: str, epoch: int, value: int = 0) -> None:
        """Begin the digest of an epoch of the shards of that manifest digest, or go on from a sum."""
        self._key = derive_key(0, "digest", shards, epoch)
        self._value = value
        self._pending: list[npt.NDArray[np.uint64]] = []
        self._count = 0

    def add(self, step: int, position_ids: npt.NDArray[np.int64]) -> None:
        """Count the positions (B,) of one step, or of a part of it."""
        self._pending.append(position_ids.astype(np.uint64) + np.uint64(step << _STEP_SHIFT & _MASK_64))
        self._count += len(position_ids)
        if self._count >= _SUM_SIZE:
            self._sum()

    @property
    def value(self) -> int:
        """The sum so far."""
        self._sum()
        return self._value

    def __str__(self) -> str:
        """Return the sum so far as 16 hexadecimal digits."""
        return format(self.value, "016x")

    def _sum(self) -> None:
        if self._pending:
            keys = sort_key(np.concatenate(self._pending), self._key)
            self._value = (self._value + int(keys.sum(dtype=np.uint64))) & _MASK_64
            self._pending, self._count = [], 0


def combine_digests(digests: Iterable[str]) -> str:
    """Return the digest of a whole epoch out of those of its ranks, each once and in any order."""
    return format(sum(int(digest, 16) for digest in digests) & _MASK_64, "016x")
