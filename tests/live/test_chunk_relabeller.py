"""Tests of new targets from a user's function, and of invalid ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError, HexdataError
from hexdata.live import Chunk, Targets
from hexdata.live.chunk_relabeller import ChunkRelabeller, Relabel
from hexdata.live.chunk_unpacker import ChunkUnpacker
from hexdata.live.pipeline import Pipeline
from hexdata.shards.blocks import Block, block_length
from tests.live.sample_games import CELLS, SampleGames, block_chunk, move_chunks, plain_row, rows_of


def relabelled(chunk: Chunk, relabel: Relabel | str) -> list[dict[str, Any]]:
    """Return the relabelled positions of a game as the next stage unpacks them."""
    (chunks,) = ChunkRelabeller(relabel=relabel).process((chunk,))
    return rows_of(ChunkUnpacker(seed=0, pool_size=99, positions_per_game="all").process(chunks))


def plain(chunk: Chunk) -> list[dict[str, Any]]:
    return [plain_row(chunk, ply) for ply in range(chunk.positions)]


def uniform(chunk: Chunk, block: Block) -> Targets:
    """Return equal policies for all positions; tests refer to it by its import path."""
    return Targets(policy=np.full((chunk.positions, CELLS), 1 / CELLS))


CHUNKS = [move_chunks(1)[0], move_chunks(1, tiers=True)[0], block_chunk(3, 6, dense=(1, 4), final=(5,))]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_none_leaves_targets_unchanged(chunk):
    assert relabelled(chunk, lambda chunk, block: None) == plain(chunk)
    assert relabelled(chunk, lambda chunk, block: Targets()) == plain(chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_are_replaced(chunk):
    values = np.linspace(0, 1, chunk.positions)
    expected = [
        {**row, "value": float(np.float32(value))} for row, value in zip(plain(chunk), values, strict=True)
    ]
    assert relabelled(chunk, lambda chunk, block: Targets(value=values)) == expected
    assert relabelled(chunk, lambda chunk, block: Targets(value=values.tolist())) == expected


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("rows", [None, [0, 4], [1], []])
def test_policies_are_replaced_and_others_are_unchanged(chunk, rows):
    plies = list(range(chunk.positions)) if rows is None else rows
    policies = np.zeros((len(plies), CELLS), np.float32)
    for row, ply in enumerate(plies):
        policies[row, [ply % CELLS, 20]] = [0.25, 0.75]
    expected = plain(chunk)
    for ply, policy in zip(plies, policies.tolist(), strict=True):
        expected[ply]["policy"] = policy
    targets = Targets(policy=policies, rows=rows)
    assert relabelled(chunk, lambda chunk, block: targets) == expected
    ((new,),) = ChunkRelabeller(relabel=lambda chunk, block: targets).process((chunk,))
    assert new.block is not None
    with_policy = new.block.get("policy_row", np.zeros(0)).tolist()
    assert with_policy == sorted(set(with_policy))
    block_length(new.block)


def test_the_function_receives_a_game_and_read_only_positions():
    calls = []

    def record(chunk: Chunk, block: Block) -> None:
        calls.append((chunk, rows_of([block])))
        with pytest.raises(ValueError, match="read-only"):
            block["value"][0] = 1

    for chunk in CHUNKS:
        relabelled(chunk, record)
    assert calls == [(chunk, plain(chunk)) for chunk in CHUNKS]


def test_the_function_can_be_given_by_name():
    rows = relabelled(CHUNKS[0], "tests.live.test_chunk_relabeller:uniform")
    assert {tuple(row["policy"]) for row in rows} == {(float(np.float32(1 / CELLS)),) * CELLS}


def test_games_are_counted():
    stage = ChunkRelabeller(relabel=lambda chunk, block: Targets() if chunk.number else None)
    list(stage.process(tuple(move_chunks(3))))
    assert stage.counts == {"relabelled": 2, "unchanged": 1}


M = 6
DENSE = np.full((M, CELLS), 1 / CELLS)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.zeros(M), "expected Targets"),
        (Targets(value=np.zeros(M - 1)), r"value of float64 with shape \(5,\)"),
        (Targets(value=["a"] * M), "value of <U1"),
        (Targets(value=[[1], [1, 2]]), "value: "),
        (Targets(value=np.full(M, np.nan)), "not finite"),
        (Targets(value=np.full(M, 1e300)), "not finite"),
        (Targets(value=np.full(M, 1.01)), "values from 0 to 1"),
        (Targets(value=np.full(M, -0.01)), "values from 0 to 1"),
        (Targets(policy=DENSE[:, 1:]), r"expected numbers with shape \(6, 25\)"),
        (Targets(policy=DENSE[:2]), r"expected numbers with shape \(6, 25\)"),
        (Targets(policy=DENSE[:2], rows=[0, 1, 2]), r"expected numbers with shape \(3, 25\)"),
        (Targets(policy=DENSE[:2], rows=[1, 0]), "ascending"),
        (Targets(policy=DENSE[:2], rows=[1, 1]), "ascending"),
        (Targets(policy=DENSE[:2], rows=[0, M]), "from 0 to 5"),
        (Targets(policy=DENSE[:2], rows=[-1, 0]), "from 0 to 5"),
        (Targets(policy=DENSE[:2], rows=[0.0, 1.0]), "from 0 to 5"),
        (Targets(policy=DENSE * 2), "the sum 1"),
        (Targets(policy=np.where(np.arange(CELLS) < 2, [2, -1] + [0] * 23, 0.0) + DENSE * 0), "0 or more"),
        (Targets(policy=np.full((M, CELLS), np.inf)), "not finite"),
    ],
)
def test_an_error_about_invalid_targets_names_the_game(targets, message):
    chunk = replace(CHUNKS[2], index=12)
    with pytest.raises(HexdataError, match=message) as caught:
        relabelled(chunk, lambda chunk, block: targets)
    assert str(caught.value).startswith("found.pkl.gz: game 12: ")


def test_an_error_in_the_function_stops_the_pipeline_and_names_the_game():
    def fail(chunk: Chunk, block: Block) -> None:
        if chunk.number == 20:
            raise KeyError("no such thing")

    with Pipeline([SampleGames(), ChunkRelabeller(relabel=fail)], [(2, "block")] * 2) as pipeline:
        pipeline.start()
        with pytest.raises(HexdataError, match=r"game 6: .*KeyError") as caught:  # noqa: PT012
            for _ in range(9):
                pipeline.take()
    assert caught.value.path == "made-2.trmph"
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("relabel", "message"),
    [
        ("nowhere.at.all:f", "No module named 'nowhere'"),
        ("tests.live.sample_games:no_such", "no_such"),
        ("", "cannot be imported"),
        ("tests.live.sample_games:N", "expected a function"),
        (5, "expected a function"),
    ],
)
def test_invalid_functions_are_refused(relabel, message):
    with pytest.raises(ConfigError, match=message):
        ChunkRelabeller(relabel=relabel)
