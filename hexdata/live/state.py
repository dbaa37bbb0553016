"""State of a live pipeline as declared models: what its stages and queues hold, as bytes with a checksum.

A state may be from a stranger. Reading it runs no code of it, and compares every value with its declared
type, so that a forged state is one error when it is read, and not an error of a stage while it runs.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, FormatError, StoreError
from hexdata.json_models import Model, as_model
from hexdata.live.chunk import BoardSize, Chunk, ChunkSource, GameBatch, KnownFile
from hexdata.shards.block_check import check_block, find_bad_row
from hexdata.shards.blocks import POLICY_FIELDS, Block, row_fields

NAME: Final = "the state of a live pipeline"
_NOT_STORED: Final = "a live pipeline contains a value that a state cannot store"
_PLAIN: Final = (type(None), bool, int, float, str, bytes, np.bool_, np.number, np.ndarray)
_ITEMS: Final[dict[str | None, Any]] = {
    "files": list[str],
    "sources": list[ChunkSource | str],
    "games": list[GameBatch],
    "blocks": list[Block],
    "batches": list[Mapping[str, npt.NDArray[Any]]],  # no block, whose fields are checked
}
"""Types of the items of a queue, by what the stage before it produces. Other items are plain values."""


class StageState(Model, frozen=True):
    """State of one stage, and the items that it has put and the next stage has not taken yet."""

    state: dict[str, Any]
    items: list[Any]


class PipelineState(Model, frozen=True):
    """State of a pipeline: what its stages share, and the stages by name."""

    files: dict[str, KnownFile]
    board_size: BoardSize | None
    stages: dict[str, StageState]


class EncodedState(Model, frozen=True):
    """A state as MessagePack, with its arrays beside it: MessagePack limits the size of one to 4 GB."""

    content: bytes
    arrays: list[bytes]
    checksum: int
    """CRC-32 of the content and the arrays, one after the other."""


def encode_state(value: object) -> dict[str, Any]:
    """Return the fields of an ``EncodedState``, which pickle and ``torch.save`` preserve.

    Raises:
        ConfigError: The value contains others than plain values, arrays and items of queues.
    """
    arrays: list[bytes] = []

    def encode(value: object) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
            raise ConfigError(_NOT_STORED, found=repr(value)[:80])
        # b"" is the only bytes value that torch.load with weights_only=True refuses.
        arrays.append(value.tobytes() or b"\0")
        return msgspec.msgpack.Ext(0, msgspec.msgpack.encode((value.dtype.str, value.shape, len(arrays) - 1)))

    try:
        content = msgspec.msgpack.encode(value, enc_hook=encode)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(_NOT_STORED, found=str(error)) from error
    return {"content": content, "arrays": arrays, "checksum": _checksum(content, arrays)}


def decode_state(state: object, *, copy: bool = True) -> Any:
    """Return the value that :func:`encode_state` encoded. Tuples are lists, and items of queues are dicts.

    With ``copy=False``, arrays are read-only views on the state.

    Raises:
        StoreError: It is not such a state, or damaged.
    """
    saved = as_model(EncodedState, state, what=NAME)

    def decode(_: int, data: memoryview) -> Any:
        dtype, shape, index = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int])
        # ``frombuffer`` refuses arrays of objects, which would be pickles.
        view = np.frombuffer(saved.arrays[index], dtype, math.prod(shape)).reshape(shape)
        return view.copy() if copy else view

    if _checksum(saved.content, saved.arrays) != saved.checksum:
        raise StoreError(f"{NAME} is damaged: its checksum differs")
    try:
        return msgspec.msgpack.decode(saved.content, ext_hook=decode)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise StoreError(f"{NAME} is damaged", found=f"{error!r:.80}") from error


def _checksum(content: bytes, arrays: Sequence[bytes]) -> int:
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), (content, *arrays), 0)


# --- declared types -------------------------------------------------------------------------------------


def require_plain(value: object) -> None:
    """Raise ConfigError for a value that msgspec would store as another, such as a set as a list."""
    if isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            require_plain(part)
    elif not isinstance(value, _PLAIN):
        raise ConfigError(_NOT_STORED, found=repr(value)[:80])


def as_type(value: Any, kind: Any) -> Any:
    """Return a decoded value as a declared type; an array needs the declared dtype.

    Raises:
        ValueError: The value is not of the type.
    """
    return msgspec.convert(value, kind, dec_hook=_as_array)


def _as_array(kind: Any, value: Any) -> Any:
    dtype = get_args(get_args(kind)[1])[0]  # of ``npt.NDArray``
    if not isinstance(value, np.ndarray) or (dtype is not Any and value.dtype != dtype):
        raise ValueError(f"Expected an array of {dtype}")
    return value


def read_stage(saved: StageState, kept: Mapping[str, Any], kind: str | None) -> tuple[StageState, set[int]]:
    """Return the state and the items of a stage with their types, and the sizes of all their boards.

    Args:
        saved: What was decoded.
        kept: Types of the values of the state, by name.
        kind: What the stage produces.

    Raises:
        ValueError: A value is not of its type, or not valid.
    """
    model = msgspec.defstruct("State", [*kept.items()], bases=(Model,), frozen=True)
    state = msgspec.structs.asdict(as_type(saved.state, model))
    items = as_type(saved.items, _ITEMS.get(kind, list[Any]))
    sizes = _sizes(items, _ITEMS.get(kind))
    return StageState(state, items), sizes.union(*(_sizes(state[name], kept[name]) for name in kept))


def _sizes(value: Any, kind: Any) -> set[int]:
    """Check the positions in a value of a declared type, and return the sizes of their boards."""
    if kind in (Block, list[Block]):
        blocks = value if kind == list[Block] else [value] if value else []
        return {*map(check_rows, blocks)}
    games = value if kind == list[GameBatch] else []
    if not all(games):
        raise ValueError("games drawn together are none")
    if kind == _ITEMS["sources"]:
        games = [source.chunks for source in value if isinstance(source, ChunkSource)]
    return {_check_chunk(chunk) for chunks in games for chunk in chunks}


def check_rows(block: Block) -> int:
    """Check that an array dict is a block of a live pipeline, with dense policies; return the board size.

    Raises:
        ValueError: A field is missing or unknown, has another dtype or shape, or an invalid value.
    """
    rows = {name: block[name] for name in row_fields(block)}
    try:
        # A reservoir may contain a position twice.
        size = check_block(rows, NAME, "block", rows.keys() - {"position_id"})
    except FormatError as error:  # which names the file of a shard
        place = str(error.record).removeprefix("block.").replace(".npy", "")
        raise ValueError(f"{place}: {error.found} instead of {error.expected}") from None
    if block.keys() - rows.keys() not in (set(), {*POLICY_FIELDS}):
        raise ValueError(f"a block with the fields {', '.join(sorted(block))}")
    if "policy" in block:
        policy, row = block["policy"], block["policy_row"]
        fits = policy.dtype == np.float32 and policy.shape == (row.size, size * size) and row.size > 0
        fits = fits and row.dtype == np.uint32 and row.ndim == 1
        fits = fits and policy.min() >= 0 and policy.max() < np.inf
        if not fits or find_bad_row("policy_row", row, size, len(rows["move"])) is not None:
            raise ValueError(f"policies of shape {policy.shape} and their rows")
    return size


def _check_chunk(chunk: Chunk) -> int:
    """Check that a game is stored as moves or as a block, and return its board size.

    Raises:
        ValueError: It is not valid.
    """
    size, moves, block = chunk.board_size, chunk.moves, chunk.block
    if moves is not None:
        has_tiers = chunk.tiers is None or chunk.tiers.shape == (len(moves) + 1,)
        is_distinct = moves.ndim == 1 and len({*moves.tolist()}) == len(moves)
        is_valid = block is None and has_tiers and is_distinct and not (moves >= size * size).any()
    else:
        is_valid = block is not None and check_rows(block) == size and chunk.positions > 0
    if not is_valid:
        raise ValueError(f"game {chunk.index} of {chunk.source} without valid moves or positions")
    return size
