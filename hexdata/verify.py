"""Proof that a store holds what its manifests say: files rehashed, rows recounted, contents compared.

Only reads. Each check says what it found; nothing is taken from an earlier check on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata.errors import HexdataError, StoreError, VerifyError
from hexdata.formats.shard_manifest import ShardManifest
from hexdata.formats.shards import Block, block_samples, columns_to_block, read_blocks
from hexdata.order import derive_key, sort_key
from hexdata.progress import SILENT, Progress
from hexdata.schema import positions_schema
from hexdata.store import Store
from hexdata.store.files import digest_file
from hexdata.store.parquet import Rows, read_rows, regroup
from hexdata.store.session import duckdb_session, read_parquet_sql

__all__ = ["Check", "VerifyResult", "verify_store"]

DUCKDB_MEMORY: Final = 400 << 20


@dataclass(frozen=True)
class Check:
    """One thing looked at: what, whether it holds, and the figures."""

    name: str
    ok: bool
    detail: str


@dataclass
class VerifyResult:
    """Every check made. ``skipped`` names the stages that the store does not have."""

    checks: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    def require(self) -> None:
        """Raise a :class:`VerifyError` that names every check that does not hold."""
        failed = [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]
        if failed:
            raise VerifyError(f"{len(failed)} of {len(self.checks)} checks failed", found="; ".join(failed))


def verify_store(store: str | Path, progress: Progress = SILENT) -> VerifyResult:
    """Check a store through all of its stages; read :attr:`VerifyResult.ok`.

    Raises:
        StoreError: there is no store, or its manifest cannot be read.
    """
    return _Run(Store.open(store), progress).verify()


class _Run:
    def __init__(self, store: Store, progress: Progress) -> None:
        self.store = store
        self.manifest = store.manifest
        self.progress = progress
        self.result = VerifyResult()

    def verify(self) -> VerifyResult:
        self._check("files", self._files)
        if not self.result.ok:
            return self.result  # what follows would only stumble over the same files
        self._check("in = out + rejected", self._counts)
        self._check("position ids", self._position_ids)
        self._check("games", self._games)
        for stage, checks in (
            ("shuffle", (("shuffled rows", self._shuffled_rows), ("shuffled order", self._shuffled_order))),
            ("export", (("shards", self._shards),)),
        ):
            if stage not in self.manifest.stages:
                self.result.skipped.append(stage)
                continue
            for name, check in checks:
                self._check(name, check)
        return self.result

    def _check(self, name: str, check: Callable[[], str]) -> None:
        try:
            self.result.checks.append(Check(name, True, check()))
        except (HexdataError, OSError, pa.ArrowException) as error:
            self.result.checks.append(Check(name, False, str(error)))

    def _files(self) -> str:
        """Every file of the manifest is there with its size and digest, and no other beside them."""
        self.progress.begin("rehash", sum(f.bytes for f in self.manifest.files.values()), "bytes")
        for name, facts in sorted(self.manifest.files.items()):
            path = self.store.path / name
            if not path.exists():
                raise VerifyError("the file is missing", path=path)
            size, sha256 = digest_file(path)
            if (size, sha256) != (facts.bytes, facts.sha256):
                raise VerifyError(
                    "the file was altered",
                    path=path,
                    found=f"{size:,} bytes, sha256 {sha256[:16]}…",
                    expected=f"{facts.bytes:,} bytes, sha256 {facts.sha256[:16]}…",
                )
            self.progress.advance(size)
        folders = {name.split("/")[0] for name in self.manifest.files}
        there = {
            path.relative_to(self.store.path).as_posix()
            for folder in folders
            for path in (self.store.path / folder).rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }
        if foreign := sorted(there - set(self.manifest.files)):
            raise VerifyError(
                "files that no manifest names", path=self.store.path, found=", ".join(foreign[:5])
            )
        return f"{len(self.manifest.files):,} files rehashed"

    def _counts(self) -> str:
        """Per source, in = out + rejected, recounted from the tables; likewise per stage."""
        sources = _read(self.store, "sources", ["source_id", "name", "records", "positions", "rejected"])
        rejected = np.bincount(
            _read(self.store, "rejected", ["source_id"])["source_id"].to_numpy(), minlength=sources.num_rows
        )
        for row in sources.to_pylist():
            part = self.store.path / f"positions/part-{row['source_id']:06d}.parquet"
            written = pq.read_metadata(part).num_rows if part.exists() else 0
            found = (written, int(rejected[row["source_id"]]))
            if found != (row["positions"], row["rejected"]) or row["records"] != sum(found):
                raise VerifyError(
                    "records are missing or too many",
                    path=row["name"],
                    found=f"{found[0]:,} positions and {found[1]:,} rejected",
                    expected=f"{row['positions']:,} and {row['rejected']:,}, together {row['records']:,}",
                )
        total = sum(sources["positions"].to_pylist())
        for stage in ("shuffle", "export"):
            lineage = self.manifest.stages.get(stage)
            if lineage and lineage["positions"] + lineage["rejected"] != total and self._current(stage):
                raise VerifyError(f"the {stage} stage lost rows", found=lineage["positions"], expected=total)
        records = sum(sources["records"].to_pylist())
        return f"{records:,} = {total:,} + {records - total:,} in {sources.num_rows:,} sources"

    def _current(self, stage: str) -> bool:
        try:
            self.store.require_stage(stage)
        except StoreError:
            return False
        return True

    def _position_ids(self) -> str:
        """Ids are dense and ascend through the parts in order."""
        expected = 0
        for path in self.store.files("positions"):
            for batch in pq.ParquetFile(path).iter_batches(columns=["position_id"]):
                ids = batch.column(0).to_numpy()
                if not (ids == np.arange(expected, expected + len(ids))).all():
                    raise VerifyError("position ids are not dense", path=path, expected=f"from {expected}")
                expected += len(ids)
        if expected != self.manifest.counts.get("positions", 0):
            raise VerifyError(
                "positions are missing", found=expected, expected=self.manifest.counts["positions"]
            )
        return f"0 to {expected - 1:,}" if expected else "none"

    def _games(self) -> str:
        """Each game has as many positions as it says, and each position's game is known."""
        games, positions = self.store.files("games"), self.store.files("positions")
        if not games:
            return "none"
        with duckdb_session(memory=DUCKDB_MEMORY, threads=2) as con:
            wrong = con.sql(f"""
                SELECT coalesce(g.game_id, p.game_id), g.positions, p.n
                FROM {read_parquet_sql(games)} g
                FULL JOIN (SELECT game_id, count(*) AS n FROM {read_parquet_sql(positions)}
                           WHERE game_id IS NOT NULL GROUP BY game_id) p USING (game_id)
                WHERE g.positions IS DISTINCT FROM p.n LIMIT 1""").fetchall()
        if wrong:
            game, stated, found = wrong[0]
            raise VerifyError(f"game {game} does not have its positions", found=found, expected=stated)
        return f"{self.manifest.counts['games']:,} games have their positions"

    def _shuffled_rows(self) -> str:
        """The shuffled buckets hold the store's positions, each once, every column the same.

        Compared as multisets by the sum and the xor of a hash of each whole row, its id within. The
        hash is DuckDB's own: both sides are computed here and now, so it need not be stable.
        """
        self.store.require_stage("shuffle")
        sums = []
        with duckdb_session(memory=DUCKDB_MEMORY, threads=2) as con:
            for folder in ("positions", "shuffled"):
                table = read_parquet_sql(self.store.files(folder))
                query = f"""SELECT count(*), sum(hash(t)::HUGEINT), bit_xor(hash(t)),
                                   count(DISTINCT position_id) FROM {table} t"""
                sums.append(con.sql(query).fetchall()[0])
        if sums[0] != sums[1]:
            raise VerifyError(
                "the shuffled rows are not the store's",
                found=f"{sums[1][0]:,} rows",
                expected=f"{sums[0][0]:,}",
            )
        return f"{sums[1][0]:,} rows, each once, every column the same"

    def _shuffled_order(self) -> str:
        """Keys ascend strictly from the first bucket of a split to its last."""
        key = derive_key(self.manifest.stages["shuffle"]["seed"], "shuffle")
        buckets = 0
        for split in self.manifest.stages["shuffle"]["splits"]:
            last = -1
            for path in self.store.files(f"shuffled/{split}"):
                buckets += 1
                for batch in pq.ParquetFile(path).iter_batches(columns=["position_id"]):
                    keys = sort_key(batch.column(0).to_numpy(), key)
                    if len(keys) and (int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any()):
                        raise VerifyError("sort keys do not ascend", path=path)
                    last = int(keys[-1]) if len(keys) else last
        return f"sort keys ascend through {buckets:,} buckets"

    def _shards(self) -> str:
        """The shards hold the shuffled positions: the same order, each field of each one the same."""
        self.store.require_stage("export")
        folder = self.store.path / "shards"
        manifest = ShardManifest.load(folder)
        schema = positions_schema(manifest.board_size)
        self.progress.begin("compare shards", sum(map(manifest.positions, manifest.splits)), "positions")
        for split, shards in manifest.splits.items():
            files = self.manifest.files_in(f"shuffled/{split}")
            sizes = tuple(((self.store.path / name).resolve(), f.rows) for name, f in files.items())
            start = 0
            for shard in shards:
                rows = Rows(sizes, start, start + shard.positions)
                size = manifest.block_size if manifest.layout == "blocks" else 1
                tables = regroup(read_rows(rows, schema), schema, size)
                self._compare(folder / shard.name, tables, manifest)
                start += shard.positions
            if start != sum(rows for _, rows in sizes):
                raise VerifyError(f"the {split} shards lack positions", path=folder, found=start)
        count = sum(len(shards) for shards in manifest.splits.values())
        return f"{count:,} shards hold the shuffled positions in their order, field by field"

    def _compare(self, path: Path, tables: Iterator[pa.Table], manifest: ShardManifest) -> None:
        blocks = read_blocks(path)
        for table in tables:
            _, found = next(blocks, ("", {}))
            expected = columns_to_block(table, "policy" in found)
            if manifest.layout == "samples":
                expected = _sample_of(expected)
            if not _equal(found, expected):
                raise VerifyError("a block differs from the shuffled positions", path=path)
            self.progress.advance(table.num_rows)
        if next(blocks, None) is not None:
            raise VerifyError("the shard holds more than it should", path=path)


def _read(store: Store, folder: str, columns: list[str]) -> pa.Table:
    files = store.files(folder)
    if not files:
        return pa.table({name: pa.array([], pa.int32()) for name in columns})
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in files])


def _sample_of(block: Block) -> Block:
    return next(block_samples(block))[1]


def _equal(found: Block, expected: Block) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], array) for name, array in expected.items()
    )
