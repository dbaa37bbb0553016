"""The tables of a store as loadable parts: their files by split, and what a row is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from hexdata.schema import SPLITS, table_schema
from hexdata.store.manifest import Manifest

__all__ = ["ALL_SPLITS", "Table", "tables_of"]

ALL_SPLITS: Final = "all_splits"
"""Name of the only split of a table whose files contain positions or games of all splits."""
_ROWS: Final = {
    "shuffled": "a position, in shuffled order, by split",
    "positions": "a position, in the order of the input",
    "games": "a game, with its split",
    "sources": "an input file",
    "rejected": "a rejected record, with the reason",
}


@dataclass(frozen=True)
class Table:
    """A table of a store.

    Attributes:
        name: Name of the table and of its folder.
        row: What a row is.
        rows: Number of rows.
        files: Glob of the files, relative to the store, by split.
        schema: Columns.
    """

    name: str
    row: str
    rows: int
    files: dict[str, str]
    schema: pa.Schema


def tables_of(manifest: Manifest) -> list[Table]:
    """Return the tables of a store that have files; the shuffled positions are the first, if they exist."""
    tables = []
    for name, row in _ROWS.items():
        listed = manifest.files_in(name)
        if name == "shuffled":
            splits = [split for split in SPLITS if manifest.files_in(f"shuffled/{split}")]
            files = {split: f"shuffled/{split}/*.parquet" for split in splits}
        else:
            files = {ALL_SPLITS: f"{name}/*.parquet"}
        if listed:
            rows = sum(facts.rows for facts in listed.values())
            schema = table_schema(name, manifest.board_size, manifest.targets_of(name))
            tables.append(Table(name, row, rows, files, schema))
    return tables
