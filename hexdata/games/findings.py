"""Flags of suspicious games; winner and split of a game, and player to move of a position.

Findings are computed per position while a source is read, and combined per game once the games are known.
They are converted to flags once the value convention of the source is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntFlag, auto
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import BLUE, RED, player_to_move, unpack_boards, winner_of
from hexdata.games.convention import Convention, Votes
from hexdata.policy import SparsePolicies
from hexdata.schema import binary_matrix

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


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
    positions (no policy)."""
    CHAIN_FOR_1 = auto()
    """The same for a value of 1."""
    NO_CHAIN = auto()
    """A final position has no winning chain."""
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


STONES: Final = (Finding.RED_AHEAD | Finding.BLUE_AHEAD | Finding.FAR_AHEAD | Finding.PLAYER_AHEAD) | (
    Finding.BLUE_MOVES_EVEN | Finding.RED_MOVES_EVEN
)
_DOUBTFUL: Final = Finding.FAR_AHEAD | Finding.REPEATED | Finding.VALUE_DIFFERS | Finding.CUT
"""Findings that exclude the chain of a game from the evidence."""

TIER_SIZES: Final = (5, 5, 10)
"""Positions per game in value sample tiers 0, 1 and 2 of the legacy tool; the others are in tier 3."""
_POLICY_ROWS: Final = 1024
"""Number of rows whose policies are compared with the boards at a time, which limits the memory."""


def column(table: pa.Table | pa.RecordBatch, name: str, null: float) -> Array:
    """Return a numeric column as int64 or float64, (N,); nulls are replaced by ``null``."""
    values = table.column(name)
    kind = pa.float64() if pa.types.is_floating(values.type) else pa.int64()
    array: Array = values.cast(kind).fill_null(null).to_numpy()
    return array


def with_columns(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    """Return a batch in which these columns have other values, in the type of the batch."""
    for name, values in columns.items():
        index = batch.schema.get_field_index(name)
        field = batch.schema.field(index)
        batch = batch.set_column(index, field, values.cast(field.type))
    return batch


def board_words(boards: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return packed boards (N, width) as 64-bit words (words, N), which NumPy computes with much faster.

    The bits of a word are in the order of its bytes, and the unused ones at the end are 0.
    """
    padded = np.zeros((len(boards), -(-boards.shape[1] // 8) * 8), np.uint8)
    padded[:, : boards.shape[1]] = boards
    return np.ascontiguousarray(padded.view("<u8").T)


def add_bits(bits: Array, masks: Mapping[Any, Mask]) -> Array:
    """Set each bit where its mask is true; return ``bits``."""
    for bit, where in masks.items():
        # Several times faster than bits[where] |= bit. NumPy converts a member of an IntFlag to int64.
        bits |= where * bits.dtype.type(bit)
    return bits


def has_bit(bits: Array, sign: int | Array) -> Mask:
    """Return a mask of the entries with any bit of ``sign``."""
    found: Mask = bits & sign != 0
    return found


# Positions


def with_findings(positions: pa.RecordBatch, board_size: int) -> pa.RecordBatch:
    """Add the columns ``findings``, bits of ``Finding``, and ``has_policy`` to positions of ``raw_schema``.

    Texts are no longer encoded as dictionaries, since an Arrow file allows only one dictionary per column.
    """
    found, has_policy = find_positions(positions, board_size), positions.column("policy").is_valid()
    for index, field in enumerate(positions.schema):
        if pa.types.is_dictionary(field.type):
            texts = positions.column(index).cast(pa.string())
            positions = positions.set_column(index, field.name, texts)
    return positions.append_column("findings", pa.array(found)).append_column("has_policy", has_policy)


def find_positions(batch: pa.RecordBatch, board_size: int) -> npt.NDArray[np.uint16]:
    """Return the findings of each position of ``raw_schema(board_size)``: uint16 (N,)."""
    boards = binary_matrix(batch.column("board"))
    move, player, winner = (column(batch, name, -1) for name in ("move", "player_to_move", "winner"))
    value, policy = column(batch, "value", np.nan), batch.column("policy")
    # A position without a move is final unless it has a policy.
    final, cells = move < 0, board_size * board_size
    occupied_move, occupied_policy = np.zeros((2, len(boards)), bool)
    occupied_move[moves_on_stones(boards, move, board_size)] = True
    for start in range(0, len(policy) if policy.null_count < len(policy) else 0, _POLICY_ROWS):
        rows, policies = SparsePolicies.from_arrow(policy.slice(start, _POLICY_ROWS), cells)
        rows += start
        final[rows] = False
        stones = unpack_boards(boards[rows], board_size, np.uint8).any(axis=1).reshape(len(rows), cells)
        owner = np.repeat(np.arange(len(rows)), np.diff(policies.starts))
        # A cell with the probability 0 is no move.
        occupied = owner[stones[owner, policies.cells] & (policies.probabilities > 0)]
        occupied_policy[rows[occupied]] = True
    words = board_words(boards)
    blue = board_words(np.packbits(np.arange(8 * boards.shape[1]) < cells)[np.newaxis])  # of the blue plane
    ahead = 2 * np.bitwise_count(words & blue).sum(axis=0, dtype=np.int16)
    ahead -= np.bitwise_count(words).sum(axis=0, dtype=np.int16)  # blue stones minus red stones
    even, decided = ahead == 0, (value == 0.0) | (value == 1.0)
    masks = {
        Finding.OCCUPIED_MOVE: occupied_move,
        Finding.OCCUPIED_POLICY: occupied_policy,
        Finding.RED_AHEAD: ahead == -1,
        Finding.BLUE_AHEAD: ahead == 1,
        Finding.FAR_AHEAD: np.abs(ahead) > 1,
        Finding.PLAYER_AHEAD: ((ahead > 0) & (player == BLUE)) | ((ahead < 0) & (player == RED)),
        Finding.BLUE_MOVES_EVEN: even & (player == BLUE),
        Finding.RED_MOVES_EVEN: even & (player == RED),
        Finding.WINNER_FOR_0: decided & (value == winner),
        Finding.WINNER_FOR_1: decided & (winner >= 0) & (value != winner),
    }
    found: npt.NDArray[np.uint16] = add_bits(np.zeros(len(boards), np.uint16), masks)
    found[final] |= find_chains(boards[final], value[final], winner[final], board_size)
    return found


def find_chains(
    boards: npt.NDArray[np.uint8], value: Array, winner: Array, board_size: int
) -> npt.NDArray[np.uint16]:
    """Return the findings about the winning chains of final positions: uint16 (N,).

    Args:
        boards: Packed boards, uint8 (N, width).
        value: Values (N,), NaN if unknown.
        winner: Named winners (N,), -1 if there is none.
        board_size: Board size n.
    """
    chain = winner_of(unpack_boards(boards, board_size, np.uint8))
    chained, decided = chain >= 0, (value == 0.0) | (value == 1.0)
    masks = {
        Finding.CHAIN_FOR_0: chained & decided & (value == chain),
        Finding.CHAIN_FOR_1: chained & decided & (value != chain),
        Finding.NO_CHAIN: ~chained,
        Finding.WINNER_AGAINST_CHAIN: chained & ~decided & (winner >= 0) & (winner != chain),
        Finding.BLUE_CHAIN: chain == BLUE,
        Finding.RED_CHAIN: chain == RED,
    }
    found: npt.NDArray[np.uint16] = add_bits(np.zeros(len(boards), np.uint16), masks)
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


def _count(masks: Iterable[Mask], source: Array, sources: int) -> Array:
    """Return the number of entries of each source for which each mask is true, (sources, masks)."""
    return np.stack([np.bincount(source[mask], minlength=sources) for mask in masks], axis=1)


def count_votes(
    bits: Array, source: npt.ArrayLike = 0, sources: int = 1, *, sound: bool = True
) -> list[Votes]:
    """Count the votes for the value convention of each source: at most one of each kind per game.

    Args:
        bits: Findings of games, and of positions whose games are unknown, (N,).
        source: Number of the source of each, (N,). Default 0 for all.
        sources: Number of sources. Default 1.
        sound: Whether chains are left out that prove nothing: if moves are repeated, stones are impossible,
            values differ, or the game was cut; and those of games that red began if the source has others.
            Default True.
    """
    source, red_began = np.broadcast_to(source, len(bits)), has_bit(bits, Finding.RED_BEGAN)
    impossible = np.where(red_began, int(Finding.BLUE_AHEAD), int(Finding.RED_AHEAD))
    counted = ~has_bit(bits, impossible | _DOUBTFUL) | (not sound)
    # A game whose positions vote for both conventions has no vote.
    zero, one = has_bit(bits, Finding.CHAIN_FOR_0), has_bit(bits, Finding.CHAIN_FOR_1)
    chains, of_red = (
        _count((chosen & zero & ~one, chosen & one & ~zero), source, sources)
        for chosen in (counted & ~red_began, counted & red_began)
    )
    # A game that red began may have swapped colours, so it counts only where there is no other evidence.
    chains = np.where(chains.any(axis=1, keepdims=True), chains, of_red)
    zero, one = has_bit(bits, Finding.WINNER_FOR_0), has_bit(bits, Finding.WINNER_FOR_1)
    winners = _count((zero & ~one, one & ~zero), source, sources)
    pairs = zip(chains.tolist(), winners.tolist(), strict=True)
    return [Votes(tuple(chain), tuple(named)) for chain, named in pairs]


# Labels and flags


def winners_of(games: pa.RecordBatch, convention: Convention) -> npt.NDArray[np.int64]:
    """Return the winner of each game, int64 (G,): from its metadata, else from its value; -1 if unknown."""
    named = column(games, "winner", -1)
    value = column(games, "value", np.nan)
    won = np.where(value == 0.0, 0, np.where(value == 1.0, 1, -1))
    by_value = won if convention == "blue-is-0" else np.where(won >= 0, 1 - won, -1)
    winner: npt.NDArray[np.int64] = np.where(named >= 0, named, by_value)
    return winner


def players_of(positions: pa.RecordBatch, board_size: int) -> pa.Array:
    """Return the player to move of each position, uint8 (N,).

    It is taken from the source, else from the game, else from the ply, else from the stones.

    Args:
        positions: Positions as returned by ``find.with_game_columns``.
        board_size: Board size n.
    """
    by_ply = pc.bit_wise_and(positions.column("ply"), 1).cast(pa.uint8())
    known = pc.coalesce(positions.column("player_to_move"), positions.column("player"), by_ply)
    if known.null_count:
        boards = binary_matrix(positions.column("board"))
        stones = unpack_boards(boards, board_size, np.uint8).sum(axis=(2, 3))
        known = pc.coalesce(known, pa.array(player_to_move(stones[:, 0], stones[:, 1])))
    return known


def split_of(game_hash: bytes, val: float, test: float) -> str:
    """Return the split of a game. It depends only on the hash, so it does not change when files are added.

    The first 8 bytes of the hash are a fraction of 2^64: below ``test`` for test, below ``test + val`` for
    val, and train otherwise.

    Args:
        game_hash: Hash of the game, 16 bytes.
        val: Share of games in val, from 0 to 1.
        test: Share of games in test, from 0 to 1.
    """
    fraction = int.from_bytes(game_hash[:8], "big") / 2**64
    return "test" if fraction < test else "val" if fraction < test + val else "train"


def end_reasons(findings: Array, winner: Array, stated: pa.Array) -> pa.Array:
    """Return the column ``games.end_reason``: "chain" if the final board has the winner's chain.

    Args:
        findings: Findings of the games, (G,).
        winner: Winner of each game, (G,): 0 blue, 1 red, -1 unknown.
        stated: The reason that the source states for each game, strings (G,), null if none. It holds for
            games without the winner's chain; null becomes "unknown".
    """
    chain = has_bit(findings, np.where(winner == RED, int(Finding.RED_CHAIN), int(Finding.BLUE_CHAIN)))
    return pc.if_else(pa.array(chain & (winner >= 0)), "chain", stated.fill_null("unknown"))


def flags_of(findings: Array, convention: Convention) -> Array:
    """Return the flags of games, bits of :class:`Flag`, uint32 (G,).

    Args:
        findings: Findings of the games, (G,).
        convention: Value convention of the source.
    """
    blue_is_0, red_began = convention == "blue-is-0", has_bit(findings, Finding.RED_BEGAN)

    def of_first(blue: Finding, red: Finding) -> Array:
        """Return the sign of each game: one of two, by the player who began."""
        return np.where(red_began, int(red), int(blue))

    signs: dict[Flag, Array | int] = {
        Flag.IMPOSSIBLE_STONES: of_first(Finding.RED_AHEAD, Finding.BLUE_AHEAD) | int(Finding.FAR_AHEAD),
        Flag.LABEL_CONTRADICTS_CHAIN: Finding.WINNER_AGAINST_CHAIN
        | (Finding.CHAIN_FOR_1 if blue_is_0 else Finding.CHAIN_FOR_0),
        Flag.MISSING_POSITIONS: Finding.MISSING,
        Flag.NO_CHAIN: Finding.NO_CHAIN,
        Flag.PLAYER_CONTRADICTS_STONES: of_first(Finding.RED_MOVES_EVEN, Finding.BLUE_MOVES_EVEN)
        | int(Finding.PLAYER_AHEAD),
        Flag.POLICY_ON_OCCUPIED: Finding.OCCUPIED_MOVE | Finding.OCCUPIED_POLICY,
        Flag.REPEATED_MOVE: Finding.REPEATED,
        Flag.TIER_COUNTS: Finding.TIERS,
        Flag.TRUNCATED: Finding.CUT,
        Flag.VALUE_NOT_CONSTANT: Finding.VALUE_DIFFERS,
        Flag.WINNER_CONTRADICTS_VALUE: Finding.WINNER_FOR_1 if blue_is_0 else Finding.WINNER_FOR_0,
    }
    masks = {flag: has_bit(findings, sign) for flag, sign in signs.items()}
    masks[Flag.COLOURS_SWAPPED] = red_began & ~has_bit(findings, Finding.SWAPPED_PIECES)
    return add_bits(np.zeros(len(findings), np.uint32), masks)


def count_flags_without_game(loose: Sequence[tuple[int, int]], convention: Convention) -> dict[str, int]:
    """Count the positions whose game is unknown, by flag. Blue is assumed to have begun.

    Args:
        loose: Findings, bits of :class:`Finding`, and the number of positions with these.
        convention: Value convention of the source.
    """
    counts = Counter[str]()
    for flags, (_, count) in zip(flags_of(np.array(loose)[:, 0], convention).tolist(), loose, strict=True):
        counts.update({flag.code: count for flag in Flag(flags)})
    return dict(sorted(counts.items()))


def flag_lists(flags: Array) -> pa.Array:
    """Return the column ``games.flags``: the sorted codes of the flags of each game (G,)."""
    # Few combinations of flags occur, so each list is made once.
    distinct, codes = np.unique(flags, return_inverse=True)
    lists = pa.array([[flag.code for flag in Flag(int(bits))] for bits in distinct], pa.list_(pa.string()))
    return lists.take(pa.array(codes))
