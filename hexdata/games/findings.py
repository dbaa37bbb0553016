"""Flags of suspicious games.

Findings are computed per position while a source is read, and combined per game once the games are known.
They are converted to flags once the value convention of the source is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntFlag, auto
from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import BLUE, RED, unpack_boards, winner_of
from hexdata.games.convention import Convention, Votes
from hexdata.games.find import binary_matrix, column, with_columns
from hexdata.policy import SparsePolicies
from hexdata.schema import board_size_of

__all__ = [
    "PLAYED",
    "Finding",
    "Flag",
    "SpoolTables",
    "count_findings_without_game",
    "count_flags",
    "count_flags_without_game",
    "count_game_votes",
    "count_position_votes",
    "drop_chains_before_end",
    "end_reasons",
    "find_positions",
    "findings_without_game",
    "flag_lists",
    "flags_of",
    "game_findings",
    "moves_on_stones",
    "read_aligned",
    "with_played_moves",
]

Array = npt.NDArray[Any]
Bits = npt.NDArray[np.uint32]


class Flag(IntFlag):
    """Flags of games. The codes in ``games.flags`` are the names with hyphens; docs/format.md defines them.

    Names are in alphabetical order, so codes in the order of bits are sorted. Files contain only the codes,
    so the numbers may change.
    """

    COLOURS_SWAPPED = auto()
    CONTRADICTORY_DUPLICATES = auto()
    DUPLICATE_EXACT = auto()
    DUPLICATE_FRAGMENT = auto()
    DUPLICATE_SYMMETRIC = auto()
    IMPOSSIBLE_STONES = auto()
    LABEL_CONTRADICTS_CHAIN = auto()
    MISSING_POSITIONS = auto()
    NO_CHAIN = auto()
    PLAYER_CONTRADICTS_STONES = auto()
    POLICY_ON_OCCUPIED = auto()
    REPEATED_MOVE = auto()
    TIER_COUNTS = auto()
    TRUNCATED = auto()
    VALUE_NOT_CONSTANT = auto()
    WINNER_CONTRADICTS_VALUE = auto()

    @property
    def code(self) -> str:
        """Stable code, such as "repeated-move"."""
        assert self.name is not None
        return self.name.lower().replace("_", "-")


class Finding(IntFlag):
    """Observations in the convention of the source: the first 16 are of positions, the others of games."""

    OCCUPIED_MOVE = auto()
    """The move, a one-hot policy, is on an occupied cell."""
    OCCUPIED_POLICY = auto()
    """A dense policy has weight on an occupied cell."""
    RED_AHEAD = auto()
    """Red has one stone more: impossible if blue began."""
    BLUE_AHEAD = auto()
    """Blue has one stone more: impossible if red began."""
    FAR_AHEAD = auto()
    """One player has at least two stones more: always impossible."""
    PLAYER_AHEAD = auto()
    """The player with more stones is to move."""
    BLUE_MOVES_EVEN = auto()
    """Blue is to move and the numbers of stones are equal, so blue began."""
    RED_MOVES_EVEN = auto()
    """Red is to move and the numbers of stones are equal, so red began."""
    CHAIN_FOR_0 = auto()
    """According to the winning chain, a value of 0 means that blue won. Chains are only searched for on final
    positions (no policy), and on those with ``OCCUPIED_MOVE``, which are final if the game is cut there."""
    CHAIN_FOR_1 = auto()
    """The same for a value of 1."""
    NO_CHAIN = auto()
    """A position that was searched has no winning chain."""
    WINNER_AGAINST_CHAIN = auto()
    """The value is neither 0 nor 1, and the named winner differs from that of the chain."""
    WINNER_FOR_0 = auto()
    """According to the named winner, a value of 0 means that blue won."""
    WINNER_FOR_1 = auto()
    """The same for a value of 1."""
    BLUE_CHAIN = auto()
    """Blue has the winning chain. Searched for on the same positions as ``CHAIN_FOR_0``."""
    RED_CHAIN = auto()
    """Red has the winning chain."""
    REPEATED = auto()
    """The game continues after a move on an occupied cell."""
    VALUE_DIFFERS = auto()
    """The positions have different values."""
    TIERS = auto()
    """The numbers of positions per value sample tier are wrong."""
    MISSING = auto()
    """Positions are missing."""
    CUT = auto()
    """The game was cut before a repeated move."""
    RED_BEGAN = auto()
    """Red made the first move."""
    SWAPPED_PIECES = auto()
    """The source states a swap of pieces, after which red has the first stone."""


_CHAIN_OF: Final = (Finding.BLUE_CHAIN, Finding.RED_CHAIN)
_CHAINS: Final = (
    Finding.CHAIN_FOR_0 | Finding.CHAIN_FOR_1 | Finding.NO_CHAIN | Finding.WINNER_AGAINST_CHAIN
) | (Finding.BLUE_CHAIN | Finding.RED_CHAIN)

_VOTES: Final = (Finding.CHAIN_FOR_0, Finding.CHAIN_FOR_1, Finding.WINNER_FOR_0, Finding.WINNER_FOR_1)

TIER_SIZES: Final = (5, 5, 10)
"""Positions per game in value sample tiers 0, 1 and 2 of the legacy tool; the others are in tier 3."""


def _mark(bits: Array, where: Array, bit: int) -> None:
    """Set a bit of the entries ``where``, a mask as long as ``bits`` or indices."""
    one = bits.dtype.type(bit)  # NumPy converts a member of an IntFlag to int64
    if where.dtype == bool:
        bits |= where * one  # several times faster than bits[where] |= one
    else:
        bits[where] |= one


def _has(bits: Array, sign: int | Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries with any bit of ``sign``."""
    found: npt.NDArray[np.bool_] = bits & np.asarray(sign, bits.dtype) != 0
    return found


_POLICY_ROWS: Final = 1024
"""Number of rows whose policies are compared with the boards at a time, which limits the memory."""


# Positions


def find_positions(batch: pa.RecordBatch, board_size: int) -> npt.NDArray[np.uint16]:
    """Return the findings of each position of ``raw_schema(board_size)``: uint16 (N,)."""
    boards = binary_matrix(batch.column("board"))
    move = column(batch, "move", -1)
    found = _stones(_ahead(boards, board_size), column(batch, "player_to_move", -1))
    _mark(found, moves_on_stones(boards, move, board_size), Finding.OCCUPIED_MOVE)
    policy = batch.column("policy")
    final, cells = move < 0, board_size * board_size
    for start in range(0, len(policy) if policy.null_count < len(policy) else 0, _POLICY_ROWS):
        rows, policies = SparsePolicies.from_arrow(policy.slice(start, _POLICY_ROWS), cells)
        rows += start
        final[rows] = False
        stones = unpack_boards(boards[rows], board_size, np.uint8).any(axis=1).reshape(len(rows), cells)
        owner = np.repeat(np.arange(len(rows)), np.diff(policies.starts))
        occupied = owner[stones[owner, policies.cells] & (policies.probabilities > 0)]
        _mark(found, rows[np.unique(occupied)], Finding.OCCUPIED_POLICY)
    _labels(found, boards, board_size, column(batch, "value", np.nan), column(batch, "winner", -1), final)
    return found


@cache
def _blue_words(board_size: int) -> npt.NDArray[np.uint64]:
    """Return the mask of the blue plane in a packed board, as 64-bit words: uint64 (W,)."""
    cells = board_size * board_size
    packed = np.packbits(np.arange(2 * cells) < cells)
    words = np.zeros(-(-len(packed) // 8), np.uint64)
    words.view(np.uint8)[: len(packed)] = packed
    words.flags.writeable = False
    return words


def _ahead(boards: npt.NDArray[np.uint8], board_size: int) -> npt.NDArray[np.int16]:
    """Return blue stones minus red stones of packed boards (N, width): int16 (N,)."""
    masks = _blue_words(board_size)
    padded = np.zeros((len(boards), 8 * len(masks)), np.uint8)
    padded[:, : boards.shape[1]] = boards
    ahead = np.zeros(len(boards), np.int16)
    for words, mask in zip(padded.view(np.uint64).T, masks, strict=True):
        ahead += np.bitwise_count(words & mask)
        ahead -= np.bitwise_count(words & ~mask)
    return ahead


def _stones(ahead: npt.NDArray[np.int16], player: Array) -> npt.NDArray[np.uint16]:
    """Return the findings from stone counts, uint16 (N,).

    Args:
        ahead: Result of :func:`_ahead`.
        player: Player to move (N,), -1 if unknown.
    """
    found = np.zeros(len(ahead), np.uint16)
    _mark(found, ahead == -1, Finding.RED_AHEAD)
    _mark(found, ahead == 1, Finding.BLUE_AHEAD)
    _mark(found, np.abs(ahead) > 1, Finding.FAR_AHEAD)
    even = ahead == 0
    _mark(found, even & (player == BLUE), Finding.BLUE_MOVES_EVEN)
    _mark(found, even & (player == RED), Finding.RED_MOVES_EVEN)
    _mark(found, ((ahead > 0) & (player == BLUE)) | ((ahead < 0) & (player == RED)), Finding.PLAYER_AHEAD)
    return found


def moves_on_stones(boards: npt.NDArray[np.uint8], move: Array, board_size: int) -> npt.NDArray[np.int64]:
    """Return the rows whose move is on a stone of either colour, ascending.

    Args:
        boards: Packed boards, uint8 (N, width).
        move: Moves (N,), -1 if there is none.
        board_size: Board size n.
    """
    rows = np.flatnonzero(move >= 0)
    stone = np.zeros(len(rows), np.uint8)
    for plane in (BLUE, RED):
        bit = move[rows] + plane * board_size * board_size
        stone |= boards[rows, bit >> 3] >> (7 - (bit & 7)).astype(np.uint8)
    occupied: npt.NDArray[np.int64] = rows[(stone & 1).astype(bool)]
    return occupied


def _labels(
    found: npt.NDArray[np.uint16],
    boards: npt.NDArray[np.uint8],
    board_size: int,
    value: Array,
    winner: Array,
    final: npt.NDArray[np.bool_],
) -> None:
    """Add to ``found`` where winning chain, value and named winner agree or contradict each other."""
    decided = (value == 0.0) | (value == 1.0)
    named = decided & (winner >= 0)
    _mark(found, named & (value == winner), Finding.WINNER_FOR_0)
    _mark(found, named & (value != winner), Finding.WINNER_FOR_1)

    rows = np.flatnonzero(final | (_has(found, Finding.OCCUPIED_MOVE)))
    chain = winner_of(unpack_boards(boards[rows], board_size, np.uint8))
    _mark(found, rows[chain < 0], Finding.NO_CHAIN)
    rows, chain = rows[chain >= 0], chain[chain >= 0]
    for player, finding in enumerate(_CHAIN_OF):
        _mark(found, rows[chain == player], finding)
    same = value[rows] == chain
    _mark(found, rows[decided[rows] & same], Finding.CHAIN_FOR_0)
    _mark(found, rows[decided[rows] & ~same], Finding.CHAIN_FOR_1)
    _mark(
        found,
        rows[~decided[rows] & (winner[rows] >= 0) & (winner[rows] != chain)],
        Finding.WINNER_AGAINST_CHAIN,
    )


def drop_chains_before_end(found: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the findings without those about chains on positions with a move, which are not final."""
    return np.where(_has(found, Finding.OCCUPIED_MOVE), found & ~found.dtype.type(_CHAINS), found)


def count_position_votes(found: npt.NDArray[Any]) -> Votes:
    """Count the votes of positions for the value convention."""
    found = drop_chains_before_end(found)
    count = [int(np.count_nonzero(_has(found, bit))) for bit in _VOTES]
    return Votes(chains=(count[0], count[1]), winners=(count[2], count[3]))


_DOUBTFUL: Final = Finding.FAR_AHEAD | Finding.REPEATED | Finding.VALUE_DIFFERS | Finding.CUT
"""Findings that exclude the chain of a game from the evidence."""


def count_game_votes(found: Bits, loose: npt.NDArray[Any] | None = None) -> Votes:
    """Count the votes of games for the value convention: one per game.

    The chain of a game is not counted if moves are repeated, stones are impossible, values differ, or the
    game was cut. Chains of games that red began are counted only if there are no others.

    Args:
        found: Findings of games (G,).
        loose: Findings of positions whose games are unknown (N,), one vote each. Default None: no positions.
    """
    single = np.zeros(0, np.uint32) if loose is None else drop_chains_before_end(loose).astype(np.uint32)
    bits = np.concatenate([found, single])
    began_red = _has(bits, Finding.RED_BEGAN)
    ahead = np.where(began_red, int(Finding.BLUE_AHEAD), int(Finding.RED_AHEAD))
    counted = ~_has(bits, ahead | int(_DOUBTFUL))
    chains = _votes(bits[counted & ~began_red], Finding.CHAIN_FOR_0, Finding.CHAIN_FOR_1)
    if not sum(chains):
        chains = _votes(bits[counted & began_red], Finding.CHAIN_FOR_0, Finding.CHAIN_FOR_1)
    return Votes(chains, _votes(bits, Finding.WINNER_FOR_0, Finding.WINNER_FOR_1))


def _votes(bits: Bits, for_0: Finding, for_1: Finding) -> tuple[int, int]:
    """Count the entries with exactly one of two findings, for each of them."""
    zero, one = _has(bits, for_0), _has(bits, for_1)
    return int(np.count_nonzero(zero & ~one)), int(np.count_nonzero(one & ~zero))


# Games


class SpoolTables(Protocol):
    """The tables of a spool."""

    def batches(self, table: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read a table batch by batch."""


_GAMES: Final = ("value", "total_positions", "positions", "first_player", "swap")
_STONES: Final = (Finding.RED_AHEAD | Finding.BLUE_AHEAD | Finding.FAR_AHEAD | Finding.PLAYER_AHEAD) | (
    Finding.BLUE_MOVES_EVEN | Finding.RED_MOVES_EVEN
)
"""Findings from numbers of stones."""
PLAYED: Final = ("board", "move", "policy", "findings")
"""Columns of ``raw`` that :func:`with_played_moves` needs."""


def game_findings(
    spools: Sequence[SpoolTables], cut: npt.NDArray[np.bool_] | None = None, *, replayed: bool = False
) -> Bits:
    """Combine the findings of the positions of each game.

    All rows are read once, with games in any order. Needs 30 bytes of memory per game.

    Args:
        spools: Spools with the tables ``raw`` and ``rows``; the first one also has ``games``.
        cut: Whether each game was cut before a repeated move, bool (G,). Default None: no game was.
        replayed: Whether the reader made the boards from the moves, as those of ``GAME_FORMATS`` do. Then
            only passes cause unusual numbers of stones, which are not findings. Default False.

    Returns:
        Bits of :class:`Finding`, uint32 (G,).
    """
    games = list(spools[0].batches("games", _GAMES))
    if not games:
        return np.zeros(0, np.uint32)
    table = pa.Table.from_batches(games)
    value = column(table, "value", np.nan)
    bits = np.zeros(table.num_rows, np.uint32)
    tiers = np.zeros(5 * table.num_rows, np.uint16)
    for spool in spools:
        columns = (*PLAYED, "value", "value_sample_tier")
        for raw, rows in read_aligned(spool, columns, ("game", "ply", "total", "move")):
            _gather(bits, tiers, value, with_played_moves(raw, rows), rows)
    total, positions = column(table, "total_positions", -1), column(table, "positions", 0)
    _mark(bits, (total >= 0) & (positions != total), Finding.MISSING)
    _mark(bits, column(table, "first_player", BLUE) == RED, Finding.RED_BEGAN)
    _mark(bits, pc.equal(table.column("swap"), "pieces").fill_null(False).to_numpy(), Finding.SWAPPED_PIECES)
    if replayed:
        bits &= ~np.uint32(_STONES)
    wrong_tiers = _has_wrong_tiers(tiers.reshape(-1, 5), positions) & (positions == total)
    if cut is not None:
        _mark(bits, cut, Finding.CUT)
        wrong_tiers &= ~cut
    _mark(bits, wrong_tiers, Finding.TIERS)
    return bits


def _gather(bits: Bits, tiers: Array, value: Array, raw: pa.RecordBatch, rows: pa.RecordBatch) -> None:
    """Add positions to the bits (G,) and the tier counts (5·G,) of their games."""
    game = column(rows, "game", -1)
    known = game >= 0
    if not known.all():
        raw, rows, game = raw.filter(pa.array(known)), rows.filter(pa.array(known)), game[known]
    if not len(game):
        return
    found = drop_chains_before_end(column(raw, "findings", 0).astype(np.uint32))
    open_end = column(raw, "move", -1) >= 0
    if raw.column("policy").null_count < len(game):
        open_end |= raw.column("policy").is_valid().to_numpy(zero_copy_only=False)
    total = column(rows, "total", -1)
    last = column(rows, "ply", -1) + 1 == total
    _mark(found, (_has(found, Finding.OCCUPIED_MOVE)) & ~last, Finding.REPEATED)
    _mark(found, last & open_end, Finding.MISSING)
    found[~last & (total >= 0)] &= ~np.uint32(Finding.NO_CHAIN | Finding.BLUE_CHAIN | Finding.RED_CHAIN)
    played = (column(rows, "ply", -1) >= 0) | (total >= 0)  # side positions have a value of their own
    _mark(found, played & (column(raw, "value", np.nan) != value[game]), Finding.VALUE_DIFFERS)
    starts = np.flatnonzero(np.diff(game, prepend=-1))
    np.bitwise_or.at(bits, game[starts], np.bitwise_or.reduceat(found, starts))
    tier = np.minimum(column(raw, "value_sample_tier", -1), 4)
    np.add.at(tiers, (5 * game + tier)[tier >= 0], np.uint16(1))


def _has_wrong_tiers(counts: Array, positions: Array) -> npt.NDArray[np.bool_]:
    """Return whether each game has tiers, but with wrong counts for its number of positions: bool (G,).

    Args:
        counts: Number of positions per tier (G, 5); the last column counts invalid tiers.
        positions: Number of positions of each game (G,).
    """
    expected = np.zeros_like(counts, dtype=np.int64)
    left = positions.astype(np.int64)
    for tier, size in enumerate(TIER_SIZES):
        expected[:, tier] = np.minimum(left, size)
        left = left - expected[:, tier]
    expected[:, len(TIER_SIZES)] = left
    wrong: npt.NDArray[np.bool_] = counts.any(axis=1) & (counts != expected).any(axis=1)
    return wrong


def with_played_moves(raw: pa.RecordBatch, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return positions with the moves that were played, where their policies do not state them.

    The policies remain what they are: a one-hot policy on another cell than the move, which a reader gives
    as the move, becomes a policy of one cell. A position without a policy gets no move, since its move would
    be a policy to train on.

    Args:
        raw: Positions with at least the columns ``PLAYED``.
        rows: The same positions with the column ``move`` of ``find.ROWS``.
    """
    stated, played = column(raw, "move", -1).copy(), column(rows, "move", -1)
    policy = raw.column("policy")
    has_policy = policy.is_valid().to_numpy(zero_copy_only=False)
    new = np.flatnonzero((played >= 0) & (played != stated) & ((stated >= 0) | has_policy))
    if not len(new):
        return raw
    boards, found = binary_matrix(raw.column("board")), raw.column("findings").to_numpy().copy()
    size = board_size_of(boards.shape[1])
    one_hot = new[stated[new] >= 0]
    occupied = one_hot[_has(found[one_hot], Finding.OCCUPIED_MOVE)]
    found[occupied] = drop_chains_before_end(found[occupied]) & ~np.uint16(Finding.OCCUPIED_MOVE)
    _mark(found, occupied, Finding.OCCUPIED_POLICY)
    _mark(found, new[moves_on_stones(boards[new], played[new], size)], Finding.OCCUPIED_MOVE)
    if len(one_hot):
        single = np.arange(len(one_hot) + 1)
        ones = SparsePolicies(single, stated[one_hot].astype(np.uint16), np.ones(len(one_hot), np.float32))
        taken = np.arange(len(stated))
        taken[one_hot] = len(stated) + single[:-1]
        of_moves = ones.to_arrow(np.ones(len(one_hot), bool)).cast(policy.type)
        policy = pa.concat_arrays([policy, of_moves]).take(pa.array(taken))
    stated[new] = played[new]
    moves = pa.array(stated, mask=stated < 0)
    return with_columns(raw, move=moves, policy=policy, findings=pa.array(found))


def read_aligned(
    spool: SpoolTables, raw: Sequence[str] | None, rows: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Read the tables ``raw`` and ``rows`` of a spool together.

    Args:
        spool: The spool.
        raw: Columns of ``raw`` to read; None for all.
        rows: Columns of ``rows`` to read.

    Yields:
        Batches of both tables for the same positions, in order.
    """
    right = iter(spool.batches("rows", rows))
    behind: pa.RecordBatch | None = None
    for left in spool.batches("raw", raw):
        while left.num_rows:
            if behind is None or not behind.num_rows:
                behind = next(right)
            count = min(left.num_rows, behind.num_rows)
            yield left.slice(0, count), behind.slice(0, count)
            left, behind = left.slice(count), behind.slice(count)


# Flags


def end_reasons(findings: Bits, winner: Array, stated: pa.Array) -> pa.Array:
    """Return the column ``games.end_reason``: "chain" if the final board has the winner's chain.

    Args:
        findings: Findings of the games, (G,).
        winner: Winner of each game, (G,): 0 blue, 1 red, -1 unknown.
        stated: The reason that the source states for each game, strings (G,), null if none. It holds for
            games without the winner's chain; null becomes "unknown".
    """
    chain = _has(findings, np.where(winner == RED, int(Finding.RED_CHAIN), int(Finding.BLUE_CHAIN)))
    return pc.if_else(pa.array(chain & (winner >= 0)), "chain", stated.fill_null("unknown"))


def flags_of(findings: Bits, convention: Convention) -> Bits:
    """Return the flags of games, bits of :class:`Flag`, uint32 (G,).

    Args:
        findings: Findings of the games, (G,).
        convention: Value convention of the source.
    """
    blue_is_0 = convention == "blue-is-0"
    red_began = _has(findings, Finding.RED_BEGAN)
    against_chain = Finding.CHAIN_FOR_1 if blue_is_0 else Finding.CHAIN_FOR_0
    against_winner = Finding.WINNER_FOR_1 if blue_is_0 else Finding.WINNER_FOR_0
    impossible = np.where(red_began, int(Finding.BLUE_AHEAD), int(Finding.RED_AHEAD)) | int(Finding.FAR_AHEAD)
    wrong_player = np.where(red_began, int(Finding.BLUE_MOVES_EVEN), int(Finding.RED_MOVES_EVEN)) | int(
        Finding.PLAYER_AHEAD
    )
    signs: dict[Flag, Array | int] = {
        Flag.IMPOSSIBLE_STONES: impossible,
        Flag.LABEL_CONTRADICTS_CHAIN: against_chain | Finding.WINNER_AGAINST_CHAIN,
        Flag.MISSING_POSITIONS: Finding.MISSING,
        Flag.NO_CHAIN: Finding.NO_CHAIN,
        Flag.PLAYER_CONTRADICTS_STONES: wrong_player,
        Flag.POLICY_ON_OCCUPIED: Finding.OCCUPIED_MOVE | Finding.OCCUPIED_POLICY,
        Flag.REPEATED_MOVE: Finding.REPEATED,
        Flag.TIER_COUNTS: Finding.TIERS,
        Flag.TRUNCATED: Finding.CUT,
        Flag.VALUE_NOT_CONSTANT: Finding.VALUE_DIFFERS,
        Flag.WINNER_CONTRADICTS_VALUE: against_winner,
    }
    flags = np.zeros(len(findings), np.uint32)
    for flag, sign in signs.items():
        _mark(flags, _has(findings, sign), flag)
    _mark(flags, red_began & ~_has(findings, Finding.SWAPPED_PIECES), Flag.COLOURS_SWAPPED)
    return flags


def count_findings_without_game(spool: SpoolTables) -> list[int]:
    """Count the findings of positions whose game is unknown: 16 numbers, by number of the bit."""
    found = drop_chains_before_end(findings_without_game(spool))
    return [int(np.count_nonzero(_has(found, 1 << bit))) for bit in range(16)]


def findings_without_game(spool: SpoolTables) -> npt.NDArray[np.uint16]:
    """Return the findings of each position whose game is unknown, uint16 (N,)."""
    found = [np.zeros(0, np.uint16)]
    for raw, rows in read_aligned(spool, ["findings"], ["game"]):
        unknown = ~rows.column("game").is_valid().to_numpy(zero_copy_only=False)
        found.append(raw.column("findings").to_numpy()[unknown])
    return np.concatenate(found)


def count_flags_without_game(counts: Sequence[int], convention: Convention) -> dict[str, int]:
    """Count the positions whose game is unknown, by flag. Blue is assumed to have begun.

    Args:
        counts: Result of :func:`count_findings_without_game`.
        convention: Value convention of the source.
    """
    bits = np.uint32(1) << np.arange(16, dtype=np.uint32)
    result: dict[str, int] = {}
    for flags, count in zip(flags_of(bits, convention).tolist(), counts, strict=True):
        for flag in Flag(flags):
            if count:
                result[flag.code] = result.get(flag.code, 0) + count
    return dict(sorted(result.items()))


def flag_lists(flags: Bits) -> pa.Array:
    """Return the column ``games.flags``: the sorted codes of the flags of each game (G,)."""
    distinct, codes = np.unique(flags, return_inverse=True)
    lists = pa.array([[flag.code for flag in Flag(int(bits))] for bits in distinct], pa.list_(pa.string()))
    return lists.take(pa.array(codes))


def count_flags(flags: Iterable[Bits]) -> dict[str, int]:
    """Return the number of games with each flag; flags without games are omitted."""
    columns = [np.zeros(0, np.uint32), *flags]
    merged = np.concatenate(columns)
    counts = {flag.code: int(np.count_nonzero(_has(merged, flag))) for flag in Flag}
    return {code: count for code, count in counts.items() if count}
