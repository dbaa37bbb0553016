"""Proof that a store holds what its manifests say: files rehashed, rows recounted, contents compared.

Only reads. Each check says what it found; nothing is taken from an earlier check on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata.errors import HexdataError, VerifyError
from hexdata.formats.shard_manifest import ShardEntry, ShardManifest
from hexdata.formats.shards import Block, block_samples, columns_to_block, read_blocks
from hexdata.order import bucket_bounds, derive_key, sort_key
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS, games_schema, positions_schema, rejected_schema, sources_schema
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
        if not (self._check("files", self._files) and self._check("tables", self._tables)):
            return self.result  # what follows would only stumble over the same files
        self._check("in = out + rejected", self._counts)
        self._check("position ids", partial(self._dense_ids, "positions", "position_id"))
        self._check("game ids", partial(self._dense_ids, "games", "game_id"))
        self._check("games", self._games)
        for stage, checks in (
            ("shuffle", (("shuffled rows", self._shuffled_rows), ("shuffled order", self._shuffled_order))),
            ("export", (("shards", self._shards),)),
            ("pickles-original", ()),
            ("pickles-shuffled", ()),
        ):
            if stage not in self.manifest.stages:
                if checks:  # pickles are written for those who ask, and compared by the round trip
                    self.result.skipped.append(stage)
                continue
            if self._check(f"{stage} stage", partial(self._stage, stage)):
                for name, check in checks:
                    self._check(name, check)
        return self.result

    def _check(self, name: str, check: Callable[[], str]) -> bool:
        try:
            made = Check(name, True, check())
        except (HexdataError, OSError, pa.ArrowException) as error:
            made = Check(name, False, str(error))
        self.result.checks.append(made)
        return made.ok

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
                "files that no manifest names",
                path=self.store.path,
                found=", ".join(foreign[:5]),
                cure="If a run was interrupted, run its command again; else remove them.",
            )
        return f"{len(self.manifest.files):,} files rehashed"

    def _tables(self) -> str:
        """Every Parquet file has its table's columns and as many rows as stated, and so has each table."""
        schemas = {"sources": sources_schema(), "games": games_schema(), "rejected": rejected_schema()}
        if self.manifest.board_size is not None:
            schemas["positions"] = schemas["shuffled"] = positions_schema(self.manifest.board_size)
        rows = dict.fromkeys(self.manifest.counts, 0)
        for name, facts in self.manifest.files.items():
            table = name.split("/")[0]
            if table in ("shards", "pickles"):
                continue
            path = self.store.path / name
            with pq.ParquetFile(path) as file:
                if table not in schemas or not file.schema_arrow.equals(schemas[table]):
                    raise VerifyError("not the columns of its table", path=path)
                if file.metadata.num_rows != facts.rows:
                    raise VerifyError(
                        "the manifest states other rows",
                        path=path,
                        found=f"{file.metadata.num_rows:,}",
                        expected=f"{facts.rows:,}",
                    )
            if table in rows:
                rows[table] += facts.rows
        if rows != self.manifest.counts:
            raise VerifyError("the manifest states other counts", found=rows, expected=self.manifest.counts)
        return ", ".join(f"{count:,} {table}" for table, count in rows.items())

    def _counts(self) -> str:
        """Per source, in = out + rejected, recounted from the tables; likewise per stage."""
        sources = _read(self.store, "sources", ["source_id", "name", "records", "positions", "rejected"])
        rejected = np.bincount(
            _read(self.store, "rejected", ["source_id"])["source_id"].to_numpy(), minlength=sources.num_rows
        )
        for row in sources.to_pylist():
            part = self.manifest.files.get(f"positions/part-{row['source_id']:06d}.parquet")
            found = (part.rows if part else 0, int(rejected[row["source_id"]]))
            if found != (row["positions"], row["rejected"]) or row["records"] != sum(found):
                raise VerifyError(
                    "records are missing or too many",
                    path=row["name"],
                    found=f"{found[0]:,} positions and {found[1]:,} rejected",
                    expected=f"{row['positions']:,} and {row['rejected']:,}, together {row['records']:,}",
                )
        records, positions = (sum(sources[name].to_pylist()) for name in ("records", "positions"))
        recounted = {"records": records, "positions": positions, "rejected": records - positions}
        stated = self.manifest.stages.get("convert", {})
        if not recounted.items() <= stated.items() or positions != self.manifest.counts.get("positions", 0):
            raise VerifyError("the sources do not add up to the store", found=recounted, expected=stated)
        return f"{records:,} = {positions:,} + {records - positions:,} in {sources.num_rows:,} sources"

    def _stage(self, stage: str) -> str:
        """The stage was run on what the store holds now, and lost none of it."""
        self.store.require_stage(stage)
        from_store = stage in ("shuffle", "pickles-original")
        before = self.manifest.counts if from_store else self.manifest.stages["shuffle"]
        lineage = self.manifest.stages[stage]
        came, went = before["positions"], lineage["positions"] + lineage["rejected"]
        if came != went:
            raise VerifyError(f"the {stage} stage lost rows", found=f"{went:,}", expected=f"{came:,}")
        return f"{came:,} = {lineage['positions']:,} + {lineage['rejected']:,}"

    def _dense_ids(self, table: str, column: str) -> str:
        """Ids count up from 0 through the parts in order."""
        expected = 0
        for path in self.store.files(table):
            for batch in pq.ParquetFile(path).iter_batches(columns=[column]):
                ids = batch.column(0).to_numpy()
                if not (ids == np.arange(expected, expected + len(ids))).all():
                    raise VerifyError(f"{column}s do not count up", path=path, expected=f"from {expected}")
                expected += len(ids)
        return f"0 to {expected - 1:,}" if expected else "none"

    def _games(self) -> str:
        """Each game has the positions it says, each position's game is known, duplicates share a split."""
        files, positions = self.store.files("games"), self.store.files("positions")
        if not files:
            return "none"
        games = read_parquet_sql(files)
        with duckdb_session(memory=DUCKDB_MEMORY, threads=2) as con:
            wrong = con.sql(f"""
                SELECT coalesce(g.game_id, p.game_id), g.positions, p.n
                FROM {games} g
                FULL JOIN (SELECT game_id, count(*) AS n FROM {read_parquet_sql(positions)}
                           WHERE game_id IS NOT NULL GROUP BY game_id) p USING (game_id)
                WHERE g.positions IS DISTINCT FROM p.n LIMIT 1""").fetchall()
            torn = con.sql(f"""
                SELECT min(game_id), max(game_id) FROM {games}
                GROUP BY game_hash HAVING count(DISTINCT split) > 1 LIMIT 1""").fetchall()
        if wrong:
            game, stated, found = wrong[0]
            raise VerifyError(f"game {game} does not have its positions", found=found, expected=stated)
        if torn:
            raise VerifyError("the same game is in two splits", found=f"games {torn[0][0]} and {torn[0][1]}")
        return f"{self.manifest.counts['games']:,} games have their positions"

    def _shuffled_rows(self) -> str:
        """Each split's buckets hold the positions of its games, each once, every column the same.

        Compared as multisets by the sum and the xor of a hash of each whole row, its id within. The
        hash is DuckDB's own: both sides are computed here and now, so it need not be stable. It takes
        an empty list for a null, hence the length beside it.
        """
        digest = "hash(p, len(p.policy))"
        sums = f"count(*), sum({digest}::HUGEINT), bit_xor({digest})"
        positions = read_parquet_sql(self.store.files("positions"))
        games = self.store.files("games")
        held_out = f"SELECT game_id, split FROM {read_parquet_sql(games)} WHERE split <> 'train'"
        join = f"LEFT JOIN ({held_out}) g USING (game_id)" if games else "CROSS JOIN (SELECT NULL AS split) g"
        with duckdb_session(memory=DUCKDB_MEMORY, threads=2) as con:
            query = (
                f"SELECT coalesce(g.split, 'train') AS part, {sums} FROM {positions} p {join} GROUP BY part"
            )
            expected = {split: tuple(facts) for split, *facts in con.sql(query).fetchall()}
            found = {
                split: con.sql(f"SELECT {sums} FROM {read_parquet_sql(files)} p").fetchall()[0]
                for split in SPLITS
                if (files := self.store.files(f"shuffled/{split}"))
            }
        for split in expected.keys() | found.keys():
            if expected.get(split) != found.get(split):
                raise VerifyError(
                    f"the shuffled rows of {split} are not the store's",
                    found=f"{found.get(split, (0,))[0]:,} rows",
                    expected=f"{expected.get(split, (0,))[0]:,}",
                )
        splits = {split: facts[0] for split, facts in found.items()}
        if splits != self.manifest.stages["shuffle"]["splits"]:
            raise VerifyError("the manifest states other splits", found=splits)
        return f"{sum(splits.values()):,} rows, each once, every column the same"

    def _shuffled_order(self) -> str:
        """Keys ascend strictly within each bucket, and lie in the bucket's range."""
        lineage = self.manifest.stages["shuffle"]
        key = derive_key(lineage["seed"], "shuffle")
        for split, count in lineage["buckets"].items():
            files = self.store.files(f"shuffled/{split}")
            if len(files) != count:
                raise VerifyError(f"{split} has other buckets", found=len(files), expected=count)
            for path, (low, high) in zip(files, pairwise(bucket_bounds(count)), strict=True):
                last = low - 1
                for batch in pq.ParquetFile(path).iter_batches(columns=["position_id"]):
                    keys = sort_key(batch.column(0).to_numpy(), key)
                    if int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any() or int(keys[-1]) >= high:
                        raise VerifyError("sort keys do not ascend in the bucket's range", path=path)
                    last = int(keys[-1])
        return f"sort keys ascend through {sum(lineage['buckets'].values()):,} buckets"

    def _shards(self) -> str:
        """The shards hold the shuffled positions: the same order, each field of each one the same."""
        folder = self.store.path / "shards"
        manifest = ShardManifest.load(folder)
        schema = positions_schema(manifest.board_size)
        shuffle, export = self.manifest.stages["shuffle"], self.manifest.stages["export"]
        stated = {
            "seed": manifest.seed,
            "splits": {split: manifest.positions(split) for split in manifest.splits},
            "shards": {split: len(shards) for split, shards in manifest.splits.items()},
            "digest": manifest.digest,
        }
        lineage = {**export, "seed": shuffle["seed"], "splits": shuffle["splits"]}
        if not stated.items() <= lineage.items() or export["splits"] != shuffle["splits"]:
            raise VerifyError("the shard manifest contradicts the store's", path=folder, found=stated)
        self.progress.begin("compare shards", export["positions"], "positions")
        for split, shards in manifest.splits.items():
            files = self.manifest.files_in(f"shuffled/{split}")
            sizes = tuple(((self.store.path / name).resolve(), f.rows) for name, f in files.items())
            start = 0
            for shard in shards:
                rows = Rows(sizes, start, start + shard.positions)
                size = manifest.block_size if manifest.layout == "blocks" else 1
                tables = regroup(read_rows(rows, schema), schema, size)
                self._compare(folder, shard, start // manifest.block_size, tables, manifest)
                start += shard.positions
        count = sum(len(shards) for shards in manifest.splits.values())
        return f"{count:,} shards hold the shuffled positions in their order, field by field"

    def _compare(
        self, folder: Path, shard: ShardEntry, first: int, tables: Iterator[pa.Table], manifest: ShardManifest
    ) -> None:
        """Hold one shard against its rows: keys, fields, and where the manifest says that they begin."""
        path = folder / shard.name
        facts = self.manifest.files.get(f"shards/{shard.name}")
        if facts is None or (facts.rows, facts.bytes, facts.sha256) != (
            shard.positions,
            shard.bytes,
            shard.sha256,
        ):
            raise VerifyError("the two manifests contradict each other", path=path)
        raw = np.memmap(path, np.uint8, "r")
        blocks = read_blocks(path)
        for number, table in enumerate(tables):
            key, found = next(blocks, ("", {}))
            expected = columns_to_block(table, "policy" in found or _has_policy(table))
            name = f"{first + number:06d}"
            if manifest.layout == "samples":
                ((position_id, expected),) = block_samples(expected)
                name = f"{position_id:09d}"
            if key != name or not _equal(found, expected):
                raise VerifyError(
                    "a block differs from the shuffled positions", path=path, record=f"block {name}"
                )
            for column, offsets in shard.offsets.items():
                begin = offsets[number]
                if raw[begin : begin + found[column].nbytes].tobytes() != found[column].tobytes():
                    raise VerifyError(f"{column} begins elsewhere", path=path, record=f"block {name}")
            self.progress.advance(table.num_rows)
        if next(blocks, None) is not None:
            raise VerifyError("the shard holds more than it should", path=path)


def _read(store: Store, folder: str, columns: list[str]) -> pa.Table:
    files = store.files(folder)
    if not files:
        return pa.table({name: pa.array([], pa.int32()) for name in columns})
    return pa.concat_tables([pq.read_table(path, columns=columns) for path in files])


def _has_policy(table: pa.Table) -> bool:
    return bool(table["policy"].null_count < table.num_rows)


def _equal(found: Block, expected: Block) -> bool:
    """Compare type, shape and bytes: a NaN equals itself, and -0.0 is not 0.0."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes())
        == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )
