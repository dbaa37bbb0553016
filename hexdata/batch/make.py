"""Batch options, and the conversion of packed blocks into batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from hexdata.batch.symmetry import SymmetryArray, draw_symmetries, transform_labels, transform_stones
from hexdata.batch.weights import draw_value_weights
from hexdata.board import RED, cast_cells, pack_boards, unpack_boards
from hexdata.checks import check_choice
from hexdata.errors import ConfigError
from hexdata.fill import POSITION_PLY, boards_to_fill, fill_to_policy, fill_to_stones
from hexdata.schema import NO_MOVE, TARGETS, is_target
from hexdata.shards.blocks import POLICY_FIELDS, Block, block_length, block_to_policy
from hexdata.text import did_you_mean

__all__ = [
    "DEFAULT_FIELDS",
    "FIELDS",
    "Batch",
    "BatchOptions",
    "BoardForm",
    "FinalPolicy",
    "check_stored_fields",
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

_TIERS: Final = 4


@dataclass(frozen=True)
class BatchOptions:
    """Contents of batches of B positions on boards of size n.

    Raises:
        ConfigError: An option has an invalid value.
    """

    fields: tuple[str, ...] = DEFAULT_FIELDS
    """The arrays of a batch:

    - ``board`` (B, ``planes``, n, n), cells 0 or 1: blue's stones, red's stones and, with three planes, the
      player to move. With ``board="packed"``: uint8 (B, ceil(2·n·n / 8)), as ``board.pack_boards`` returns.
      With ``board="fill"``: fill rows (B, n·n), uint8, or uint16 above board size 15, and ``ply`` (B,) of the
      same dtype; ``hexdata.fill`` describes them.
    - ``policy`` float32 (B, n·n): the stored dense policy if the position has one, otherwise one-hot.
    - ``policy_mask`` bool (B,): False for final positions, whose policy is set by ``final_policy``.
    - ``move`` uint16 (B,): cell index; 65535 for final positions.
    - ``value`` float32 (B,): 0 if blue wins, 1 if red wins.
    - ``value_weight`` float32 (B,): 0 or 1, drawn with ``tier_probability``.
    - ``position_id``, ``game_id`` int64 (B,), the latter -1 if unknown; ``player_to_move`` uint8 (B,), 0
      blue, 1 red; ``value_sample_tier`` uint8 (B,), 255 if unknown; ``position_in_game`` and
      ``total_positions`` uint16 (B,), 65535 if unknown.
    - If the store has them: ``root_value`` float32 (B,), from 0 for blue to 1 for red; ``visits`` int32 (B,),
      -1 if unknown; ``weight`` float32 (B,); and ``extra.NAME`` float32 (B,) for each number NAME that its
      sources give. Floats are NaN if unknown.
    """
    planes: int = 2
    """Number of planes, 2 or 3. The third plane is 1 if red is to move and 0 if blue is. With packed boards
    and fill rows, the third plane is added on the device, and batches contain ``player_to_move`` for this."""
    board: BoardForm = "float32"
    """Dtype of the boards, "packed" for one bit per cell, or "fill" for one ply per cell."""
    final_policy: FinalPolicy = "zeros"
    """Policy of final positions: "zeros", "uniform" (1/n² everywhere), or "skip" to omit final positions."""
    tier_probability: tuple[float, float, float, float] | None = None
    """Probabilities of value weight 1 for tiers 0, 1, 2 and 3, drawn in every epoch; positions of unknown
    tier always have weight 1. Batches then contain ``value_weight``. None: all positions have weight 1."""
    symmetry: bool = False
    """Whether to apply to each position one of its four symmetries, drawn in every epoch."""

    def __post_init__(self) -> None:
        self._check_fields()
        if not isinstance(self.planes, int) or self.planes not in (2, 3):
            raise ConfigError("unknown planes", found=repr(self.planes), expected="2 or 3")
        for name, known in (("board", BoardForm), ("final_policy", FinalPolicy)):
            check_choice(name, getattr(self, name), get_args(known))
        if not isinstance(self.symmetry, bool):
            raise ConfigError("symmetry cannot be used", found=repr(self.symmetry), expected="True or False")
        if self.tier_probability is not None and not _are_probabilities(self.tier_probability):
            raise ConfigError(
                "tier_probability cannot be used",
                found=repr(self.tier_probability),
                expected="a tuple of four numbers from 0 to 1, those of tiers 0, 1, 2, 3",
            )

    def _check_fields(self) -> None:
        known = ", ".join((*FIELDS, *TARGETS, "extra.NAME"))
        if not isinstance(self.fields, tuple) or not self.fields:
            raise ConfigError(
                "fields cannot be used", found=repr(self.fields), expected=f"a tuple of {known}"
            )
        unknown = [
            name
            for name in self.fields
            if name not in FIELDS and not (isinstance(name, str) and is_target(name))
        ]
        if unknown:
            hint = did_you_mean(str(unknown[0]), (*FIELDS, *TARGETS))
            raise ConfigError("unknown fields", found=unknown, expected=f"some of {known}", hint=hint)
        if len(set(self.fields)) < len(self.fields):
            raise ConfigError("a field is named twice", found=self.fields, expected="each once")

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
        return self.fields + tuple(name for name in added if name not in self.fields)


def _are_probabilities(numbers: object) -> bool:
    return (
        isinstance(numbers, tuple)
        and len(numbers) == _TIERS
        and all(isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x <= 1 for x in numbers)
    )


def check_stored_fields(fields: Sequence[str], stored: Collection[str], location: str) -> None:
    """Check that a store has the optional columns among the fields of batches.

    Args:
        fields: Names of the fields of batches.
        stored: Names of the stored members.
        location: Location of the store, for messages.

    Raises:
        ConfigError: It lacks some of them.
    """
    missing = [name for name in fields if is_target(name) and name not in stored]
    if missing:
        raise ConfigError(
            "the store does not have these fields",
            path=location,
            found=", ".join(missing),
            expected=f"some of {', '.join((*FIELDS, *sorted(filter(is_target, stored))))}",
            hint="Leave these fields out, or convert sources that contain them.",
        )


def required_members(options: BatchOptions, stored: Collection[str]) -> list[str]:
    """Return the sorted names of the members that batches with these options need.

    Args:
        options: Contents of the batches.
        stored: Names of the stored members: those of shards, or of a table of games, which contains ``fill``
            in place of ``board``.
    """
    third_plane = {"player_to_move"} if options.planes == 3 else set()
    policy = {"move", *POLICY_FIELDS}
    board = {"board", "move"} if options.board == "fill" else {"board"}
    as_fill = "fill" in stored
    sources = {
        "board": ({"fill"} if as_fill else board) | third_plane,
        "ply": set[str](),
        "policy": {"fill", "policy"} if as_fill and options.final_policy != "uniform" else policy,
        "policy_mask": {"move", "policy_row"} if as_fill else policy,
        "value_weight": {"position_id"} | ({"value_sample_tier"} if options.tier_probability else set()),
    }
    members = {member for name in options.delivered for member in sources.get(name, {name})}
    if options.symmetry:
        members.add("position_id")
    return sorted(members - (set(POLICY_FIELDS) - set(stored)))


def make_batch(block: Block, options: BatchOptions, board_size: int, *, seed: int, epoch: int) -> Batch:
    """Convert packed positions into a batch with the fields ``options.delivered``, in the same order.

    Args:
        block: Members of B positions, those of :func:`required_members`; fill rows have the name ``fill``. It
            is not modified; fields that need no conversion share its arrays. Its policies may be dense, or
            sparse with the names of ``SPARSE_FIELDS``.
        options: Contents of the batch.
        board_size: Board size n.
        seed: Seed of the symmetries and value weights.
        epoch: Epoch of the symmetries and value weights.
    """
    symmetries = None
    if options.board == "fill" and "board" in block:
        fill = boards_to_fill(block["board"], block["move"], board_size)
        block = {**block, "fill": fill, "ply": np.full(len(fill), POSITION_PLY, fill.dtype)}
    if options.symmetry:
        symmetries = draw_symmetries(block["position_id"], seed, epoch)
        block = transform_labels(block, symmetries, board_size)
    batch: Batch = {}
    for name in options.delivered:
        if name == "board":
            batch[name] = _boards(block, options, board_size, symmetries)
        elif name == "policy":
            batch[name] = _policies(block, options, board_size)
        elif name == "policy_mask":
            batch[name] = _policy_mask(block)
        elif name == "value_weight":
            batch[name] = _value_weights(block, options, seed, epoch)
        elif is_target(name) and block[name].dtype == np.float64:
            with np.errstate(over="ignore"):  # a larger number is infinite in float32
                batch[name] = block[name].astype(np.float32)
        else:
            batch[name] = block[name]
    return batch


def _boards(
    block: Block, options: BatchOptions, board_size: int, symmetries: SymmetryArray | None
) -> npt.NDArray[Any]:
    """Return the boards of a block whose labels have been transformed.

    Planes are assembled as uint8 and cast once, so that the large array is written only once.
    """
    packed = options.board == "packed"
    if options.board == "fill":
        return block["fill"]
    planes = 2 if packed else options.planes
    shape = (len(block["fill" if "fill" in block else "board"]), planes, board_size, board_size)
    if "fill" in block:
        cells = np.empty(shape, np.uint8)
        fill_to_stones(block["fill"], block["ply"], cells.reshape(*shape[:2], board_size**2)[:, :2])
    elif packed and symmetries is None:
        return block["board"]
    else:
        cells = unpack_boards(block["board"], board_size, np.uint8)
        if symmetries is not None:
            transform_stones(cells, symmetries)
        if planes == 3:
            stones = cells
            cells = np.empty(shape, np.uint8)
            cells[:, :2] = stones
    if packed:
        return pack_boards(cells.view(np.bool_))
    if planes == 3:
        red_moves = block["player_to_move"] == RED
        cells[:, 2] = red_moves.view(np.uint8)[:, np.newaxis, np.newaxis]
    return cast_cells(cells, options.board)


def _policies(block: Block, options: BatchOptions, board_size: int) -> npt.NDArray[np.float32]:
    cells = board_size * board_size
    if "move" in block:
        policy = block_to_policy(block, cells)
    elif "policy_cell" in block and len(block["policy_row"]):
        policy = _add_sparse_policies(block, cells)
    else:
        policy = fill_to_policy(block["fill"], block["ply"])
    if options.final_policy == "uniform":
        policy[~_policy_mask(block)] = 1 / cells
    return policy


def _add_sparse_policies(block: Block, cells: int) -> npt.NDArray[np.float32]:
    """Return the policies of a block with fill rows and sparse policies."""
    policy = np.zeros((block_length(block), cells), np.float32)
    is_one_hot = np.ones(len(policy), np.bool_)
    is_one_hot[block["policy_row"]] = False
    rows = np.flatnonzero(is_one_hot)
    policy[rows] = fill_to_policy(block["fill"][rows], block["ply"][rows])
    starts = np.repeat(block["policy_row"].astype(np.int64) * cells, block["policy_count"])
    policy.reshape(-1)[starts + block["policy_cell"]] = block["policy_probability"]
    return policy


def _policy_mask(block: Block) -> npt.NDArray[np.bool_]:
    """Return whether each position has a policy, dense or one-hot: bool (B,)."""
    mask: npt.NDArray[np.bool_] = block["move"] != NO_MOVE
    if "policy_row" in block:
        mask[block["policy_row"]] = True
    return mask


def _value_weights(block: Block, options: BatchOptions, seed: int, epoch: int) -> npt.NDArray[np.float32]:
    if options.tier_probability is None:
        return np.ones(block_length(block), np.float32)
    ids, tiers = block["position_id"], block["value_sample_tier"]
    return draw_value_weights(ids, tiers, options.tier_probability, seed, epoch)
