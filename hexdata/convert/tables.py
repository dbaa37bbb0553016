"""A source of a run with everything known about it, and its rows in the tables sources and rejected."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final

import numpy as np
import pyarrow as pa

from hexdata.convert.duplicates import FlagCounts
from hexdata.convert.inputs import SourceFile
from hexdata.convert.options import ConvertOptions
from hexdata.convert.spool import REJECTED, Spool, SpoolFacts, read_header
from hexdata.errors import Reason
from hexdata.formats.run_header import date_of_name
from hexdata.games.convention import Convention, Decision, layout_convention
from hexdata.games.findings import count_flags_without_game
from hexdata.schema import is_legacy_format, rejected_schema, sources_schema
from hexdata.strict_json import shortened
from hexdata.text import count_of

__all__ = [
    "ConvertSource",
    "failed_files",
    "failures_by_reason",
    "note_of_unused_option",
    "notes_of",
    "reasons_of",
    "rejected_batches",
    "source_batches",
]


SMALL_HEADER: Final = 4096
"""Headers of at most this many bytes are kept in memory and always accepted; real ones have 300 to 40,000."""
_LARGE_HEADERS: Final = 64 << 20
"""``limit-headers``: maximum bytes of JSON text of all larger headers of a run, as later stages load them."""


@dataclass(frozen=True)
class ConvertSource:
    """A source of this run with everything known about it.

    ``facts`` includes the decisions of the run, such as a rejected file. The spool contains the source's
    own content, which does not depend on the other sources of a run.
    """

    file: SourceFile
    spool: Spool
    facts: SpoolFacts
    decision: Decision | None = None
    """The value convention and its evidence; None without positions."""
    source_id: int = -1
    first_position: int = 0
    first_game: int = 0
    collection: str = ""
    """Key of the collection of a shuffled source, else empty."""
    owns_games: bool = True
    origins: tuple[tuple[int, str], ...] = ()
    """(file_idx, raw file) for games whose raw file only a companion names."""
    targets: tuple[str, ...] = ()
    """Optional columns of its positions in the store."""
    not_targets: Mapping[str, str] = field(default_factory=dict)
    """The reason for each name whose numbers stay in the metadata only."""

    @property
    def convention(self) -> Convention | None:
        """The value convention; None without positions."""
        return None if self.decision is None else self.decision.convention


def notes_of(source: ConvertSource) -> list[str]:
    """Return the notes on a source, including those on its convention and on positions of unknown games."""
    notes = [*source.facts.notes, *_notes_of_numbers(source)]
    if is_legacy_format(source.facts.format) and not source.facts.records:
        notes = [*notes, "contains no examples"]
    notes = [*notes, *_notes_of_header(source.facts)]
    if source.decision is None:
        return notes
    notes = [*notes, *_notes_of_decision(source, source.decision)]
    if any(source.facts.loose):
        loose = count_flags_without_game(source.facts.loose, source.decision.convention).items()
        listed = ", ".join(f"{count:,} {code}" for code, count in loose)
        notes = [*notes, f"positions of unknown games: {listed}"] if listed else notes
    return notes


def _notes_of_header(facts: SpoolFacts) -> Iterator[str]:
    """Yield notes on what a reader of games states in the header."""
    if is_legacy_format(facts.format):
        return
    changes = facts.header.get("run_changes")
    for name, values in changes.items() if isinstance(changes, dict) else ():
        listed = ", ".join("none" if value is None else str(value) for value in values)
        yield f"several values of {name}, so the column is null: {listed}"
    unread = facts.header.get("run_unread")
    for name, lines in unread.items() if isinstance(unread, dict) else ():
        yield f"lines that state no {name}, so they are not used: {', '.join(map(repr, lines))}"
    counts = facts.header.get("counts")
    if facts.format == "selfplay-games" and isinstance(counts, dict):
        if counts.get("logits"):
            yield (
                f"policies and root values of {count_of(counts['logits'], 'game')} are outputs of the "
                "network without search"
            )
        if counts.get("probabilities"):
            yield (
                f"the values of {count_of(counts['probabilities'], 'game')} are only in metadata, since "
                "their scale is unknown"
            )


def _notes_of_numbers(source: ConvertSource) -> Iterator[str]:
    """Yield a note on the numbers in the metadata that are no columns, if there are any."""
    if source.not_targets:
        listed = [f"{shortened(name)} ({why})" for name, why in sorted(source.not_targets.items())]
        rest = f" and {len(listed) - _MAX_LISTED:,} more" if len(listed) > _MAX_LISTED else ""
        yield f"numbers kept in the metadata only: {', '.join(listed[:_MAX_LISTED])}{rest}"


def _notes_of_decision(source: ConvertSource, decision: Decision) -> Iterator[str]:
    """Yield notes on a convention that the source's games do not show alone, or that some contradict."""
    if not is_legacy_format(source.facts.format):
        return
    convention, layout = decision.convention, layout_convention(source.facts.header)
    chains, winners = source.facts.ballots.chains, source.facts.ballots.winners
    if decision.by == "layout":
        yield (
            f"its games do not show its value convention; read as {convention}, "
            "which the legacy tool used for this layout"
        )
    elif layout not in (None, convention):
        shown = {
            "given": f"its games do not show its value convention; read as {convention}, as given",
            "winners": f"read as {convention}, as {max(winners):,} of {sum(winners):,} named winners show",
            "chains": f"read as {convention}, as {max(chains):,} of {sum(chains):,} winning chains show",
        }
        yield f"{shown[decision.by]}, although {layout} is usual for its layout"
    if decision.contradicting:
        yield (
            f"{decision.contradicting:,} of {sum(chains):,} winning chains contradict its value convention, "
            f"{convention}, decided by {_DECIDED_BY[decision.by]}"
        )


_DECIDED_BY: Final = {
    "winners": "named winners",
    "chains": "the other chains",
    "layout": "the layout",
    "given": "the option",
}


def note_of_unused_option(names: list[str], given: str) -> str | None:
    """Return a note on the files whose convention is not the given one.

    Args:
        names: Names of these files.
        given: The convention given with ``--value-convention``.

    Returns:
        The note, or None if there are no such files.
    """
    if not names:
        return None
    files = "1 file, which has" if len(names) == 1 else f"{len(names):,} files, which have"
    listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    return f"the value convention {given} was not applied to {files} the other one: {listed}"


_MAX_LISTED: Final = 5
"""Maximum number of files that a note names."""


def source_batches(
    sources: list[ConvertSource], flags: list[FlagCounts], options: ConvertOptions
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of sources in the table sources, with the schema ``sources_schema()``."""
    for start in range(0, len(sources), _SOURCES_AT_ONCE):
        part = slice(start, start + _SOURCES_AT_ONCE)
        yield _source_batch(sources[part], flags[part], options)


_SOURCES_AT_ONCE: Final = 256


def _source_batch(
    sources: list[ConvertSource], flags: list[FlagCounts], options: ConvertOptions
) -> pa.RecordBatch:
    rows: list[dict[str, Any]] = [
        {
            "source_id": s.source_id,
            "name": s.file.name,
            "bytes": s.file.bytes,
            "sha256": s.file.sha256,
            "format": s.facts.format,
            "value_sense": s.convention,
            "value_sense_evidence": json.dumps(_evidence(s)),
            "records": s.facts.records,
            "positions": s.facts.positions,
            "games": s.facts.games,
            "rejected": s.facts.rejected,
            **_run_of(s.facts.header, s.file.name),
            "header": json.dumps(_header(s)),
            "notes": json.dumps(notes_of(s)) if notes_of(s) else None,
            "flags": json.dumps(counts.flags),
            "salvaged": s.facts.damage is not None if options.salvage else None,
        }
        for s, counts in zip(sources, flags, strict=True)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=sources_schema())


_RUN: Final[dict[str, tuple[type, ...]]] = {
    "model": (str,),
    "simulations": (int,),
    "temperature": (int, float),
    "seed": (int,),
    "commit": (str,),
}
"""Columns of sources that a reader states under the key ``run`` of the header, with their types."""


def _run_of(header: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the columns of sources that describe the run of self-play; values of other types are null.

    The date is that of the header; if the header states none, that of the source's name.

    Args:
        header: Header of the source.
        name: Name of the source.
    """
    run, changes = header.get("run"), header.get("run_changes")
    run = dict(run) if isinstance(run, dict) else {}
    if "date" not in run and not (isinstance(changes, dict) and "date" in changes):
        run["date"] = date_of_name(name)
    columns: dict[str, Any] = {}
    for name, kinds in _RUN.items():
        value = run.get(name)
        if type(value) in kinds and not (isinstance(value, int) and value.bit_length() > _INT64_BITS):
            columns[name] = value
    with suppress(KeyError, TypeError, ValueError):
        columns["date"] = date.fromisoformat(run["date"])
    return columns


_INT64_BITS: Final = 63


def _header(source: ConvertSource) -> Mapping[str, Any]:
    """Return the header of a source; of a grown file, with the source that it continues."""
    header, file = read_header(source.facts.header), source.file
    if file.part is None or file.base is None:
        return header
    return {**header, "continues": {"source_id": file.base.source_id, "bytes": file.part.start}}


def _evidence(source: ConvertSource) -> dict[str, Any]:
    """Return the evidence for the value convention of a source."""
    facts, decision = source.facts, source.decision
    return {
        "chains": facts.votes.chains,
        "winners": facts.votes.winners,
        "given": decision is not None and decision.by == "given",
        "by": decision and decision.by,
        "counted": {"chains": facts.ballots.chains, "winners": facts.ballots.winners},
    }


def rejected_batches(source: ConvertSource) -> Iterator[pa.RecordBatch]:
    """Yield the rejected records of a source, with the schema ``rejected_schema()``."""
    if source.facts.failure is None:
        batches = source.spool.batches("rejected")
    else:
        reason, detail = source.facts.failure
        columns = {"record": [None], "reason": [reason], "detail": [detail]}
        batches = iter(pa.table(columns, schema=REJECTED).to_batches())
    schema = rejected_schema()
    for batch in batches:
        ids = pa.array(np.full(batch.num_rows, source.source_id, np.int32))
        yield pa.RecordBatch.from_arrays([ids, *batch.columns], schema=schema)


def reasons_of(sources: list[ConvertSource]) -> dict[str, int]:
    """Count the rejected records by reason, most frequent first."""
    counts: Counter[str] = Counter()
    for source in sources:
        for batch in rejected_batches(source):
            for entry in batch.column("reason").value_counts().to_pylist():
                counts[entry["values"]] += entry["counts"]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def failures_by_reason(sources: list[ConvertSource]) -> Iterator[tuple[str, str, str]]:
    """Yield reason, name and detail of each file with rejected records, for ``text.lines_by_cause``.

    A file that was rejected as a whole has one entry; another one has one entry per reason.
    """
    found = []
    for source in sources:
        if source.facts.failure:
            found.append((*source.facts.failure, source.file.name))
            continue
        firsts: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for batch in rejected_batches(source) if source.facts.rejected else ():
            for reason, detail in zip(
                *(batch.column(c).to_pylist() for c in ("reason", "detail")), strict=True
            ):
                counts[reason] += 1
                firsts.setdefault(reason, detail)
        for reason, count in counts.items():
            example = f"{count_of(count, 'record')}, such as: {firsts[reason]}"
            found.append((reason, example, source.file.name))
    for reason, detail, name in sorted(found):
        yield reason, name, detail


def failed_files(sources: list[ConvertSource]) -> dict[str, str]:
    """Return the name and the reason of each file that was rejected as a whole."""
    return {s.file.name: ": ".join(s.facts.failure) for s in sources if s.facts.failure}


def refuse_large_headers(facts: dict[str, SpoolFacts]) -> None:
    """Reject the sources with the largest headers, so that the others are within ``_LARGE_HEADERS``.

    Args:
        facts: Facts of each source by name; those of rejected sources are replaced.
    """
    left = _LARGE_HEADERS
    sizes = [(f.header_bytes, name) for name, f in facts.items() if f.header_bytes > SMALL_HEADER]
    for size, name in sorted(sizes):
        left -= size
        if left < 0:
            facts[name] = SpoolFacts.failed(
                Reason.LIMIT_HEADERS,
                f"its header has {size:,} bytes; expected at most {_LARGE_HEADERS:,} for all large headers "
                "of a run; convert fewer of these files at once",
            )
