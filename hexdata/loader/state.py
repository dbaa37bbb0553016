"""What a checkpoint keeps of a loader: where it stands, and everything that fixes the order of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hexdata.checks import check_same_options, check_versions, is_count
from hexdata.errors import ConfigError, StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.order import ORDER_VERSION

__all__ = ["Place", "check_state", "make_state"]

_STATE_VERSION: Final = 3


@dataclass(frozen=True)
class Place:
    """Where a loader stands: the next batch of an epoch, and the digest of those before it.

    ``digest`` is None where it cannot be known, as other ranks delivered them.
    """

    epoch: int = 0
    batch: int = 0
    digest: int | None = 0


def make_state(options: LoaderOptions, shards: str, rows: str | None, place: Place) -> dict[str, Any]:
    """Return the JSON-able state of a loader.

    Args:
        options: of the loader.
        shards: the manifest's digest.
        rows: the digest of the rows that take part; None for all.
        place: where it stands.

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
        "epoch": place.epoch,
        "batch": place.batch,
        "epoch_digest": None if place.digest is None else format(place.digest, "016x"),
    }


def check_state(
    state: dict[str, Any], options: LoaderOptions, shards: str, rows: str | None, steps: int
) -> Place:
    """Return the place of a state that such a loader can go on from; ``steps`` are those of its epochs.

    Raises:
        StoreError: if it was taken on other shards, on other rows of them, or under another version of
            the order.
        ConfigError: if it was taken with other options, which the message names, or is no state.
    """
    expected = make_state(options, shards, rows, Place())
    is_state = isinstance(state, dict) and {"version", "order_version"} <= state.keys()
    if is_state:
        check_versions(state, expected)
    if not is_state or state.keys() != expected.keys():
        raise ConfigError(
            "not the state of a loader", found=state, expected=f"a dict of {', '.join(expected)}"
        )
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
    return _read_place(state, options, steps)


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


def _read_place(state: dict[str, Any], options: LoaderOptions, steps: int) -> Place:
    epoch, batch, digest = state["epoch"], state["batch"], state["epoch_digest"]
    if not (is_count(epoch) and is_count(batch) and batch <= steps):
        raise ConfigError("the state stands nowhere", found=f"batch {batch!r} of epoch {epoch!r}")
    if not batch:
        return Place(epoch, 0, 0)
    if (state["rank"], state["world_size"]) != (options.rank, options.world_size) or digest is None:
        return Place(epoch, batch, None)
    try:
        return Place(epoch, batch, int(digest, 16))
    except (TypeError, ValueError):
        raise ConfigError("the state has a broken digest", found=repr(digest)) from None
