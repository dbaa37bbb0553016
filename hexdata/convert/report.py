"""The wording of a conversion: notes on its files and sources, errors over many files, and its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.convert.inputs import SkipCause
from hexdata.convert.spool import Source
from hexdata.errors import InputError, Reason, RejectRateError
from hexdata.formats import GAME_FORMATS, SALVAGEABLE
from hexdata.games.findings import count_flags_without_game
from hexdata.schema import is_legacy_format
from hexdata.store import Store
from hexdata.store.commands import RunRecord, command_line
from hexdata.text import count_of, lines_by_cause, listed, shortened

_NOTES_OF_COUNTS: Final = {
    "logits": "games whose policies and root values are outputs of the network without search",
    "probabilities": "games whose values are only in metadata, since their scale is unknown",
    "other_encodings": "texts not in the stated encoding, with unreadable characters replaced",
    "results": "results not understood, so that only a resignation or a chain names the winner",
    "variations": "variations left out, as only the main lines are read",
    "setup": "games with stones that were set up, so that the positions before are missing",
    "passes": "positions whose policies have a share for a pass or a swap, which is left out",
    "sums": "policies with a sum above 1, such as visits, which are kept as they are",
    "arrays": "keys beside those of boards, policies and values, which are all that is read",
    "unescaped": "brackets within names kept, although no backslash precedes them",
}
"""Text of the note on each count in the header of games that has one."""


def notes_of_header(kind: str, header: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on what a reader of another format than that of the legacy tool states in the header."""
    # Objects, unless the header is one that a reader of another package states.
    changes, counts = (
        found if isinstance(found := header.get(name), dict) else {} for name in ("run_changes", "counts")
    )
    for name, values in changes.items():
        found = ", ".join("none" if value is None else str(value) for value in values)
        yield f"several values of {name}, so the column is null: {found}"
    for name, note in _NOTES_OF_COUNTS.items():
        if counts.get(name) and kind in (*GAME_FORMATS, "alphazero", "selfplay-games"):
            yield f"{note}: {counts[name]:,}"


def notes_of(source: Source) -> Iterator[str]:
    """Yield notes on a source after all decisions, including those on its convention and unknown games."""
    facts, decision = source.facts, source.decision
    yield from facts.notes
    counted = {"examples_generated": (facts.records, "records"), "valid_games": (facts.games, "games")}
    for key, (found, noun) in counted.items():
        # Games of a shuffled source are counted for its collection, about which no file states a number.
        if facts.positions and not facts.mixed and facts.stated.get(key, found) != found:
            yield f"{noun} that processing_stats and the file have: {facts.stated[key]} and {found}"
    yield from source.notes
    if facts.not_targets:
        names = [f"{shortened(name)} ({why})" for name, why in sorted(facts.not_targets.items())]
        yield f"numbers kept in the metadata only: {listed(names, 5)}"
    if not facts.records:
        yield "contains no records"
    if decision is None:
        return
    convention = decision.convention
    if decision.by in ("layout", "given"):
        yield f"its games do not show its value convention; read as {convention} ({decision.by})"
    if decision.contradicting:
        chains = f"{decision.contradicting:,} of {sum(facts.ballots.chains):,}"
        yield f"winning chains against its value convention, {convention} ({decision.by}): {chains}"
    if facts.loose and (loose := count_flags_without_game(facts.loose, convention)):
        yield f"positions of unknown games: {', '.join(f'{n:,} {code}' for code, n in loose.items())}"


def notes_of_option(sources: Iterable[Source], given: str) -> list[str]:
    """Return a note on legacy sources that have another value convention than the given one, if any."""
    others = [s for s in sources if is_legacy_format(s.facts.format) and s.convention not in (None, given)]
    if given == "auto" or not others:
        return []
    files = f"{count_of(len(others), 'file')} with the other one: {listed([s.name for s in others], 5)}"
    return [f"the value convention {given} was not applied to {files}"]


def notes_of_skipped(skipped: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on the skipped files of each cause, which a detail may follow after a colon."""
    causes: dict[str, list[str]] = {}
    for name, text in skipped.items():
        cause, _, detail = text.partition(": ")
        causes.setdefault(cause, []).append(f"{name} ({detail})" if detail else name)
    for cause, names in sorted(causes.items()):
        code = f"{cause}, already read" if cause == SkipCause.KNOWN_BYTES else cause
        yield f"skipped {count_of(len(names), 'file')} ({code}): {listed(names)}"


def several_sizes_error(sources: Sequence[Source], store: Store, run: RunRecord) -> InputError:
    """Return the error of a run whose sources, or its store, have several board sizes."""
    stored = store.manifest.board_size
    sizes = sorted((s.facts.board_size or 0, s.name, s.facts.positions) for s in sources if s.facts.positions)
    return InputError(
        "a store has one board size; nothing was published",
        path=store.path,
        found=f"in the store, {stored} x {stored}" if stored else None,
        lines=lines_by_cause((f"{n} x {n} boards", name, count_of(m, "position")) for n, name, m in sizes),
        hint="Convert each size into its own store:",
        commands=_commands_of_sizes(sources, store, run),
    )


def _commands_of_sizes(sources: Iterable[Source], store: Store, run: RunRecord) -> list[str]:
    """Return the command that converts each board size of some sources, in its own store."""
    stored = store.manifest.board_size
    found = {int(size) for source in sources for size in source.facts.sizes}
    found |= {source.facts.board_size or 0 for source in sources if source.facts.positions} | {stored or 0}
    targets = {n: store.path if n == stored else f"{store.path}-{n}x{n}" for n in sorted(found)}
    return [
        command_line("convert", *run.inputs, target, **run.options | {"board_size": n})
        for n, target in targets.items()
        if MIN_SIZE <= n <= MAX_SIZE
    ]


def rejected_error(
    sources: Sequence[Source],
    store: Store,
    run: RunRecord,
    *,
    rejected: int,
    records: int,
    lost: float,
    limit: float,
) -> RejectRateError:
    """Return the error of a run of which too much was rejected.

    Args:
        sources: The sources.
        store: The store.
        run: The options and inputs of the run.
        rejected: Number of rejected records.
        records: Number of records.
        lost: Share of the bytes in files that were rejected as a whole.
        limit: Largest allowed share of each.
    """
    found = []
    if rejected:
        found += [f"{rejected:,} of {count_of(records, 'record')} ({rejected / records:.2%})"]
    if files := sum(source.facts.failure is not None for source in sources):
        found += [f"{files:,} of {count_of(len(sources), 'file')} ({lost:.2%} of the bytes)"]
    is_size_given = "board_size" in run.options
    causes = []
    for source in sources:
        for reason, (count, first) in source.facts.reasons.items():
            if is_size_given and reason == Reason.BOARD_SIZE:
                count -= source.facts.other_sizes  # left out on request
            # The one reason of a file that was rejected as a whole is not counted in records.
            detail = first if source.facts.failure else f"{count_of(count, 'record')}, such as: {first}"
            if count:
                causes.append((reason, source.name, detail))
    reasons = {reason for reason, _, _ in causes}
    hints, commands = [], []
    if Reason.UNREADABLE in reasons:
        hints.append("Make the unreadable files readable, or remove them.")
    if reasons != {Reason.UNREADABLE}:
        hints.append("Check the files, and move those that contain no positions out of the inputs.")
        hints.append("If the loss is acceptable, raise --max-reject-rate.")
    if "salvage" not in run.options and not reasons.isdisjoint(SALVAGEABLE):
        hints.append("Add --salvage to keep what precedes damage, except in formats read as a whole.")
    if not is_size_given and any(source.facts.sizes for source in sources):
        hints.append("Convert each board size into its own store:")
        commands = _commands_of_sizes(sources, store, run)
    return RejectRateError(
        "too much was rejected; nothing was published",
        path=store.path,
        found=" and ".join(found),
        expected=f"at most {limit:.2%} of the records and of the bytes",
        lines=lines_by_cause(sorted(causes)),
        hint=" ".join(hints),
        commands=commands,
    )
