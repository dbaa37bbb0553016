"""Options and contents of batches: fields, symmetries and value weights of packed positions and fill rows.

Every random draw depends only on seed, epoch and position id.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from hexdata.arrays import NUMPY, Arrays
from hexdata.board import RED, Symmetry
from hexdata.checks import as_tuple, check_choice, check_fields, unusable
from hexdata.errors import ConfigError
from hexdata.fill import POSITION_PLY, boards_to_fill, fill_dtype, fill_to_stones, transform_fill
from hexdata.order import derive_key
from hexdata.schema import FULL_WEIGHT, NO_MOVE, TARGETS, is_target
from hexdata.shards.blocks import POLICY_FIELDS, block_to_members, block_to_policy
from hexdata.text import did_you_mean

__all__ = [
    "DEFAULT_FIELDS",
    "FIELDS",
    "Batch",
    "BatchOptions",
    "BoardForm",
    "FinalPolicy",
    "make_batch",
    "required_members",
]

Batch = dict[str, npt.NDArray[Any]]
"""Arrays of one training step by field name; the first dimension is the batch size B."""

BoardForm = Literal["float32", "float16", "uint8", "packed", "fill"]
FinalPolicy = Literal["zeros", "uniform", "skip"]

DEFAULT_FIELDS: Final = ("board", "policy", "value")
FIELDS: Final = (
    *DEFAULT_FIELDS,
    "policy_mask",
    "policy_weight",
    "value_weight",
    "position_id",
    "game_id",
    "move",
    "player_to_move",
    "value_sample_tier",
    "position_in_game",
    "total_positions",
)
"""Fields that the batches of every store can have."""

# Tiers 0 to 3; 255 means that the tier is unknown.
_TIERS: Final = 4
# The precision of a double: order.md defines the draw as such a multiple of 2^-53.
_DRAW_BITS: Final = 53


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Contents of batches of B positions on boards of size n.

    Attributes:
        fields: The arrays of a batch:

            - ``board`` (B, ``planes``, n, n), cells 0 or 1: blue's stones, red's stones and, with three
              planes, the player to move. With ``board="packed"``: uint8 (B, ceil(2·n·n / 8)), as
              ``board.pack_boards`` returns. With ``board="fill"``: fill rows (B, n·n), uint8, or uint16 above
              board size 15, and ``ply`` (B,) of the same dtype; ``hexdata.fill`` describes them.
            - ``policy`` float32 (B, n·n): the stored dense policy if the position has one, otherwise one-hot.
              Zeros if ``policy_weight`` is 0.
            - ``policy_mask`` bool (B,): False for final positions, whose policy is set by ``final_policy``,
              and for positions whose ``policy_weight`` is 0.
            - ``policy_weight`` float32 (B,): 0 if the sources say that the policy is not to be trained, else
              1.
            - ``move`` uint16 (B,): cell index; 65535 for final positions.
            - ``value`` float32 (B,): 0 if blue wins, 1 if red wins.
            - ``value_weight`` float32 (B,): 0 or 1, drawn with ``tier_probability``.
            - ``position_id``, ``game_id`` int64 (B,), the latter -1 if unknown; ``player_to_move`` uint8
              (B,), 0 blue, 1 red; ``value_sample_tier`` uint8 (B,), 255 if unknown; ``position_in_game`` and
              ``total_positions`` uint16 (B,), 65535 if unknown.
            - If the store has them: ``root_value`` float32 (B,), from 0 for blue to 1 for red; ``visits``
              int32 (B,), -1 if unknown; ``weight`` float32 (B,); and ``extra.NAME`` float32 (B,) for each
              number NAME that its sources give. Floats are NaN if unknown.
        planes: Number of planes, 2 or 3. The third plane is 1 if red is to move and 0 if blue is. With packed
            boards and fill rows, the third plane is added on the device, and batches contain
            ``player_to_move`` for this.
        board: Dtype of the boards, "packed" for one bit per cell, or "fill" for one ply per cell.
        final_policy: Policy of final positions: "zeros", "uniform" (1/n² everywhere), or "skip" to omit final
            positions.
        tier_probability: Probabilities of value weight 1 for tiers 0, 1, 2 and 3, drawn in every epoch;
            positions of unknown tier always have weight 1. Batches then contain ``value_weight``. None: all
            positions have weight 1.
        symmetry: Whether to apply to each position one of its four symmetries, drawn in every epoch.

    Raises:
        ConfigError: An option has an invalid value.
    """

    fields: Sequence[str] = DEFAULT_FIELDS
    planes: int = 2
    board: BoardForm = "float32"
    final_policy: FinalPolicy = "zeros"
    tier_probability: Sequence[float] | None = None
    symmetry: bool = False

    def __post_init__(self) -> None:
        for name in ("fields", "tier_probability"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        known = (*FIELDS, *TARGETS)
        if not isinstance(self.fields, tuple) or not self.fields:
            raise unusable("fields", repr(self.fields), f"a tuple of {', '.join(known)}, extra.NAME")
        for name in self.fields:
            if name not in FIELDS and not (isinstance(name, str) and is_target(name)):
                hint, expected = did_you_mean(str(name), known), f"some of {', '.join(known)}, extra.NAME"
                raise ConfigError("unknown fields", found=repr(name), expected=expected, hint=hint)
        if len(set(self.fields)) < len(self.fields):
            raise ConfigError(f"fields contain a name twice: {', '.join(self.fields)}")
        if not isinstance(self.planes, int) or self.planes not in (2, 3):
            raise ConfigError("unknown planes", found=repr(self.planes), expected="2 or 3")
        check_choice("board", self.board, get_args(BoardForm))
        check_choice("final_policy", self.final_policy, get_args(FinalPolicy))
        check_fields(self)
        if self.tier_probability is not None and not _are_probabilities(self.tier_probability):
            expected = "a tuple of four numbers from 0 to 1, those of tiers 0, 1, 2, 3"
            raise unusable("tier_probability", repr(self.tier_probability), expected)

    @cached_property
    def delivered(self) -> tuple[str, ...]:
        """The fields of every batch: the requested fields, then those that other options add."""
        added = []
        if "board" in self.fields:
            if self.board == "fill":
                added.append("ply")
            if self.board in ("packed", "fill") and self.planes == 3:
                added.append("player_to_move")
        if self.tier_probability is not None:
            added.append("value_weight")
        return (*self.fields, *(name for name in added if name not in self.fields))


def _are_probabilities(numbers: object) -> bool:
    return (
        isinstance(numbers, tuple)
        and len(numbers) == _TIERS
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= 1 for x in numbers)
    )


def required_members(options: BatchOptions, stored: Collection[str], location: object = None) -> list[str]:
    """Return the sorted names of the members that batches with these options need.

    Args:
        options: Contents of the batches.
        stored: Names of the stored members: those of shards, or of a table of games, which contains ``fill``
            in place of ``board``.
        location: Location of the store, for messages (default None).

    Raises:
        ConfigError: The batches have a field that is not stored.
    """
    missing = [name for name in options.fields if name not in FIELDS and name not in stored]
    if missing:
        known, found = ", ".join((*FIELDS, *sorted(filter(is_target, stored)))), ", ".join(missing)
        reason = "the store does not have these fields"
        raise ConfigError(reason, path=location, found=found, expected=f"some of {known}")
    # Also for packed boards and fill rows, whose third plane is made on the device.
    third_plane = {"player_to_move"} if options.planes == 3 else set()
    policy = {"move", *POLICY_FIELDS}
    # A fill row of a single position contains its next move.
    board = {"board", "move"} if options.board == "fill" else {"board"}
    as_fill = "fill" in stored
    sources = {
        "board": ({"fill"} if as_fill else board) | third_plane,
        "ply": set[str](),
        # A fill row gives the one-hot policy without the move; "uniform" has to know which moves are missing.
        "policy": {"fill", "policy"} if as_fill and options.final_policy != "uniform" else policy,
        "policy_mask": {"move", "policy_row"} if as_fill else policy,
        "policy_weight": {"policy_weight" if "policy_weight" in stored else "position_id"},
        "value_weight": {"position_id"} | ({"value_sample_tier"} if options.tier_probability else set()),
    }
    members = {member for name in options.delivered for member in sources.get(name, {name})}
    # The symmetry is drawn from the id.
    if options.symmetry:
        members.add("position_id")
    # Masks apply to policies whether or not the weight is requested.
    if "policy" in members or "policy_row" in members:
        members.add("policy_weight")
    # Stores without policies of a search, or without masks, lack these, and batches are made without them.
    return sorted(members - ({*POLICY_FIELDS, "policy_weight"} - set(stored)))


def make_batch(
    block: Mapping[str, Any],
    options: BatchOptions,
    board_size: int,
    *,
    seed: int,
    epoch: int,
    ops: Arrays = NUMPY,
) -> dict[str, Any]:
    """Convert packed positions into a batch with the fields ``options.delivered``, in the same order.

    Args:
        block: Members of B positions, those of :func:`required_members`; fill rows have the name ``fill``. It
            is not modified; fields that need no conversion share its arrays. Its policies may be dense, or
            sparse with the names of ``SPARSE_FIELDS``.
        options: Contents of the batch.
        board_size: Board size n.
        seed: Seed of the symmetries and value weights.
        epoch: Epoch of the symmetries and value weights.
        ops: Operations of the library of the arrays (default NumPy).
    """
    block = block_to_members(dict(block)) if "policy" in block else dict(block)
    xp, n = ops.xp, board_size
    symmetries = None
    if options.board == "fill" and "board" in block:
        block["fill"] = boards_to_fill(block["board"], block["move"], n, ops)
        block["ply"] = ops.full((len(block["fill"]),), POSITION_PLY, fill_dtype(n).name)
    if options.symmetry:
        # Two bits choose one of four symmetries, which thus does not depend on batch, rank or worker.
        symmetries = ops.draw_bits(block["position_id"], derive_key(seed, "augment", epoch), 2)
        # Before the fields are made, because several are made of the same labels.
        _transform_labels(block, symmetries, n, ops)
    batch = {}
    for name in options.delivered:
        if name == "board":
            batch[name] = _boards(block, options, n, symmetries, ops)
        elif name == "policy":
            policy = block_to_policy(block, n * n, ops)
            if options.final_policy == "uniform":
                # Before masks are applied: a masked final position has zeros.
                policy[~_has_policy(block)] = 1 / (n * n)
            if "policy_weight" in block:  # zeros add nothing to a loss, also if a trainer ignores the weight
                policy[block["policy_weight"] == 0] = 0
            batch[name] = policy
        elif name == "policy_mask":
            batch[name] = _has_policy(block)
            if "policy_weight" in block:
                batch[name] &= block["policy_weight"] != 0
        elif name == "policy_weight" and name not in block:
            batch[name] = ops.full((len(block["position_id"]),), FULL_WEIGHT, "float32")
        elif name == "value_weight":
            batch[name] = _value_weights(block, options, seed, epoch, ops)
        elif block[name].dtype == xp.float64:  # only a column extra.NAME
            with np.errstate(over="ignore"):  # a larger number is infinite in float32
                batch[name] = ops.cast(block[name], "float32")
        else:
            batch[name] = block[name]
    return batch


def _transform_labels(block: dict[str, Any], symmetries: Any, n: int, ops: Arrays) -> None:
    """Replace fill rows, moves, policies, values and players by those after a symmetry of each position.

    A reflection swaps the colours, so values become 1 - value and the other player is to move. Packed boards
    are transformed when they are unpacked.
    """
    xp, table = ops.xp, ops.symmetry_table(n)
    swapped = symmetries >= Symmetry.LONG_DIAGONAL
    if "fill" in block:
        block["fill"], block["ply"] = transform_fill(block["fill"], block["ply"], symmetries, n, ops)
    if "move" in block:
        move = block["move"]
        has_move = move != NO_MOVE
        # One table for all symmetries, so that a batch is one gather instead of four selections.
        image = table[symmetries * (n * n) + xp.where(has_move, move, 0)]
        block["move"] = xp.where(has_move, image, move)
    if "policy_cell" in block:
        rows = ops.cast(block["policy_row"], "int64")
        # The table of each policy's symmetry, once for each of its cells.
        first = ops.repeat(symmetries[rows] * (n * n), block["policy_count"])
        block["policy_cell"] = table[first + block["policy_cell"]]
    for name in ("value", "root_value"):
        if name in block:
            block[name] = xp.where(swapped, 1 - block[name], block[name])
    if "player_to_move" in block:
        block["player_to_move"] = block["player_to_move"] ^ swapped


def _boards(block: Mapping[str, Any], options: BatchOptions, n: int, symmetries: Any, ops: Arrays) -> Any:
    """Return the boards of a block whose labels have been transformed.

    Planes are assembled as uint8 and cast once, so that the large array is written only once.
    """
    form, xp = options.board, ops.xp
    if form == "fill":
        return block["fill"]
    if form == "packed" and "fill" not in block and symmetries is None:
        return block["board"]
    planes = 2 if form == "packed" else options.planes
    if "fill" in block:
        cells = ops.empty((len(block["fill"]), planes, n * n), xp.uint8)
        fill_to_stones(block["fill"], block["ply"], cells[:, :2], ops)
    else:
        stones = ops.unpack(block["board"], 2 * n * n).reshape(-1, 2, n * n)
        if symmetries is not None:
            swapped = (symmetries >= Symmetry.LONG_DIAGONAL)[:, None, None]
            stones = ops.image(stones, symmetries, n)
            # The colours change places after the image: a reflection exchanges the goals of the players.
            stones = xp.where(swapped, xp.flip(stones, (1,)), stones)
        cells = stones
        if planes == 3:
            # A third plane needs a larger array; two planes are used where they are.
            cells = ops.empty((len(stones), planes, n * n), xp.uint8)
            cells[:, :2] = stones
    if form == "packed":
        return ops.pack(cells.reshape(len(cells), 2 * n * n))
    if planes == 3:
        cells[:, 2] = ops.cast(block["player_to_move"] == RED, "uint8")[:, None]
    return ops.cast_cells(cells.reshape(len(cells), planes, n, n), form)


def _has_policy(block: Mapping[str, Any]) -> Any:
    """Return whether each position has a policy, sparse or one-hot: bool (B,)."""
    mask = block["move"] != NO_MOVE
    if "policy_row" in block:
        mask[block["policy_row"]] = True
    return mask


def _value_weights(
    block: Mapping[str, Any], options: BatchOptions, seed: int, epoch: int, ops: Arrays
) -> Any:
    """Return the value weights, float32 (B,): 1 with the probability of the tier, otherwise 0.

    A draw is a multiple of 2^-53, so that it is compared as an integer. Unknown tiers have probability 1.
    """
    ids = block["position_id"]
    if options.tier_probability is None:
        return ops.full((len(ids),), 1, "float32")
    # An integer is below p · 2^53 exactly if it is below that number rounded up. The product is exact.
    limits = [math.ceil(probability * 2.0**_DRAW_BITS) for probability in options.tier_probability]
    # One limit for each value of uint8, so that unknown tiers need no condition: every draw is below theirs.
    all_limits = ops.constant((*limits, *[1 << _DRAW_BITS] * (256 - _TIERS)))
    draws = ops.draw_bits(ids, derive_key(seed, "value", epoch), _DRAW_BITS)
    tiers = ops.cast(block["value_sample_tier"], "int64")
    return ops.cast(draws < all_limits[tiers], "float32")
