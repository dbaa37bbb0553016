"""The stage that replaces values and policies of games by those that a user's function returns.

Boards, and targets that the function does not return, are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, InputError
from hexdata.live.chunk import Chunk, GameBatch
from hexdata.live.chunk_unpacker import unpack_chunks
from hexdata.live.stage import Transform, find_object
from hexdata.live.state import check_rows
from hexdata.shards.blocks import Block

_SUM_TOLERANCE: Final = 1e-3
"""Deviation from 1 that a sum of float16 probabilities may have."""


@dataclass(frozen=True)
class Targets:
    """New targets for the m positions of a game. A target that is None is unchanged.

    Attributes:
        value: Values, shape (m,), each from 0 (blue wins) to 1 (red wins).
        policy: Policies, shape (k, n·n), with no negative number; each row sums to 1.
        rows: Distinct indices of the positions that the policies belong to, shape (k,), from 0. None for all
            positions; then k = m.
    """

    value: npt.ArrayLike | None = None
    policy: npt.ArrayLike | None = None
    rows: npt.ArrayLike | None = None


Relabel = Callable[[Chunk, Block], Targets | None]
"""Signature of the function. Its arguments are a game and its positions, as a read-only block of all shard
fields, by ply. It returns the new targets, or None to leave the game unchanged. With several threads, the
function runs concurrently."""


@dataclass(kw_only=True, eq=False)
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

    relabel: Relabel | str
    threads: int = 1

    consumes = produces = "games"

    def __post_init__(self) -> None:
        super().__init__(threads=self.threads)
        self._function: Any = find_object(self.relabel) if isinstance(self.relabel, str) else self.relabel
        if not callable(self._function):
            raise ConfigError(f"relabel must be a function, not {self.relabel!r}")

    def process(self, item: GameBatch) -> Iterable[GameBatch]:
        """Return the games with new targets."""
        return (tuple(self._relabel(chunk) for chunk in item),)

    def _relabel(self, chunk: Chunk) -> Chunk:
        block = unpack_chunks((chunk,), np.ones((1, chunk.positions), np.bool_))
        shown = {name: array.view() for name, array in block.items()}
        for view in shown.values():  # a function must not modify games that are drawn again
            view.flags.writeable = False
        game = {"path": chunk.source, "record": f"game {chunk.index}"}
        try:
            targets = self._function(chunk, shown)
        except Exception as error:
            raise InputError("the function that relabels games failed", found=repr(error), **game) from error
        if targets is None:
            self.count("unchanged")
            return chunk
        try:
            block = _with_targets(block, targets)
        except Exception as error:  # what the function returned may fail in any way when it is converted
            raise InputError("the new targets of a game are invalid", found=str(error), **game) from error
        self.count("relabelled")
        # As a block: a game stored as moves has one value, and its moves are its policies.
        return replace(chunk, moves=None, tiers=None, block=block)


def _with_targets(block: Block, targets: object) -> Block:
    """Return a block with new targets; policies that are not replaced are kept.

    Raises:
        TypeError: These are no targets, or others than numbers.
        ValueError: A target has another shape, or is no distribution or value.
    """
    if not isinstance(targets, Targets):
        raise TypeError(f"{targets!r:.80} instead of Targets or None")
    new = dict(block)
    if targets.value is not None:
        new["value"] = _as_floats(targets.value)
    if targets.policy is not None:
        policies = _as_floats(targets.policy)
        positions = len(block["value"])
        rows = np.arange(positions) if targets.rows is None else _as_rows(targets.rows, positions)
        if not np.allclose(policies.sum(axis=1, dtype=np.float64), 1, rtol=0, atol=_SUM_TOLERANCE):
            raise ValueError("policies whose sums are not 1")
        # The function may replace policies of some positions only; the others keep theirs.
        if "policy" in block:
            kept = ~np.isin(block["policy_row"], rows)
            policies = np.concatenate((block["policy"][kept], policies))
            rows = np.concatenate((block["policy_row"][kept], rows))
        order = np.argsort(rows)  # the policies of a block are in the order of its rows
        if len(rows):
            new |= {"policy": policies[order], "policy_row": rows[order].astype(np.uint32)}
    check_rows(new)
    return new


def _as_rows(values: npt.ArrayLike, positions: int) -> npt.NDArray[np.int64]:
    """Return indices of positions; none may be negative."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":  # an empty list has the dtype float64
        raise TypeError(f"rows of {array.dtype} instead of integers")
    if ((array < 0) | (array >= positions)).any():
        raise ValueError(f"rows from {array.min()} to {array.max()} instead of 0 to {positions - 1}")
    return array.astype(np.int64)


def _as_floats(values: Any) -> npt.NDArray[np.float32]:
    """Return a copy of numbers as float32. Those above its range become infinite, which is refused later."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{array.dtype} instead of numbers")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)
