"""Assignment of the positions of sources to games, by metadata or by boards.

Positions are processed in windows that end where a game begins, so memory does not grow with the sources. A
window is split into segments, whose positions are put into the order of play. Then one pass over all segments
finds which of them are games, and what their boards show.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import RED, Symmetry, game_hashes, pack_boards, transform_planes, unpack_boards
from hexdata.games.findings import (
    STONES,
    TIER_SIZES,
    Array,
    Finding,
    Mask,
    add_bits,
    board_words,
    column,
    find_chains,
    has_bit,
    moves_on_stones,
    with_columns,
)
from hexdata.policy import SparsePolicies
from hexdata.schema import KEPT_PREFIX, binary_matrix, games_schema

Grouping = Literal["boards", "ids", "runs", "trusted ids", "unchecked ids", "katahex", "chains"]
"""Way to find the games of a source: by boards (tuples have no metadata), by the ids in the metadata, or by
runs of plies (metadata without ids). The positions of a shuffled source are sorted by id first. Each of its
ids identifies one game ("trusted ids"), or several games may share an id, whose positions then belong to no
game ("unchecked ids"). In KataHex, a game has further positions beside those of its moves. "chains" have ids,
but are games only if their boards follow each other."""
_SHUFFLED: Final = ("trusted ids", "unchecked ids", "katahex")
"""Groupings of games whose missing positions may be in other files."""
_RECOVERED: Final = ("boards", "runs", "chains")
"""Groupings of games without ids."""

Columns = dict[str, Array]
"""Columns of ``EVIDENCE`` by name, (N,), with ``ply`` and ``total`` for ``position_in_game`` and
``total_positions``; -1 represents null. ``boards`` is (N, width), and ``source`` the number of the source of
each position. Or columns of segments, (S,)."""

WINDOW_ROWS: Final = 32_768
"""Number of positions from which a window is searched for games."""

_MIXED_FORMATS: Final = ("katahex", "legacy-shuffled")
"""Formats whose positions may be in any order."""

_NUMBERS: Final = (
    *("move", "position_in_game", "total_positions", "file_idx", "line_idx", "winner"),
    *("value_sample_tier", "findings", "has_policy"),
)
_TEXTS: Final = ("origin", "end_reason", "swap")
EVIDENCE: Final = ("board", "value", *_NUMBERS, *_TEXTS)
"""Columns of spooled positions that are used to find games."""

ROWS: Final = pa.schema(
    [
        ("game", pa.int32()),
        ("ply", pa.uint16()),
        ("total", pa.uint16()),
        ("player", pa.uint8()),
        ("move", pa.uint16()),
        ("findings", pa.uint16()),
        ("cut", pa.uint8()),
    ]
)
"""Schema with one row per position: its game, counted from 0 within the source, the ply, the number of
positions of the game, the player to move according to the boards of the game, and the move: the one that was
played if the boards show it, else the stated one. Null if unknown. ``findings`` are those with this move;
``cut`` is ``CUT_LAST``, ``CUT_OFF`` or 0."""
CUT_LAST: Final = 1
"""The last position of a game that was cut before a repeated move, which is ``move``."""
CUT_OFF: Final = 2
"""A position after it, which is rejected."""
_BEYOND: Final = 1 << 16
"""Greater than every ply."""
_TIER_BOUNDS: Final = np.cumsum([0, *TIER_SIZES, 1 << 40])
"""The first of the positions of each tier of a whole game, and a number above all."""

_ASSIGNED: Final = ("game_id", "source_id", "winner", "duplicate_of", "split", "flags")
GAMES: Final = pa.schema(
    [
        *(field for field in games_schema() if field.name not in _ASSIGNED),
        *(("winner", pa.uint8()), ("value", pa.float64()), ("findings", pa.uint32())),
    ]
)
"""Schema with one row per game: the columns of the store that do not depend on other sources or on the value
convention; and ``winner``, the one that its first position names, and ``value`` of this position, in the
convention of the source. ``end_reason`` and ``swap`` are those that the source states."""


def find_games(
    batches: Iterable[pa.RecordBatch],
    board_size: int,
    grouping: Grouping,
    sizes: Sequence[int] | None = None,
    *,
    replayed: bool = False,
    truncate: bool = False,
) -> Iterator[tuple[pa.Table, pa.Table, pa.Table]]:
    """Find the games of one or more sources.

    Args:
        batches: Columns ``EVIDENCE`` of all positions, in record order. They may have others.
        board_size: Board size n.
        grouping: Way to find the games.
        sizes: Number of positions of each source. Default None: all are from one source.
        replayed: Whether the reader made the boards from the moves, as those of ``GAME_FORMATS`` do. Then
            only passes cause unusual numbers of stones, which are not findings. Default False.
        truncate: Whether games are cut before the first move on an occupied cell, as the legacy tool did.
            Default False.

    Yields:
        Consecutive positions, as they were given; the same positions as ``ROWS``; and their games, ``GAMES``.
    """
    ends = np.cumsum(sizes or [])
    pending: list[pa.RecordBatch] = []
    first_row = first_game = 0
    need = WINDOW_ROWS
    # None is the end, at which the last window is complete.
    for batch in chain(batches, [None]):
        if batch is not None:
            pending.append(batch)
        rows = sum(b.num_rows for b in pending)
        if not rows or (batch is not None and rows < need):
            continue
        table = pa.Table.from_batches(pending)
        window = _window_of(table)
        window["source"] = np.searchsorted(ends, np.arange(first_row, first_row + rows), side="right")
        if grouping == "boards":  # these are split where no move leads to the next board
            window["player"], window["cell"] = played_moves(window["boards"], window["move"], board_size)
        split = {"boards": _by_boards, "runs": _by_runs}.get(grouping, _by_ids)
        bounds, may_be_game = split(window, batch is None)
        done = int(bounds[-1])
        if done:
            segments = _Segments.between(bounds)
            play = {
                name: values[:done] for name, values in window.items() if name not in ("source", "origin")
            }
            # Positions of a game need not be in order in their file, but boards follow each other by ply.
            row = _order_of_play(play["ply"], segments.of_row, grouping)
            if (row[1:] < row[:-1]).any():
                play = {name: values.take(row, axis=0) for name, values in play.items()}
            play |= _played(play, segments, grouping, board_size)
            games = _choose_games(play, segments, may_be_game, grouping)
            play |= _stored_moves(play, games, segments, board_size)
            if replayed:
                # The boards follow from the moves, so unusual numbers of stones are due to passes.
                play["findings"] &= ~int(STONES)
            if truncate:
                play, games = _cut_games(play, games, segments, board_size)
            texts = table.select(_TEXTS).take(pa.array(row[segments.starts]))
            found = _games_of(play, games, segments, texts, grouping, board_size)
            yield table.slice(0, done), _rows_of(play, games, segments, first_game, row), found
            first_game += found.num_rows
        # The last game may continue in the next batch, so its positions are kept.
        pending = table.slice(done).to_batches()
        first_row += done
        need = WINDOW_ROWS + (rows - done)  # the window grows if a game is longer


def _window_of(table: pa.Table) -> Columns:
    """Return the columns of positions as arrays."""
    window = {name: column(table, name, -1) for name in _NUMBERS}
    window["ply"], window["total"] = window.pop("position_in_game"), window.pop("total_positions")
    window["boards"] = binary_matrix(table.column("board"))
    window["value"] = column(table, "value", np.nan)
    # Numbers compare faster than texts.
    origins = table.column("origin").combine_chunks().dictionary_encode()
    window["origin"] = origins.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return window


def is_mixed(kind: str, header: Mapping[str, object]) -> bool:
    """Return whether the positions of a source are shuffled, so that neighbours may be from different games.

    Args:
        kind: Format of the source, as in ``SourceReader.format``.
        header: Header of the source.
    """
    return kind in _MIXED_FORMATS or not {"chunk_info", "pass_info"}.isdisjoint(header)


def grouping_of(kind: str, mixed: bool, with_id: int, with_ply: int) -> Grouping:
    """Return the way to find the games of a source.

    Args:
        kind: Format of the source; "shard" for a training shard, whose ids are those of its store.
        mixed: Whether its positions are shuffled.
        with_id: Number of positions with a legacy game id.
        with_ply: Number of positions with ``position_in_game``.
    """
    if not mixed:
        return "ids" if with_id else "runs" if with_ply else "boards"
    if not with_id:
        return "chains"
    return {"shard": "trusted ids", "katahex": "katahex"}.get(kind, "unchecked ids")  # type: ignore[return-value]


def _by_boards(window: Columns, last: bool) -> tuple[Array, Mask]:
    """Split at empty boards, and where no move leads to the next board. The boards also show the plies.

    Returns:
        The bounds of the segments, (S + 1,), and whether each may be a game, (S,).
    """
    boards = window["boards"]
    empty: Mask = np.logical_not(boards.any(axis=1))
    follows = (window["player"][:-1] >= 0) & (np.diff(window["source"]) == 0)
    starts = np.flatnonzero(empty | ~np.concatenate(([False], follows)))
    # Unless it is the last window, the last segment has no end yet.
    bounds = np.append(starts, len(boards)) if last else starts
    known, lengths = empty[bounds[:-1]], np.diff(bounds)
    index = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    window["ply"] = np.where(np.repeat(known, lengths), index, -1)
    window["total"] = np.repeat(lengths, lengths)
    return bounds, known


def _by_ids(window: Columns, last: bool) -> tuple[Array, Mask]:
    """Split where the id changes. Positions without an id belong to no known game."""
    changed = np.ones(len(window["line_idx"]), dtype=bool)
    ids = [window[name] for name in ("source", "file_idx", "line_idx", "origin")]
    changed[1:] = np.logical_or.reduce([each[1:] != each[:-1] for each in ids])
    starts = np.flatnonzero(changed)
    bounds = np.append(starts, len(changed)) if last else starts
    known: Mask = window["line_idx"][bounds[:-1]] >= 0
    return bounds, known


def _by_runs(window: Columns, last: bool) -> tuple[Array, Mask]:
    """Find runs of ``total_positions`` positions whose plies are 0 … total - 1 in any order."""
    ply, total = window["ply"], window["total"]
    # The next position with another length, source or winner; no run goes beyond it.
    differs = [np.diff(window[name]) != 0 for name in ("total", "source", "winner")]
    changes = np.append(np.flatnonzero(np.logical_or.reduce(differs)) + 1, len(total))
    end = changes[np.searchsorted(changes, np.arange(len(total)), side="right")]
    sums = np.concatenate(([0], np.cumsum(ply)))
    bounds, known, start = [0], [], 0
    while start < len(total):
        length = int(total[start])
        stop = start + max(length, 1)
        # The rest of the run is in the next window.
        if stop > len(total) and not last:
            break
        # The sums first: to sort at every position would take time quadratic in a length that a file states.
        is_run = (
            0 < length <= end[start] - start
            and 2 * (sums[stop] - sums[start]) == length * (length - 1)
            and np.array_equal(np.sort(ply[start:stop]), np.arange(length))
        )
        # A position that begins no run belongs to no game; one may begin at the next position.
        start = stop if is_run else start + 1
        bounds.append(start)
        known.append(is_run)
    return np.array(bounds, dtype=np.int64), np.array(known, dtype=bool)


def played_moves(boards: npt.NDArray[np.uint8], stated: Array, board_size: int) -> tuple[Array, Array]:
    """Return the player and the cell of the move that leads from each board to the next.

    The boards decide, because a policy of a search need not be that of the move that was played. A stone on
    an occupied cell replaces the other stone, as in the legacy tool. If it has the same colour, the boards
    are equal; then the move is the stated one.

    Args:
        boards: Packed boards (N, width), at least one.
        stated: Move that the source states for each board (N,), -1 if none.
        board_size: N.

    Returns:
        int64 (N,) and (N,); both are -1 where no single move leads to the next board, and for the last board.
    """
    cells = board_size * board_size
    player, cell = np.full((2, len(boards)), -1)
    words = board_words(boards)
    change = words[:, 1:] ^ words[:, :-1]
    changed = np.bitwise_count(change).sum(axis=0, dtype=np.uint16)
    # Almost every move adds one stone. Its bit is the only one in all words.
    added = (changed == 1) & (change & words[:, 1:]).any(axis=0)
    bit = np.bitwise_count(np.bitwise_or.reduce(change, axis=0) - np.uint64(1)).astype(np.int64) ^ 7
    for number, word in enumerate(change):
        bit += 64 * number * (word != 0)
    rows = np.flatnonzero(added)
    player[rows], cell[rows] = np.divmod(bit[rows], cells)
    # The others replace a stone, on the only cell that changed, or leave the board as it was.
    rows = np.flatnonzero((changed == 2) | ((changed == 0) & (stated[:-1] >= 0)))
    before, after = (
        unpack_boards(boards[each], board_size, bool).reshape(-1, 2, cells) for each in (rows, rows + 1)
    )
    differs = (before != after).any(axis=1)
    at = np.where(changed[rows] == 0, stated[rows], differs.argmax(axis=1))
    now = after[np.arange(len(rows)), :, at]
    is_move = (differs.sum(axis=1) <= 1) & (now.sum(axis=1) == 1)
    player[rows[is_move]], cell[rows[is_move]] = now[is_move, 1], at[is_move]
    return player, cell


class _Segments(NamedTuple):
    """Consecutive positions of a window, each of which may be a game."""

    starts: Array
    """Row of the first position of each segment, (S,)."""
    lengths: Array
    """Number of positions of each, (S,)."""
    of_row: Array
    """Segment of each position, (N,)."""
    place: Array
    """Index of each position in its segment, (N,)."""

    @classmethod
    def between(cls, bounds: Array) -> _Segments:
        """Return the segments between bounds, (S + 1,)."""
        lengths = np.diff(bounds)
        of_row = np.repeat(np.arange(len(lengths)), lengths)
        return cls(bounds[:-1], lengths, of_row, np.arange(len(of_row)) - bounds[of_row])


def _order_of_play(ply: Array, segment: Array, grouping: Grouping) -> Array:
    """Return the indices that sort the positions of each segment by ply, (N,).

    Positions without a ply come first, or last in files where these are positions beside those of the moves.
    """
    if grouping in ("katahex", "trusted ids"):
        ply = np.where(ply < 0, _BEYOND, ply)
    key = (segment << 17) + ply  # ply is from -1 to 2^16
    order = np.argsort(key, kind="stable")
    if grouping == "katahex":
        # Of several positions of a turn, the first is that of the game.
        beside = ply[order] == _BEYOND
        beside[1:] |= np.diff(key[order]) == 0
        order = order[np.argsort(2 * segment[order] + beside, kind="stable")]
    return order


def _played(play: Columns, segments: _Segments, grouping: Grouping, size: int) -> Columns:
    """Return ``player`` and ``cell`` of the move that leads from each position to the next in its game."""
    if grouping == "boards":
        player, cell = play["player"], play["cell"]
    else:
        player, cell = played_moves(play["boards"], play["move"], size)
    # No move leads from a position of a game to one beside it.
    none = (segments.place == segments.lengths[segments.of_row] - 1) | (grouping == "katahex")
    return {"player": np.where(none, -1, player), "cell": np.where(none, -1, cell)}


def _choose_games(play: Columns, segments: _Segments, may_be_game: Mask, grouping: Grouping) -> Columns:
    """Return which segments are games, and what their positions show together.

    Args:
        play: Columns of the positions, in the order of play.
        segments: The segments.
        may_be_game: Whether each segment may be a game, (S,).
        grouping: Way to find the games.

    Returns:
        Columns of the segments, (S,): ``is_game``; ``whole``, whether it is a game with all its positions;
        ``first_player``, -1 if unknown; ``total``, the stated number of its positions; and ``cut``, the ply
        at which ``_cut_games`` cuts it, for now beyond its end.
    """
    starts, lengths, segment, index = segments
    ply, player, total = play["ply"], play["player"], play["total"]
    # Players alternate, so the player at ply 0 is that of the first position, or the other one at an odd ply.
    first_player = np.where(player[starts] >= 0, (player[starts] + ply[starts]) & 1, -1)
    # A segment is complete if its plies count from 0, its players alternate and its first board is empty.
    alternating = (np.maximum(first_player, 0)[segment] + index) & 1
    is_last = index == lengths[segment] - 1  # no move follows, so its player is unknown
    in_order = (ply == index) & ((player == alternating) | is_last)
    complete = np.logical_and.reduceat(in_order, starts) & (total[starts] == lengths)
    complete &= ~play["boards"][starts].any(axis=1)
    is_game = may_be_game
    if grouping in ("runs", "chains"):
        # Positions of several games may have matching plies, so their boards must follow each other.
        is_game = may_be_game & complete
    elif grouping == "unchecked ids":
        # Positions of one id that differ in length or winner, or repeat a ply, are of several games.
        differs = np.diff(total, prepend=0) != 0
        differs |= (np.diff(play["winner"], prepend=0) != 0) | (np.diff(ply, prepend=0) == 0)
        differs &= index > 0  # the position before the first one is of another segment
        is_game = may_be_game & ~np.logical_or.reduceat(differs, starts)
    # Of a game in a shuffled source, other files may have more positions, and its first move.
    is_first_known = is_game & (complete | (grouping not in _SHUFFLED))
    return {
        "is_game": is_game,
        "whole": is_game & complete,
        "first_player": np.where(is_first_known, first_player, -1),
        "total": total[starts],
        "cut": np.full(len(starts), _BEYOND),
    }


def _stored_moves(play: Columns, games: Columns, segments: _Segments, size: int) -> Columns:
    """Return ``move``, ``has_policy``, ``findings`` and ``total`` as they are stored.

    The move is the one that was played. A one-hot policy on another cell, which a reader gives as the move,
    becomes a policy of one cell. A position without a policy gets no move, since its move would be a policy
    to train on.
    """
    stated, has_policy, found = play["move"], play["has_policy"] > 0, play["findings"].copy()
    played = np.where(games["is_game"][segments.of_row], play["cell"], -1)
    is_new = (played >= 0) & (played != stated) & ((stated >= 0) | has_policy)
    new = np.flatnonzero(is_new)
    # What was a move on a stone is now a policy on one.
    occupied = new[has_bit(found[new], Finding.OCCUPIED_MOVE)]
    found[occupied] ^= int(Finding.OCCUPIED_MOVE) | int(Finding.OCCUPIED_POLICY)
    found[new[moves_on_stones(play["boards"][new], played[new], size)]] |= int(Finding.OCCUPIED_MOVE)
    return {
        "move": np.where(is_new, played, stated),
        "has_policy": has_policy | (is_new & (stated >= 0)),
        "findings": found,
        "total": np.where(play["ply"] >= 0, play["total"], -1),
        "cut": np.zeros(len(found), np.int64),
    }


def _cut_games(play: Columns, games: Columns, segments: _Segments, size: int) -> tuple[Columns, Columns]:
    """Cut the games before the first move on an occupied cell, as the legacy tool did.

    Returns:
        The columns of the positions, whose last one that is kept is final; and those of the segments, with
        ``cut``, the ply of this position.
    """
    starts, segment = segments.starts, segments.of_row
    ply, total, found = play["ply"], play["total"], play["findings"]
    # A move in the last position of a game was not played.
    repeats = has_bit(found, Finding.OCCUPIED_MOVE) & games["is_game"][segment] & (ply >= 0)
    cut = np.minimum.reduceat(np.where(repeats & (ply + 1 != total), ply, _BEYOND), starts)
    last = np.flatnonzero(ply == cut[segment])
    found[last] &= ~int(Finding.OCCUPIED_MOVE)
    found[last] |= find_chains(play["boards"][last], play["value"][last], play["winner"][last], size)
    state = np.where(ply > cut[segment], CUT_OFF, 0)
    state[last] = CUT_LAST
    total = np.where(cut[segment] < _BEYOND, cut[segment] + 1, total)
    game_total = np.where(cut < _BEYOND, cut + 1, games["total"])
    return play | {"total": total, "cut": state}, games | {"total": game_total, "cut": cut}


def _rows_of(play: Columns, games: Columns, segments: _Segments, first_game: int, row: Array) -> pa.Table:
    """Return positions as ``ROWS``, in the order in which they were given, by their ``row`` in it."""
    number = np.where(games["is_game"], np.cumsum(games["is_game"]) - 1 + first_game, -1)
    player, ply = games["first_player"][segments.of_row], play["ply"]
    columns = {
        "game": number[segments.of_row],
        "player": np.where((player < 0) | (ply < 0), -1, (player + ply) & 1),
        **{name: play[name] for name in ("ply", "total", "move", "findings", "cut")},
    }
    given = np.empty_like(row)
    given[row] = np.arange(len(row))
    return pa.table({name: _nullable(columns[name][given]) for name in ROWS.names}).cast(ROWS)


def _combine_findings(play: Columns, games: Columns, segments: _Segments) -> tuple[Array, Array]:
    """Return the findings of each segment, and the number of its positions, without those cut off."""
    starts, segment = segments.starts, segments.of_row
    ply, total, value, found = (play[name] for name in ("ply", "total", "value", "findings"))
    kept, at_end = play["cut"] != CUT_OFF, ply + 1 == total
    has_next = play["has_policy"] | ((play["move"] >= 0) & (play["cut"] != CUT_LAST))
    # These positions have no policy either, but others follow: no chain is expected there.
    unexpected = Finding.NO_CHAIN | Finding.BLUE_CHAIN | Finding.RED_CHAIN
    found = np.where(~at_end & (total >= 0), found & ~int(unexpected), found)
    masks = {
        Finding.REPEATED: has_bit(found, Finding.OCCUPIED_MOVE) & ~at_end,
        Finding.MISSING: at_end & has_next,
        # Side positions, without a ply, have a value of their own.
        Finding.VALUE_DIFFERS: (ply >= 0) & (value != value[starts][segment]),
    }
    of_games = np.bitwise_or.reduceat(np.where(kept, add_bits(found, masks), 0), starts)
    count = np.add.reduceat(kept.astype(np.int64), starts)
    # The legacy tool drew tiers for whole games, one after the other; without any tier, there was no draw.
    tier, kinds = play["value_sample_tier"], len(_TIER_BOUNDS) - 1
    tiers = np.bincount((kinds * segment + tier)[kept & (tier >= 0)], minlength=kinds * len(starts))
    tiers = tiers.reshape(-1, kinds)
    expected = np.clip(count[:, np.newaxis] - _TIER_BOUNDS[:-1], 0, np.diff(_TIER_BOUNDS))
    is_cut = games["cut"] < _BEYOND
    is_drawn = (count == games["total"]) & ~is_cut & tiers.any(axis=1)
    masks = {
        Finding.MISSING: (games["total"] >= 0) & (count != games["total"]),
        Finding.RED_BEGAN: games["first_player"] == RED,
        Finding.CUT: is_cut,
        Finding.TIERS: is_drawn & (tiers != expected).any(axis=1),
    }
    return add_bits(of_games, masks), count


def _games_of(
    play: Columns, games: Columns, segments: _Segments, texts: pa.Table, grouping: Grouping, size: int
) -> pa.Table:
    """Return the games among the segments as ``GAMES``."""
    starts, is_game, whole = segments.starts, games["is_game"], games["whole"]
    found, count = _combine_findings(play, games, segments)
    swapped = pc.equal(texts["swap"], "pieces").fill_null(False).to_numpy()
    # The hash of a game that is cut is that of the moves that remain, so that equal games have equal splits.
    counts = np.where(whole, np.minimum(segments.lengths - 1, games["cut"]), 0)
    moves = play["cell"][segments.place < counts[segments.of_row]].astype(np.uint16)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    first = np.maximum(games["first_player"][whole], 0)
    hashes = dict(
        zip(np.flatnonzero(whole).tolist(), game_hashes(moves, counts[whole], size, first), strict=True)
    )
    others = np.flatnonzero(is_game & ~whole)
    if grouping in _SHUFFLED:
        # Other files may have more of this game, so that its deepest board is not known here.
        origin, file_idx, line_idx = texts["origin"].to_pylist(), play["file_idx"], play["line_idx"]
        ids = [(origin[i], int(file_idx[starts[i]]), int(line_idx[starts[i]])) for i in others]
        names = [_identity_hash(*each, size) for each in ids]
    else:
        names = _position_hashes(play["boards"][(starts + segments.lengths - 1)[others]], size)
    hashes |= zip(others.tolist(), names, strict=True)
    columns = {
        **{name: _nullable(play[name][starts]) for name in ("file_idx", "line_idx", "winner")},
        **{name: texts.column(name) for name in _TEXTS},
        "value": play["value"][starts],
        "total_positions": _nullable(games["total"]),
        "positions": count,
        "first_player": _nullable(games["first_player"]),
        "moves": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), moves, mask=pa.array(~whole)),
        "game_hash": pa.array([hashes.get(index) for index in range(len(starts))], pa.binary(16)),
        "provenance": pa.repeat("recovered" if grouping in _RECOVERED else "metadata", len(starts)),
        "findings": add_bits(found, {Finding.SWAPPED_PIECES: swapped}),
    }
    if grouping == "chains":
        columns["line_idx"] = pa.nulls(len(starts))  # the number of the chain
    columns["end_reason"] = pc.if_else(pa.array(games["cut"] < _BEYOND), None, columns["end_reason"])
    return pa.table(columns).filter(pa.array(is_game)).select(GAMES.names).cast(GAMES)


def with_game_columns(raw: pa.RecordBatch, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return positions with the columns of ``ROWS``, and with the moves that were played.

    Positions that were cut off are left out. A move before which a game was cut is stored in ``metadata``, so
    that the example can be exported as it was.

    Args:
        raw: Positions, with at least the columns move, policy and metadata.
        rows: The same positions as ``ROWS``.
    """
    stated, move, cut = column(raw, "move", -1), column(rows, "move", -1), column(rows, "cut", 0)
    one_hot = np.flatnonzero((stated >= 0) & (move != stated))
    if len(one_hot):
        # Policies of one cell, which replace the nulls of these positions.
        number = np.arange(len(one_hot) + 1)
        ones = SparsePolicies(number, stated[one_hot].astype(np.uint16), np.ones(len(one_hot), np.float32))
        policy, taken = raw.column("policy"), np.arange(raw.num_rows)
        taken[one_hot] = raw.num_rows + number[:-1]
        policies = pa.concat_arrays([policy, ones.to_arrow().cast(policy.type)])
        raw = with_columns(raw, policy=policies.take(pa.array(taken)))
    last = np.flatnonzero(cut == CUT_LAST)
    if len(last):
        texts = raw.column("metadata").to_pylist()
        for row in last.tolist():
            metadata = {**json.loads(texts[row] or "{}"), f"{KEPT_PREFIX}move": int(move[row])}
            texts[row] = json.dumps(metadata, separators=(",", ":"))
        raw = with_columns(raw, metadata=pa.array(texts, pa.string()))
        move = np.where(cut == CUT_LAST, -1, move)
    raw = with_columns(raw, move=_nullable(move), findings=rows.column("findings"))
    for name in ("game", "ply", "total", "player"):
        raw = raw.append_column(name, rows.column(name))
    return raw.filter(pa.array(cut != CUT_OFF)) if (cut == CUT_OFF).any() else raw


def _nullable(numbers: Array) -> pa.Array:
    """Return integers as an Arrow array; negative ones become null."""
    return pa.array(numbers, mask=numbers < 0)


def _position_hashes(boards: npt.NDArray[np.uint8], size: int) -> list[bytes]:
    """Return the hashes of packed boards (N, width), 16 bytes each, equal for their images under symmetries.

    They are those of games with missing moves, given the board with the most stones.
    """
    planes = unpack_boards(boards, size, np.uint8)
    images = zip(*(pack_boards(transform_planes(planes, symmetry)) for symmetry in Symmetry), strict=True)
    least = (min(image.tobytes() for image in each) for each in images)
    return [hashlib.sha256(b"hexdata position %d " % size + board).digest()[:16] for board in least]


def _identity_hash(origin: str | None, file_idx: int, line_idx: int, size: int) -> bytes:
    """Return the hash of the ids of a game, 16 bytes; a ``file_idx`` of -1 means that there is none.

    It is the hash of a game with missing moves whose positions may be in several files, so that the board
    with the most stones is unknown.
    """
    identity = json.dumps([size, origin, file_idx, line_idx]).encode("ascii")
    return hashlib.sha256(b"hexdata identity " + identity).digest()[:16]
