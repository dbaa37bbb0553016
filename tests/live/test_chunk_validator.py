"""Tests of the games that are left out, and of their counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hexdata.errors import ConfigError
from hexdata.games.findings import Flag
from hexdata.live.chunk_validator import INVALID_FLAGS, ChunkValidator
from tests.live.sample_games import move_chunks


def test_the_default_flags_are_pinned():
    assert INVALID_FLAGS == (
        "impossible-stones",
        "label-contradicts-chain",
        "player-contradicts-stones",
        "policy-on-occupied",
        "repeated-move",
        "winner-contradicts-value",
    )


@pytest.mark.parametrize("flag", [flag.code for flag in Flag])
def test_each_flag_is_checked_independently(flag):
    plain, flagged = move_chunks(2)
    flagged = replace(flagged, flags=(flag,))
    (usual,) = ChunkValidator().process((plain, flagged))
    assert usual == ((plain,) if flag in INVALID_FLAGS else (plain, flagged))
    (alone,) = ChunkValidator(flags=[flag]).process((flagged, plain))
    assert alone == (plain,)
    (everything,) = ChunkValidator(flags=[]).process((plain, flagged))
    assert everything == (plain, flagged)


def test_limits_of_length_are_inclusive():
    chunks = move_chunks(30)
    lengths = sorted({chunk.positions for chunk in chunks})
    least, most = lengths[1], lengths[-2]
    stage = ChunkValidator(min_positions=least, max_positions=most)
    (kept,) = stage.process(tuple(chunks))
    assert kept == tuple(chunk for chunk in chunks if least <= chunk.positions <= most)
    assert stage.counts == {
        "passed": len(kept),
        "left_out": 30 - len(kept),
        "left_out.short": sum(chunk.positions < least for chunk in chunks),
        "left_out.long": sum(chunk.positions > most for chunk in chunks),
    }


def test_a_game_is_counted_for_each_reason_and_once_in_total():
    (chunk,) = move_chunks(1)
    bad = replace(chunk, flags=("no-chain", "policy-on-occupied", "repeated-move"))
    stage = ChunkValidator(max_positions=1)
    assert list(stage.process((bad, bad))) == []
    assert stage.counts == {
        "passed": 0,
        "left_out": 2,
        "left_out.policy-on-occupied": 2,
        "left_out.repeated-move": 2,
        "left_out.long": 2,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flags": ["no-chains"]}, "unknown flags"),
        ({"flags": "no-chain"}, "flags cannot be used"),
        ({"min_positions": 0}, "min_positions"),
        ({"min_positions": 9, "max_positions": 8}, "max_positions"),
        ({"threads": 0}, "threads"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ChunkValidator(**options)
