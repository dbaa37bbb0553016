"""A run of ``convert`` under the store's lock: the order of its steps."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, groupby
from math import inf
from typing import Any, Final, TypeVar, cast

import pyarrow as pa

from hexdata import __version__
from hexdata.convert import publish, report
from hexdata.convert.companions import add_companions
from hexdata.convert.inputs import SkipCause, choose_new, digest_source, require_same_sidecars
from hexdata.convert.options import ConvertOptions, ConvertResult
from hexdata.convert.read import count_games, read_sources
from hexdata.convert.shuffled import collection_key, find_shuffled_games
from hexdata.convert.spool import Source, SpoolFacts
from hexdata.convert.targets import choose_columns
from hexdata.engine import Engine
from hexdata.errors import ConfigError, InputError, Reason, StoreError
from hexdata.games.convention import Convention, Decision, decide, votes_text
from hexdata.progress import Progress
from hexdata.schema import is_legacy_format, positions_schema, rejected_schema, sources_schema
from hexdata.storage import AnyPath, client_memory, is_address, local_work, storage_of
from hexdata.store import Store
from hexdata.store.commands import RECORDED_OPTIONS, RunRecord
from hexdata.store.files import FileFacts
from hexdata.store.integrity import rebuild_hint, require_intact
from hexdata.store.parquet import write_parquet
from hexdata.store.stage_files import StageFiles
from hexdata.system import default_workers
from hexdata.text import count_of, listed, without_game

Result = TypeVar("Result")

_READ_TABLES: Final = ("games", "sources", "rejected")
"""The tables of an existing store that are read, so that new files can be compared with them."""
_DIGESTED_AT_ONCE: Final = 64
"""Maximum number of files of a task of a thread."""
_LARGE_FILE: Final = 1 << 17
"""Mean size in bytes of local files from which several threads digest them faster than one."""
_HELD_BYTES: Final = 32 << 20
"""Maximum size of all small files whose bytes are kept after they are digested."""
_SOURCE_WEIGHT: Final = 256
"""The work that a source takes in addition to that of its bytes, in bytes of text."""
_BATCH_WEIGHT: Final = 1 << 20
"""Work of a task and a part of the store: half a second of a core, and 0.3 million positions of games."""
_SECONDS_PER_WEIGHT: Final = 5e-7
"""Approximate CPU time to read a source."""
_SECONDS_PER_POSITION: Final = 5e-7
"""Approximate CPU time to write a position."""
_SMALL_HEADER: Final = 4096
"""Headers of at most this many bytes are always accepted; real ones have 300 to 40,000."""
LARGE_HEADERS: Final = 64 << 20
"""``limit-headers``: maximum bytes of JSON text of all larger headers of a run, as later stages load them."""


@dataclass
class ConvertRun:
    """A run under the store's lock. Each method is one step, called in order by ``convert``.

    Args:
        store: The open store, locked for writing.
        options: Options of the conversion.
        progress: Receives progress reports and notes.
        engine: Runs the tasks of the sources.
        files: The input files, sorted by name.
        run: The options and inputs, for the commands in messages.

    Raises:
        ConfigError: The store was created with other shares of val and test, or has another board size.
    """

    store: Store
    options: ConvertOptions
    progress: Progress
    engine: Engine
    files: Sequence[Source]
    run: RunRecord

    def __post_init__(self) -> None:
        store, options = self.store, self.options
        self.client_memory = client_memory(store.path, *(file.path for file in self.files))
        self.parts = StageFiles(store, "convert", FileFacts, self.progress)
        """The files of positions and games that this run writes."""
        recorded, size = store.manifest.stages.get("convert", {}), store.manifest.board_size
        given = {name: (recorded.get(name), getattr(options, name)) for name in ("val", "test")}
        given["board size"] = size, options.board_size
        others = [f"{n} {a}, not {b}" for n, (a, b) in given.items() if None not in (a, b) and a != b]
        if others:
            hint = "Use the options of the store, or convert into a new store."
            raise ConfigError(f"the store has {' and '.join(others)}", path=store.path, hint=hint)

    def convert(self, skipped: dict[str, str]) -> ConvertResult:
        """Convert the files that the store does not have yet and return the result of the run.

        Args:
            skipped: Name → cause of the files below the inputs that are no sources; others are added.
        """
        store, options = self.store, self.options
        # New games are compared with these tables. Positions are not read, so it is enough that they exist.
        require_intact(store, _READ_TABLES, self.progress)
        for name in store.missing("positions"):
            hint, path = rebuild_hint(store, name), store.path / name
            raise StoreError("the file is missing or has another size", path=path, hint=hint)
        new, same = self._digest()
        if any(source.facts.failure for source in new):  # before any file is read
            self._check_rejected(new)
        self._read(new)
        require_same_sidecars(new)
        sources, left_out = self._choose_size(new)
        skipped |= left_out
        for file, name in same:
            # A copy of a file that is left out is so for the same reason: the store lacks its bytes.
            renamed = f": same bytes as {name}" if file.name != name else ""
            skipped[file.name] = left_out.get(name, f"{SkipCause.KNOWN_BYTES}{renamed}")
        for note in report.notes_of_skipped(skipped):
            self.progress.note(note)
        self._check_rejected(sources)
        _decide_conventions(sources, options.value_convention)
        # Collections without ids depend on conventions, companions on games, and ids on their number.
        self._find_shuffled(sources)
        add_companions(sources)
        totals = _assign_ids(sources, store.manifest.counts)
        targets = choose_columns(sources, store.manifest.targets)
        for source in sources:
            source.notes = tuple(report.notes_of(source))
        unknown, flags = 0, Counter[str]()
        if sources:
            replaced = self._write_parts(sources, targets).values()
            # From the files, as parts of a run that was killed are not written again.
            games = (name for name in self.parts.entries if name.startswith("games/"))
            flags_of, in_games = publish.summarize_games(store.path / name for name in games)
            for own in flags_of.values():
                flags.update(own)
            positions = sum(source.facts.positions for source in sources)
            if unknown := positions - in_games:
                self.progress.note(without_game(unknown, positions))
            store.manifest.board_size, store.manifest.targets = self.board_size, targets
            for name in replaced:  # by parts that have all optional columns of the store
                del store.manifest.files[name]
            self._publish(sources, totals, flags_of)
        self.parts.remove_others()  # parts that were replaced, also by a run that was killed since
        self.parts.remove_work()
        return _result(sources, skipped, flags, unknown, options)

    def _run(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], seconds: float
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, one per batch of sources, and yield the index and the result of each.

        Args:
            function: The task.
            tasks: Its arguments.
            seconds: CPU time of all tasks, approximately.
        """
        memory, workers = self.options.WORKER_MEMORY + self.client_memory, self._workers(seconds)
        return self.engine.run(function, tasks, workers=workers, memory=memory)

    def _workers(self, seconds: float = inf) -> int:
        """Return the number of workers on each machine for an amount of CPU time."""
        return self.options.processes(self.engine.cores_for(seconds), self.client_memory)

    # Reading

    def _digest(self) -> tuple[list[Source], list[tuple[Source, str]]]:
        """Return the new files; and the others, each with the name of the source that has the same bytes."""
        files, workers = self.files, self._workers()
        is_small = sum(file.bytes for file in files) < len(files) * _LARGE_FILE
        if is_small and not any(is_address(file.path) for file in files):
            workers = 1  # several threads wait for Python's lock between small reads
        self.progress.begin("digest", len(files), "files")
        step, held = min(_DIGESTED_AT_ONCE, len(files) // (8 * workers) + 1), 0
        pieces = [files[start : start + step] for start in range(0, len(files), step)]
        # Threads are enough: reading and hashing release the lock of Python.
        with ThreadPoolExecutor(workers) as pool:
            for done in pool.map(lambda piece: [digest_source(file) for file in piece], pieces):
                self.progress.advance(len(done))
                held += sum(len(file.content or b"") for file in done)
                for file in done if held > _HELD_BYTES else ():
                    file.content = None  # it is read again
        new, same = choose_new(files, self.store, salvage=self.options.salvage)
        if grown := [file.name for file in new if file.part]:
            text = f"reading only the new lines of {count_of(len(grown), 'file')}: {listed(grown)}"
            self.progress.note(text)
        return new, same

    def _read(self, files: Sequence[Source]) -> None:
        """Read the files and set their facts."""
        self.progress.begin("read", sum(file.new_bytes for file in files), "bytes")
        seconds = sum(map(_weight, files)) * _SECONDS_PER_WEIGHT
        batches = _batches([file for file in files if not file.facts.failure])
        folders = [self.parts.work / _digest_of(batch, self.options) for batch in batches]
        tasks = ((batch, folder, self.options) for batch, folder in zip(batches, folders, strict=True))
        for index, facts in self._run(read_sources, tasks, seconds):
            _set_facts(batches[index], facts, folders[index])
            self.progress.advance(sum(file.new_bytes for file in batches[index]))
        # Once, as memory that is released is slow to get again: DuckDB's limit leaves little beside it.
        pa.default_memory_pool().release_unused()
        _limit_headers(files)

    def _choose_size(self, sources: list[Source]) -> tuple[list[Source], dict[str, str]]:
        """Choose the board size; return the sources of this size, and name → cause of the others.

        Raises:
            InputError: The sources have several sizes and the option ``board_size`` is not given; or the
                store is new and none has the given size.
        """
        wanted, stored = self.options.board_size, self.store.manifest.board_size
        if wanted is None:
            sizes = {source.facts.board_size for source in sources if source.facts.positions} | {stored}
            if len(sizes - {None}) > 1:
                raise report.several_sizes_error(sources, self.store, self.run)
            self.board_size = next(iter(sizes - {None}), None)
            return sources, {}
        # A file without any board is kept, so that its rejected records are reported.
        others = {s.name: s.facts.board_size for s in sources if s.facts.board_size not in (None, wanted)}
        kept = [source for source in sources if source.name not in others]
        if others and stored is None and all(source.facts.board_size is None for source in kept):
            found = ", ".join(f"{n} x {n}" for n in sorted({*others.values()} - {None}))
            raise InputError("no file has this board size", found=found, expected=f"{wanted} x {wanted}")
        self.board_size = wanted if any(source.facts.positions for source in kept) else stored
        return kept, {name: f"{SkipCause.BOARD_SIZE}: {n} x {n}" for name, n in others.items()}

    def _check_rejected(self, sources: Sequence[Source]) -> None:
        """Check the share of rejected records, and of the bytes of files rejected as a whole.

        What was left out on request is no loss: the ends of games, and positions of other board sizes.

        Raises:
            RejectRateError: A share is above ``max_reject_rate``.
        """
        read = [source for source in sources if source.facts.failure is None]
        other_sizes = sum(s.facts.other_sizes for s in read) if self.options.board_size else 0
        records = sum(s.facts.records for s in read) - other_sizes
        rejected = sum(s.facts.rejected - s.facts.cut for s in read) - other_sizes
        total = sum(max(s.new_bytes, 1) for s in sources)  # the size of a broken link is 0
        lost = (total - sum(max(s.new_bytes, 1) for s in read)) / max(total, 1)
        limit = self.options.max_reject_rate
        if max(rejected / max(records, 1), lost) > limit:
            raise report.rejected_error(
                sources, self.store, self.run, rejected=rejected, records=records, lost=lost, limit=limit
            )

    def _find_shuffled(self, sources: Sequence[Source]) -> None:
        """Find the games of shuffled sources, one collection at a time; its first source owns them."""
        collections: dict[str, list[Source]] = {}
        for source in sources:
            if source.facts.mixed and source.facts.positions:
                source.collection = collection_key(source)
                members = collections.setdefault(source.collection, [])
                members.append(source)
                source.owns_games = source is members[0]
        for members in collections.values():
            assert self.board_size is not None
            members[0].facts.games = find_shuffled_games(
                members,
                self.board_size,
                truncate=self.options.truncate_repeats,
                memory=self.options.memory,
                threads=self.options.processes(default_workers()),
            )
            for source in members:
                count_games(source.spool, [source.facts])

    # Writing

    def _write_parts(self, sources: Sequence[Source], targets: tuple[str, ...]) -> dict[str, str]:
        """Write the parts of positions and games of all batches, without those that an earlier run wrote.

        Returns:
            New name → name of the parts of the store that get more columns.
        """
        store, options, old = self.store, self.options, self.store.manifest
        sources = [source for source in sources if source.facts.positions]
        batches = groupby(sources, key=lambda source: source.folder)
        parts = [publish.groups_of(batch) for _, batch in batches]
        files = [publish.part_files(part) for part in parts]
        duplicates = local_work(self.parts.work, "duplicates") / "duplicates.parquet"
        memory, threads = options.memory, options.processes(default_workers())
        groups = [*chain.from_iterable(parts)]
        publish.find_duplicates(groups, store, duplicates, self.progress, memory=memory, threads=threads)
        # All parts have the same columns, so that other programs can read them together. The name of a part
        # that gets more columns changes, since the old part stays until the manifest names the new one.
        same = targets == old.targets
        widened = {} if same else {publish.widened_name(name): name for name in old.files_in("positions")}
        # All that determines the parts: what a killed run wrote with another plan is not used. The name of a
        # folder is a digest of the names and contents of a batch, also of files that are left out.
        read = [[s.source_id, s.number, s.origins, s.folder.name] for s in sources]
        plan: list[Any] = [__version__, _reading(options), options.value_convention, self.board_size, targets]
        plan += [old.counts, hashlib.sha256(json.dumps(read).encode()).hexdigest()]
        self.parts.resume(plan, (*widened, *chain.from_iterable(files)))
        self.parts.remove_others()
        done = self.parts.entries.keys()
        todo = [part for part, own in zip(parts, files, strict=True) if not done >= own.keys()]
        positions = sum(group.positions for part in todo for group in part)
        self.progress.begin("write", positions, "positions")
        widened_rows = sum(old.files[name].rows for name in widened.values())
        seconds = (positions + widened_rows) * _SECONDS_PER_POSITION
        tasks = (
            (store.path, part, self.board_size, targets, options, publish.duplicates_among(duplicates, part))
            for part in todo
        )
        schemas = tuple(positions_schema(self.board_size or 0, columns) for columns in (old.targets, targets))
        widening = [
            (store.path, name, old.files[name], new, schemas)
            for new, name in widened.items()
            if new not in done
        ]
        publishing = self._run(publish.publish_part, tasks, seconds)
        try:
            for _, written in chain(publishing, self._run(publish.widen_part, widening, seconds)):
                for name, facts in written.items():
                    self.parts.record(name, facts)
                    if name.startswith("positions/") and name not in widened:
                        self.progress.advance(facts.rows)
        finally:
            # After an error, too, so that the next run does not write the finished parts again.
            self.parts.save()
            storage_of(duplicates.parent).remove_tree()
        return widened

    def _publish(
        self,
        sources: Sequence[Source],
        totals: Mapping[str, int],
        flags: Mapping[int, Mapping[str, int]],
    ) -> None:
        """Write the sources and rejected parts of this run, then the manifest."""
        manifest, options = self.store.manifest, self.options
        rejected = sum(s.facts.rejected for s in sources)
        rows = publish.source_batches(sources, flags, salvage=options.salvage)
        tables = [("sources", sources_schema(), rows)]
        if rejected:
            tables.append(("rejected", rejected_schema(), publish.rejected_batches(sources)))
        written = {}
        for name, schema, batches in tables:
            part = f"{name}/part-{len(manifest.files_in(name)):06d}.parquet"
            written[part] = write_parquet(self.store.path / part, schema, batches, replace=False)
        # Last, the manifest: until it is replaced, readers see the store as it was before.
        manifest.counts = {**totals, "rejected": manifest.counts["rejected"] + rejected}
        positions, rejected = manifest.counts["positions"], manifest.counts["rejected"]
        given = {name: getattr(options, name) for name in RECORDED_OPTIONS["convert"]}
        lineage = {name: value for name, value in given.items() if value not in (None, "reject")}
        counts = {"records": positions + rejected, "positions": positions, "rejected": rejected}
        self.parts.publish(lineage | counts, written)


def _result(
    sources: Sequence[Source],
    skipped: Mapping[str, str],
    flags: Counter[str],
    unknown: int,
    options: ConvertOptions,
) -> ConvertResult:
    """Return the result of a run, in which ``unknown`` positions belong to no known game."""
    counts = {
        name: sum(getattr(source.facts, name) for source in sources)
        for name in ("records", "positions", "rejected", "games")
    }
    reasons: Counter[str] = Counter()
    for source in sources:
        for reason, (count, _) in source.facts.reasons.items():
            reasons[reason] += count
    return ConvertResult(
        sources=len(sources),
        skipped=len(skipped),
        **counts,
        duplicate_games=sum(count for code, count in flags.items() if code.startswith("duplicate-")),
        reasons=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        without_game=unknown,
        failed_files={s.name: ": ".join(s.facts.failure) for s in sources if s.facts.failure},
        flags=dict(sorted(flags.items())),
        notes=report.notes_of_option(sources, options.value_convention),
        file_notes={source.name: [*source.notes] for source in sources if source.notes},
        skipped_files=dict(sorted(skipped.items())),
    )


# Batches of sources


def _weight(file: Source) -> int:
    """Return the work that a source takes, in bytes of text. A legacy pickle has fewer positions per byte."""
    return _SOURCE_WEIGHT + file.new_bytes // (8 if file.name.endswith(".pkl.gz") else 1)


def _batches(files: Iterable[Source]) -> list[list[Source]]:
    """Divide the files, in order, into batches: each is read by one task and makes one part of the store.

    This depends only on the names and sizes of the files, and so do the parts.
    """
    batches: list[list[Source]] = []
    total = _BATCH_WEIGHT
    for file in files:
        weight = _weight(file)
        total += weight
        if total > _BATCH_WEIGHT:
            batches.append([])
            total = weight
        batches[-1].append(file)
    return batches


def _reading(options: ConvertOptions) -> list[Any]:
    """Return the values of the options that change what is read of a source, and of the splits."""
    return [getattr(options, name) for name in (*RECORDED_OPTIONS["convert"], "board_size")]


def _digest_of(batch: Sequence[Source], options: ConvertOptions) -> str:
    """Return the digest of what is read of the files of a batch, and how."""
    files = [[file.name, file.identity, file.part and asdict(file.part)] for file in batch]
    return hashlib.sha256(json.dumps([__version__, _reading(options), files]).encode("ascii")).hexdigest()


def _set_facts(batch: Sequence[Source], facts: Sequence[SpoolFacts], folder: AnyPath) -> None:
    """Set what was read of the sources of a batch, and where it is in their spools."""
    before: dict[str | None, tuple[int, int, int]] = {}  # sources, positions and games in each spool
    for number, (source, own) in enumerate(zip(batch, facts, strict=True)):
        source.facts, source.folder, source.number, source.content = own, folder, number, None
        if own.failure and own.failure[0] == Reason.UNREADABLE:
            source.sha256 = ""  # as if it could not be digested: the store does not have these bytes
        place = before.get(own.spool, (0, 0, 0))
        source.index, source.first_row, source.first_spooled_game = place
        before[own.spool] = place[0] + 1, place[1] + own.spooled, place[2] + own.games


def _limit_headers(sources: Iterable[Source]) -> None:
    """Reject the sources with the largest headers if all large headers together are above the limit."""
    large = [source for source in sources if source.facts.header_bytes > _SMALL_HEADER]
    large.sort(key=lambda source: (source.facts.header_bytes, source.name))
    sizes = [source.facts.header_bytes for source in large]
    for source, size, total in zip(large, sizes, accumulate(sizes), strict=True):
        if total > LARGE_HEADERS:
            detail = (
                f"its header has {size:,} bytes; expected at most {LARGE_HEADERS:,} for the large headers of "
                "a run; convert fewer of these files at once"
            )
            source.facts = SpoolFacts.failed(Reason.LIMIT_HEADERS, detail)
            source.sha256 = ""  # a later run can have fewer of them


# Decisions over all sources: value conventions and ids


def _decide_conventions(sources: Sequence[Source], option: str) -> None:
    """Set the value convention of each source: by its own evidence, else the given one.

    Raises:
        InputError: The convention of some sources is undecided; the error lists all of them.
    """
    given = None if option == "auto" else cast("Convention", option)
    undecided = []
    for source, facts in ((source, source.facts) for source in sources if source.facts.positions):
        source.decision = Decision("blue-is-0", "winners")  # the store's, in which other formats are read
        if is_legacy_format(facts.format):
            source.decision = decide(facts.ballots, facts.layout, given)
        if source.decision is None:
            undecided.append(f"{source.name}: {votes_text(facts.ballots, facts.layout)}")
    if undecided:
        raise InputError(
            f"the value convention of {count_of(len(undecided), 'file')} cannot be determined",
            found="; ".join(undecided),
            expected="almost all votes for the same convention",
            hint="Look at the games of these files. If you know it, pass --value-convention blue-is-0 or "
            "blue-is-1; it does not override named winners that agree.",
        )


def _assign_ids(sources: Sequence[Source], stored: Mapping[str, int]) -> dict[str, int]:
    """Assign ids: to sources by name, to positions by source and record, to games by source and order.

    Args:
        sources: The sources, sorted by name.
        stored: Number of sources, positions and games of the store.

    Returns:
        The numbers of all sources, positions and games.
    """
    source_id, position, game = (stored[name] for name in ("sources", "positions", "games"))
    collections: dict[str, int] = {}  # all sources of a collection share the games of the first
    for source in sources:
        source.source_id, source.first_position = source_id, position
        source.first_game = collections.setdefault(source.collection, game) if source.collection else game
        source_id += 1
        position += source.facts.positions
        game += source.facts.games
    return {"sources": source_id, "positions": position, "games": game}
