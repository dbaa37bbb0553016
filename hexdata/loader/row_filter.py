"""Which rows of a split take part in its epochs: all, or those that a predicate, an age or a rule picks.

Decides once, from the labels alone; never looks at a board.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.schema import NO_GAME, NO_MOVE
from hexdata.selection.expression import Expression, check_condition, check_expression, explain_failures
from hexdata.shards.blocks import SENTINELS, Block
from hexdata.shards.mapped import MappedShards
from hexdata.store.session import DuckDBPyConnection, duckdb_session

__all__ = ["RowSubset", "select_rows"]

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_LOW_BITS: Final = 16
_LABELS: Final = {
    **dict.fromkeys((*SENTINELS, "player_to_move", "position_id"), "BIGINT"),
    "value": "FLOAT",
}
"""What ``where`` may use, by type. Wider than stored: ``position_in_game - total_positions`` is below 0."""
_MEMORY: Final = 256 << 20


class RowSubset:
    """Ascending rows of a split, two bytes each: the low 16 bits, and where each higher part begins."""

    def __init__(self, rows: Iterable[Int64Array]) -> None:
        """Keep the rows, given in ascending pieces."""
        low: list[npt.NDArray[np.uint16]] = [np.empty(0, np.uint16)]
        counts = np.zeros(1, np.int64)
        for piece in rows:
            low.append(piece.astype(np.uint16))
            higher = np.bincount(piece >> _LOW_BITS, minlength=len(counts))
            higher[: len(counts)] += counts
            counts = higher
        self._low = np.concatenate(low)
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return len(self._low)

    def rows(self, numbers: Int64Array) -> Int64Array:
        """Return the rows of these numbers: number i is the i-th row of the subset."""
        higher = np.searchsorted(self._starts, numbers, side="right") - 1
        return (higher << _LOW_BITS) + self._low[numbers]

    @property
    def digest(self) -> str:
        """SHA-256 over the rows: equal for equal subsets."""
        digest = hashlib.sha256(self._starts.astype("<i8").data)
        digest.update(self._low.astype("<u2", copy=False).data)
        return digest.hexdigest()


def select_rows(shards: MappedShards, options: LoaderOptions) -> RowSubset | None:
    """Return the rows that ``where``, ``newest`` and ``final_policy="skip"`` leave; None for all.

    Each is asked of the whole split: ``newest`` counts games whether or not ``where`` picks them.

    Raises:
        ConfigError: ``where`` is no condition on a position's own labels, or fails on one; or no row is
            left.
    """
    skips_finals = options.batch.final_policy == "skip"
    if options.where is None and options.newest is None and not skips_finals:
        return None
    masks: list[Iterator[BoolArray]] = []
    if options.where is not None:  # first, as it may be refused, and the others read the whole split
        masks.append(_matches(shards, options.where))
    if options.newest is not None:
        masks.append(_in_newest_games(shards, options.newest))
    if skips_finals:
        masks.append(_has_policy(shards))
    subset = RowSubset(_combine_masks(masks))
    if not len(subset):
        asked = {"where": options.where, "newest": options.newest, "final_policy": options.batch.final_policy}
        raise ConfigError(f"no position of {options.split} is left to train on", found=asked)
    return subset


def _combine_masks(masks: list[Iterator[BoolArray]]) -> Iterator[Int64Array]:
    """Yield, shard by shard, the rows that every mask lets through."""
    start = 0
    for of_shard in zip(*masks, strict=True):
        kept = np.logical_and.reduce(of_shard)
        yield np.flatnonzero(kept) + start
        start += len(kept)


def _has_policy(shards: MappedShards) -> Iterator[BoolArray]:
    """Yield, shard by shard, which positions have a policy, one-hot or dense."""
    for block in shards.scan(("move",)):
        mask = block["move"] != NO_MOVE
        mask[block["policy_row"]] = True
        yield mask


def _in_newest_games(shards: MappedShards, games: int) -> Iterator[BoolArray]:
    """Yield, shard by shard, which positions are of the ``games`` games of the highest ids.

    Positions of unknown games are of none.
    """
    newest = np.empty(0, np.int64)
    for block in shards.scan(("game_id",)):
        ids = block["game_id"]
        if len(newest) == games:
            ids = ids[ids > newest[0]]
        newest = np.unique(np.concatenate([newest, ids[ids != NO_GAME]]))[-games:]
    for block in shards.scan(("game_id",)):
        # All ids from the oldest of them on are among the newest; -1, for none, is below any.
        yield block["game_id"] >= (newest[0] if len(newest) else np.iinfo(np.int64).max)


def _matches(shards: MappedShards, where: str) -> Iterator[BoolArray]:
    """Yield, shard by shard, which positions fulfil the predicate. Only the labels that it names are read."""
    with duckdb_session(memory=_MEMORY, threads=1) as con:
        predicate = _read_predicate(con, where)
        labels = sorted(predicate.columns) or ["position_id"]
        for block in shards.scan(labels):
            with explain_failures(predicate):
                mask = _evaluate(con, {name: block[name] for name in labels}, predicate)
            yield mask


def _read_predicate(con: DuckDBPyConnection, where: str) -> Expression:
    """Read the predicate, which must follow from a position's own labels.

    Raises:
        ConfigError: it does not, or is none.
    """
    return check_condition("where", check_expression(con, "where", where, _LABELS))


def _evaluate(con: DuckDBPyConnection, labels: Block, predicate: Expression) -> BoolArray:
    """Return which positions fulfil the predicate; null is no."""
    mask = np.zeros(len(next(iter(labels.values()))), np.bool_)
    arrays = {name: pa.array(array) for name, array in labels.items()}
    con.register("labels", pa.table({"_row": pa.array(np.arange(len(mask))), **arrays}))
    columns = ", ".join(_column_sql(name) for name in labels)
    query = f"SELECT _row FROM (SELECT _row, {columns} FROM labels) WHERE {predicate.sql}"
    mask[con.execute(query).fetchnumpy()["_row"]] = True
    return mask


def _column_sql(name: str) -> str:
    """Return a label as the predicate sees it: null where the shards have a stand-in."""
    value = f"nullif({name}, {SENTINELS[name]})" if name in SENTINELS else name
    return f"({value})::{_LABELS[name]} AS {name}"
