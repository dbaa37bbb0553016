"""Verification of the round trip: restores each source from the store and compares it with the original file.

A legacy source is written back as a pickle, and both files are decoded by the reader of the format. Of other
sources, the positions that the reader yields are compared with those of the store. Differences that the
readers do not show, such as pickle opcodes, are ignored. The store and the inputs are only read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import MAX_SIZE
from hexdata.errors import BudgetError, HexdataError, InputError, Reason, VerifyError
from hexdata.export.originals import Original, list_originals, with_file_idx
from hexdata.formats import BATCH_ROWS, FilePart, SourceReader, open_source
from hexdata.formats.legacy import write_legacy
from hexdata.formats.trmph import find_sidecar
from hexdata.games.findings import column, with_columns
from hexdata.policy import SparsePolicies
from hexdata.progress import SILENT, Progress
from hexdata.schema import KEPT_PREFIX, POLICY_TYPE, raw_schema
from hexdata.storage import AnyPath, as_path, storage_of, translate_errors
from hexdata.storage.errors import add_path_to_error
from hexdata.store import Store
from hexdata.store.files import Sidecar, digest_file, identity_of
from hexdata.store.parquet import read_parquet, regroup
from hexdata.temporary import temporary_folder
from hexdata.text import count_of, shortened
from hexdata.verify.tables import Check

_FAST: Final = 1
"""Compression level of gzip: low, because the file is read once and removed."""
_COMPARED: Final = [n for n in raw_schema(MAX_SIZE).names if n not in ("record", "end_reason", "swap")]
"""The columns that are compared. A pickle has no others, and no optional columns."""


@dataclass(frozen=True)
class RoundTrip(Check):
    """The result of the round trip of one source.

    Attributes:
        name: Name of the source.
        ok: False if the source differs, cannot be written back, or is not among the inputs.
        detail: The number of examples compared, or the difference.
        checked: False if the file is not among the inputs, or was rejected as a whole.
    """

    checked: bool = True


def check_round_trip(
    store: str | AnyPath, inputs: str | AnyPath | Sequence[str | AnyPath], progress: Progress = SILENT
) -> list[RoundTrip]:
    """Write each source of a store back and compare it with its original file.

    Every accepted example is compared field by field, as are the header and the spelling of the fields. The
    records that the reader rejects must be those that the store lists as rejected. Of a text, the numbers of
    comments and of the bytes between games must be those in the store. Raw games are compared as
    the positions that their reader yields.

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
    with translate_errors(target.path):
        originals = list_originals(target)
        several = inputs if isinstance(inputs, Sequence) and not isinstance(inputs, str) else [inputs]
        locations = [as_path(path) for path in several]
        paths, changed = _find(originals, locations)
        if originals and not paths and not changed:
            reason, path = "none of the store's sources is among the inputs", next(iter(locations), None)
            names = ", ".join(source.name for source in originals[:3])
            hint = "Give the original files, or folders that contain them. They must be unchanged."
            raise InputError(reason, path=path, expected=names, hint=hint)
        found = [source for source in originals if source.identity in paths]
        progress.begin("round trip", sum(source.positions for source in found), "positions")
        results = []
        for source in originals:
            path, name = paths.get(source.identity), source.name
            if source.sha256 in changed:
                results.append(RoundTrip(name, False, "its sidecar is missing or has changed"))
            elif path is None:
                results.append(RoundTrip(name, False, "the file is not among the inputs", checked=False))
            elif source.format == "unknown":
                detail = "rejected as a whole, nothing to compare"
                results.append(RoundTrip(name, True, detail, checked=False))
            else:
                results.append(_check(target, source, path))
                progress.advance(source.positions)
        return results


def _find(originals: Sequence[Original], inputs: Sequence[AnyPath]) -> tuple[dict[str, AnyPath], set[str]]:
    """Find the files of the sources among the inputs; only files of a known size are digested.

    Returns:
        The file of each source by ``Original.identity``; and the digests of the files that were found with
        another sidecar than that of their source.
    """
    by_digest = {source.sha256: source for source in originals}
    sizes, identities = ({getattr(s, name) for s in originals} for name in ("bytes", "identity"))
    found: dict[str, AnyPath] = {}
    changed: set[str] = set()
    for location in inputs:
        if not storage_of(location).exists():
            raise InputError("no such file or folder", path=location, hint="Check the path.")
        for name, size in storage_of(location).files().items():
            path = location / name if name else location
            digest = digest_file(path)[1] if size in sizes else ""
            if (source := by_digest.get(digest)) is None:
                continue
            identity = digest
            if source.format in ("trmph", "unknown"):  # a sidecar has no meaning for the others
                identity = identity_of(digest, Sidecar.of(find_sidecar(path)))
            if identity in identities:
                # Copies of a file have equal bytes, so the first one represents all.
                found.setdefault(identity, path)
            else:
                changed.add(digest)
    by_id = {source.source_id: source for source in originals}
    # Last first: a file that is found for one source may also begin with the source before it.
    for source in reversed(originals):  # a grown file contains the sources that it continues
        base = by_id.get(source.continues.source_id) if source.continues else None
        grown = found.get(source.identity)
        if not (base and grown and digest_file(grown, base.bytes)[1] == base.sha256):
            continue
        if base.sidecar is None or base.sidecar.begins(find_sidecar(grown)):
            found.setdefault(base.identity, grown)
    # A copy with the right sidecar elsewhere among the inputs is sufficient.
    return found, changed - {source.sha256 for source in originals if source.identity in found}


def _check(store: Store, source: Original, path: AnyPath) -> RoundTrip:
    """Compare the positions of a source with its file."""
    if source.is_raw and not source.records:
        # An empty file has nothing to compare; the file found may be another empty one.
        return RoundTrip(source.name, True, "contains no games, like the original")
    detail = f"{source.positions:,} examples equal the original"
    try:
        with _open_original(path, source) as original:
            _compare_source(store, source, original)
    except BudgetError:
        raise  # a full disk does not concern the source
    except HexdataError as error:
        return RoundTrip(source.name, False, error.detail())
    if rejected := source.records - source.positions:
        detail += f"; {count_of(rejected, 'record')} rejected"
    if between := _counts(source).get("bytes_between_games"):
        detail += f"; {between:,} bytes are comments, blank lines or text between games"
    return RoundTrip(source.name, True, detail)


def _counts(source: Original) -> dict[str, Any]:
    """Return the numbers that the reader of a text has counted."""
    # The header of a legacy pickle is that of the file, whose key may have any value.
    counts: dict[str, Any] = source.header.get("counts", {}) if source.is_raw else {}
    return counts


def _open_original(path: AnyPath, source: Original) -> SourceReader:
    """Open the file of a source; of a file that has grown, only the lines of this source."""
    part = None
    if source.continues is not None:
        part = FilePart(source.continues.bytes, source.bytes, source.board_size)
    # The file has grown since it was converted; the source is its beginning.
    elif source.is_raw and storage_of(path).size() != source.bytes:
        part = FilePart(0, source.bytes)
    header = source.header if source.is_raw else {}  # the header of a legacy pickle is that of the file
    reader = open_source(
        path,
        salvage=True,
        part=part,
        format=header.get("stated_format"),
        variations="main" if "variations" in _counts(source) else "reject",
        alphazero_convention=header.get("convention"),
    )
    if source.board_size is not None:
        reader.select_board_size(source.board_size)
    return reader


def _compare_source(store: Store, source: Original, original: SourceReader) -> None:
    """Compare the original file of a source with a pickle written of it, or games with their positions.

    Raises:
        VerifyError: They differ; the error names the first record and field.
        FormatError: One of the two files cannot be read.
    """
    columns, of_source = ["record", "reason"], pc.field("source_id") == source.source_id
    tables = [read_parquet(path, columns, of_source) for path in store.files("rejected")]
    rejected = {row["record"]: row["reason"] for table in tables for row in table.to_pylist()}
    cut = [number for number, reason in rejected.items() if reason == Reason.AFTER_REPEAT]
    if cut and not _has_cut_games(store, source):
        cut = []
    batches = _accepted(original, source, rejected, cut)
    accepted = (with_file_idx(batch, source.source_id) for batch in batches)
    if source.is_raw:
        stored = map(_comparable, source.batches())
        done = _compare_positions(map(_comparable, accepted), stored)
    else:
        with temporary_folder("written") as scratch:
            written = scratch / "written.pkl.gz"
            with add_path_to_error(written), written.open("wb") as file:
                write_legacy(
                    file,
                    source.batches(masked=True),
                    board_size=source.board_size or 0,
                    dialect=source.dialect,
                    header=source.header,
                    level=_FAST,
                )
            with open_source(written) as returned:
                done = _compare_positions(accepted, _accepted(returned, source, {}))
                _compare_headers(original.header, returned.header)
    if done != source.positions:
        reason = "the file has another number of examples than the store"
        raise VerifyError(reason, found=f"{source.positions:,}", expected=f"{done:,}")
    if "bytes_between_games" in (counts := _counts(source)):  # the other bytes of a text are records
        _compare_headers({"counts": original.header["counts"]}, {"counts": counts})


def _has_cut_games(store: Store, source: Original) -> bool:
    """Return whether games of a source were cut before a repeated move, as ``--truncate-repeats`` does."""
    # The first source of a shuffled collection has the games of all, the others have none.
    rows = pc.field("source_id") == source.source_id if source.games else None
    tables = (read_parquet(path, ["flags"], rows) for path in store.files("sources"))
    return any(pc.any(pc.match_substring(table["flags"], '"truncated"')).as_py() for table in tables)


def _accepted(
    reader: SourceReader, source: Original, rejected: dict[int, str], cut: Sequence[int] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield the positions of a file that the store did not reject.

    Args:
        reader: The open file.
        source: Its source in the store.
        rejected: Reasons of the rejected records by number.
        cut: Those of them that only ``convert`` rejects, as their games were cut before.

    Raises:
        VerifyError: The reader rejects a record that the store accepted or rejected for another reason, or
            does not find a record that the store rejected.
    """
    # A file that was rejected as a whole has no number of a record.
    missing = set(rejected) - {None}
    for batch in reader.batches():
        for each in batch.rejected:
            if rejected.get(each.record) != each.reason:
                reason = f"the record was rejected when it was read again: {each.reason}, {each.detail}"
                expected = rejected.get(each.record, "a position")
                raise VerifyError(reason, record=each.record, expected=expected)
            missing.discard(each.record)
        positions = batch.positions
        if cut:
            known = pc.is_in(positions.column("record"), pa.array(cut, pa.int64()))
            missing.difference_update(positions.column("record").filter(known).to_pylist())
            positions = positions.filter(pc.invert(known))
        yield positions
    if reader.damage is not None and rejected.get(source.records - 1) == reader.damage.code:
        missing.discard(source.records - 1)  # the damage is the last record of a salvaged source
    if missing:
        reason, record = "a record that the store rejected is not in the file", min(missing)
        raise VerifyError(reason, record=record, expected=rejected[record])


def _comparable(positions: pa.RecordBatch) -> pa.RecordBatch:
    """Return positions of games with either a policy or a move, and with the metadata of the source only.

    A store may state the move beside a policy with the whole probability on one cell, of which readers make a
    move.
    """
    move = column(positions, "move", -1).copy()
    rows, policies = SparsePolicies.from_arrow(positions.column("policy"), MAX_SIZE**2)
    single = np.flatnonzero(np.diff(policies.starts) == 1)
    single = single[policies.probabilities[policies.starts[single]] == 1]
    move[rows] = -1
    move[rows[single]] = policies.cells[policies.starts[single]]
    kept = np.delete(np.arange(len(rows)), single)
    has_policy = np.isin(np.arange(len(move)), rows[kept])
    # Many rows have the same text, which is parsed once.
    encoded = positions.column("metadata").dictionary_encode()
    texts = [_of_source(text) for text in encoded.dictionary.to_pylist()]
    return with_columns(
        positions,
        move=pa.array(move, mask=move < 0),
        policy=policies.take(kept).to_arrow(has_policy),
        metadata=pa.array(texts, pa.string()).take(encoded.indices),
    )


def _of_source(text: str) -> str | None:
    """Return metadata without the values that ``convert`` has added, sorted; None if there are no others."""
    values = {key: value for key, value in json.loads(text).items() if not key.startswith(KEPT_PREFIX)}
    return json.dumps(values, sort_keys=True) if values else None


def _compare_positions(expected: Iterator[pa.RecordBatch], found: Iterator[pa.RecordBatch]) -> int:
    """Compare positions, given as batches of ``raw_schema``, bit by bit, and return their number.

    Numbers of records are not compared, as those of a pickle do not count the rejected ones.

    Raises:
        VerifyError: They differ; the error names the first field that differs and its first record.
    """
    done = 0
    # zip would ignore additional rows of one side.
    for one, other in zip_longest(_tables(expected), _tables(found)):
        if one is None or other is None or one.num_rows != other.num_rows:
            raise VerifyError("the file has more or fewer examples than the store")
        for name in _COMPARED:
            bits = _bits(one[name]), _bits(other[name])
            if not bits[0].equals(bits[1]):
                pairs = zip(bits[0].to_pylist(), bits[1].to_pylist(), strict=True)
                # If no value differs, the types of the columns do; then row 0 represents all rows.
                row = next((row for row, (right, wrong) in enumerate(pairs) if right != wrong), 0)
                right, wrong = (shortened(repr(table[name][row].as_py())) for table in (one, other))
                record = one["record"][row].as_py()
                raise VerifyError(f"{name} differs", record=record, found=wrong, expected=right)
        done += one.num_rows
    return done


def _tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield positions in tables of ``BATCH_ROWS`` rows, with the columns that are compared."""
    # The readers cut their batches at different rows, since one file lacks the rejected records.
    cut = (batch.select(["record", *_COMPARED]) for batch in batches if batch.num_rows)
    if (first := next(cut, None)) is not None:
        yield from regroup(chain([first], cut), first.schema, BATCH_ROWS)


_POLICY_BITS: Final = pa.list_(pa.struct([("cell", pa.uint16()), ("probability", pa.int32())]))


def _bits(column: pa.ChunkedArray) -> pa.Array:
    """Return a column with floats as integers of the same bits, so that -0.0 differs from 0.0, and texts."""
    array = column.combine_chunks()
    if pa.types.is_dictionary(array.type):  # two readers may number the texts differently
        return array.cast(pa.string())
    bits = {pa.float64(): pa.int64(), POLICY_TYPE: _POLICY_BITS}.get(array.type)
    return array if bits is None else array.view(bits)


def _compare_headers(expected: dict[str, object], found: dict[str, object]) -> None:
    """Compare the top-level keys except ``examples``, their order, and the spelling of the example fields.

    Raises:
        VerifyError: They differ; the error names the first key.
    """
    # Unsorted texts: the order of keys matters within values, too.
    texts = [[(key, json.dumps(value)) for key, value in each.items()] for each in (expected, found)]
    for (key, stated), (other_key, other) in zip_longest(*texts, fillvalue=("no key", "")):
        if key != other_key:
            raise VerifyError("the top-level keys differ", found=other_key, expected=key)
        if stated != other:
            reason = f"the top-level value of {key!r} differs"
            raise VerifyError(reason, found=shortened(other), expected=shortened(stated))
