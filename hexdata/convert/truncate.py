"""Truncation of games before the first move on an occupied cell, as the legacy tool did, on request.

The functions yield the truncated tables of a spool and write nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import game_hash
from hexdata.games.find import GAMES, ROWS, column, with_columns
from hexdata.games.findings import PLAYED, Finding, SpoolTables, read_aligned, with_played_moves
from hexdata.store.originals import KEPT_PREFIX

__all__ = ["NO_CUT", "cut_games", "cut_rows", "find_cuts"]

Array = npt.NDArray[Any]
Cuts = npt.NDArray[np.int64]
"""The ply of the last position kept of each game, (G,); ``NO_CUT`` if all positions are kept."""

NO_CUT: Final = 1 << 16


def find_cuts(spools: Sequence[SpoolTables]) -> Cuts:
    """Return the first ply of each game that has a move on an occupied cell.

    Such a move in the last position of a game does not count, because it was not played.

    Args:
        spools: Spools that share their games; the first has the table ``games``.
    """
    count = sum(batch.num_rows for batch in spools[0].batches("games", ["positions"]))
    cuts = np.full(count, NO_CUT, np.int64)
    for spool in spools:
        for stated, rows in read_aligned(spool, PLAYED, ["game", "ply", "total", "move"]):
            raw = with_played_moves(stated, rows)
            game, ply = column(rows, "game", -1), column(rows, "ply", -1)
            occupied = column(raw, "findings", 0) & int(Finding.OCCUPIED_MOVE) != 0
            played = occupied & (game >= 0) & (ply >= 0) & (ply + 1 != column(rows, "total", -1))
            np.minimum.at(cuts, game[played], ply[played])
    return cuts


def cut_rows(
    spool: SpoolTables, cuts: Cuts, lost: npt.NDArray[np.int64]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, list[int]]]:
    """Yield the kept rows of ``raw`` and of ``rows``, and the numbers of the removed records, per batch.

    The last position kept of a truncated game becomes a final position, without a move.

    Args:
        spool: Spool of a source.
        cuts: Result of ``find_cuts``, (G,).
        lost: int64 (G,); the number of positions removed from each game is added to it.
    """
    for stated, rows in read_aligned(spool, None, ROWS.names):
        raw = with_played_moves(stated, rows)
        game, ply, total = (column(rows, name, -1) for name in ("game", "ply", "total"))
        cut = np.full(len(game), NO_CUT)
        cut[game >= 0] = cuts[game[game >= 0]]
        removed = ply > cut
        np.add.at(lost, game[removed], 1)
        total = np.where(cut < NO_CUT, cut + 1, total)
        kept_rows = pa.array(~removed)
        yield (
            _without_move(raw, ply == cut).filter(kept_rows),
            with_columns(
                rows,
                total=pa.array(total, mask=total < 0),
                move=pa.nulls(len(game), pa.uint16()),  # ``raw`` has them now
            ).filter(kept_rows),
            raw.column("record").filter(pa.array(removed)).to_pylist(),
        )


def cut_games(
    spool: SpoolTables, cuts: Cuts, lost: npt.NDArray[np.int64], board_size: int
) -> Iterator[pa.Table]:
    """Yield the rows of ``games`` after truncation.

    A game with missing moves keeps its hash. The stated end of a truncated game does not apply to it.

    Args:
        spool: Spool with the table ``games``.
        cuts: Result of ``find_cuts``, (G,).
        lost: Number of positions removed from each game, int64 (G,).
        board_size: N.
    """
    done = 0
    for batch in spool.batches("games"):
        games = batch.to_pylist()
        for index in np.flatnonzero(cuts[done : done + len(games)] < NO_CUT).tolist():
            game, cut = games[index], int(cuts[done + index])
            game["total_positions"] = cut + 1
            game["positions"] -= int(lost[done + index])
            game["end_reason"] = None
            if game["moves"] is not None:
                game["moves"] = game["moves"][:cut]
                game["game_hash"] = game_hash(game["moves"], board_size, game["first_player"] or 0)
        done += len(games)
        yield pa.Table.from_pylist(games, schema=GAMES)


def _without_move(raw: pa.RecordBatch, last: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """Remove the move, and the finding about it, from the positions that the mask ``last`` (N,) selects.

    The move is stored in ``metadata``, so that the example can be exported as it was.
    """
    moves = column(raw, "move", -1)
    texts = raw.column("metadata").to_pylist() if last.any() else []
    for index in np.flatnonzero(last).tolist():
        metadata = {**json.loads(texts[index] or "{}"), f"{KEPT_PREFIX}move": int(moves[index])}
        texts[index] = json.dumps(metadata, separators=(",", ":"))
    if texts:
        raw = with_columns(raw, metadata=pa.array(texts, pa.string()))
    move = np.where(last, -1, moves)
    found = column(raw, "findings", 0)
    found = np.where(last, found & ~int(Finding.OCCUPIED_MOVE), found)
    return with_columns(raw, move=pa.array(move, mask=move < 0), findings=pa.array(found))
