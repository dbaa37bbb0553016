"""The stage that replaces values and policies of games by those that a user's function returns.

Boards, and targets that the function does not return, are unchanged.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, HexdataError, InputError
from hexdata.live.chunk import Chunk, GameBatch
from hexdata.live.chunk_unpacker import unpack_chunks
from hexdata.live.stage import Transform
from hexdata.shards.blocks import Block

__all__ = ["ChunkRelabeller", "Relabel", "Targets"]

_SUM_TOLERANCE: Final = 1e-3


@dataclass(frozen=True)
class Targets:
    """New targets for the m positions of a game. A target that is None is unchanged."""

    value: npt.ArrayLike | None = None
    """Values, shape (m,), each from 0 (blue wins) to 1 (red wins)."""
    policy: npt.ArrayLike | None = None
    """Policies, shape (k, n·n), with no negative number; each row sums to 1."""
    rows: npt.ArrayLike | None = None
    """Indices of the positions that the policies belong to, shape (k,), ascending, from 0. None for all
    positions; then k = m."""


Relabel = Callable[[Chunk, Block], Targets | None]
"""Signature of the function. Its arguments are a game and its positions, as a read-only block of all shard
fields, by ply. It returns the new targets, or None to leave the game unchanged. With several threads, the
function runs concurrently."""


class ChunkRelabeller(Transform):
    """Replaces the targets of games by those that a function returns: game batches in, game batches out.

    An error in the function, or invalid targets, stop the pipeline; the error names the game. The
    counts are ``relabelled`` and ``unchanged`` (games).

    Args:
        relabel: Function, or its import path: ``"package.module:function"``.
        threads: Number of threads of the stage. Default 1.

    Raises:
        ConfigError: The function does not exist or is not callable.
    """

    def __init__(self, *, relabel: Relabel | str, threads: int = 1) -> None:
        super().__init__(threads=threads)
        self.relabel = _find_function(relabel)

    def process(self, item: GameBatch) -> Iterable[GameBatch]:
        """Return the games with new targets."""
        return (tuple(self._relabel(chunk) for chunk in item),)

    def _relabel(self, chunk: Chunk) -> Chunk:
        block = _read_only(unpack_chunks((chunk,), np.ones((1, chunk.positions), np.bool_)))
        try:
            targets = self.relabel(chunk, block)
        except Exception as error:
            raise _target_error(
                chunk, "the function that relabels games failed", repr(error), None
            ) from error
        if targets is None:
            self.count("unchanged")
            return chunk
        if not isinstance(targets, Targets):
            raise _target_error(chunk, _INVALID, repr(targets)[:80], "Targets, or None")
        new = dict(block)
        if targets.value is not None:
            new["value"] = _check_values(chunk, targets.value)
        if targets.policy is not None:
            new |= _check_policies(chunk, block, targets)
        self.count("relabelled")
        return replace(chunk, moves=None, tiers=None, block=new)


_INVALID: Final = "the new targets of a game are invalid"


def _find_function(relabel: Relabel | str) -> Relabel:
    found: Any = relabel
    if isinstance(relabel, str):
        try:
            found = pkgutil.resolve_name(relabel)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                "relabel cannot be imported",
                found=f"{relabel!r}: {error}",
                expected="package.module:function",
            ) from error
    if not callable(found):
        raise ConfigError("relabel is not callable", found=repr(relabel), expected="a function")
    function: Relabel = found
    return function


def _read_only(block: Block) -> Block:
    """Return read-only views of the arrays, so that a function cannot modify them."""
    views = {name: array.view() for name, array in block.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def _check_values(chunk: Chunk, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    found = _as_floats(chunk, "value", values, (chunk.positions,))
    if not ((found >= 0) & (found <= 1)).all():
        raise _target_error(
            chunk, _INVALID, f"values from {found.min()} to {found.max()}", "values from 0 to 1"
        )
    return found


def _check_policies(chunk: Chunk, block: Block, targets: Targets) -> Block:
    """Return the dense policies of a game: the new ones, and the old ones of positions without a new one."""
    cells = chunk.board_size * chunk.board_size
    rows = np.asarray(np.arange(chunk.positions) if targets.rows is None else targets.rows)
    if (
        rows.ndim != 1
        or (rows.size and rows.dtype.kind not in "iu")
        or not np.isin(rows, np.arange(chunk.positions)).all()
        or (np.diff(rows.astype(np.int64)) <= 0).any()
    ):
        expected = f"positions from 0 to {chunk.positions - 1}, ascending"
        raise _target_error(chunk, _INVALID, f"rows {rows.tolist()}"[:80], expected)
    policies = _as_floats(chunk, "policy", targets.policy, (len(rows), cells))
    sums = policies.sum(axis=1, dtype=np.float64)
    if (policies < 0).any() or (np.abs(sums - 1) > _SUM_TOLERANCE).any():
        found = f"policies from {policies.min()}, with sums from {sums.min()} to {sums.max()}"
        raise _target_error(chunk, _INVALID, found, "numbers of 0 or more with the sum 1")
    unchanged = (
        np.flatnonzero(~np.isin(block["policy_row"], rows)) if "policy" in block else np.zeros(0, np.intp)
    )
    if len(unchanged):
        policies = np.concatenate((block["policy"][unchanged], policies))
        rows = np.concatenate((block["policy_row"][unchanged], rows))
    order = np.argsort(rows)
    return {"policy": policies[order], "policy_row": rows[order].astype(np.uint32)} if len(rows) else {}


def _as_floats(chunk: Chunk, name: str, values: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a copy of the numbers as finite float32 of the expected shape; raise InputError if they do not
    fit.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise _target_error(chunk, _INVALID, f"{name}: {error}", f"an array of shape {shape}") from error
    if array.dtype.kind not in "fiu" or array.shape != shape:
        found = f"{name} of {array.dtype} with shape {array.shape}"
        raise _target_error(chunk, _INVALID, found, f"numbers with shape {shape}")
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise _target_error(chunk, _INVALID, f"{name} with numbers that are not finite", "finite numbers")
    return numbers


def _target_error(chunk: Chunk, reason: str, found: str, expected: str | None) -> HexdataError:
    return InputError(
        reason,
        path=chunk.source,
        record=f"game {chunk.index}",
        found=found,
        expected=expected,
        hint="Correct the function given to ChunkRelabeller.",
    )
