"""The old tool's cut, on request: a game ends before the first move that is played on an occupied cell.

Says what stays of spooled tables and what goes. Reads spools, writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import game_hash
from hexdata.games.find import GAMES, ROWS, column
from hexdata.games.findings import Finding, Tables, side_by_side
from hexdata.store.originals import KEPT_PREFIX

__all__ = ["NO_CUT", "cut_games", "cut_rows", "find_cuts"]

Array = npt.NDArray[Any]
Cuts = npt.NDArray[np.int64]
"""For each game (G,) the ply of the last position that stays, ``NO_CUT`` if all do."""

NO_CUT: Final = 1 << 16


def find_cuts(spools: Sequence[Tables]) -> Cuts:
    """Find where the games of ``spools`` are to be cut: the first ply with a move on an occupied cell.

    That a game's last position has such a move does not cut it: the move was not played.
    """
    count = sum(batch.num_rows for batch in spools[0].batches("games", ["positions"]))
    cuts = np.full(count, NO_CUT, np.int64)
    for spool in spools:
        for raw, rows in side_by_side(spool, ["findings"], ["game", "ply", "total"]):
            game, ply = column(rows, "game", -1), column(rows, "ply", -1)
            occupied = column(raw, "findings", 0) & int(Finding.OCCUPIED_MOVE) != 0
            played = occupied & (game >= 0) & (ply >= 0) & (ply + 1 != column(rows, "total", -1))
            np.minimum.at(cuts, game[played], ply[played])
    return cuts


def cut_rows(
    spool: Tables, cuts: Cuts, lost: npt.NDArray[np.int64]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, list[int]]]:
    """Give what stays of ``raw`` and of ``rows``, and the records that go.

    The last position that stays of a game that is cut becomes a final one: it has no move any more.

    Args:
        spool: of a source.
        cuts: (G,).
        lost: int64 (G,): the positions that go are added to it.
    """
    for raw, rows in side_by_side(spool, None, ROWS.names):
        game, ply, total = (column(rows, name, -1) for name in ("game", "ply", "total"))
        cut = np.full(len(game), NO_CUT)
        cut[game >= 0] = cuts[game[game >= 0]]
        goes = ply > cut
        np.add.at(lost, game[goes], 1)
        total = np.where(cut < NO_CUT, cut + 1, total)
        stays = pa.array(~goes)
        yield (
            _without_move(raw, ply == cut).filter(stays),
            _replaced(rows, "total", pa.array(total, mask=total < 0)).filter(stays),
            raw.column("record").filter(pa.array(goes)).to_pylist(),
        )


def cut_games(spool: Tables, cuts: Cuts, lost: npt.NDArray[np.int64], board_size: int) -> Iterator[pa.Table]:
    """Give ``games`` as they are once cut; ``lost`` (G,) positions of each have gone.

    A game whose moves are not all at hand keeps its hash.
    """
    done = 0
    for batch in spool.batches("games"):
        games = batch.to_pylist()
        for place in np.flatnonzero(cuts[done : done + len(games)] < NO_CUT).tolist():
            game, cut = games[place], int(cuts[done + place])
            game["total_positions"] = cut + 1
            game["positions"] -= int(lost[done + place])
            if game["moves"] is not None:
                game["moves"] = game["moves"][:cut]
                game["game_hash"] = game_hash(game["moves"], board_size, game["first_player"] or 0)
        done += len(games)
        yield pa.Table.from_pylist(games, schema=GAMES)


def _without_move(raw: pa.RecordBatch, last: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """Make final the positions that ``last`` (N,) marks: no move, and no finding about it.

    ``extra`` keeps the move, for the way back.
    """
    moves = column(raw, "move", -1)
    texts = raw.column("extra").to_pylist() if last.any() else []
    for place in np.flatnonzero(last).tolist():
        kept = {**json.loads(texts[place] or "{}"), f"{KEPT_PREFIX}move": int(moves[place])}
        texts[place] = json.dumps(kept, separators=(",", ":"))
    if texts:
        raw = _replaced(raw, "extra", pa.array(texts, pa.string()))
    move = np.where(last, -1, moves)
    found = column(raw, "findings", 0)
    found = np.where(last, found & ~int(Finding.OCCUPIED_MOVE), found)
    raw = _replaced(raw, "move", pa.array(move, mask=move < 0))
    return _replaced(raw, "findings", pa.array(found))


def _replaced(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    return batch.set_column(index, field, values.cast(field.type))
