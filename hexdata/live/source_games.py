"""Games of one file, as chunks: grouped, named and checked as in ``convert``.

The whole file is held in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from hexdata.board import BLUE
from hexdata.errors import FormatError, Reason
from hexdata.formats import GAME_FORMATS, SourceReader
from hexdata.formats.legacy.dialect import with_policy_weights
from hexdata.games.convention import Convention, convert_values, decide, layout_convention, votes_text
from hexdata.games.find import find_games, grouping_of, is_mixed, with_game_columns
from hexdata.games.findings import (
    Finding,
    column,
    count_votes,
    flag_lists,
    flags_of,
    has_bit,
    players_of,
    with_findings,
)
from hexdata.live.chunk import Chunk
from hexdata.schema import FULL_WEIGHT, NO_MOVE, NO_TIER, is_legacy_format
from hexdata.shards.blocks import columns_to_block, members_to_block, slice_rows


def extract_games(
    name: str, batches: Sequence[pa.RecordBatch], reader: SourceReader, default: Convention | None
) -> tuple[list[Chunk], int]:
    """Return the games of a file, of all splits in file order, and the number of positions of no known game.

    If the positions are from many files, only their ids group them, and an incomplete game is named by its
    id.

    Args:
        name: Name of the file.
        batches: All positions of the file, in record order; not empty.
        reader: Reader of the file, which has returned them.
        default: Value convention of a legacy file where nothing else determines it.

    Raises:
        FormatError: "value-sense": the values do not show whether 0 or 1 means that
            blue won; "shuffled-without-ids": the positions are mixed and have no ids.
    """
    kind, header, board_size = reader.format, reader.header, reader.board_size
    assert board_size is not None  # since there are positions
    is_legacy, mixed = is_legacy_format(kind), is_mixed(kind, header)
    if is_legacy:
        batches = [with_policy_weights(batch) for batch in batches]
    raw = pa.concat_batches([with_findings(batch, board_size) for batch in batches])
    records, found = raw.num_rows, raw.column("findings").to_numpy()
    with_id, with_ply = (records - raw.column(each).null_count for each in ("line_idx", "position_in_game"))
    grouping = grouping_of(kind, mixed, with_id, with_ply)
    if grouping == "chains":
        reason = "the positions are shuffled and have no game ids, so they cannot be grouped into games"
        hint = "Convert all files of this shuffle together."
        raise FormatError(reason, code=Reason.SHUFFLED_WITHOUT_IDS, path=name, hint=hint)
    if mixed:  # grouped by id; those without an id are left out
        origin = raw.column("origin").dictionary_encode().indices.fill_null(-1).to_numpy()
        line, file = column(raw, "line_idx", -1), column(raw, "file_idx", -1)
        order = np.lexsort((line, file, origin))
        raw = raw.take(pa.array(order[line[order] >= 0]))
    parts = [*find_games([raw], board_size, grouping, replayed=kind in GAME_FORMATS)]
    rows = pa.concat_tables([rows for _, rows, _ in parts]).combine_chunks().to_batches()[0]
    games = pa.concat_tables([games for *_, games in parts])
    raw = with_game_columns(raw, rows)
    convention: Convention = "blue-is-0"
    if is_legacy:  # only these have a value convention of their own
        if not mixed:  # else each position has one vote, also those without an id
            loose = column(rows, "game", -1) < 0
            found = np.concatenate([games["findings"].to_numpy(), rows.column("findings").to_numpy()[loose]])
        (votes,), layout = count_votes(found), layout_convention(header)
        decided = decide(votes, layout, default)
        if decided is None:
            reason = "the value convention of the file cannot be determined"
            hint = "If you know it, set value_convention."
            raise FormatError(reason, Reason.VALUE_SENSE, votes_text(votes, layout), path=name, hint=hint)
        convention = decided.convention
    chunks = _make_chunks(name, raw, games, board_size, convention)
    return chunks, records - raw.num_rows + rows.column("game").null_count


def _make_chunks(
    name: str, raw: pa.RecordBatch, games: pa.Table, board_size: int, convention: Convention
) -> list[Chunk]:
    """Return the games as chunks: as moves where these and one value describe a game fully, else as a block.

    ``raw`` has the columns of ``ROWS``, and ``games`` is ``GAMES``.
    """
    game, ply = column(raw, "game", -1), column(raw, "ply", -1)
    order = np.lexsort((ply, game))
    order = order[game[order] >= 0]
    # Games are numbered from 0, so these are the first rows of each, and the end.
    bounds = np.searchsorted(game[order], np.arange(games.num_rows + 1))
    starts, sizes = bounds[:-1], np.diff(bounds)
    raw = raw.take(pa.array(order))
    # Both ids follow from the number of the game in the pool, when the game is drawn.
    unused = pa.array(np.zeros(len(order), np.int64))
    has_weights = "policy_weight" in raw.schema.names
    columns = {
        **{each: raw.column(each) for each in ("board", "move", "policy", "value_sample_tier")},
        "policy_weight": raw.column("policy_weight") if has_weights else pa.nulls(len(order), pa.float32()),
        "game_id": unused,
        "player_to_move": players_of(raw, board_size),
        "position_id": unused,
        "position_in_game": raw.column("ply"),
        "total_positions": raw.column("total"),
        "value": convert_values(column(raw, "value", np.nan), convention),
    }
    with_policy = raw.column("policy").null_count < len(order)
    block = columns_to_block(pa.table(columns), with_policy, ["policy_weight"])
    weight = block["policy_weight"]
    if (weight == FULL_WEIGHT).all():
        del block["policy_weight"]
    block = members_to_block(block, board_size * board_size)

    ply, total, value = (block[each] for each in ("position_in_game", "total_positions", "value"))
    # Plain positions have exactly the fields that moves and one value give: blue begins, the plies are
    # complete, the value is constant, only the last has no move, and no policy is of a search.
    plain = (block["player_to_move"] == ply & 1) & (total == np.repeat(sizes, sizes))
    plain &= (value == np.repeat(value[starts], sizes)) & (weight == FULL_WEIGHT)
    plain &= (block["move"] == NO_MOVE) == (ply + 1 == total)
    plain &= ~has_bit(column(raw, "findings", 0), Finding.OCCUPIED_MOVE)
    plain[block.get("policy_row", [])] = False
    # Only a game of which every ply was found has moves.
    as_moves = games["moves"].is_valid().to_numpy()
    as_moves &= (column(games, "first_player", -1) == BLUE) | (sizes == 1)
    as_moves &= np.logical_and.reduceat(plain, starts)

    chunks = []
    hashes = games["game_hash"].to_pylist()
    codes = flag_lists(flags_of(games["findings"].to_numpy(), convention)).to_pylist()
    moves, tiers = block["move"].copy(), block["value_sample_tier"].copy()
    for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
        chunk = Chunk(board_size, name, number, hashes[number], flags=tuple(codes[number]))
        if as_moves[number]:
            played, own = moves[start : stop - 1], tiers[start:stop]
            known = own if (own != NO_TIER).any() else None
            chunk = replace(chunk, moves=played, value=float(value[start]), tiers=known)
        else:  # a copy, so that the game does not keep the arrays of the whole file
            rows = slice_rows(block, start, stop)
            chunk = replace(chunk, block={each: array.copy() for each, array in rows.items()})
        chunks.append(chunk)
    return chunks
