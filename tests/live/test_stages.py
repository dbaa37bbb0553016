"""The stages between the pool and the trainer: what they emit, what they hold, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.batch import FIELDS, BatchOptions, make_batch
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.games.findings import Flag
from hexdata.live import Chunk, Targets, shuffling_frame_sampler
from hexdata.live.chunk import PLY_STRIDE
from hexdata.live.chunk_relabeller import ChunkRelabeller
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.chunk_unpacker import ChunkUnpacker
from hexdata.live.chunk_validator import INVALID_FLAGS, ChunkValidator
from hexdata.live.file_path_provider import FilePathProvider
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool, StreamShuffler
from hexdata.live.shuffling_frame_sampler import ShufflingFrameSampler
from hexdata.live.stage import Transform
from hexdata.live.state import decode_state, encode_state
from hexdata.live.tensor_generator import TensorGenerator
from hexdata.order import derive_key, uniform_draw
from hexdata.shards.blocks import Block, block_fields, join_blocks, slice_rows
from tests.live.made import CELLS, N, block_chunk, ids_of, move_chunks, plain_rows, rows_of
from tests.pairs import FULL


def unpacker(**options: Any) -> ChunkUnpacker:
    return ChunkUnpacker(**{"seed": 3, "pool_size": 100, "positions_per_game": "all", **options})


def sampler(size: int) -> ShufflingFrameSampler:
    return ShufflingFrameSampler(seed=5, reservoir=size)


BATCHES = BatchOptions(fields=FIELDS, symmetry=True, tier_probability=(1.0, 0.5, 0.5, 0.0), planes=3)


def generator(batch_size: int = 8, **options: Any) -> TensorGenerator:
    return TensorGenerator(batch_size=batch_size, batch=BATCHES, seed=2, **options)


# --- every stage ------------------------------------------------------------------------------------------

GAMES = [tuple(replace(block_chunk(0, 9), number=n % 7) for n in range(i, i + 4)) for i in range(9)]
MOVES = [tuple(move_chunks(9)[start : start + 3]) for start in range(0, 9, 3)]
BLOCKS = [
    block
    for number, size in enumerate([5, 9, 1, 30, 2, 2, 11])
    for block in unpacker().process((block_chunk(number, size, range(0, size, 3) if number % 2 else ()),))
]


@dataclass(frozen=True)
class Case:
    make: Callable[[], Transform]
    inputs: list[Any]
    once: bool = True
    """Whether each position is emitted exactly once."""


CASES = {
    "validator": Case(lambda: ChunkValidator(), MOVES),
    "relabeller": Case(lambda: ChunkRelabeller(relabel=lambda chunk, block: Targets()), MOVES),
    "unpacker of whole games": Case(unpacker, MOVES),
    "unpacker of some positions": Case(lambda: unpacker(positions_per_game=2), GAMES, once=False),
    "sampler that fills": Case(lambda: sampler(23), BLOCKS),
    "sampler of one position": Case(lambda: sampler(1), BLOCKS),
    "sampler that never fills": Case(lambda: sampler(500), BLOCKS),
    "tensors": Case(generator, BLOCKS),
}


def shown(items: Iterable[Any]) -> list[Any]:
    """Return positions of games, blocks or batches as plain values, in order."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, tuple):
            found += [row for chunk in item for row in plain_rows(chunk)]
        elif "position_in_game" in item and "value_weight" in item:
            found += zip(item["position_id"].tolist(), *map(bytes, item["board"]), strict=False)
        else:
            found += rows_of([item])
    return found


def ids(rows: list[Any]) -> list[int]:
    return sorted(row["position_id"] if isinstance(row, dict) else row[0] for row in rows)


def steps(stage: Transform, inputs: Iterable[Any]) -> Iterator[list[Any]]:
    for item in inputs:
        yield shown(stage.process(item))
    for item in stage.finish():
        yield shown([item])


@pytest.mark.parametrize("name", CASES)
def test_a_state_continues_at_any_time_and_nothing_is_lost(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of the drain, and if further items arrive after a part of it."""
    monkeypatch.setattr(shuffling_frame_sampler, "_DRAIN_ROWS", 4)
    case = CASES[name]
    whole = list(steps(case.make(), case.inputs))
    expected = ids(shown(case.inputs))
    if case.once:
        assert ids([row for step in whole for row in step]) == expected
    for stop in range(len(whole) + 1):
        stage = case.make()
        first = [row for step in islice(steps(stage, case.inputs), stop) for row in step]
        state = encode_state(stage.state())
        for more in ([], case.inputs[:1]):
            other = case.make()
            other.load_state(decode_state(state))
            found = first + [row for step in steps(other, [*case.inputs[stop:], *more]) for row in step]
            if not more:
                assert found == [row for step in whole for row in step], stop
            elif case.once:
                assert ids(found) == sorted(expected + ids(shown(more)))


DRAWS = {"seed": 1, "pool_size": 4}


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        *((FilePathProvider, {"patterns": each}) for each in ([], "*.trmph", [3])),
        *((FilePathProvider, each) for each in ({"settle": 0}, {"settle": 10**400})),
        *((ChunkSourceLoader, {name: 0}) for name in ("board_size", "max_positions")),
        (ChunkSourceLoader, {"value_convention": "red"}),
        *((ShufflingChunkPool, {name: 0} | DRAWS) for name in ("game_batch_size", "passes")),
        (ShufflingChunkPool, {"min_chunks": 5} | DRAWS),
        *((ShufflingChunkPool, {"reuse": each} | DRAWS) for each in (0, float("nan"), "8")),
        *((ChunkValidator, {"flags": each}) for each in (["no-chains"], "no-chain", "", 5)),
        (ChunkRelabeller, {"relabel": len, "threads": 0}),
        *((ChunkRelabeller, {"relabel": each}) for each in ("nowhere.at.all:f", "os:no_such", "", 5)),
        (ChunkUnpacker, {"positions_per_game": 0} | DRAWS),
    ],
)
def test_invalid_options_are_refused(make: Any, wrong: dict[str, Any], tmp_path: Any) -> None:
    own = {"directory": tmp_path} if make in (FilePathProvider, ChunkSourceLoader) else {}
    with pytest.raises(ConfigError):
        make(**own, **wrong)


# --- the validator ----------------------------------------------------------------------------------------


def test_games_with_wrong_boards_or_labels_are_left_out() -> None:
    wrong = {"impossible-stones", "label-contradicts-chain", "player-contradicts-stones"}
    wrong |= {"policy-on-occupied", "repeated-move", "winner-contradicts-value"}
    assert set(INVALID_FLAGS) == wrong
    plain, flagged = move_chunks(2)
    for flag in Flag:
        bad = replace(flagged, flags=(flag.code,))
        assert list(ChunkValidator().process((plain, bad))) == [(plain, bad)[: 2 - (flag.code in wrong)]]
        stage = ChunkValidator(flags=[flag.code])
        assert list(stage.process((bad, plain))) == [(plain,)]
        assert list(ChunkValidator(flags=[]).process((plain, bad))) == [(plain, bad)]
    several = replace(plain, flags=("no-chain", "policy-on-occupied", "repeated-move"))
    stage = ChunkValidator()
    assert list(stage.process((several, several))) == []
    reasons = dict.fromkeys(("policy-on-occupied", "repeated-move"), 2)
    expected = {"passed": 0, "left_out": 2} | {f"left_out.{name}": count for name, count in reasons.items()}
    assert stage.counts == expected
    assert "left_out.policy-on-occupied 2, left_out.repeated-move 2" in str(stage.wait_reason())


# --- the relabeller ---------------------------------------------------------------------------------------


def uniform(chunk: Chunk, block: Block) -> Targets:
    """Return equal policies for all positions; a test refers to it by its import path."""
    return Targets(policy=np.full((chunk.positions, CELLS), 1 / CELLS))


CHUNKS = [move_chunks(1)[0], move_chunks(1, tiers=True)[0], block_chunk(3, 6, dense=(1, 4), final=(5,))]


def relabelled(chunk: Chunk, relabel: Any) -> list[dict[str, Any]]:
    """Return the relabelled positions of a game as the next stage unpacks them."""
    (chunks,) = ChunkRelabeller(relabel=relabel).process((chunk,))
    return rows_of(unpacker().process(chunks))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_targets_are_replaced_and_others_are_unchanged(chunk: Chunk) -> None:
    values = np.linspace(0, 1, chunk.positions)
    for made in (None, Targets(), Targets(value=values), Targets(value=values.tolist())):
        expected = plain_rows(chunk)
        if made and made.value is not None:
            expected = [
                {**row, "value": float(np.float32(v))} for row, v in zip(expected, values, strict=True)
            ]
        assert relabelled(chunk, lambda chunk, block, made=made: made) == expected
    for rows in (None, [0, 4], [1], []):
        plies = list(range(chunk.positions)) if rows is None else rows
        policies = np.zeros((len(plies), CELLS), np.float32)
        for row, ply in enumerate(plies):
            policies[row, [ply % CELLS, 20]] = [0.25, 0.75]
        expected = plain_rows(chunk)
        for ply, policy in zip(plies, policies.tolist(), strict=True):
            expected[ply]["policy"] = policy
        targets = Targets(policy=policies, rows=rows)
        assert relabelled(chunk, lambda chunk, block, targets=targets: targets) == expected

    def record(chunk: Chunk, block: Block) -> None:
        seen.append((chunk, rows_of([block])))
        with pytest.raises(ValueError, match="read-only"):
            block["value"][0] = 1

    seen: list[Any] = []
    relabelled(chunk, record)
    assert seen == [(chunk, plain_rows(chunk))]
    even = [float(np.float32(1 / CELLS))] * CELLS
    assert all(row["policy"] == even for row in relabelled(chunk, "tests.live.test_stages:uniform"))


DENSE = np.full((6, CELLS), 1 / CELLS)


@pytest.mark.parametrize(
    "targets",
    [
        np.zeros(6),
        *(Targets(value=each) for each in (np.zeros(5), ["a"] * 6, [[1], [1, 2]])),
        *(Targets(value=np.full(6, each)) for each in (np.nan, 1e300, 1.01, -0.01)),
        *(Targets(policy=each) for each in (DENSE[:, 1:], DENSE[:2], DENSE * 2, np.full((6, CELLS), np.inf))),
        Targets(policy=np.where(np.arange(CELLS) < 2, [2, -1] + [0] * 23, 0.0) + DENSE * 0),
        *(Targets(policy=DENSE[:2], rows=rows) for rows in ([0, 1, 2], [1, 1], [0, 6], [-1, 0], [0.9, 2])),
        *(Targets(policy=DENSE[:2], rows=rows) for rows in ([True, False], ["2", "3"], [1 << 70, 1])),
    ],
)
def test_an_error_about_invalid_targets_names_the_game(targets: Any) -> None:
    with pytest.raises(HexdataError, match=r"^found\.pkl\.gz: game 12: .*targets(?!.*(shard|export))"):
        relabelled(replace(CHUNKS[2], index=12), lambda chunk, block: targets)


# --- the unpacker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("board_size", [3, 5, 13])
def test_all_fields_of_positions_are_unpacked(board_size: int) -> None:
    chunks = move_chunks(7, board_size, tiers=True)
    chunks[2] = replace(chunks[2], tiers=None)
    (block,) = unpacker().process(tuple(chunks))
    assert rows_of([block]) == [row for chunk in chunks for row in plain_rows(chunk)]
    dtypes = {name: field.dtype for name, field in block_fields(board_size, with_policy=False).items()}
    assert {name: array.dtype.str for name, array in block.items()} == dtypes
    if board_size == N:
        chunks += [block_chunk(14, 6, dense=(1, 5)), block_chunk(19, 3), block_chunk(17, 4, dense=(0,))]
        (block,) = unpacker().process(tuple(chunks[::-1]))
        rows = sorted(rows_of([block]), key=lambda row: row["position_id"])
        assert rows == [row for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 8) for row in plain_rows(chunks[n])]
        assert (np.diff(block["policy_row"].astype(np.int64)) > 0).all()
        assert {n: array.dtype.str for n, array in block.items()} == dtypes | {
            "policy": "<f4",
            "policy_row": "<u4",
        }


@settings(max_examples=100 if FULL else 15)
@given(
    draws=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), min_size=1, max_size=12),
    wanted=st.integers(1, 12),
    final=st.booleans(),
    seed=st.integers(0, 9),
)
def test_unused_positions_are_drawn_first(
    draws: list[list[int]], wanted: int, final: bool, seed: int
) -> None:
    """The only final position of game 6 has a policy of a search, so it is always drawn."""
    chunks = [*move_chunks(4), *(block_chunk(n, n - 1, dense=(0,) * (n == 6), final=(0,)) for n in (4, 5, 6))]
    stage = unpacker(seed=seed, positions_per_game=wanted, final_positions=final, pool_size=7)
    used: dict[int, set[int]] = {number: set() for number in range(7)}
    for numbers in draws:
        drawn = Counter(ids_of(stage.process(tuple(chunks[number] for number in numbers))))
        for number in numbers:
            last = {chunks[number].positions - 1} if number < 4 else {0} if number < 6 else set()
            eligible = set(range(chunks[number].positions)) - (set() if final else last)
            own = {each % PLY_STRIDE for each in drawn if each // PLY_STRIDE == number}
            assert own <= eligible
            assert len(own) == min(wanted, len(eligible))
            fresh = eligible - used[number]
            if len(fresh) > wanted:
                assert own <= fresh
                used[number] |= own
            else:
                assert fresh <= own
                used[number] = own - fresh
        assert set(drawn.values()) <= {1}


# --- the sampler ------------------------------------------------------------------------------------------


def block_of(start: int, rows: int, dense: Iterable[bool] = ()) -> Block:
    """Return distinguishable rows; ``dense`` states which of them have a policy."""
    numbers = np.arange(start, start + rows)
    with_policy = np.flatnonzero(list(dense)[:rows])
    policies = (numbers[with_policy, np.newaxis] + np.arange(2) / 8).astype(np.float32)
    found = {"policy": policies, "policy_row": with_policy.astype(np.uint32)} if len(with_policy) else {}
    return {
        "board": (numbers[:, np.newaxis] + np.arange(3)).astype(np.uint8),
        "position_id": numbers,
        **found,
    }


@settings(max_examples=100 if FULL else 20)
@given(
    blocks=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.booleans(), max_size=20)), min_size=1, max_size=12
    ),
    size=st.integers(1, 25),
)
def test_swapping_a_block_equals_swapping_row_by_row(blocks: list[tuple[int, list[bool]]], size: int) -> None:
    """In such small reservoirs, nearly every block draws some index twice."""
    reservoir, held, swapped, key = sampler(size), list[Any](), 0, derive_key(5, "live", "reservoir")
    for number, (length, dense) in enumerate(blocks):
        rows, expected = rows_of([block_of(20 * number, length, dense)]), []
        added = min(length, size - len(held))
        held += rows[:added]
        for row in rows[added:]:
            index = int(float(uniform_draw([swapped], key)[0]) * len(held))
            swapped += 1
            expected.append(held[index])
            held[index] = row
        assert rows_of(reservoir.process(block_of(20 * number, length, dense))) == expected
        assert reservoir.held == len(held)
        assert bool(reservoir.wait_reason()) == (len(held) < size)
    left = sorted(rows_of(reservoir.finish()), key=lambda row: row["position_id"])
    assert left == sorted(held, key=lambda row: row["position_id"])


def test_optional_columns_that_a_block_lacks_are_null() -> None:
    """Other fields that are missing are an error, and not zeros."""
    plain, given = block_of(0, 4), {"visits": (np.int32, -1), "root_value": (np.float32, np.nan)}
    given |= {"extra.x": (np.float64, np.nan), "policy_weight": (np.float32, 1)}
    searched = {**block_of(4, 4), **{name: np.full(4, 0.5).astype(kind) for name, (kind, _) in given.items()}}
    for first, second in ((plain, searched), (searched, plain)):
        stage = sampler(4)
        joined = join_blocks([*stage.process(first), *stage.process(second), *stage.finish()])
        for name, (kind, null) in given.items():
            expected = np.where(joined["position_id"] < 4, null, searched[name][0])
            assert joined[name].dtype == kind
            np.testing.assert_array_equal(joined[name], expected)
        with pytest.raises(StoreError, match="different fields"):
            stage.process({"position_id": np.arange(3)})


# --- tensors ----------------------------------------------------------------------------------------------


@settings(max_examples=100 if FULL else 10)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8), batch_size=st.integers(1, 40))
def test_batches_contain_the_rows_in_order(sizes: list[int], batch_size: int) -> None:
    stage = generator(batch_size)
    found = [batch for size in sizes for batch in stage.process(BLOCKS[size])]
    found += stage.finish()
    rows = join_blocks([BLOCKS[size] for size in sizes])
    starts = range(0, len(rows["move"]), batch_size)
    assert len(found) == len(starts)
    for number, (batch, start) in enumerate(zip(found, starts, strict=True)):
        part = slice_rows(rows, start, min(start + batch_size, len(rows["move"])))
        expected = make_batch(part, BATCHES, N, seed=2, epoch=number)
        assert list(batch) == list(expected)
        for name, array in expected.items():
            assert batch[name].dtype == array.dtype
            np.testing.assert_array_equal(batch[name], array, err_msg=name)
    assert stage.counts.get("batches", 0) == len(found)
    assert stage.counts.get("positions", 0) == sum(len(batch["value"]) for batch in found)


# --- draws ------------------------------------------------------------------------------------------------


def test_the_draws_are_pinned() -> None:
    """Another result would change every live run and need a new ORDER_VERSION."""
    shuffler = StreamShuffler(42)
    shuffler.extend(10)
    assert shuffler.draw(10).tolist() == [9, 1, 5, 6, 2, 4, 7, 8, 0, 3]
    stage, chunk = unpacker(positions_per_game=3), replace(block_chunk(0, 8), number=17)
    plies = [sorted(each % PLY_STRIDE for each in ids_of(stage.process((chunk,)))) for _ in range(4)]
    assert plies == [[0, 5, 6], [3, 4, 7], [1, 2, 3], [1, 2, 6]]
    reservoir = sampler(4)
    assert reservoir.process(block_of(0, 4)) == []
    assert ids_of(reservoir.process(block_of(4, 6))) == [0, 4, 5, 3, 6, 1]
    assert ids_of(reservoir.finish()) == [7, 9, 2, 8]
