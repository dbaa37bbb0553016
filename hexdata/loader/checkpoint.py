"""Checkpoints of a loader: its position in an epoch, and the digest of the positions it delivered."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_count, check_same_options, check_versions
from hexdata.errors import ConfigError, StoreError
from hexdata.loader.options import ARRAY, LoaderOptions
from hexdata.order import ORDER_VERSION, derive_key, sort_key

# Increased when the keys of a state change. States of other versions are refused, never converted.
_STATE_VERSION: Final = 4
_MASK_64: Final = (1 << 64) - 1
STEP_SHIFT: Final = 36
"""Position ids occupy the lower bits: sums are unique for ids below 2^36 and steps below 2^28."""
_SUM_SIZE: Final = 1 << 16
"""Number of positions summed at once. Summing each batch would take a few per cent of the loader's time."""


class LoaderPosition(NamedTuple):
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


# No loader saves longer lists. The limit keeps a damaged state from being compared and printed at length.
_MOST_PARTS: Final = 256
"""Largest length of a list in a state."""
_OPTIONAL: Final = ("files", "shards", "dedup", "weights", "where_changed", "first_where")
"""Keys of a state that are absent if they are None."""


def _order_options(options: LoaderOptions) -> dict[str, Any]:
    """Return the options that determine the order of batches, which must be those of the loader that resumes.

    Ranks may change, since steps have the same positions for the same global batch.
    """
    streams = options.mode == "stream"
    return {
        "split": options.split,
        "seed": options.seed,
        "shuffle": bool(options.shuffle),
        "mode": options.mode,
        "global_batch": options.global_batch,
        "remainder": options.remainder,
        "where": options.where,
        "dedup": None if options.dedup == "none" else options.dedup,
        "newest": options.newest,
        "weights": options.weights_text,
        "final_policy_skip": options.final_policy == "skip",
        "streams": list(options.streams) if streams else None,
        "window": options.window if streams else None,
        "shards": None if options.shards is None else list(options.shards),
    }


def make_state(
    options: LoaderOptions, data: DataIdentity, position: LoaderPosition, first_where: str | None
) -> dict[str, Any]:
    """Return the state of a loader as a dict for JSON.

    Args:
        options: Options of the loader.
        data: Identity of its positions.
        position: Position of the loader.
        first_where: The condition ``where`` with which the loader was made.
    """
    is_changed = first_where != options.where
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
        "where_changed": True if is_changed else None,
        "first_where": first_where if is_changed else None,
    }
    return {name: value for name, value in state.items() if value is not None or name not in _OPTIONAL}


def check_form(state: Any, expected: Mapping[str, Any], optional: Collection[str], what: str) -> Any:
    """Return a state whose versions, keys, epoch and batch are right, with None for absent keys.

    Args:
        state: What was given as a state.
        expected: A state of the object that resumes.
        optional: Keys that may be absent from a state.
        what: What the object is called, such as "loader".

    Raises:
        StoreError: The state has another version.
        ConfigError: It is not a state.
    """
    # Versions first: the keys of a state of another version would be reported as "not a state".
    if isinstance(state, dict) and {"version", "order_version"} <= state.keys():
        check_versions(state, expected)
    required, known = expected.keys() - {*optional}, expected.keys() | {*optional}
    if not (isinstance(state, dict) and required <= state.keys() <= known):
        raise ConfigError(f"this is not the state of a {what}: {state!r:.80}")
    # A nested value could not be compared with an option, and its text could be of any length.
    for name, value in state.items():
        parts = value if isinstance(value, list) and len(value) <= _MOST_PARTS else [value]
        if not all(part is None or isinstance(part, str | int | float) for part in parts):
            raise ConfigError(f"this is not the state of a {what}: {name} is {value!r:.80}")
    for name in ("epoch", "batch"):
        check_count(f"the {name} of the state", state[name], 0)
    return {**dict.fromkeys(optional), **state}


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
    # `first_where` is not compared here: where_of_state has compared the first conditions.
    given = check_form(state, make_state(options, data, LoaderPosition(), options.where), _OPTIONAL, "loader")
    files, epoch, batch, expected = given["files"], given["epoch"], given["batch"], _order_options(options)
    different = [name for name in expected if given[name] != expected[name]]
    # Further games only append files, so the digest of the first files of the store is still that of the
    # state. Options of the state are compared below in any case.
    has_grown = (
        options.mode == "games"
        and batch == 0  # nothing of the epoch is delivered
        and given["digest"] != data.digest
        and options.weights_text != ARRAY  # those of the added positions are new
        and isinstance(files, list)
        and len(files) == len(data.files or ())
        and all(type(each) is int and each >= 0 for each in files)
        and older_digest(files) == given["digest"]
    )
    names = "games" if options.mode == "games" else "shards"
    # A digest that differs because of another option is not checked: the option is the cause to report.
    for found, own, applies, others in (
        (given["digest"], data.digest, "mode" not in different, names),
        (given["rows"], data.rows, not different, f"positions of these {names}, or to other weights"),
    ):
        if applies and not has_grown and found != own:
            hint = f"Resume on the {names} of that run, or begin with set_epoch({epoch + (batch > 0)})."
            raise StoreError(f"the state belongs to other {others}", found=found, expected=own, hint=hint)
    check_same_options(given, expected, different, "loader")
    if batch > (most := steps(epoch)):
        raise ConfigError(f"the state is beyond its epoch: batch {batch} of {most} of epoch {epoch}")
    # At batch 0 nothing has been delivered, so the digest is 0 for every rank.
    if (digest := given["epoch_digest"]) is None or not batch:
        return LoaderPosition(epoch, batch, None if batch else 0)
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest)):
        raise ConfigError(f"this is not the state of a loader: epoch_digest is {digest!r:.80}")
    # The sum of another rank's positions would be a wrong digest for this one.
    is_of_rank = (given["rank"], given["world_size"]) == (options.rank, options.world_size)
    return LoaderPosition(epoch, batch, int(digest, 16) if is_of_rank else None)


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
    # `first_where` may be None for "no condition", and absent keys are None too, so `where_changed` decides.
    first = state.get("first_where") if state.get("where_changed") else state.get("where")
    return state.get("where") if first == first_where else where


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
        # The step is above the id in the same word, so that a position
        # delivered at another step changes the sum.
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
