"""Verification of the values in the tables positions and games. Read-only."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.formats.legacy.limits import DEFAULT_LIMITS
from hexdata.formats.source import BATCH_ROWS
from hexdata.schema import END_REASONS, SPLITS, SWAPS, positions_schema
from hexdata.shards.block_check import BadRow
from hexdata.shards.position_check import find_bad_position
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.columns import select_sql
from hexdata.store.parquet import open_parquet, read_batches, text_bytes
from hexdata.store.session import duckdb_session, quote, read_parquet_sql
from hexdata.verify.games import find_wrong_duplicate
from hexdata.verify.options import VerifyOptions

__all__ = ["check_game_values", "check_position_values"]

_ADDED_METADATA: Final = 1024
"""Bytes that ``convert`` may add to the metadata of a record: the original values of columns it fills in."""
_HINT: Final = "Convert the sources into a new store."


def check_position_values(store: Store) -> str:
    """Check that every position has a valid board, move, policy, value and labels.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: A value is invalid; the error names the first one.
    """
    size = store.manifest.board_size
    if size is None:
        return "none"
    schema = positions_schema(size, store.manifest.targets)
    count = 0
    for path in store.files("positions"):
        row = texts = 0
        with open_parquet(path, schema) as file:
            for batch in read_batches(file, schema):
                bad = find_bad_position(batch) or _long_metadata(batch)
                if bad is not None:
                    raise _invalid_position(path, f"row {row + bad.row}", bad.found, bad.expected)
                row += batch.num_rows
                texts += int(text_bytes(batch.column("metadata")).sum())
                if texts > (most := _mean_metadata(row)):
                    found = f"{texts:,} bytes of metadata"
                    raise _invalid_position(path, f"rows 0 to {row - 1}", found, f"at most {most:,}")
        count += row
    return f"all values of {count:,} positions are valid"


def _long_metadata(rows: pa.RecordBatch) -> BadRow | None:
    """Return the first row whose metadata is longer than ``convert`` accepts; None if there is none."""
    sizes, most = text_bytes(rows.column("metadata")), DEFAULT_LIMITS.metadata_bytes + _ADDED_METADATA
    if not (sizes > most).any():
        return None
    row = int((sizes > most).argmax())
    return BadRow(row, f"metadata of {sizes[row]:,} bytes", f"at most {most:,}")


def _mean_metadata(rows: int) -> int:
    """Return the maximum bytes of metadata in the first rows of a source."""
    of_row = DEFAULT_LIMITS.metadata_mean + _ADDED_METADATA
    return DEFAULT_LIMITS.metadata_bytes + of_row * max(rows, BATCH_ROWS)


def _invalid_position(path: AnyPath, record: str, found: object, expected: object) -> VerifyError:
    return VerifyError(
        "the table contains an invalid value",
        path=path,
        record=record,
        found=found,
        expected=expected,
        hint=_HINT,
    )


def check_game_values(store: Store, options: VerifyOptions) -> str:
    """Check that every game has a valid split, winner, end, source, number of positions, moves and duplicate.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: A value is invalid; the error names one.
    """
    files, size = store.files("games"), store.manifest.board_size
    if not files or size is None:
        return "none"
    games = f"({select_sql('games', store.manifest, lambda _: read_parquet_sql(files))})"
    splits, reasons, swaps = (", ".join(map(quote, names)) for names in (SPLITS, END_REASONS, SWAPS))
    rules = {
        "split": (f"split NOT IN ({splits})", " or ".join(SPLITS)),
        "winner": ("winner NOT IN ('BLUE', 'RED')", "BLUE, RED or null"),
        "end_reason": (f"end_reason NOT IN ({reasons})", f"{', '.join(END_REASONS)} or null"),
        "swap": (f"swap NOT IN ({swaps})", f"{' or '.join(SWAPS)}, or null"),
        "first_player": ("first_player > 1", "0 for blue or 1 for red"),
        "positions": ("positions < 1", "1 or more"),
        "source_id": (
            f"source_id NOT BETWEEN 0 AND {store.manifest.counts.get('sources', 0) - 1}",
            "one of the sources",
        ),
        "provenance": ("provenance NOT IN ('metadata', 'recovered')", "metadata or recovered"),
        "flags": ("len(flags) <> list_count(flags)", "names of flags or null"),
        "moves": (
            f"""list_max(moves) >= {size * size} OR len(moves) <> list_count(moves)
                OR (len(moves) <> len(list_distinct(moves))
                AND NOT coalesce(list_contains(flags, 'repeated-move'), false))""",
            f"cells below {size * size}, each once unless the game has the flag repeated-move",
        ),
    }
    with duckdb_session(**options.session(store.path)._asdict(), store=store.path) as con:
        violated = ", ".join(f"bool_or({rule})" for rule, _ in rules.values())
        any_violated = con.sql(f"SELECT {violated} FROM {games}").fetchall()[0]
        for (name, (rule, expected)), is_violated in zip(rules.items(), any_violated, strict=True):
            if is_violated:
                query = f"SELECT game_id, {name} FROM {games} WHERE {rule} LIMIT 1"
                raise _invalid_game(store, con.sql(query).fetchall()[0], name, expected)
        wrong = find_wrong_duplicate(store, con, options)
    if wrong is not None:
        expected = "the first game of the same game_hash, or null if it is this one"
        raise _invalid_game(store, wrong, "duplicate_of", expected)
    return f"all values of {store.manifest.counts['games']:,} games are valid"


def _invalid_game(store: Store, row: tuple[Any, ...], name: str, expected: str) -> VerifyError:
    return VerifyError(
        "the table contains an invalid value",
        path=store.path / "games",
        record=f"game {row[0]}",
        found=f"{name} {'null' if row[1] is None else row[1]}",
        expected=expected,
        hint=_HINT,
    )
