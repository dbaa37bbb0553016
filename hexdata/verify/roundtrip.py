"""Verification of the round trip: writes each source back from the store and compares it with the original.

The store and the inputs are only read. The readers of the formats decode both files. The results are compared
batch by batch. Differences that the readers do not show, such as pickle opcodes, are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, zip_longest
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import MAX_SIZE
from hexdata.errors import BudgetError, HexdataError, InputError, VerifyError
from hexdata.formats import BATCH_ROWS, FilePart, SizeSelectingReader, SourceReader, open_source
from hexdata.formats.legacy import write_legacy
from hexdata.formats.legacy.dialect import DIALECT_KEY
from hexdata.games.find import column, with_columns
from hexdata.policy import SparsePolicies
from hexdata.progress import SILENT, Progress
from hexdata.schema import POLICY_TYPE
from hexdata.storage import AnyPath, add_path_to_disk_full, as_path, prefix_of, storage_of
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full, translate_temporary_disk_full
from hexdata.store.files import digest_beginning, digest_file
from hexdata.store.originals import Original, list_originals, pickle_names, with_file_idx
from hexdata.store.parquet import read_parquet, regroup
from hexdata.temporary import temporary_folder
from hexdata.text import count_of

__all__ = ["RoundTrip", "check_round_trip"]

_FAST: Final = 1
"""Compression level of gzip: low, because the file is read once and removed."""
_LONGEST: Final = 200
"""Maximum number of characters of a value in a message."""
_EXPORT: Final = "pickles-original"
"""The stage that exports every source as its original file."""


@dataclass(frozen=True)
class RoundTrip:
    """The result of the round trip of one source."""

    name: str
    """Name of the source."""
    ok: bool
    """False if the source differs, cannot be written back, or is not among the inputs."""
    detail: str
    """The number of examples compared, or the difference."""
    checked: bool = True
    """False if the file is not among the inputs, or was rejected as a whole."""


def check_round_trip(
    store: str | AnyPath, inputs: str | AnyPath | Sequence[str | AnyPath], progress: Progress = SILENT
) -> list[RoundTrip]:
    """Write each source of a store back and compare it with its original file.

    Every accepted example is compared field by field, as are the header and the spelling of the fields. The
    records that the reader rejects must be those that the store lists as rejected. Of a text, the numbers of
    comments and of the bytes between games must be those in the store. Raw games are compared as
    the positions that their reader yields. If the store has pickles in the original order, they are compared
    too.

    Args:
        store: Folder of the store, or its address in an object store.
        inputs: One path or address, or a sequence of them. Each is a file, or a folder, which is searched
            with its subfolders. Files are matched by digest; their names do not matter.
        progress: Receives progress reports. Default: ignores them.

    Returns:
        One result per source, in the order of their ids.

    Raises:
        StoreError: There is no store, or the disk or an object store fails.
        InputError: An input is missing, or no source of the store is among the inputs.
        BudgetError: The disk of the temporary folder is full.
    """
    target = Store.open(store)
    with translate_disk_full(target.path), translate_temporary_disk_full():
        originals = list_originals(target)
        several = inputs if isinstance(inputs, Sequence) and not isinstance(inputs, str) else [inputs]
        locations = [as_path(path) for path in several]
        paths = _find(originals, locations)
        if originals and not paths:
            raise InputError(
                "none of the store's sources is among the inputs",
                path=locations[0] if locations else None,
                expected=", ".join(source.name for source in originals[:3]),
                hint="Give the original files, or folders that contain them. They must be unchanged.",
            )
        found = [source for source in originals if source.sha256 in paths]
        progress.begin("round trip", sum(source.positions for source in found), "positions")
        exported = _exported(target, originals)
        return [
            _check(target, source, paths.get(source.sha256), exported.get(source.source_id), progress)
            for source in originals
        ]


def _exported(store: Store, originals: Sequence[Original]) -> dict[int, AnyPath]:
    """Return the exported pickles by source id; an empty dict if the export is older than the tables."""
    if store.manifest.stages.get(_EXPORT, {}).get("of") != store.input_digest(_EXPORT):
        return {}
    sources = [source for source in originals if source.format != "unknown"]
    return {
        source.source_id: path
        for source, name in zip(sources, pickle_names(sources), strict=True)
        if storage_of(path := store.path / "pickles" / "original" / name).exists()
    }


def _find(originals: Sequence[Original], inputs: Sequence[AnyPath]) -> dict[str, AnyPath]:
    """Return the file of each source that is among the inputs, by digest; hash only files of a known size."""
    sizes = {source.bytes for source in originals}
    digests = {source.sha256 for source in originals}
    found: dict[str, AnyPath] = {}
    for location in inputs:
        if not storage_of(location).exists():
            raise InputError("no such file or folder", path=location, hint="Check the path.")
        for name, size in storage_of(location).files().items():
            if size in sizes:
                path = location / name if name else location
                digest = digest_file(path)[1]
                if digest in digests:
                    found.setdefault(digest, path)
    by_id = {source.source_id: source for source in originals}
    for source in reversed(originals):  # a grown file contains the sources that it continues
        base = by_id.get(source.continues.source_id) if source.continues else None
        grown = found.get(source.sha256)
        if base and grown and digest_beginning(grown, base.bytes) == base.sha256:
            found.setdefault(base.sha256, grown)
    return found


def _check(
    store: Store, source: Original, path: AnyPath | None, exported: AnyPath | None, progress: Progress
) -> RoundTrip:
    if path is None:
        return RoundTrip(source.name, False, "the file is not among the inputs", checked=False)
    if source.format == "unknown":
        return RoundTrip(source.name, True, "rejected as a whole, nothing to compare", checked=False)
    if source.is_raw and not source.records:
        # An empty file has nothing to compare; the file found may be another empty one.
        return RoundTrip(source.name, True, "contains no games, like the original")
    try:
        with temporary_folder("written") as scratch:
            written = scratch / "written.pkl.gz"
            with translate_temporary_disk_full(), add_path_to_disk_full(written):
                write_legacy(
                    written,
                    source.batches(),
                    board_size=source.board_size or 0,
                    dialect=source.dialect,
                    header={} if source.is_raw else source.header,
                    all_metadata=source.is_raw,
                    level=_FAST,
                )
            with _open_original(path, source) as original, open_source(written) as returned:
                _compare(store, source, original, returned, progress)
        if exported is not None:
            _compare_exported(store, source, path, exported)
    except BudgetError:
        raise  # a full disk does not concern the source
    except HexdataError as error:
        return RoundTrip(source.name, False, error.detail())
    also = "" if exported is None else ", also in the exported pickle"
    if rejected := source.records - source.positions:
        also += f"; {count_of(rejected, 'record')} rejected"
    if between := source.header.get("counts", {}).get("bytes_between_games"):
        also += f"; {between:,} bytes are comments, blank lines or text between games"
    return RoundTrip(source.name, True, f"{source.positions:,} examples equal the original{also}")


def _open_original(path: AnyPath, source: Original) -> SourceReader:
    """Open the file of a source; of a file that has grown, only the lines of this source."""
    part = None
    if source.continues is not None:
        part = FilePart(source.continues.bytes, source.bytes, source.board_size)
    elif source.is_raw and storage_of(path).size() != source.bytes:
        part = FilePart(0, source.bytes)
    reader = open_source(path, salvage=True, part=part)
    if isinstance(reader, SizeSelectingReader) and source.board_size is not None:
        reader.select_board_size(source.board_size)
    return reader


def _compare_exported(store: Store, source: Original, path: AnyPath, exported: AnyPath) -> None:
    """Compare the exported pickle of a source with the original file.

    Raises:
        VerifyError: They differ, or one of them cannot be read.
    """
    try:
        with _open_original(path, source) as original, open_source(exported) as returned:
            _compare(store, source, original, returned, SILENT)
    except HexdataError as error:
        name = str(exported).removeprefix(prefix_of(store.path))
        raise VerifyError(f"{name}: {error.detail()}") from error


def _compare(
    store: Store, source: Original, original: SourceReader, returned: SourceReader, progress: Progress
) -> None:
    """Compare a source that was written back with the original file.

    Raises:
        VerifyError: They differ; the error names the first record and field.
        FormatError: One of the two files cannot be read.
    """
    rejected = _rejected(store, source)
    rows = _rows(_accepted(original, source, rejected)), _rows(_accepted(returned, source, {}))
    done = 0
    for expected, found in zip_longest(*rows):
        _compare_rows(expected, found)
        done += expected.num_rows
        progress.advance(expected.num_rows)
    if done != source.positions:
        raise VerifyError(
            "the file has another number of examples than the store",
            found=f"{source.positions:,}",
            expected=f"{done:,}",
        )
    if not source.is_raw:
        _compare_headers(original.header, returned.header)
    elif "bytes_between_games" in source.header.get("counts", {}):  # of a text: the other bytes are records
        _compare_headers({"counts": original.header["counts"]}, {"counts": source.header["counts"]})


def _rejected(store: Store, source: Original) -> dict[int, str]:
    """Return the rejected records of a source in the store: number of the record to reason code."""
    columns, of_source = ["record", "reason"], pc.field("source_id") == source.source_id
    tables = [read_parquet(path, columns, of_source) for path in store.files("rejected")]
    return {row["record"]: row["reason"] for table in tables for row in table.to_pylist()}


def _accepted(reader: SourceReader, source: Original, rejected: dict[int, str]) -> Iterator[pa.RecordBatch]:
    """Yield the positions of a file that the store did not reject, with the schema ``raw_schema``.

    ``origin`` is a column of strings instead of a dictionary. ``end_reason``, ``swap`` and the targets are
    missing, since a pickle does not contain them.

    Raises:
        VerifyError: The reader rejects a record that the store accepted or rejected for another reason, or
            does not find a record that the store rejected.
    """
    missing = set(rejected) - {None}
    for batch in reader.batches():
        for record, reason, detail in map(astuple, batch.rejected):
            if rejected.get(record) != reason:
                raise VerifyError(
                    f"the record was rejected when it was read again: {reason}, {detail}",
                    record=record,
                    expected=rejected.get(record, "a position"),
                )
            missing.discard(record)
        positions = batch.positions
        if rejected:
            known = pc.is_in(positions.column("record"), pa.array(rejected, pa.int64()))
            missing.difference_update(positions.column("record").filter(known).to_pylist())
            positions = positions.filter(pc.invert(known))
        if positions.num_rows:
            origin = positions.schema.get_field_index("origin")
            positions = positions.set_column(origin, "origin", positions.column(origin).cast(pa.string()))
            positions = positions.drop_columns(["end_reason", "swap", *reader.targets])
            if source.is_raw:
                positions = _comparable(positions)
            yield with_file_idx(positions, source.source_id)
    if missing:
        raise VerifyError(
            "a record that the store rejected is not in the file",
            record=min(missing),
            expected=rejected[min(missing)],
        )


def _comparable(positions: pa.RecordBatch) -> pa.RecordBatch:
    """Return positions of a source without legacy examples in the form that dict examples can represent.

    A dict example has either a policy or a move, which is a one-hot policy. Spellings of the dict examples
    are removed from ``metadata``.
    """
    move = column(positions, "move", -1).copy()
    rows, policies = SparsePolicies.from_arrow(positions.column("policy"), MAX_SIZE**2)
    single = np.flatnonzero(np.diff(policies.starts) == 1)
    single = single[policies.probabilities[policies.starts[single]] == 1]
    move[rows] = -1
    move[rows[single]] = policies.cells[policies.starts[single]]
    kept = np.delete(np.arange(len(rows)), single)
    has_policy = np.isin(np.arange(len(move)), rows[kept])
    encoded = positions.column("metadata").dictionary_encode()
    texts = [_without_spellings(text) for text in encoded.dictionary.to_pylist()]
    return with_columns(
        positions,
        move=pa.array(move, mask=move < 0),
        policy=policies.take(kept).to_arrow(has_policy),
        metadata=pa.array(texts, pa.string()).take(encoded.indices),
    )


def _without_spellings(text: str) -> str | None:
    """Return metadata without the key for spellings; None if no other key remains."""
    if DIALECT_KEY not in text:
        return text
    values = {key: value for key, value in json.loads(text).items() if key != DIALECT_KEY}
    return json.dumps(values, separators=(",", ":")) if values else None


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Regroup batches into tables of ``BATCH_ROWS`` rows."""
    first = next(batches, None)
    if first is not None:
        yield from regroup(chain([first], batches), first.schema, BATCH_ROWS)


def _compare_rows(expected: pa.Table | None, found: pa.Table | None) -> None:
    """Compare tables bit by bit, except ``record``, because records are renumbered without the rejected ones.

    Raises:
        VerifyError: They differ; the error names the first field that differs and its first record.
    """
    if expected is None or found is None or expected.num_rows != found.num_rows:
        raise VerifyError("the file has more or fewer examples than the store")
    for name in expected.schema.names:
        if name != "record":
            wrong = _first_difference(_bits(expected[name]), _bits(found[name]))
            if wrong is not None:
                raise VerifyError(
                    f"{name} differs",
                    record=expected["record"][wrong].as_py(),
                    found=_cut(repr(found[name][wrong].as_py())),
                    expected=_cut(repr(expected[name][wrong].as_py())),
                )


_POLICY_BITS: Final = pa.list_(pa.struct([("cell", pa.uint16()), ("probability", pa.int32())]))


def _bits(column: pa.ChunkedArray) -> pa.Array:
    """Return a column with floats as integers of the same bits, so that -0.0 differs from 0.0."""
    array = column.combine_chunks()
    bits = {pa.float64(): pa.int64(), POLICY_TYPE: _POLICY_BITS}.get(array.type)
    return array if bits is None else array.view(bits)


def _first_difference(expected: pa.Array, found: pa.Array) -> int | None:
    if expected.equals(found):
        return None
    pairs = zip(expected.to_pylist(), found.to_pylist(), strict=True)
    return next((row for row, (one, other) in enumerate(pairs) if one != other), 0)


def _compare_headers(expected: dict[str, object], found: dict[str, object]) -> None:
    """Compare the top-level keys except ``examples``, their order, and the spelling of the example fields.

    Raises:
        VerifyError: They differ; the error names the first key.
    """
    pairs = zip_longest(expected.items(), found.items(), fillvalue=(None, None))
    for (key, value), (found_key, found_value) in pairs:
        if key != found_key:
            raise VerifyError("the top-level keys differ", found=found_key, expected=key)
        texts = json.dumps(value), json.dumps(found_value)  # unsorted, because the order of keys matters
        if texts[0] != texts[1]:
            raise VerifyError(
                f"the top-level value of {key!r} differs", found=_cut(texts[1]), expected=_cut(texts[0])
            )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
