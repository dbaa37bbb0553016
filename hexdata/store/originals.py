"""The sources of a store as their files had them: its tables turned back into raw batches.

The inverse of publishing: restores the convention of values, and takes out what was filled in. Knows the
columns and what the files are called, and writes none.
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
from hexdata.remote import AnyPath
from hexdata.schema import games_schema, positions_schema, raw_schema, sources_schema
from hexdata.store import Store
from hexdata.store.parquet import Rows, open_parquet, read_parquet, read_rows
from hexdata.strict_json import parse_metadata, shortened

__all__ = [
    "KEPT_PREFIX",
    "PICKLE_SUFFIX",
    "WINNERS",
    "Original",
    "in_convention",
    "list_originals",
    "pickle_names",
    "with_file_idx",
]

PICKLE_SUFFIX: Final = ".pkl.gz"
_RAW_SUFFIX: Final = re.compile(r"\.trmph(\.gz)?$")

KEPT_PREFIX: Final = "hexdata:"
"""Keys of ours in ``extra`` begin so: what an example says where its columns cannot.

``hexdata:value`` is in the source's convention; ``hexdata:player_to_move``, ``hexdata:position_in_game`` and
``hexdata:total_positions`` stand where the column was filled in; ``hexdata:game_id`` is a legacy id without
a game.
"""

WINNERS: Final = ("BLUE", "RED")
"""What the column ``winner`` holds, by the number that stands for it in raw batches."""

_NUMBERS: Final = (
    "move",
    "value",
    "player_to_move",
    "position_in_game",
    "total_positions",
    "file_idx",
    "line_idx",
)
"""Columns of ``raw_schema`` that ``extra`` may overrule."""


def in_convention(value: npt.NDArray[np.float64], convention: str) -> npt.NDArray[np.float64]:
    """Turn values from the store's convention, 0.0 where blue won, to a source's, or back."""
    return value if convention == "blue-is-0" else 1.0 - value


Check = Callable[[pa.RecordBatch, AnyPath, int], None]
"""Raises where stored positions cannot be used."""


@dataclass(frozen=True)
class Original:
    """One source of a store."""

    source_id: int
    name: str
    bytes: int
    sha256: str
    format: str
    """ "unknown" if the file was rejected as a whole."""
    value_sense: str | None
    records: int
    positions: int
    games: int
    header: dict[str, Any]
    board_size: int | None
    """Of the store; None if it has no position."""
    part: AnyPath
    """Its positions; there is no such file if it has none."""
    game_parts: tuple[tuple[AnyPath, int], ...]
    """The games of the whole store."""

    @property
    def is_raw(self) -> bool:
        """Whether its file holds games, and no examples."""
        return self.format == "trmph"

    @property
    def dialect(self) -> Any:
        """How its examples are spelled; those of raw games as the legacy tool spelled them."""
        return "dicts-player" if self.is_raw else self.header["dialect"]

    def batches(self, check: Check | None = None) -> Iterator[pa.RecordBatch]:
        """Read its positions as ``raw_schema``, in record order, as its file had them.

        But ``record`` counts the positions of the store, ``origin`` is null, and what has the number of
        a line and not of a file, as raw games do, gets the source's id for it: a legacy id is both.

        Args:
            check: called with each batch as it is stored, its file and its first row. Default None.
        """
        if not self.positions:
            return
        assert self.board_size is not None
        rows = Rows(((self.part, self.positions),), 0, self.positions)
        first_game, ids = self._legacy_ids()
        row = 0
        for batch in read_rows(rows, positions_schema(self.board_size)):
            if check is not None:
                check(batch, self.part, row)
            row += batch.num_rows
            yield with_file_idx(self._raw(batch, first_game, ids), self.source_id)

    def _legacy_ids(self) -> tuple[int, pa.Table]:
        """Return the lowest game_id of the source, and the legacy ids of it and the games after it."""
        low, high = np.iinfo(np.int64).max, -1
        with open_parquet(self.part) as file:
            for batch in file.iter_batches(columns=["game_id"]):
                bounds = pc.min_max(batch.column(0)).as_py()
                if bounds["min"] is not None:
                    low, high = min(low, bounds["min"]), max(high, bounds["max"])
        schema = pa.schema([games_schema().field(name) for name in ("file_idx", "line_idx")])
        batches = read_rows(Rows(self.game_parts, low, high + 1), schema)
        return low, pa.Table.from_batches(batches, schema).combine_chunks()

    def _raw(self, stored: pa.RecordBatch, first_game: int, ids: pa.Table) -> pa.RecordBatch:
        assert self.board_size is not None
        schema = raw_schema(self.board_size)
        value = stored.column("value").to_numpy().astype(np.float64)
        legacy = ids.take(pc.subtract(stored.column("game_id"), first_game))
        columns = {name: stored.column(name) for name in schema.names if name in stored.schema.names}
        columns |= {
            "record": stored.column("position_id"),
            "value": pa.array(in_convention(value, self.value_sense or "blue-is-0")),
            "file_idx": legacy["file_idx"].combine_chunks(),
            "line_idx": legacy["line_idx"].combine_chunks(),
            "winner": pc.index_in(stored.column("winner").cast(pa.string()), pa.array(WINNERS)),
            "origin": pa.nulls(stored.num_rows, schema.field("origin").type),
        }
        columns |= _overruled(columns, stored.column("extra"))
        arrays = [columns[field.name].cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def with_file_idx(batch: pa.RecordBatch, source_id: int) -> pa.RecordBatch:
    """Return a raw batch with ``source_id`` as ``file_idx`` where there is a ``line_idx`` only."""
    file_idx, line_idx = batch.column("file_idx"), batch.column("line_idx")
    filled = pc.if_else(line_idx.is_valid(), pc.fill_null(file_idx, source_id), file_idx)
    index = batch.schema.get_field_index("file_idx")
    return batch.set_column(index, batch.schema.field(index), filled)


def _overruled(columns: dict[str, pa.Array], extra: pa.Array) -> dict[str, pa.Array]:
    """Return the columns in which ``extra`` knows better, corrected."""
    named = pc.match_substring(extra, f'"{KEPT_PREFIX}').fill_null(False)
    rows = np.flatnonzero(named.to_numpy(zero_copy_only=False))
    texts = extra.take(pa.array(rows)).dictionary_encode()
    kept = [_kept(text) for text in texts.dictionary.to_pylist()]
    codes = texts.indices.to_numpy()
    result = {}
    for name in _NUMBERS:
        own = np.array([name in values for values in kept], bool)[codes]
        if own.any():
            mask = np.zeros(len(extra), bool)
            mask[rows[own]] = True
            try:
                values = pa.array([kept[code].get(name) for code in codes[own]], columns[name].type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise StoreError(
                    f"extra of a position has a wrong value of {KEPT_PREFIX}{name}",
                    found=shortened(str(error)),
                    expected=str(columns[name].type),
                ) from error
            result[name] = pc.replace_with_mask(columns[name], pa.array(mask), values)
    return result


def _kept(text: str) -> dict[str, Any]:
    """Return what keys of ours in an ``extra`` say, by column of ``raw_schema``."""
    kept = {
        key.removeprefix(KEPT_PREFIX): value
        for key, value in parse_metadata(text, None, "extra of a position").items()
        if key.startswith(KEPT_PREFIX)
    }
    game_id = kept.get("game_id", [None, None])
    if not (isinstance(game_id, list) and len(game_id) == 2):
        raise StoreError(
            f"extra of a position has a wrong value of {KEPT_PREFIX}game_id",
            found=shortened(repr(game_id)),
            expected="a list of 2 numbers",
        )
    file_idx, line_idx = game_id
    return kept | ({"file_idx": file_idx, "line_idx": line_idx} if "game_id" in kept else {})


def list_originals(store: Store) -> list[Original]:
    """Return the sources of a store, in the order of their ids."""
    names = ["source_id", "name", "bytes", "sha256", "format", "value_sense"]
    names += ["records", "positions", "games", "header"]
    schema = pa.schema([sources_schema().field(name) for name in names])
    parts = tuple(
        zip(store.files("games"), (f.rows for f in store.manifest.files_in("games").values()), strict=True)
    )
    return [
        Original(
            **row | {"header": _header_of(path, row)},
            board_size=store.manifest.board_size,
            part=(store.path / "positions" / f"part-{row['source_id']:06d}.parquet").resolve(),
            game_parts=parts,
        )
        for path in store.files("sources")
        for row in read_parquet(path, names).cast(schema).to_pylist()
    ]


def _header_of(path: AnyPath, row: dict[str, Any]) -> dict[str, Any]:
    """Return the header of a source, with the dialect that a legacy file has."""
    text = row["header"]
    try:
        header = json.loads(text or "{}")
        fine = isinstance(header, dict) and (row["format"] == "trmph" or "dialect" in header)
    except (ValueError, RecursionError):
        fine = False
    if not fine:
        raise StoreError(
            "the header of a source is not one that hexdata writes",
            path=path,
            record=f"source {row['source_id']}",
            found=repr(text)[:80],
            expected="a JSON object with the dialect of the file",
            hint="Make the store again from its sources.",
        )
    return cast("dict[str, Any]", header)


def pickle_names(originals: Sequence[Original]) -> list[str]:
    """Return what the pickle of each source is called: its own name, as the legacy tool ends such names.

    Names that would be one (``a.pkl`` and ``a.pkl.gz``, ``a.trmph`` and ``a_processed.pkl.gz``) get their
    sources' numbers.

    Raises:
        StoreError: a name would lead out of its folder.
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
        raise StoreError("a source's name leads out of the store", found=source.name)
    name = source.name.replace("\\", "_")  # other systems take it for a slash
    if source.is_raw:
        return _RAW_SUFFIX.sub("", name) + "_processed" + PICKLE_SUFFIX
    return name.removesuffix(".gz").removesuffix(".pkl") + PICKLE_SUFFIX
