"""The source files of a store, restored from its tables as raw batches.

This reverses the conversion: it restores each source's value convention and removes the values that were
filled in. It computes rows and file names but writes no files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.errors import StoreError
from hexdata.schema import games_schema, is_legacy_format, positions_schema, raw_schema, sources_schema
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.integrity import VERIFY_HINT
from hexdata.store.parquet import ParquetRows, open_parquet, read_parquet, read_rows
from hexdata.strict_json import Count, check_value, parse_metadata, shortened

__all__ = [
    "KEPT_PREFIX",
    "PICKLE_SUFFIX",
    "WINNERS",
    "Original",
    "convert_values",
    "list_originals",
    "pickle_names",
    "with_file_idx",
]

PICKLE_SUFFIX: Final = ".pkl.gz"
_RAW_SUFFIX: Final = re.compile(r"\.(trmph|hexworld|h?sgf|npz|pkl|pickle)(\.gz)?$")

KEPT_PREFIX: Final = "hexdata:"
"""Prefix of the keys in ``metadata`` that hold original values which the columns cannot represent.

``hexdata:value`` is the value in the source's convention. ``hexdata:player_to_move``,
``hexdata:position_in_game`` and ``hexdata:total_positions`` are the original values of columns that were
filled in. ``hexdata:game_id`` is a legacy id without a game.
"""

WINNERS: Final = ("BLUE", "RED")
"""The text of the column ``winner`` for each winner number of a raw batch."""

_NUMBERS: Final = (
    "move",
    "value",
    "player_to_move",
    "position_in_game",
    "total_positions",
    "file_idx",
    "line_idx",
)
"""Columns of ``raw_schema`` whose values ``metadata`` may override."""


_KEPT: Final = f'"{KEPT_PREFIX}(?:{"|".join((*_NUMBERS, "game_id"))})":'
"""Regular expression of the keys in a text of ``metadata`` under which these values are."""


def convert_values(value: npt.NDArray[np.float64], convention: str) -> npt.NDArray[np.float64]:
    """Convert values between the store's convention (0.0 if blue won) and a source's, in either direction."""
    return value if convention == "blue-is-0" else 1.0 - value


BatchCheck = Callable[[pa.RecordBatch, AnyPath, int], None]
"""Called with a stored batch, its file and its first row. Raises if the positions cannot be used."""


@dataclass(frozen=True)
class Continued:
    """The source that a grown file continues."""

    source_id: Count
    bytes: Count
    """Offset in the file at which the lines of the new source begin."""


@dataclass(frozen=True)
class Original:
    """One source file of a store."""

    source_id: int
    name: str
    bytes: int
    sha256: str
    format: str
    """Source format; "unknown" if the whole file was rejected."""
    value_sense: str | None
    records: int
    positions: int
    games: int
    header: dict[str, Any]
    board_size: int | None
    """Cells along an edge; None if the store has no positions."""
    part: AnyPath
    """File with the source's positions. It does not exist if the source has none."""
    game_parts: tuple[tuple[AnyPath, int], ...]
    """Files with the games of the whole store, each with its number of rows."""

    @property
    def is_raw(self) -> bool:
        """True if the source file contains no legacy examples, so it is written back as dict examples."""
        return self.format != "unknown" and not is_legacy_format(self.format)

    @property
    def continues(self) -> Continued | None:
        """The source that this one continues; None if it is the beginning of its file."""
        if not self.is_raw or "continues" not in self.header:
            return None
        what = f"the header of source {self.source_id}"
        return check_value(Continued, self.header["continues"], what=what)

    @property
    def dialect(self) -> Any:
        """The dialect of the legacy examples; for raw games, the dialect that the legacy tool wrote."""
        if self.is_raw:
            return "dicts-player"
        if "dialect" not in self.header:
            raise StoreError(
                "the header of a source has no dialect",
                record=f"source {self.source_id}",
                expected="the key dialect",
                hint="Convert the sources into a new store.",
            )
        return self.header["dialect"]

    def batches(self, check: BatchCheck | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the positions of the source as ``raw_schema``, in record order with their original values.

        There are three differences: ``record`` is the position id in the store; ``origin``, ``end_reason``
        and ``swap`` are null; and rows with a ``line_idx`` but no ``file_idx`` (raw games) get the source's
        id as ``file_idx``, since a legacy id has both.

        Args:
            check: Called with each stored batch, its file and its first row; None for no check (default).

        Raises:
            StoreError: A file is missing or damaged, or ``metadata`` holds an invalid value.
        """
        if not self.positions:
            return
        assert self.board_size is not None
        rows = ParquetRows(((self.part, self.positions),), 0, self.positions)
        first_game, ids = self._legacy_ids()
        row = 0
        for batch in read_rows(rows, positions_schema(self.board_size)):
            if check is not None:
                check(batch, self.part, row)
            row += batch.num_rows
            yield with_file_idx(self._raw(batch, first_game, ids), self.source_id)

    def _legacy_ids(self) -> tuple[int, pa.Table]:
        """Return the source's lowest game_id, and the legacy ids of all games from it to its highest."""
        low, high = np.iinfo(np.int64).max, -1
        with open_parquet(self.part) as file:
            for batch in file.iter_batches(columns=["game_id"]):
                bounds = pc.min_max(batch.column(0)).as_py()
                if bounds["min"] is not None:
                    low, high = min(low, bounds["min"]), max(high, bounds["max"])
        schema = pa.schema([games_schema().field(name) for name in ("file_idx", "line_idx")])
        games = sum(rows for _, rows in self.game_parts)
        if low < 0 or high >= games:
            raise StoreError(
                "a position is of a game that the store does not contain",
                path=self.part,
                found=f"game {low if low < 0 else high}",
                expected=f"0 to {games - 1}",
                hint=VERIFY_HINT,
            )
        batches = read_rows(ParquetRows(self.game_parts, low, high + 1), schema)
        return low, pa.Table.from_batches(batches, schema).combine_chunks()

    def _raw(self, stored: pa.RecordBatch, first_game: int, ids: pa.Table) -> pa.RecordBatch:
        assert self.board_size is not None
        schema = raw_schema(self.board_size)
        value = stored.column("value").to_numpy().astype(np.float64)
        legacy = ids.take(pc.subtract(stored.column("game_id"), first_game))
        columns = {name: stored.column(name) for name in schema.names if name in stored.schema.names}
        columns |= {
            "record": stored.column("position_id"),
            "value": pa.array(convert_values(value, self.value_sense or "blue-is-0")),
            "file_idx": legacy["file_idx"].combine_chunks(),
            "line_idx": legacy["line_idx"].combine_chunks(),
            "winner": pc.index_in(stored.column("winner").cast(pa.string()), pa.array(WINNERS)),
            **{
                name: pa.nulls(stored.num_rows, schema.field(name).type)
                for name in ("origin", "end_reason", "swap")
            },
        }
        columns |= _overridden(columns, stored.column("metadata"))
        arrays = [columns[field.name].cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def with_file_idx(batch: pa.RecordBatch, source_id: int) -> pa.RecordBatch:
    """Return a raw batch with ``source_id`` as ``file_idx`` in the rows that have only a ``line_idx``."""
    file_idx, line_idx = batch.column("file_idx"), batch.column("line_idx")
    filled = pc.if_else(line_idx.is_valid(), pc.fill_null(file_idx, source_id), file_idx)
    index = batch.schema.get_field_index("file_idx")
    return batch.set_column(index, batch.schema.field(index), filled)


def _overridden(columns: dict[str, pa.Array], metadata: pa.Array) -> dict[str, pa.Array]:
    """Return the columns that ``metadata`` overrides, with the original values restored."""
    named = pc.match_substring_regex(metadata, _KEPT).fill_null(False)
    rows = np.flatnonzero(named.to_numpy(zero_copy_only=False))
    texts = metadata.take(pa.array(rows)).dictionary_encode()
    kept = [_original_values(text) for text in texts.dictionary.to_pylist()]
    codes = texts.indices.to_numpy()
    result = {}
    for name in _NUMBERS:
        overridden = np.array([name in values for values in kept], bool)[codes]
        if overridden.any():
            mask = np.zeros(len(metadata), bool)
            mask[rows[overridden]] = True
            try:
                values = pa.array([kept[code].get(name) for code in codes[overridden]], columns[name].type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise StoreError(
                    f"metadata of a position has an invalid value for {KEPT_PREFIX}{name}",
                    found=shortened(str(error)),
                    expected=str(columns[name].type),
                ) from error
            result[name] = pc.replace_with_mask(columns[name], pa.array(mask), values)
    return result


def _original_values(text: str) -> dict[str, Any]:
    """Return the original values stored in a ``metadata`` text, by column of ``raw_schema``."""
    kept = {
        key.removeprefix(KEPT_PREFIX): value
        for key, value in parse_metadata(text, None, "metadata of a position").items()
        if key.startswith(KEPT_PREFIX)
    }
    game_id = kept.get("game_id", [None, None])
    if not (isinstance(game_id, list) and len(game_id) == 2):
        raise StoreError(
            f"metadata of a position has an invalid value for {KEPT_PREFIX}game_id",
            found=shortened(repr(game_id)),
            expected="a list of 2 numbers",
        )
    file_idx, line_idx = game_id
    return kept | ({"file_idx": file_idx, "line_idx": line_idx} if "game_id" in kept else {})


def list_originals(store: Store) -> list[Original]:
    """Return the sources of a store in the order of their ids."""
    names = ["source_id", "name", "bytes", "sha256", "format", "value_sense"]
    names += ["records", "positions", "games", "header"]
    schema = pa.schema([sources_schema().field(name) for name in names])
    parts = tuple(
        zip(store.files("games"), (f.rows for f in store.manifest.files_in("games").values()), strict=True)
    )
    return [
        Original(
            **row | {"header": _parse_header(path, row)},
            board_size=store.manifest.board_size,
            part=(store.path / "positions" / f"part-{row['source_id']:06d}.parquet").resolve(),
            game_parts=parts,
        )
        for path in store.files("sources")
        for row in read_parquet(path, names).cast(schema).to_pylist()
    ]


def _parse_header(path: AnyPath, row: dict[str, Any]) -> dict[str, Any]:
    """Return the parsed header of a source."""
    text = row["header"]
    try:
        header = json.loads(text or "{}")
        valid = isinstance(header, dict)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise StoreError(
            "the header of a source is not valid JSON",
            path=path,
            record=f"source {row['source_id']}",
            found=repr(text)[:80],
            expected="a JSON object",
            hint="Convert the sources into a new store.",
        )
    return cast("dict[str, Any]", header)


def pickle_names(originals: Sequence[Original]) -> list[str]:
    """Return the pickle file name of each source: its own name with the suffix that the legacy tool uses.

    If several sources would get the same name (``a.pkl`` and ``a.pkl.gz``, or ``a.trmph`` and
    ``a_processed.pkl.gz``), their source ids are added.

    Raises:
        StoreError: A source name is an absolute path or contains "..".
    """
    names = [_pickle_name(source) for source in originals]
    taken = Counter(names)
    return [
        name
        if taken[name] == 1
        else f"{name.removesuffix(PICKLE_SUFFIX)}.source-{source.source_id}{PICKLE_SUFFIX}"
        for source, name in zip(originals, names, strict=True)
    ]


def _pickle_name(source: Original) -> str:
    path = PurePosixPath(source.name)
    if path.is_absolute() or ".." in path.parts:
        raise StoreError("the name of a source is an absolute path or contains '..'", found=source.name)
    name = source.name.replace("\\", "_")  # a backslash is a path separator on Windows
    if source.is_raw:
        return _RAW_SUFFIX.sub("", name) + "_processed" + PICKLE_SUFFIX
    return name.removesuffix(".gz").removesuffix(".pkl") + PICKLE_SUFFIX
