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
from hexdata.shards.blocks import Block

_SUM_TOLERANCE: Final = 1e-3
"""Deviation from 1 that a sum of float16 probabilities may have."""


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
            block |= _new_targets(block, targets, chunk.board_size**2)
        except (TypeError, ValueError) as error:
            raise InputError("the new targets of a game are invalid", found=str(error), **game) from error
        self.count("relabelled")
        # As a block: a game stored as moves has one value, and its moves are its policies.
        return replace(chunk, moves=None, tiers=None, block=block)


def _new_targets(block: Block, targets: object, cells: int) -> Block:
    """Return the fields that the targets replace; policies that are not replaced are kept.

    Raises:
        TypeError: These are no targets.
        ValueError: A target has another shape, or is no distribution or value.
    """
    if not isinstance(targets, Targets):
        raise TypeError(f"{targets!r:.80} instead of Targets or None")
    positions = np.arange(len(block["value"]))
    new: Block = {}
    if targets.value is not None:
        new["value"] = _as_floats("value", targets.value, positions.shape, 1)
    if targets.policy is None:
        return new
    rows = positions if targets.rows is None else np.asarray(targets.rows)
    if not np.array_equal(rows, np.intersect1d(rows, positions)):
        raise ValueError(f"rows {rows.tolist()!r:.80}, not ascending positions from 0 to {positions[-1]}")
    policies = _as_floats("policy", targets.policy, (len(rows), cells), np.inf)
    sums = policies.sum(axis=1, dtype=np.float64)
    if (np.abs(sums - 1) > _SUM_TOLERANCE).any():
        raise ValueError(f"policies with sums from {sums.min()} to {sums.max()}, not 1")
    # The function may replace policies of some positions only; the others keep theirs.
    if "policy" in block:
        kept = ~np.isin(block["policy_row"], rows)
        policies = np.concatenate((block["policy"][kept], policies))
        rows = np.concatenate((block["policy_row"][kept], rows))
    order = np.argsort(rows)  # the policies of a block are in the order of its rows
    given = {"policy": policies[order], "policy_row": rows[order].astype(np.uint32)}
    return new | (given if len(rows) else {})


def _as_floats(name: str, values: Any, shape: tuple[int, ...], most: float) -> npt.NDArray[np.float32]:
    """Return a copy of the numbers as float32; raise ValueError if they are not finite numbers from 0 to
    ``most`` of the expected shape.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "fiu" or array.shape != shape:
        raise ValueError(f"{name} of {array.dtype} with shape {array.shape}, not numbers with shape {shape}")
    # Numbers above the range of float32 become infinite, which the next line refuses.
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    if not (np.isfinite(numbers) & (numbers >= 0) & (numbers <= most)).all():
        raise ValueError(f"{name} with numbers that are not finite, below 0 or above {most}")
    return numbers
