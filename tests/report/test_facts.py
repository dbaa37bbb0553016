"""Numbers of the report, compared with counts in plain Python over the store's files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from hexdata.board import cell_name
from hexdata.cli import app
from hexdata.progress import SILENT
from hexdata.report.facts import QUERIES, ReportFacts, gather_facts
from hexdata.sql import SqlLimits
from hexdata.store import Store
from hexdata.store.integrity import stage_command

Row = dict[str, Any]


def facts_of(store: Path) -> ReportFacts:
    return gather_facts(store, SqlLimits(threads=1), SILENT)


def rows_of(store: Path, folder: str) -> list[Row]:
    paths = sorted((store / folder).glob("*.parquet"))
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


def reached(pieces: Iterable[tuple[int, int]]) -> Counter[int]:
    """Return the number of games by the number of pieces they reach, given (game, piece) per position."""
    of_game = defaultdict(set)
    for game, piece in pieces:
        of_game[game].add(piece)
    return Counter(len(found) for found in of_game.values())


@pytest.fixture(params=["demo_store", "odd_shuffled"])
def store(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_spread_counts_the_buckets_of_each_game(store: Path) -> None:
    """Forty buckets are counted directly; three buckets are replaced by 64 equal pieces."""
    spread = facts_of(store).spread
    assert spread is not None
    buckets = sorted((store / "shuffled" / "train").glob("*.parquet"))
    positions = len(rows_of(store, "positions"))
    split = [(number, row) for number, path in enumerate(buckets) for row in pq.read_table(path).to_pylist()]
    known = [(rank, bucket, row) for rank, (bucket, row) in enumerate(split) if row["game_id"] is not None]
    pieces = len(buckets) if len(buckets) == 40 else 64
    assert (spread.pieces, spread.by_bucket) == (pieces, len(buckets) == 40)
    before = reached((row["game_id"], row["position_id"] * pieces // positions) for _, _, row in known)
    after = reached(
        (row["game_id"], bucket if spread.by_bucket else rank * pieces // len(split))
        for rank, bucket, row in known
    )
    assert Counter(dict(enumerate(spread.before))) == before
    assert Counter(dict(enumerate(spread.after))) == after
    assert spread.games == before.total() == pytest.approx(sum(spread.chance))


def test_values_before_the_shuffle(store: Path) -> None:
    found = facts_of(store).values_before
    paths = sorted((store / "shuffled" / "train").glob("*.parquet"))
    positions = len(rows_of(store, "positions"))
    values = defaultdict(list)
    for row in rows_of(store, "shuffled/train"):
        values[row["position_id"] * len(paths) // positions].append(row["value"])
    assert [(row["piece"], row["positions"]) for row in found] == [
        (piece, len(values[piece])) for piece in sorted(values)
    ]
    assert [row["value_mean"] for row in found] == pytest.approx([fmean(values[p]) for p in sorted(values)])


def test_tables_are_those_of_the_files(store: Path) -> None:
    tables = facts_of(store).tables
    assert set(tables) == set(QUERIES)
    games, positions, rejected = (rows_of(store, name) for name in ("games", "positions", "rejected"))
    assert {row["positions"]: row["games"] for row in tables["lengths"]} == Counter(
        game["positions"] for game in games
    )
    assert {row["tier"]: row["positions"] for row in tables["tiers"]} == Counter(
        row["value_sample_tier"] for row in positions
    )
    assert {row["flag"]: row["games"] for row in tables["flags"]} == Counter(
        flag for game in games for flag in game["flags"] or ()
    )
    assert {row["reason"]: row["records"] for row in tables["rejects"]} == Counter(
        row["reason"] for row in rejected
    )
    moved = [game for game in games if game["moves"]]
    assert {row["move"]: row["games"] for row in tables["first_moves"]} == Counter(
        game["moves"][0] for game in moved
    )
    assert {row["move"]: row["games"] for row in tables["opening_cells"]} == Counter(
        move for game in moved for move in game["moves"][:10]
    )
    size = Store.open(store).manifest.board_size
    assert size is not None
    assert all(row["cell"] == cell_name(row["move"], size) for row in tables["opening_cells"])


def test_splits_are_counted(store: Path) -> None:
    games = rows_of(store, "games")
    for row in facts_of(store).tables["splits"]:
        own = [game for game in games if game["split"] == row["split"]]
        assert row["games"] == len(own)
        assert row["positions"] == sum(game["positions"] for game in own)
        assert row["duplicates"] == sum(game["duplicate_of"] is not None for game in own)
        buckets = sorted((store / "shuffled" / row["split"]).glob("*.parquet"))
        assert row["buckets"] == len(buckets)
        assert row["shuffled"] == sum(pq.read_metadata(path).num_rows for path in buckets)


def test_stages_are_those_of_the_manifest(demo_store: Path) -> None:
    facts = facts_of(demo_store)
    assert [stage.stage for stage in facts.stages] == ["convert", "shuffle", "export"]
    for stage, folders in zip(
        facts.stages, (["positions", "games", "sources"], ["shuffled"], ["shards"]), strict=True
    ):
        paths = [p for folder in folders for p in (demo_store / folder).rglob("*.*") if p.suffix != ".md"]
        assert (stage.files, stage.bytes) == (len(paths), sum(p.stat().st_size for p in paths))
        assert stage.fresh
        assert stage.last is not None
        assert (stage.last.stage, stage.runs) == (stage.stage, 1)


def test_facts_are_json(store: Path) -> None:
    json.dumps(asdict(facts_of(store)), allow_nan=False)


def test_the_commands_of_the_lineage_reproduce_the_digests(demo_store: Path, tmp_path: Path) -> None:
    """Running the commands on the page gives files with the digests on the page."""
    facts = facts_of(demo_store)
    again = tmp_path / "again"
    for stage in facts.stages:
        words = stage_command(stage.stage, stage.lineage, "STORE").split()
        arguments = {"STORE": str(again), "INPUT...": str(demo_store.parent / "legacy")}
        alone = (
            ["--threads", "1"] if stage.stage == "shuffle" else ["--workers", "1"]
        )  # does not change the bytes
        result = CliRunner().invoke(app, [arguments.get(word, word) for word in words[1:]] + alone)
        assert result.exit_code == 0, result.output
    assert [s.digest for s in facts_of(again).stages] == [s.digest for s in facts.stages]
    assert facts_of(again).manifest_sha256 == facts.manifest_sha256
