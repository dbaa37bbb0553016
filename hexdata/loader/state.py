"""What a checkpoint keeps of a loader: where it stands, and everything that fixes the order of the rest."""

from __future__ import annotations

from typing import Any, Final

from hexdata.errors import ConfigError, StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.order import ORDER_VERSION

__all__ = ["check_state", "make_state"]

_STATE_VERSION: Final = 1


def make_state(options: LoaderOptions, digest: str, epoch: int, batch: int) -> dict[str, Any]:
    """Return the JSON-able state of a loader whose next batch is ``batch`` of ``epoch``.

    Rank and world size are left out: with the same global batch the rest is the same for any of them.
    """
    return {
        "version": _STATE_VERSION,
        "order_version": ORDER_VERSION,
        "digest": digest,
        **_order_options(options),
        "epoch": epoch,
        "batch": batch,
    }


def check_state(state: dict[str, Any], options: LoaderOptions, digest: str, batches: int) -> tuple[int, int]:
    """Return (epoch, next batch) of a state that this loader can go on from.

    Raises:
        StoreError: if it was taken on other shards or under another version of the order.
        ConfigError: if it was taken with other options, which the message names, or is no state.
    """
    expected = make_state(options, digest, 0, 0)
    if not isinstance(state, dict) or state.keys() != expected.keys():
        raise ConfigError(
            "not the state of a loader", found=state, expected=f"a dict of {', '.join(expected)}"
        )
    for name in ("version", "order_version"):
        if state[name] != expected[name]:
            raise StoreError(
                f"the state has another {name}",
                found=state[name],
                expected=expected[name],
                cure="Resume with the hexdata release that wrote it, or start a new epoch.",
            )
    if state["digest"] != digest:
        raise StoreError(
            "the state was taken on other shards",
            found=f"digest {state['digest']}",
            expected=digest,
            cure="Resume on the shards of that run, or start a new epoch.",
        )
    other = [name for name in _order_options(options) if state[name] != expected[name]]
    if other:
        raise ConfigError(
            f"the state was taken with another {', '.join(other)}",
            found={name: state[name] for name in other},
            expected={name: expected[name] for name in other},
            cure="Make the loader with the options of that run.",
        )
    return _check_place(state["epoch"], state["batch"], batches)


def _order_options(options: LoaderOptions) -> dict[str, Any]:
    """Return the options that the order of the batches hangs on."""
    return {
        "split": options.split,
        "seed": options.seed,
        "shuffle": options.shuffle,
        "window_shards": options.window_shards,
        "global_batch": options.global_batch,
        "remainder": options.remainder,
    }


def _check_place(epoch: object, batch: object, batches: int) -> tuple[int, int]:
    if not (isinstance(epoch, int) and isinstance(batch, int) and epoch >= 0 and 0 <= batch <= batches):
        raise ConfigError("the state stands nowhere", found=f"batch {batch!r} of epoch {epoch!r}")
    return epoch, batch
