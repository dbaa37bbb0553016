"""Rows of a store as JSON values for the page: games, positions, and the boards of a sheet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import BLUE, PASS, RED, Symmetry, format_moves, symmetry_table
from hexdata.browse.index import GAME, NONE, PROVENANCES, StoreIndex
from hexdata.errors import StoreError
from hexdata.schema import END_REASONS, SPLITS, SWAPS, positions_schema, sources_schema
from hexdata.show.position import COLOURS, Position
from hexdata.show.store import find_position, game_of_rows, position_of_row, read_row
from hexdata.store import Store
from hexdata.store.integrity import require_rows_intact_once
from hexdata.store.parquet import ROW_GROUP_ROWS, ParquetFiles, collect, read_parquet, read_rows

__all__ = ["HEXWORLD", "SHEET_ORDERS", "StoreRows", "hexworld_link"]

Json = dict[str, Any]

HEXWORLD: Final = "https://hexworld.org/board/"
SHEET_ORDERS: Final = ("before", "after")
"""Orders of the positions of a sheet: before and after the shuffle."""
_LISTED: Final = (
    *("position_id", "game_id", "position_in_game", "total_positions", "board", "move", "value"),
    *("player_to_move", "winner", "value_sample_tier"),
)
"""Columns of a list of positions, besides the optional ones."""


class StoreRows:
    """Reads the rows of a store that a page shows.

    Args:
        store: The store.
        index: Its index.
    """

    def __init__(self, store: Store, index: StoreIndex) -> None:
        self.store, self.index = store, index
        manifest = store.manifest
        self._size = manifest.board_size or 0
        self._positions = store.rows("positions")
        self._buckets = {split: store.rows(f"shuffled/{split}") for split in SPLITS}
        self._sources = dict(self._read_sources())

    def _read_sources(self) -> Iterator[tuple[int, str]]:
        for path in self.store.files("sources"):
            table = read_parquet(path, ["source_id", "name"], None, sources_schema())
            yield from zip(table["source_id"].to_pylist(), table["name"].to_pylist(), strict=True)

    def source(self, source_id: int) -> str | None:
        """Return the name of a source."""
        return self._sources.get(source_id)

    # Games

    def games(self, ids: Sequence[int]) -> list[Json]:
        """Return the rows of games for a list. They are read from the index alone."""
        return [
            self._game_row(number, row) for number, row in zip(ids, self.index.games[list(ids)], strict=True)
        ]

    def _game_row(self, game_id: int, row: npt.NDArray[Any]) -> Json:
        facts = dict(zip(GAME.names or (), row.tolist(), strict=True))
        opening = [cell for cell in facts["opening"].tolist() if cell < self._size**2 or cell == PASS]
        bits = facts["flags"]
        return {
            "game": game_id,
            "moves": _known(facts["moves"]),
            "positions": facts["positions"],
            "winner": _name(COLOURS, facts["winner"]),
            "first": COLOURS[facts["first_player"]],
            "opening": opening,
            "split": _name(SPLITS, facts["split"]),
            "end": _name(END_REASONS, facts["end_reason"]),
            "swap": _name(SWAPS, facts["swap"]),
            "provenance": _name(PROVENANCES, facts["provenance"]),
            "source": self.source(facts["source"]),
            "duplicate_of": _known(facts["duplicate_of"]),
            "flags": [flag for bit, flag in enumerate(self.index.flags) if bits >> bit & 1],
        }

    def game(self, game_id: int) -> Json:
        """Return a game with its positions, sorted by ply.

        If the positions are scattered over the store, only their ids are returned, with ``"facts": false``.

        Raises:
            StoreError: There is no such game, or a file is damaged.
        """
        game = read_row(self.store, "games", "game_id", game_id)
        ids = self.index.position_ids(game_id)
        content: Json = self.games([game_id])[0]
        moves = game["moves"]
        content["cells"] = moves
        content["hexworld"] = moves and hexworld_link(moves, self._size, game["first_player"] or BLUE)
        if self.index.games[game_id]["first_row"] == NONE:
            return content | {"facts": False, "boards": [{"position": number} for number in ids.tolist()]}
        rows = self._read(self._positions, int(ids[0]), int(ids[-1]) + 1, self._schema("positions"))
        found = game_of_rows(self.store, game, rows)
        return content | {"facts": True, "boards": [board_json(position) for position in found.positions]}

    # Positions

    def positions(self, ids: Sequence[int]) -> list[Json]:
        """Return the rows of positions for a list, in the order of their ids in ``ids``."""
        schema = self._schema("positions")
        kept = [
            field for field in schema if field.name in _LISTED or field.name in self.store.manifest.targets
        ]
        found: dict[int, Json] = {}
        for low, high in _clusters(sorted(ids)):
            for row in self._take(low, high, pa.schema(kept), ids):
                found[row["position_id"]] = board_json(position_of_row({**_UNLISTED, **row}, self._size))
        return [found[number] for number in ids]

    def _take(self, low: int, high: int, schema: pa.Schema, ids: Sequence[int]) -> Iterator[Json]:
        wanted = np.array([number for number in ids if low <= number <= high])
        rows = self._positions.rows(low, high + 1)
        require_rows_intact_once(self.store, rows)
        table = collect(read_rows(rows, schema), schema)
        yield from table.take(pa.array(wanted - low)).to_pylist()

    def position(self, position_id: int) -> Json:
        """Return a position with all its facts, among them its game and its ply.

        Raises:
            StoreError: There is no such position, or a file is damaged.
        """
        return board_json(find_position(self.store, position_id))

    # Sheets

    def sheet(self, order: str, split: str, start: int, count: int) -> list[Json]:
        """Return consecutive positions of the store, or of a split of the shuffled order.

        Args:
            order: "before" or "after" the shuffle.
            split: Split, after the shuffle.
            start: Index of the first position in that order.
            count: Maximum number of positions.

        Raises:
            StoreError: The order has no position there, or a file is damaged.
        """
        files = self._positions if order == "before" else self._buckets[split]
        stop = min(start + count, len(files))
        if start >= stop:
            raise StoreError(
                "there are no positions at this index",
                found=f"{start:,}",
                expected=f"0 to {len(files) - 1:,}" if len(files) else "nothing: there are no positions",
            )
        schema = self._schema("positions" if order == "before" else "shuffled")
        return [
            board_json(position_of_row(row, self._size)) for row in self._read(files, start, stop, schema)
        ]

    def _schema(self, table: str) -> pa.Schema:
        return positions_schema(self._size, self.store.manifest.targets_of(table))

    def _read(self, files: ParquetFiles, start: int, stop: int, schema: pa.Schema) -> list[Json]:
        chosen = files.rows(start, stop)
        require_rows_intact_once(self.store, chosen)
        rows: list[Json] = collect(read_rows(chosen, schema), schema).to_pylist()
        return rows


_UNLISTED: Final[Json] = {"policy": None, "metadata": None}
"""Columns of a position that a list does not read."""


def _clusters(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of ascending ids that are read together."""
    first = last = None
    for number in ids:
        if first is None or last is None or number - first >= ROW_GROUP_ROWS:
            if first is not None and last is not None:
                yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last


def _known(number: int) -> int | None:
    return None if number == NONE else number


def _name(names: Sequence[str], number: int) -> str | None:
    return None if number == NONE else names[number]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def board_json(position: Position) -> Json:
    """Return a position as JSON values, with cells as indices."""
    blue, red = (np.flatnonzero(plane).tolist() for plane in position.planes)
    policy = position.policy
    cells = [] if policy is None else np.flatnonzero(policy).tolist()
    return {
        "position": position.position_id,
        "game": position.game_id,
        "ply": position.ply,
        "total": position.total_positions,
        "blue": blue,
        "red": red,
        "player": COLOURS[position.player],
        "last": position.last_move,
        "next": position.move,
        "policy": None if policy is None else [[cell, _finite(float(policy[cell]))] for cell in cells],
        "value": _finite(position.value),
        "winner": None if position.winner is None else COLOURS[position.winner],
        "tier": position.value_sample_tier,
        "root_value": _finite(position.root_value),
        "visits": position.visits,
        "weight": _finite(position.weight),
        "extra": {name: _finite(number) for name, number in position.extra.items()},
        "metadata": position.metadata,
    }


def hexworld_link(moves: Sequence[int], size: int, first_player: int = BLUE) -> str:
    """Return the address of a game at hexworld.org, whose first player connects top to bottom as blue does.

    A game that red began is reflected in the long diagonal.
    """
    mirror = symmetry_table(size)[Symmetry.LONG_DIAGONAL]
    texts = []
    for move in moves:
        if move == PASS:
            texts.append(":p")
        else:
            texts.append(format_moves([int(mirror[move]) if first_player == RED else move], size))
    return f"{HEXWORLD}#{size},{''.join(texts)}"
