"""A run of ``convert`` under the store's lock: the decisions over all sources, and the order of the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from math import inf
from typing import Any, Final, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata import __version__
from hexdata.convert.chains import resolve_chains
from hexdata.convert.companions import Companions, read_companions, unnamed_files
from hexdata.convert.duplicates import FlagCounts, NewGames, StoredGames, find_duplicates, sorted_counts
from hexdata.convert.games_by_id import KATAHEX, collection_key, resolve_collection
from hexdata.convert.inputs import (
    InputFiles,
    KnownSource,
    SkipCause,
    SourceFile,
    digest_source,
    find_new_lines,
    name_suffixes,
    new_sources,
)
from hexdata.convert.options import ConvertOptions, ConvertResult
from hexdata.convert.publish import Assignment, publish_games, publish_positions
from hexdata.convert.spool import (
    ReadOptions,
    Spool,
    SpooledHeader,
    SpoolFacts,
    complete_spools,
    read_source,
)
from hexdata.convert.tables import (
    SMALL_HEADER,
    ConvertSource,
    failed_files,
    failures_by_reason,
    note_of_unused_option,
    notes_of,
    reasons_of,
    refuse_large_headers,
    rejected_batches,
    source_batches,
)
from hexdata.convert.targets import choose_targets
from hexdata.engine import Engine
from hexdata.errors import ConfigError, InputError, Reason, RejectRateError, StoreError
from hexdata.formats import SALVAGEABLE
from hexdata.games.convention import (
    Convention,
    Decision,
    decide,
    layout_convention,
    votes_text,
)
from hexdata.pool import default_workers
from hexdata.progress import Progress
from hexdata.schema import is_legacy_format, rejected_schema, sources_schema
from hexdata.storage import AnyPath, client_memory, storage_of
from hexdata.store import Store
from hexdata.store.arrow_memory import release_memory
from hexdata.store.commands import RunRecord, command_line
from hexdata.store.files import FileFacts
from hexdata.store.integrity import find_damage, rebuild_hint, require_intact
from hexdata.store.ledger import Ledger
from hexdata.store.manifest import StoreFile
from hexdata.store.parquet import read_parquet, write_parquet
from hexdata.store.stage_log import StageLog
from hexdata.strict_json import parse_metadata
from hexdata.text import count_of, lines_by_cause, without_game

__all__ = ["ConvertRun"]

Result = TypeVar("Result")

_READ_TABLES: Final = ("games", "sources", "rejected")
"""The tables of an existing store that are read, so that new files can be compared with them."""


class ConvertRun:
    """A run under the store's lock. Each method is one step, called in order by ``convert``.

    Args:
        store: The open store, locked for writing.
        options: Options of the conversion.
        progress: Receives progress reports and notes.
        engine: Runs the tasks of the sources.
        files: The input files.
        inputs: The inputs as given, for error messages.

    Raises:
        ConfigError: The store was created with other shares of val and test, or has another board size.
    """

    def __init__(
        self,
        store: Store,
        options: ConvertOptions,
        progress: Progress,
        engine: Engine,
        files: InputFiles,
        inputs: Sequence[AnyPath],
    ) -> None:
        self.files = files.sources
        """The input files, sorted by name."""
        self.skipped = dict(files.skipped)
        """Name → cause of the files that are not read."""
        self.inputs = inputs
        self.store = store
        self.options = self._check_board_size(store, self._check_splits(store, options))
        self.progress = progress
        self.engine = engine
        self.client_memory = client_memory(store.path, *(file.path for file in self.files))
        self.work = store.work / "convert"
        self.seconds = inf
        """CPU time of all tasks that read and write sources, approximately."""

    @staticmethod
    def _check_splits(store: Store, options: ConvertOptions) -> ConvertOptions:
        """Return the options if their splits are those of the store, since a game's split never changes.

        Raises:
            ConfigError: The store was created with other shares of val and test.
        """
        recorded = store.manifest.stages.get("convert")
        if recorded is None or (recorded["val"], recorded["test"]) == (options.val, options.test):
            return options
        raise ConfigError(
            "the store was created with other shares of val and test",
            path=store.path,
            found=f"val {options.val}, test {options.test}",
            expected=f"val {recorded['val']}, test {recorded['test']}",
            hint="Use the same shares, or convert into a new store.",
        )

    @staticmethod
    def _check_board_size(store: Store, options: ConvertOptions) -> ConvertOptions:
        """Return the options if their board size is that of the store.

        Raises:
            ConfigError: The store has another board size.
        """
        size = store.manifest.board_size
        if None in (size, options.board_size) or size == options.board_size:
            return options
        raise ConfigError(
            "the store has another board size",
            path=store.path,
            found=f"--board-size {options.board_size}",
            expected=f"{size}, the size of this store",
            hint="Convert the files into a new store.",
        )

    def convert(self) -> ConvertResult:
        """Convert the files that the store does not have yet and return the result of the run."""
        self._check_store()
        new, same = self._digest()
        self._check_rejected([self._unread(file) for file in new])
        sources = self._one_board_size(self._read(new))
        self._skip_known(same, {file.name for file in new} - {source.file.name for source in sources})
        self._note_skipped()
        self._check_rejected(sources)
        sources = self._with_companions(self._resolve(self._with_conventions(sources)))
        sources = self._with_targets(self._assign(sources))
        flags = self._flag_games(sources)
        notes = self._notes(sources, (name for _, name in same))
        unknown_before = self.store.count_without_game()
        if sources:
            facts = self._publish(sources)
            self._publish_tables(sources, facts, flags)
        result = self._result(sources, flags, notes, self.store.count_without_game() - unknown_before)
        storage_of(self.work).remove_tree()  # not needed once the manifest lists all parts
        return result

    def _check_store(self) -> None:
        """Check the tables of the store that are read, and that those of positions have their sizes.

        Raises:
            StoreError: A file is missing or damaged.
        """
        require_intact(self.store, _READ_TABLES, engine=self.engine, progress=self.progress)
        for name in self.store.missing("positions"):
            raise StoreError(
                "the file is missing or has another size",
                path=self.store.path / name,
                hint=rebuild_hint(self.store, name),
            )

    def _run(
        self, function: Callable[..., Result], tasks: list[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, one per source, and yield the index and the result of each."""
        memory = self.options.WORKER_MEMORY + self.client_memory
        return self.engine.run(function, tasks, workers=self._workers(self.seconds), memory=memory)

    def _workers(self, work: float = inf) -> int:
        """Return the number of workers on each machine for tasks of ``work`` CPU seconds; default: much."""
        return self.options.processes(self.engine.machines.cores_for(work), self.client_memory)

    def _digest(self) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
        files = self.files
        self.progress.begin("digest", len(files), "files")
        digested = list(files)
        tasks = [(file.path,) for file in files]
        for index, found in self.engine.run_light(digest_source, tasks, workers=self._workers()):
            file = replace(files[index], **found._asdict())
            digested[index] = replace(file, bytes=file.bytes or files[index].bytes)
            self.progress.advance(1)
        new, same = new_sources(digested, self._known_sources())
        new = [file if file.base is None else self._grown(file, file.base) for file in new]
        if grown := [file.name for file in new if file.part]:
            names = _listed([(name, "") for name in grown])
            self.progress.note(f"reading only the new lines of {count_of(len(grown), 'file')}: {names}")
        return new, same

    def _grown(self, file: SourceFile, base: KnownSource) -> SourceFile:
        """Return a file to which lines were appended since it was ``base``, with the part to read.

        Raises:
            SourceChangedError: Its old bytes have changed.
        """

        def last_rejected() -> bool:
            last = (pc.field("source_id") == base.source_id) & (pc.field("record") == base.records - 1)
            tables = [read_parquet(path, ["record"], last) for path in self.store.files("rejected")]
            return any(table.num_rows for table in tables)

        return replace(file, part=find_new_lines(file, base, last_rejected, self.store.manifest.board_size))

    def _known_sources(self) -> list[KnownSource]:
        """Return the store's sources, except those to be salvaged now."""
        damaged = self._damaged_sources() if self.options.salvage else set()
        columns = [name for name in KnownSource._fields if name != "continues"]
        known = []
        for path in self.store.files("sources"):
            rows = read_parquet(path, [*columns, "salvaged"]).to_pylist()
            headers = []
            if any(row["format"] == "trmph" for row in rows):  # others cannot be continued
                trmph = pc.field("format") == "trmph"
                headers = read_parquet(path, ["source_id", "header"], trmph).to_pylist()
            continues = {
                row["source_id"]
                for row in headers
                if "continues" in parse_metadata(row["header"], path, f"header of source {row['source_id']}")
            }
            known += [
                KnownSource(**{name: row[name] for name in columns}, continues=row["source_id"] in continues)
                for row in rows
                if row["source_id"] not in damaged or row["salvaged"] is not None
            ]
        return known

    def _damaged_sources(self) -> set[int]:
        """Return the ids of the store's sources that were rejected as a whole because of damage."""
        whole = (pc.field("record").is_null()) & pc.field("reason").isin(sorted(SALVAGEABLE))
        tables = [read_parquet(path, ["source_id"], whole) for path in self.store.files("rejected")]
        return {source for table in tables for source in table["source_id"].to_pylist()}

    def _read(self, files: list[SourceFile]) -> list[ConvertSource]:
        """Read the files, in the order of their names up to ``max_positions``; skip the others.

        Raises:
            ConfigError: The store would have no positions, since the first file has more.
        """
        self.progress.begin("read", sum(file.new_bytes for file in files), "bytes")
        self.seconds = sum(map(_seconds_of, files))
        most = self.options.max_positions
        if most is None:
            facts = self._read_files(files)
        else:
            facts = self._read_up_to(files, most)
            self.skipped |= {file.name: SkipCause.MAX_POSITIONS for file in files[len(facts) :]}
            files = files[: len(facts)]
        refuse_large_headers(facts)
        return [
            ConvertSource(file, _spool(self.work / file.identity, facts[file.name]), facts[file.name])
            for file in files
        ]

    def _read_up_to(self, files: list[SourceFile], most: int) -> dict[str, SpoolFacts]:
        """Read the first files with which the store has at most ``most`` positions.

        Files are read in groups, each as large as the remaining positions need according to the files before.

        Args:
            files: The files, in order.
            most: Maximum number of positions in the store.

        Returns:
            The facts of these files, by name and in order.

        Raises:
            ConfigError: The store would have no positions, since the first file with positions has more.
        """
        stored = positions = self.store.manifest.counts.get("positions", 0)
        kept: dict[str, SpoolFacts] = {}
        start = read = 0
        while start < len(files) and positions < most:
            stop = start + self._workers()
            if positions > stored:
                needed = (most - positions) * read / (positions - stored)
                sizes = np.cumsum([file.new_bytes for file in files[start:]])
                stop = max(stop, start + int(np.searchsorted(sizes, needed)))
            facts = self._read_files(files[start:stop])
            for file in files[start:stop]:
                found = facts[file.name].positions
                if positions + found > most:
                    if not positions:
                        raise ConfigError(
                            "max_positions is below the number of positions of the first file",
                            path=file.path,
                            found=f"{most:,}",
                            expected=f"at least {found:,}, since files are converted as a whole",
                        )
                    return kept
                kept[file.name] = facts[file.name]
                positions += found
                read += file.new_bytes
            start = stop
        return kept

    def _read_files(self, files: list[SourceFile]) -> dict[str, SpoolFacts]:
        """Read the files and return the facts of each by name."""
        facts = {file.name: self._unread(file).facts for file in files if file.problem}
        readable = [file for file in files if not file.problem]
        options = self.options
        reading = ReadOptions(options.salvage, options.truncate_repeats, options.board_size)
        tasks = [
            (
                file.path,
                self.work / file.sha256,
                replace(reading, part=file.part),
                file.version,
                file.bytes,
                file.sha256,
            )
            for file in readable
        ]
        for index, found in self._run(read_source, tasks):
            if found.header_bytes > SMALL_HEADER:
                found.header = SpooledHeader(Spool(self.work / readable[index].sha256))
            facts[readable[index].name] = found
            release_memory()
            self.progress.advance(readable[index].new_bytes)
        return facts

    def _unread(self, file: SourceFile) -> ConvertSource:
        """Return the source of a file that was not read yet, or that cannot be read."""
        facts = SpoolFacts.failed(Reason.UNREADABLE, file.problem) if file.problem else SpoolFacts()
        return ConvertSource(file, Spool(self.work / file.identity), facts)

    def _with_conventions(self, sources: list[ConvertSource]) -> list[ConvertSource]:
        """Set the value convention of each source: by its own evidence, else the given one.

        Raises:
            InputError: The convention of some sources is undecided; the error lists all of them.
        """
        result = [self._with_convention(source) for source in sources]
        undecided = [s for s in result if s.facts.positions and s.decision is None]
        if not undecided:
            return result
        found = [votes_text(s.facts.ballots, layout_convention(s.facts.header)) for s in undecided]
        names = [s.file.name for s in undecided]
        one = len(names) == 1
        raise InputError(
            f"the value convention of {'the file' if one else f'{len(names)} files'} cannot be determined",
            path=names[0] if one else None,
            found=found[0] if one else "; ".join(f"{n}: {f}" for n, f in zip(names, found, strict=True)),
            expected="almost all votes for the same convention",
            hint=_HINT,
        )

    def _with_convention(self, source: ConvertSource) -> ConvertSource:
        facts = source.facts
        if not facts.positions:
            return source
        if not is_legacy_format(facts.format):  # its values are in the store's convention
            return replace(source, decision=Decision("blue-is-0", "winners"))
        option = self.options.value_convention
        given = None if option == "auto" else cast("Convention", option)
        return replace(source, decision=decide(facts.ballots, layout_convention(facts.header), given))

    def _one_board_size(self, sources: list[ConvertSource]) -> list[ConvertSource]:
        """Return the sources of one board size: all, or those of the option ``board_size``.

        Raises:
            InputError: The sources have several sizes and the option is not given; or the store is new and
                none has the given size.
        """
        by_size: dict[int, list[ConvertSource]] = {}
        for source in sources:
            if source.facts.board_size is not None and (self.options.board_size or source.facts.positions):
                by_size.setdefault(source.facts.board_size, []).append(source)
        self.board_size = self.store.manifest.board_size
        if self.options.board_size is None:
            if len({*by_size, self.board_size} - {None}) > 1:
                raise self._several_sizes_error(by_size)
            self.board_size = self.board_size or next(iter(by_size), None)
            return sources
        chosen = by_size.pop(self.options.board_size, [])
        if any(source.facts.positions for source in chosen):
            self.board_size = self.options.board_size
        if by_size and not chosen and self.board_size is None:
            raise InputError(
                "no file has this board size",
                path=self.inputs[0] if len(self.inputs) == 1 else None,
                found=", ".join(f"{n} x {n} in {count_of(len(by_size[n]), 'file')}" for n in sorted(by_size)),
                expected=f"{self.options.board_size} x {self.options.board_size}, as given with --board-size",
            )
        others = {s.file.name: f"{n} x {n}" for n in sorted(by_size) for s in by_size[n]}
        self.skipped |= {name: f"{SkipCause.BOARD_SIZE}: {size}" for name, size in others.items()}
        return [source for source in sources if source.file.name not in others]

    def _several_sizes_error(self, by_size: dict[int, list[ConvertSource]]) -> InputError:
        """Return the error that lists the sources of each board size, with the command for each."""
        stored = self.store.manifest.board_size
        positions = {n: sum(s.facts.positions for s in by_size[n]) for n in sorted(by_size)}
        main = stored or max(positions, key=lambda n: positions[n])
        options = RunRecord.of(self.options).options
        commands = []
        for n in sorted({*positions, main}):
            store = str(self.store.path) if n == main else f"{self.store.path}-{n}x{n}"
            commands.append(command_line("convert", *self.inputs, store, **options | {"board_size": n}))
        found = ", ".join(f"{n} x {n}" for n in positions)
        if stored:
            found += f"; in the store, {stored} x {stored}"
        return InputError(
            "a store has one board size; nothing was published",
            path=self.store.path,
            found=found,
            lines=lines_by_cause(
                (f"{n} x {n} boards, {count:,} positions", source.file.name, "")
                for n, count in positions.items()
                for source in by_size[n]
            ),
            hint="Convert each size into its own store:",
            commands=commands,
        )

    def _assign(self, sources: list[ConvertSource]) -> list[ConvertSource]:
        """Assign ids: to sources by name, to positions by source and record, to games by source and order."""
        manifest = self.store.manifest
        source_id = manifest.counts.get("sources", 0)
        position = manifest.counts.get("positions", 0)
        game = manifest.counts.get("games", 0)
        collections: dict[str, int] = {}
        assigned = []
        for source in sources:
            first_game = collections.setdefault(source.collection, game) if source.collection else game
            game += source.facts.games
            assigned.append(
                replace(
                    source,
                    source_id=source_id,
                    first_position=position,
                    first_game=first_game,
                )
            )
            source_id += 1
            position += source.facts.positions
        self.totals = {"sources": source_id, "positions": position, "games": game}
        return assigned

    def _with_targets(self, sources: list[ConvertSource]) -> list[ConvertSource]:
        """Choose the optional columns of each source. Columns that readers give have precedence.

        Raises:
            InputError: The store cannot have a column that a reader gives.
        """
        known = self.store.manifest.targets
        _, refused, declared = choose_targets(known, [source.facts.declared for source in sources])
        for source, causes in zip(sources, refused, strict=True):
            for name, cause in causes.items():
                raise InputError(
                    "the store cannot have a column of this file",
                    path=source.file.name,
                    found=f"{name}: {cause}",
                    hint="Convert the file into a new store.",
                )
        chosen, left_out, _ = choose_targets(declared, [source.facts.targets for source in sources])
        return [
            replace(source, targets=tuple(own), not_targets={**source.facts.not_targets, **causes})
            for source, own, causes in zip(sources, chosen, left_out, strict=True)
        ]

    def _resolve(self, sources: list[ConvertSource]) -> list[ConvertSource]:
        """Find the games of shuffled sources, one collection at a time; its first source owns them."""
        collections: dict[str, list[int]] = {}
        for index, source in enumerate(sources):
            if source.facts.mixed and source.facts.positions:
                name = collection_key(source.file, source.facts, source.convention)
                collections.setdefault(name, []).append(index)
        resolved = list(sources)
        for name, indices in collections.items():
            members = [sources[index] for index in indices]
            facts = [replace(source.facts) for source in members]
            facts[0].games = self._find_games([s.spool for s in members], facts)
            spools = complete_spools([s.spool for s in members], facts)
            for index, spool, own in zip(indices, spools, facts, strict=True):
                resolved[index] = replace(
                    sources[index], spool=spool, facts=own, collection=name, owns_games=index == indices[0]
                )
        return resolved

    def _find_games(self, spools: list[Spool], facts: list[SpoolFacts]) -> int:
        """Find the games of a collection by ids, or by boards without an id; return their number."""
        assert self.board_size is not None
        with_id = sum(own.with_id for own in facts)
        games = 0
        if with_id:
            side_positions = facts[0].format == KATAHEX
            games = resolve_collection(spools, with_id, self.board_size, side_positions=side_positions)
        if with_id == sum(own.positions for own in facts):
            return games
        return games + resolve_chains(
            spools,
            self.board_size,
            games,
            memory=self.options.memory,
            threads=self.options.processes(default_workers()),
            progress=self.progress,
        )

    def _with_companions(self, sources: list[ConvertSource]) -> list[ConvertSource]:
        """Add the notes and the names of raw files from the companion files beside the sources."""
        folders: dict[AnyPath, Companions] = {}
        result = []
        for source in sources:
            folder = source.file.path.parent
            notes = [] if folder in folders else folders.setdefault(folder, read_companions(folder)).notes
            found, facts = folders[folder], source.facts
            origins: tuple[tuple[int, str], ...] = ()
            if facts.positions and is_legacy_format(facts.format):
                notes = notes + found.compare(source.file.path.name, facts)
                wanted = unnamed_files(source.spool) if source.owns_games else set()
                named, conflicts = found.origins(wanted, facts)
                origins, notes = tuple(named.items()), notes + conflicts
            facts = replace(facts, notes=facts.notes + notes)
            result.append(replace(source, facts=facts, origins=origins))
        return result

    def _check_rejected(self, sources: list[ConvertSource]) -> None:
        """Check the share of rejected records, and of the bytes of files rejected as a whole.

        Raises:
            RejectRateError: A share is above ``max_reject_rate``.
        """
        limit = self.options.max_reject_rate
        if _reject_rate(sources) <= limit:
            return
        readable = [s for s in sources if not _is_unreadable(s)]
        hints = []
        if len(readable) < len(sources):
            hints.append(
                "Make the unreadable files readable (their permissions, links or disk), or remove them."
            )
        if any(s.facts.other_sizes and s.facts.reading.board_size is None for s in sources):
            hints.append("Give --board-size to convert the positions of one board size.")
        elif Reason.BOARD_SIZE in reasons_of(sources):
            hints.append("Split files with games of several board sizes, for example with grep '#13,'.")
        if _reject_rate(readable) > limit:
            hints.append(
                "Check the files, and move those that contain no positions out of the inputs. If the loss is "
                "acceptable, raise --max-reject-rate."
            )
        read = [s for s in sources if s.facts.failure is None]
        records, rejected = sum(s.facts.records for s in read), sum(s.facts.rejected for s in read)
        files = f"{len(sources) - len(read):,} of {count_of(len(sources), 'file')}"
        raise RejectRateError(
            "too much was rejected; nothing was published",
            path=self.store.path,
            found=f"{rejected:,} of {count_of(records, 'record')} and {files}" if rejected else files,
            expected=f"at most {limit:.2%} of the records and of the bytes",
            lines=lines_by_cause(failures_by_reason(sources)),
            hint=" ".join(hints),
        )

    def _skip_known(self, same: list[tuple[SourceFile, str]], left_out: set[str]) -> None:
        """Record the files with known bytes as skipped.

        Args:
            same: Such files, each with the name of the source that has the same bytes.
            left_out: Names of files of this run that are skipped because of their board size or
                ``max_positions``.
        """
        for file, name in same:
            renamed = f": same bytes as {name}" if file.name != name else ""
            cause = self.skipped[name] if name in left_out else f"{SkipCause.KNOWN_BYTES}{renamed}"
            self.skipped[file.name] = cause

    def _note_skipped(self) -> None:
        """Report the skipped files, in one note for each cause."""
        causes: dict[str, list[tuple[str, str]]] = {}
        for name, text in self.skipped.items():
            cause, _, detail = text.partition(": ")
            causes.setdefault(cause, []).append((name, detail))
        for cause, files in sorted(causes.items()):
            text = f"skipped {count_of(len(files), 'file')}"
            if cause == SkipCause.UNKNOWN_NAME:
                text += f" of unknown type: {name_suffixes(name for name, _ in files)}"
            elif cause == SkipCause.BOARD_SIZE:
                sizes = Counter(size for _, size in files)
                found = (f"{size} ({count_of(count, 'file')})" for size, count in sizes.items())
                text += f" because of their board size: {', '.join(found)}"
            elif cause == SkipCause.MAX_POSITIONS:
                named = _listed([(name, "") for name, _ in files])
                text += f" beyond {self.options.max_positions:,} positions: {named}"
            elif cause == SkipCause.KNOWN_BYTES and len(files) == len(self.files):
                named = _listed([(name, detail) for name, detail in files if detail])
                text = f"{count_of(len(files), 'file')} already in the store; nothing to convert"
                text += f": {named}" if named else ""
            else:
                kind = (
                    " that the store already has" if cause == SkipCause.KNOWN_BYTES else " that are no files"
                )
                named = _listed([(name, detail) for name, detail in files if detail])
                text += f"{kind}: {named}" if named else kind
            self.progress.note(text)

    def _flag_games(self, sources: list[ConvertSource]) -> list[FlagCounts]:
        """Write the duplicates and flags of games into the spools; return the counts of each source."""
        owners = [index for index, s in enumerate(sources) if s.owns_games and s.facts.games]
        new = []
        for source in (sources[index] for index in owners):
            assert source.convention is not None
            new.append(NewGames(source.spool, source.convention, source.first_game, source.facts.games))
        stored = []
        start = 0
        files = self.store.manifest.files_in("games")
        for name in sorted(files, key=lambda name: (len(name), name)):  # part-1000000 after part-999999
            stored.append(StoredGames(self.store.path / name, start, files[name].rows))
            start += files[name].rows
        counts = [FlagCounts()] * len(sources)
        if new:
            folder = self.work / "duplicates"
            found = find_duplicates(new, stored, self.board_size or 0, folder, self._run, self.progress)
            for index, own in zip(owners, found, strict=True):
                counts[index] = own
        return counts

    def _publish(self, sources: list[ConvertSource]) -> dict[str, FileFacts]:
        """Write the positions and games parts of every source; return the facts of each file by name."""
        self.progress.begin("write", sum(s.facts.positions for s in sources), "positions")
        plan = [
            [s.file.name, s.file.sha256, asdict(self._assignment(s))] for s in sources if s.facts.positions
        ]
        read_options = [self.options.salvage, self.options.truncate_repeats]
        log = StageLog(self.store.path, "convert")
        log.line(
            *(
                f"{s.file.name}: {s.facts.records:,} records, {s.facts.positions:,} positions, "
                f"{s.facts.rejected:,} rejected, {s.facts.games:,} games, read in {s.facts.seconds:.2f} s"
                for s in sources
            )
        )
        log.publish()
        ledger = Ledger(
            self.work / "convert_progress.json",
            "convert",
            [__version__, read_options, plan],
            dict[StoreFile, FileFacts],
        )
        done = self._finished_sources(sources, ledger)
        self._remove_unlisted_parts({name for sha256 in done for name in ledger[sha256]})
        todo = []
        for source in sources:
            if source.file.sha256 in done or not source.facts.positions:
                self.progress.advance(source.facts.positions)
            else:
                todo.append(source)
        tasks = [(self.store.path, s.spool, self._assignment(s), s.owns_games) for s in todo]
        try:
            for index, written in self._run(_publish_source, tasks):
                source = todo[index]
                _check_position_count(source, written)
                parts = {name: facts.to_json() for name, facts in written.items()}
                ledger.finish_buffered(source.file.sha256, parts)
                self.progress.advance(source.facts.positions)
        finally:
            ledger.save()
        return {
            name: FileFacts(**facts)
            for source in sources
            if source.file.sha256 in ledger
            for name, facts in ledger[source.file.sha256].items()
        }

    def _finished_sources(self, sources: list[ConvertSource], ledger: Ledger) -> set[str]:
        """Return the digests of sources whose parts were written by an earlier run and are intact."""
        parts = {
            name: (source.file.sha256, FileFacts(**facts))
            for source in sources
            if source.file.sha256 in ledger
            for name, facts in ledger[source.file.sha256].items()
        }
        stated = {name: facts for name, (_, facts) in parts.items()}
        damaged = {parts[name][0] for name in find_damage(self.store, stated, engine=self.engine)}
        return {sha256 for sha256, _ in parts.values()} - damaged

    def _remove_unlisted_parts(self, done: set[str]) -> None:
        """Remove parts that an interrupted run of other sources left, which no manifest or ledger names."""
        named = done | self.store.manifest.files.keys()
        for folder in ("positions", "games", "sources", "rejected"):
            path = self.store.path / folder
            for name in storage_of(path).files():
                if name.endswith(".parquet") and "/" not in name and f"{folder}/{name}" not in named:
                    self.store.require_lock()
                    storage_of(path / name).remove()

    def _assignment(self, source: ConvertSource) -> Assignment:
        assert self.board_size is not None
        assert source.convention is not None
        return Assignment(
            source.source_id,
            self.board_size,
            source.first_position,
            source.first_game,
            source.convention,
            self.options.val,
            self.options.test,
            source.origins,
            source.targets,
            tuple(source.facts.declared),
        )

    def _publish_tables(
        self, sources: list[ConvertSource], facts: dict[str, FileFacts], flags: list[FlagCounts]
    ) -> None:
        """Write the sources and rejected parts of this run, then the manifest."""
        manifest = self.store.manifest
        rejected = sum(s.facts.rejected for s in sources)
        tables: dict[str, tuple[pa.Schema, Iterable[pa.RecordBatch | pa.Table]]]
        tables = {"sources": (sources_schema(), source_batches(sources, flags, self.options))}
        if rejected:
            tables["rejected"] = (rejected_schema(), chain.from_iterable(map(rejected_batches, sources)))
        for name, (schema, batches) in tables.items():
            part = f"{name}/part-{len(manifest.files_in(name)):06d}.parquet"
            facts[part] = write_parquet(self.store.path / part, schema, batches, replace=False)
        manifest.board_size = self.board_size
        manifest.counts = {**self.totals, "rejected": manifest.counts.get("rejected", 0) + rejected}
        manifest.files |= facts
        manifest.targets = tuple(sorted({*manifest.targets, *(n for s in sources for n in s.targets)}))
        manifest.stages["convert"] = {
            "val": self.options.val,
            "test": self.options.test,
            "salvage": self.options.salvage,
            "truncate_repeats": self.options.truncate_repeats,
            "records": manifest.counts["positions"] + manifest.counts["rejected"],
            "positions": manifest.counts["positions"],
            "rejected": manifest.counts["rejected"],
        }
        manifest.save(self.store.path)

    def _result(
        self, sources: list[ConvertSource], flags: list[FlagCounts], notes: list[str], unknown: int
    ) -> ConvertResult:
        counts = sum((Counter(own.flags) for own in flags), Counter())
        positions = sum(s.facts.positions for s in sources)
        if unknown:
            self.progress.note(without_game(unknown, positions))
        return ConvertResult(
            sources=len(sources),
            skipped=len(self.skipped),
            records=sum(s.facts.records for s in sources),
            positions=positions,
            rejected=sum(s.facts.rejected for s in sources),
            games=sum(s.facts.games for s in sources if s.owns_games),
            duplicate_games=sum(own.duplicates for own in flags),
            reasons=reasons_of(sources),
            without_game=unknown,
            failed_files=failed_files(sources),
            flags=sorted_counts(counts),
            notes=notes,
            file_notes={s.file.name: notes_of(s) for s in sources if notes_of(s)},
            skipped_files=dict(sorted(self.skipped.items())),
        )

    def _notes(self, sources: list[ConvertSource], same: Iterable[str]) -> list[str]:
        """Return a note on files that have not the given convention, if there are any.

        Args:
            sources: The sources of this run.
            same: Names of the store's sources whose bytes were among the inputs.
        """
        given = self.options.value_convention
        if given == "auto":
            return []
        other = [
            s.file.name
            for s in sources
            if is_legacy_format(s.facts.format) and s.convention not in (None, given)
        ]
        unused = note_of_unused_option(
            sorted([*other, *self._stored_with_other_convention(set(same), given)]), given
        )
        return [] if unused is None else [unused]

    def _stored_with_other_convention(self, names: set[str], given: str) -> list[str]:
        """Return those of ``names`` whose sources in the store have another value convention."""
        other = ~pc.field("value_sense").isin([given]) & pc.field("value_sense").is_valid()
        legacy = pc.starts_with(pc.field("format"), "legacy-")
        tables = [read_parquet(path, ["name"], other & legacy) for path in self.store.files("sources")]
        return [name for table in tables for name in table["name"].to_pylist() if name in names]


def _seconds_of(file: SourceFile) -> float:
    """Return the CPU time to convert a source, approximately: texts have far more positions per byte."""
    return file.new_bytes * (1.5e-7 if file.name.endswith(".pkl.gz") else 1e-6)


_HINT: Final = (
    "Look at the games of these files. If you know the convention, pass --value-convention blue-is-0 "
    "or --value-convention blue-is-1; it does not override named winners that agree."
)


def _spool(folder: AnyPath, facts: SpoolFacts) -> Spool:
    """Return the spool that contains the tables of a source that was just read: truncated ones, if any."""
    return Spool(folder).cut if facts.cut else Spool(folder)


_MAX_LISTED: Final = 3
"""Maximum number of files that a note on skipped files names."""


def _is_unreadable(source: ConvertSource) -> bool:
    return source.facts.failure is not None and source.facts.failure[0] == Reason.UNREADABLE


def _reject_rate(sources: list[ConvertSource]) -> float:
    """Return the share of rejected records, or of the bytes of rejected files if it is larger."""
    read = [s for s in sources if s.facts.failure is None]
    # What was left out on request is no loss: the ends of games, and positions of other board sizes.
    other_sizes = sum(s.facts.other_sizes for s in read if s.facts.reading.board_size is not None)
    records = sum(s.facts.records for s in read) - other_sizes
    rejected = sum(s.facts.rejected - s.facts.cut for s in read) - other_sizes
    sizes = [max(s.file.new_bytes, 1) for s in sources]  # the size of a broken link is 0
    lost = sum(sizes) - sum(max(s.file.new_bytes, 1) for s in read)
    return max(rejected / max(records, 1), lost / max(sum(sizes), 1))


def _listed(files: Sequence[tuple[str, str]]) -> str:
    """Return the names and details of some files on one line."""
    texts = [f"{name} ({detail})" if detail else name for name, detail in files[:_MAX_LISTED]]
    return ", ".join(
        [*texts, f"… and {len(files) - _MAX_LISTED:,} more"] if len(files) > _MAX_LISTED else texts
    )


def _check_position_count(source: ConvertSource, written: dict[str, FileFacts]) -> None:
    """Check that every position of the spool was written.

    Raises:
        StoreError: The number of positions written differs.
    """
    rows = sum(facts.rows for name, facts in written.items() if name.startswith("positions/"))
    if rows != source.facts.positions:
        raise StoreError(
            "positions are missing from the temporary files of this source",
            path=source.spool.folder,
            found=f"{rows:,}",
            expected=f"{source.facts.positions:,}",
            hint="Remove the folder and run the command again.",
        )


def _publish_source(
    store: AnyPath, spool: Spool, assigned: Assignment, owns_games: bool
) -> dict[str, FileFacts]:
    """Write the parts of one source in a worker; return the facts by path relative to the store."""
    name = f"part-{assigned.source_id:06d}.parquet"
    facts = {f"positions/{name}": publish_positions(spool, store / "positions" / name, assigned)}
    if owns_games:
        facts[f"games/{name}"] = publish_games(spool, store / "games" / name, assigned)
    release_memory()
    return facts
