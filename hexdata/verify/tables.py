"""Verification of the files, row counts and ids of a store. Read-only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from hexdata.cards import CARDS
from hexdata.errors import StoreError, VerifyError
from hexdata.storage import storage_of
from hexdata.store import Store
from hexdata.store.integrity import check_tables as require_tables
from hexdata.store.parquet import open_parquet, read_parquet
from hexdata.verify.stages import FOLDERS

__all__ = ["check_counts", "check_dense_ids", "check_files", "check_stage", "check_tables"]


def check_files(store: Store, damage: Mapping[str, StoreError]) -> str:
    """Check that every file of the manifest is undamaged and that the store has no other files.

    Args:
        store: The store to check.
        damage: Damaged files, as ``find_damage`` returns them.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: Files are damaged or are not in the manifest.
    """
    existing = {
        f"{folder}/{name}"
        for folder in FOLDERS
        for name in storage_of(store.path / folder).files()
        if not name.rpartition("/")[2].startswith(".")
    }
    if damage:
        raise _damage_error(store, list(damage.values()))
    if unlisted := sorted(existing - set(store.manifest.files) - set(CARDS)):
        raise VerifyError(
            "the store contains files that are not in the manifest",
            path=store.path,
            found=", ".join(unlisted[:5]),
            hint="If a command was interrupted, run it again. Otherwise remove these files.",
        )
    return f"{len(store.manifest.files):,} files have the recorded digests"


def _damage_error(store: Store, damage: list[StoreError]) -> VerifyError:
    """Return an error that names every damaged file and the command that writes it again."""
    if len(damage) > 1:
        listed = "; ".join(str(error) for error in damage)
        return VerifyError(f"{len(damage):,} files are damaged", path=store.path, found=listed)
    (error,) = damage
    return VerifyError(
        error.reason, path=error.path, found=error.found, expected=error.expected, hint=error.hint
    )


def check_tables(store: Store) -> str:
    """Check the columns and the number of rows of every Parquet file, and the number of rows of each table.

    Raises:
        StoreError: A file has other columns or another number of rows.
        VerifyError: The rows of the files of a table do not add up to its count in the manifest.
    """
    require_tables(store, store.manifest.files)
    rows = dict.fromkeys(store.manifest.counts, 0)
    for name, facts in store.manifest.files.items():
        table = name.split("/")[0]
        if table in rows:
            rows[table] += facts.rows
    if rows != store.manifest.counts:
        raise VerifyError(
            "the tables have other numbers of rows than the manifest records",
            path=store.path,
            found=rows,
            expected=store.manifest.counts,
        )
    return ", ".join(f"{count:,} {table}" for table, count in rows.items())


def check_counts(store: Store) -> str:
    """Check that records = positions + rejected, for each source and for the stage convert, by counting rows.

    Raises:
        VerifyError: The numbers differ, or the ids of the sources or of rejected records are wrong.
    """
    sources = _read(store, "sources", ["source_id", "name", "records", "positions", "rejected"])
    counted = _read(store, "rejected", ["source_id"])["source_id"].value_counts()
    rejected = dict(zip(*(counted.field(i).to_pylist() for i in range(2)), strict=True))
    if sources["source_id"].to_pylist() != list(range(sources.num_rows)):
        raise VerifyError("the ids of the sources are not 0, 1, 2, …", path=store.path / "sources")
    for row in sources.to_pylist():
        part = store.manifest.files.get(f"positions/part-{row['source_id']:06d}.parquet")
        found = (part.rows if part else 0, rejected.get(row["source_id"], 0))
        if found != (row["positions"], row["rejected"]) or row["records"] != sum(found):
            raise VerifyError(
                "the records of a source do not add up",
                path=row["name"],
                found=f"{found[0]:,} positions and {found[1]:,} rejected records",
                expected=f"{row['positions']:,} and {row['rejected']:,}, {row['records']:,} in total",
            )
    records, positions = (sum(sources[name].to_pylist()) for name in ("records", "positions"))
    recounted = {"records": records, "positions": positions, "rejected": records - positions}
    stated = store.manifest.stages.get("convert", {})
    if not recounted.items() <= stated.items() or positions != store.manifest.counts.get("positions", 0):
        raise VerifyError(
            "the totals of the sources differ from those in the manifest", found=recounted, expected=stated
        )
    if unknown := sorted(set(rejected) - set(range(sources.num_rows))):
        raise VerifyError(
            "rejected records belong to a source that does not exist",
            path=store.path / "rejected",
            found=f"source {unknown[0]}",
        )
    return f"{records:,} = {positions:,} + {records - positions:,} in {sources.num_rows:,} sources"


def check_dense_ids(store: Store, table: str, column: str) -> str:
    """Check that the ids in ``column`` are 0, 1, 2, … across the parts of a table, in order.

    Raises:
        VerifyError: They are not.
    """
    expected = 0
    for path in store.files(table):
        with open_parquet(path) as file:
            for batch in file.iter_batches(columns=[column]):
                ids = batch.column(0).to_numpy()
                if not (ids == np.arange(expected, expected + len(ids))).all():
                    raise VerifyError(
                        f"{column}s are not consecutive", path=path, expected=f"from {expected}"
                    )
                expected += len(ids)
    return f"0 to {expected - 1:,}" if expected else "none"


def check_stage(store: Store, stage: str) -> str:
    """Check that a stage was run on the current content of the store and lost no rows.

    Raises:
        StoreError: The content of the store has changed since the stage was run.
        VerifyError: The positions written, rejected and excluded do not add up to those read.
    """
    store.require_stage(stage)
    from_store = stage in ("shuffle", "pickles-original")
    before = store.manifest.counts if from_store else store.manifest.stages["shuffle"]
    lineage = store.manifest.stages[stage]
    left_out = sum(lineage.get("left_out", {}).values())  # only a shuffle can leave out positions
    read, accounted = before["positions"], lineage["positions"] + lineage["rejected"] + left_out
    if read != accounted:
        raise VerifyError(
            f"the output of the {stage} stage does not account for all positions",
            found=f"{accounted:,}",
            expected=f"{read:,}",
        )
    excluded = f" + {left_out:,} excluded by options" if left_out else ""
    return f"{read:,} = {lineage['positions']:,} + {lineage['rejected']:,}{excluded}"


def _read(store: Store, folder: str, columns: list[str]) -> pa.Table:
    files = store.files(folder)
    if not files:
        return pa.table({name: pa.array([], pa.int32()) for name in columns})
    return pa.concat_tables([read_parquet(path, columns) for path in files])
