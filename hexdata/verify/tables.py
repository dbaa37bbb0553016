"""Checks of the files, tables and stages of a store. Read-only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import BLUE, game_hashes
from hexdata.cards import CARDS
from hexdata.errors import HexdataError, StoreError, VerifyError
from hexdata.schema import END_REASONS, SPLITS, SWAPS, games_schema, positions_schema, table_schema
from hexdata.shards.block_check import find_bad_position
from hexdata.storage import AnyPath, storage_of
from hexdata.store import STAGES, Store
from hexdata.store.integrity import check_tables as require_tables
from hexdata.store.integrity import rebuild_hint
from hexdata.store.parquet import open_parquet, read_batches
from hexdata.store.session import DuckDBPyConnection, QueryLimits, duckdb_session, quote, read_parquet_sql

_FOLDERS: Final = dict.fromkeys(folder.partition("/")[0] for folders in STAGES.values() for folder in folders)
"""The folders of a store that contain only files of the manifest."""
_HASHED: Final = 8_192
"""Games whose moves are hashed at a time."""
_RANGE: Final = 400_000
"""Games whose positions are grouped at a time. Their plies take some 150 bytes a game."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: Name of the check, such as "position ids".
        ok: The check passed.
        detail: The figures found, or the message of the error.
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class VerifyOptions(QueryLimits):
    """Limits of ``verify_store``.

    Attributes:
        memory: Memory limit in bytes. Default 1 GB. Data that does not fit is written to the system's
            temporary folder.
        threads: Number of DuckDB threads, and of files hashed at a time. Default None: one per core, as far
            as ``memory`` allows.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small for the threads, or for one thread.
    """

    BASE: ClassVar[int] = 270 << 20
    THREAD: ClassVar[int] = 40 << 20
    BUFFERS: ClassVar[int] = 64 << 20


def require_none(errors: Sequence[HexdataError], fault: str, path: AnyPath) -> None:
    """Raise the only error, or one that names all: ``fault`` says what they have in common.

    Raises:
        HexdataError: There are errors.
    """
    if len(errors) == 1:
        raise errors[0] from None
    if errors:
        found = "; ".join(map(str, errors))
        raise VerifyError(f"{len(errors):,} {fault}", path=path, found=found)


def check_files(store: Store, damage: Mapping[str, StoreError]) -> str:
    """Check that no file is damaged and that the store has no other files; return the detail of the check.

    Args:
        store: The store to check.
        damage: Error of each damaged file of the manifest, from ``find_damage``.

    Raises:
        VerifyError: Several files are damaged, or files are not in the manifest.
        StoreError: One file is damaged; its error.
    """
    require_none([*damage.values()], "files are damaged", store.path)
    existing = {f"{folder}/{name}" for folder in _FOLDERS for name in storage_of(store.path / folder).files()}
    # Hidden files are temporary files of killed stages, which the next stage removes.
    visible = {name for name in existing if not name.rpartition("/")[2].startswith(".")}
    if unlisted := sorted(visible - store.manifest.files.keys() - {*CARDS}):
        reason, found = "the store contains files that are not in the manifest", ", ".join(unlisted[:5])
        hint = "If a command was interrupted, run it again. Otherwise remove these files."
        raise VerifyError(reason, path=store.path, found=found, hint=hint)
    return f"{len(store.manifest.files):,} files have the recorded digests"


def check_tables(store: Store) -> str:
    """Check the columns and the number of rows of every Parquet file, and the number of rows of each table.

    Raises:
        StoreError: A file has other columns or another number of rows.
        VerifyError: The rows of the files of a table do not add up to its count in the manifest.
    """
    manifest = store.manifest
    require_tables(store, manifest.files)
    rows = {
        table: sum(facts.rows for facts in manifest.files_in(table).values()) for table in manifest.counts
    }
    if rows != manifest.counts:
        reason = "the tables have other numbers of rows than the manifest records"
        raise VerifyError(reason, path=store.path, found=rows, expected=manifest.counts)
    return ", ".join(f"{count:,} {table}" for table, count in rows.items())


def find_unreadable(store: Store) -> dict[str, StoreError]:
    """Decode every Parquet file; return the error of each with a broken page, by its name."""
    unreadable = {}
    for name in store.manifest.files:
        if name.endswith(".parquet"):
            try:
                with open_parquet(store.path / name) as file:
                    for _ in file.iter_batches():
                        pass
            except StoreError as error:
                error.hint = rebuild_hint(store, name)
                unreadable[name] = error
    return unreadable


# --- rows that must not exist ---------------------------------------------------------------------------

RULED: Final = ("in = out + rejected", "source values", "position ids", "game ids", "games", "game values")
"""The checks of the rules in ``rules.sql``."""
_RULE: Final = re.compile(r"^-- ([^|\n]+) \| (\w+) \| (\w+) \| (.+)\n((?s:.+?);)$", re.MULTILINE)
"""Check, table, kind of the record, what is expected, and the query."""


def find_broken_rules(store: Store, limits: dict[str, Any]) -> dict[str, list[HexdataError]]:
    """Return the checks of ``rules.sql`` that fail, each with an error of the first row that breaks a rule.

    Args:
        store: The store to check.
        limits: Memory and threads of the DuckDB session.

    Raises:
        StoreError: A table cannot be read.
    """
    counts, convert = store.manifest.counts, store.manifest.stages.get("convert", {})
    names = {"splits": SPLITS, "end_reasons": END_REASONS, "swaps": SWAPS}
    values: dict[str, Any] = {name: ", ".join(map(quote, each)) for name, each in names.items()}
    # -1 differs from any total, if the manifest has no such stage. The counts of rejected records are those
    # that the stage states.
    values |= counts | {name: convert.get(name, -1) for name in ("records", "rejected")}
    values |= {
        "converted": convert.get("positions", -1),
        "cells": (store.manifest.board_size or 1) ** 2,
        "test": convert.get("test", 0.0),
        "held_out": convert.get("test", 0.0) + convert.get("val", 0.0),
    }
    text = (resources.files("hexdata.verify") / "rules.sql").read_text(encoding="utf-8")
    broken = defaultdict[str, list[HexdataError]](list)
    with duckdb_session(**limits, store=store.path) as con:
        _create_tables(store, con)
        # The statistics of a file may be as wrong as its values, and DuckDB would not look at these.
        con.execute("SET disabled_optimizers = 'statistics_propagation'")
        for check, table, kind, expected, query in _RULE.findall(text):
            # One range of games after another, where the query has a range.
            for first in range(0, counts["games"], _RANGE) if "$first" in query else [0]:
                values |= {"first": first, "last": first + _RANGE - 1}
                bad = Template(query.rstrip(";")).substitute(values)
                for number, found in con.sql(f"SELECT * FROM ({bad}) ORDER BY ALL LIMIT 1").fetchall():
                    record, expects = f"{kind} {number}", Template(expected).substitute(values)
                    broken[check].append(_invalid(store.path / table, record, found, expects))
    return broken


def _invalid(path: AnyPath, record: str, found: object, expected: object) -> VerifyError:
    reason, hint = "the table contains an invalid value", "Convert the sources into a new store."
    return VerifyError(reason, path=path, record=record, found=found, expected=expected, hint=hint)


def _create_tables(store: Store, con: DuckDBPyConnection) -> None:
    """Create the tables that the rules read: those of the store, with the location of each row, and files."""
    rows = list[dict[str, Any]]()
    for table in STAGES["convert"]:
        files, first_row = store.manifest.files_in(table), 0
        for path, facts in files.items():
            # Of part-000012.parquet, and of part-000012-1.parquet, which is part 12 with more columns.
            part = int(re.split("[-.]", path)[1])
            place = {"folder": table, "file": path.rpartition("/")[2], "part": part}
            rows.append({**place, "first_row": first_row, "rows": facts.rows})
            first_row += facts.rows
        if files:
            found = read_parquet_sql(store.files(table), row_location=True)
            # Without the folder, which is written differently for an object store.
            file = f"'{table}' AS folder, parse_filename(filename, false, 'both_slash') AS file"
            con.execute(f"CREATE VIEW {table} AS SELECT * EXCLUDE filename, {file} FROM {found}")
        else:
            schema = table_schema(table, store.manifest.board_size, store.manifest.targets)
            more = [("folder", pa.string()), ("file", pa.string()), ("file_row_number", pa.int64())]
            con.register(table, pa.schema([*schema, *pa.schema(more)]).empty_table())
    texts, numbers = dict.fromkeys(("folder", "file"), pa.string()), ("part", "first_row", "rows")
    schema = pa.schema(texts | dict.fromkeys(numbers, pa.int64()))  # also if the manifest has no files
    con.register("files", pa.Table.from_pylist(rows, schema))


def check_game_hashes(store: Store) -> str:
    """Check that the hash of each game with moves is that of these moves; return the detail of the check.

    Raises:
        VerifyError: A hash differs; the error names the first such game.
    """
    size, count = store.manifest.board_size or 1, 0
    for path in store.files("games"):
        with open_parquet(path, games_schema()) as file:
            # The moves of a batch are copied several times, as 64-bit numbers.
            columns = ["game_id", "first_player", "moves", "game_hash"]
            for batch in file.iter_batches(_HASHED, columns=columns):
                games = batch.filter(pc.is_valid(batch["moves"]))
                moves, lengths = games["moves"].flatten(), pc.list_value_length(games["moves"])
                first, hashes = games["first_player"].fill_null(BLUE), games["game_hash"].to_pylist()
                made = game_hashes(moves.to_numpy(), lengths.to_numpy(), size, first.to_numpy())
                for number, one, other in zip(games["game_id"].to_pylist(), made, hashes, strict=True):
                    if one != other:
                        raise _invalid(path, f"game {number}", f"game_hash {other.hex()}", one.hex())
                count += len(games)
    return f"the hashes of {count:,} games are those of their moves"


def check_position_values(store: Store) -> str:
    """Check that every position has a valid board, move, policy, value and labels.

    Raises:
        VerifyError: A value is invalid; the error names the first one.
    """
    size = store.manifest.board_size
    schema = positions_schema(size or 1, store.manifest.targets)
    for path in store.files("positions") if size is not None else ():
        row = 0
        with open_parquet(path, schema) as file:
            for batch in read_batches(file, schema):
                if (bad := find_bad_position(batch)) is not None:
                    raise _invalid(path, f"row {row + bad.row}", bad.found, bad.expected)
                row += batch.num_rows
    return f"all values of {store.manifest.counts['positions']:,} positions are valid"
