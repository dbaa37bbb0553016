"""One run of ``convert`` under the store's lock: what is decided over all sources, step by step."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata import __version__
from hexdata.convert.games import binary_matrix
from hexdata.convert.inputs import SourceFile, digest_source, new_sources
from hexdata.convert.mixed import collection_of, resolve_collection
from hexdata.convert.options import ConvertOptions, ConvertResult
from hexdata.convert.publish import Assignment, publish_games, publish_positions
from hexdata.convert.sense import Sense, decide
from hexdata.convert.spool import REJECTED, UNREADABLE, Spool, SpoolFacts, read_source
from hexdata.errors import ConfigError, InputError, RejectRateError, StoreError
from hexdata.pool import run_tasks
from hexdata.progress import Progress
from hexdata.schema import rejected_schema, sources_schema
from hexdata.store import Store
from hexdata.store.files import FileFacts, remove_temporaries
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import write_parquet

__all__ = ["Run"]


@dataclass(frozen=True)
class _Source:
    """A source of this run with all that is known of it. Its ``facts`` are the run's judgement; the
    spool keeps what the source says, whatever a run makes of it.
    """

    file: SourceFile
    spool: Spool
    facts: SpoolFacts
    sense: Sense | None = None
    sense_given: bool = False
    source_id: int = -1
    first_position: int = 0
    first_game: int = 0
    owns_games: bool = True


class Run:
    """One run under the store's lock: each method is one step of ``convert``, in the order below."""

    def __init__(self, store: Store, options: ConvertOptions, progress: Progress) -> None:
        self.store = store
        self.options = self._as_begun(store, options)
        self.progress = progress
        self.work = store.work / "convert"
        remove_temporaries(store.path)

    @staticmethod
    def _as_begun(store: Store, options: ConvertOptions) -> ConvertOptions:
        """Hold the splits to what the store was begun with: a game's split never changes."""
        begun = store.manifest.stages.get("convert")
        if begun is None or (begun["val"], begun["test"]) == (options.val, options.test):
            return options
        raise ConfigError(
            "the store was begun with other splits",
            path=store.path,
            found=f"val {options.val}, test {options.test}",
            expected=f"val {begun['val']}, test {begun['test']}",
            cure="Use the same shares, or convert into a new store.",
        )

    def convert(self, files: list[SourceFile]) -> ConvertResult:
        """Convert those of the files, sorted by name, that the store does not have."""
        new, same = self._digest(files)
        for file, name in same:
            self.progress.note(f"{file.name}: same bytes as {name}, which the store has; skipped")
        sources = self._one_board_size(self._read(new))
        self._check_rejected(sources)
        sources = self._assign([self._with_sense(source) for source in sources])
        duplicates = self._duplicates(sources)
        result = self._result(sources, len(same), duplicates)
        if sources:
            facts = self._publish(sources, duplicates)
            self._publish_tables(sources, facts)
        shutil.rmtree(self.work, ignore_errors=True)  # the manifest now says all that it said
        return result

    def _digest(self, files: list[SourceFile]) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
        self.progress.begin("digest", len(files), "files")
        digested = list(files)
        tasks = [(file.path,) for file in files]
        for index, found in run_tasks(digest_source, tasks, workers=self.options.processes()):
            size, sha256, problem = found
            digested[index] = replace(files[index], bytes=size, sha256=sha256, problem=problem)
            self.progress.advance(1)
        return new_sources(digested, self._known())

    def _known(self) -> list[tuple[str, str, int]]:
        """Return name, digest and positions of the store's sources."""
        columns = ["name", "sha256", "positions"]
        tables = [pq.read_table(path, columns=columns) for path in self.store.files("sources")]
        return [tuple(row[name] for name in columns) for table in tables for row in table.to_pylist()]

    def _read(self, files: list[SourceFile]) -> list[_Source]:
        self.progress.begin("read", sum(file.bytes for file in files), "bytes")
        facts = {f.name: SpoolFacts.failed(UNREADABLE, f.problem) for f in files if f.problem}
        readable = [file for file in files if not file.problem]
        tasks = [(file.path, self.work / file.sha256) for file in readable]
        for index, found in run_tasks(read_source, tasks, workers=self.options.processes()):
            facts[readable[index].name] = found
            self.progress.advance(readable[index].bytes)
        return [_Source(file, Spool(self.work / file.identity), facts[file.name]) for file in files]

    def _with_sense(self, source: _Source) -> _Source:
        """Decide the sense by the source's own evidence, and only where that decides nothing by the option.

        A sense that was given for some odd files must not turn the labels of those that are clear.
        """
        if not source.facts.positions:
            return source
        if source.facts.format == "trmph":
            return replace(source, sense="blue-is-0")  # values come from the winner, in the store's sense
        try:
            return replace(source, sense=decide(source.facts.votes, source.file.name))
        except InputError:
            if self.options.value_sense == "auto":
                raise
            return replace(source, sense=self.options.value_sense, sense_given=True)  # type: ignore[arg-type]

    def _one_board_size(self, sources: list[_Source]) -> list[_Source]:
        """Reject, as a whole, each source with another board size than the store's."""
        size = self.store.manifest.board_size
        size = size or next((s.facts.board_size for s in sources if s.facts.positions), None)
        self.board_size = size
        return [
            replace(s, facts=SpoolFacts.failed("board-size", _other_size(s.facts.board_size, size)))
            if s.facts.positions and s.facts.board_size != size
            else s
            for s in sources
        ]

    def _assign(self, sources: list[_Source]) -> list[_Source]:
        """Give ids: sources by name, positions by source and record, games by source and place."""
        manifest = self.store.manifest
        source_id = manifest.counts.get("sources", 0)
        position = manifest.counts.get("positions", 0)
        game = manifest.counts.get("games", 0)
        collections: dict[str, int] = {}
        assigned = []
        for source in sources:
            first_game, owns = game, True
            if source.facts.mixed and source.facts.positions:
                name = collection_of(source.file, source.facts)
                owns = name not in collections
                if owns:
                    collections[name] = game
                    source = replace(source, facts=replace(source.facts, games=self._resolve(sources, name)))
                first_game = collections[name]
            game += source.facts.games
            assigned.append(
                replace(
                    source,
                    source_id=source_id,
                    first_position=position,
                    first_game=first_game,
                    owns_games=owns,
                )
            )
            source_id += 1
            position += source.facts.positions
        self.totals = {"sources": source_id, "positions": position, "games": game}
        return assigned

    def _resolve(self, sources: list[_Source], name: str) -> int:
        mixed = [s for s in sources if s.facts.mixed and s.facts.positions]
        members = [s for s in mixed if collection_of(s.file, s.facts) == name]
        assert self.board_size is not None
        with_id = sum(s.facts.with_id for s in members)
        return resolve_collection([s.spool for s in members], with_id, self.board_size)

    def _check_rejected(self, sources: list[_Source]) -> None:
        """Publish nothing if too much was rejected: of the records, or of the bytes (whole files)."""
        read = [s for s in sources if s.facts.failure is None]
        records = sum(s.facts.records for s in read)
        rejected = sum(s.facts.rejected for s in read)
        sizes = [max(s.file.bytes, 1) for s in sources]  # a link that leads nowhere has no size
        lost = sum(sizes) - sum(max(s.file.bytes, 1) for s in read)
        rate = max(rejected / max(records, 1), lost / max(sum(sizes), 1))
        if rate <= self.options.max_reject_rate:
            return
        reasons = _reasons(sources)
        failed = [f"{name} ({reason})" for name, reason in _failed(sources).items()]
        raise RejectRateError(
            "too much was rejected; nothing was published",
            path=self.store.path,
            found=f"{rejected:,} of {records:,} records and {len(failed)} of {len(sources)} files rejected: "
            + ", ".join([*(f"{count:,} {reason}" for reason, count in reasons.items()), *failed[:5]]),
            expected=f"at most {self.options.max_reject_rate:.2%} of the records and of the bytes",
            cure="Look at the files; if the loss is acceptable, raise --max-reject-rate: what was read "
            "is kept, and the run goes on from there.",
        )

    def _duplicates(self, sources: list[_Source]) -> list[npt.NDArray[np.int64]]:
        """Find, for each game of this run, the first game of the store with its hash; -1 if itself."""
        old = [pq.read_table(path, columns=["game_hash"])["game_hash"] for path in self.store.files("games")]
        own = [_game_hashes(s) for s in sources]
        hashes = [_NO_HASHES, *map(binary_matrix, old), *own]
        halves = np.concatenate(hashes).view(np.uint64)
        # The first of equal hashes has the lowest id: a stable sort keeps ids ascending within them.
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        same = np.zeros(len(order), dtype=bool)
        same[1:] = (halves[order][1:] == halves[order][:-1]).all(axis=1)
        leader = order[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))]
        first = np.full(len(order), -1, dtype=np.int64)
        first[order[same]] = leader[same]
        counts = [len(column) for column in own]
        return np.split(first[len(first) - sum(counts) :], np.cumsum(counts)[:-1]) if counts else []

    def _publish(
        self, sources: list[_Source], duplicates: list[npt.NDArray[np.int64]]
    ) -> dict[str, FileFacts]:
        """Write the positions and games parts of every source; return the facts of all of them."""
        self.progress.begin("write", sum(s.facts.positions for s in sources), "positions")
        plan = [
            [s.file.name, s.file.sha256, asdict(self._assignment(s))] for s in sources if s.facts.positions
        ]
        ledger = Ledger(self.work / "convert_progress.json", "convert", [__version__, plan])
        self._remove_strays(
            {name for s in sources if s.file.sha256 in ledger for name in ledger[s.file.sha256]}
        )
        todo = []
        for source, duplicate_of in zip(sources, duplicates, strict=True):
            if source.file.sha256 in ledger or not source.facts.positions:
                self.progress.advance(source.facts.positions)
            else:
                todo.append((source, duplicate_of))
        tasks = [(self.store.path, s.spool, self._assignment(s), dup, s.owns_games) for s, dup in todo]
        for index, written in run_tasks(_publish_source, tasks, workers=self.options.processes()):
            source = todo[index][0]
            _check_whole(source, written)
            ledger.finish(source.file.sha256, {name: facts.to_json() for name, facts in written.items()})
            self.progress.advance(source.facts.positions)
        return {
            name: FileFacts(**facts)
            for source in sources
            if source.file.sha256 in ledger
            for name, facts in ledger[source.file.sha256].items()
        }

    def _remove_strays(self, done: set[str]) -> None:
        """Remove parts that an interrupted run of other sources left: nothing names them."""
        for folder in ("positions", "games", "sources", "rejected"):
            for path in (self.store.path / folder).glob("*.parquet"):
                if f"{folder}/{path.name}" not in done | self.store.manifest.files.keys():
                    path.unlink()

    def _assignment(self, source: _Source) -> Assignment:
        assert self.board_size is not None
        assert source.sense is not None
        return Assignment(
            source.source_id,
            self.board_size,
            source.first_position,
            source.first_game,
            source.sense,
            self.options.val,
            self.options.test,
        )

    def _publish_tables(self, sources: list[_Source], facts: dict[str, FileFacts]) -> None:
        """Write the sources and rejected parts of this run, then the manifest; remove the spools."""
        manifest = self.store.manifest
        rejected = sum(s.facts.rejected for s in sources)
        tables = {"sources": (sources_schema(), [_source_table(sources)])}
        if rejected:
            tables["rejected"] = (rejected_schema(), [_rejected_table(s) for s in sources])
        for name, (schema, batches) in tables.items():
            part = f"{name}/part-{len(manifest.files_in(name)):06d}.parquet"
            facts[part] = write_parquet(self.store.path / part, schema, batches)
        manifest.board_size = self.board_size
        manifest.counts = {**self.totals, "rejected": manifest.counts.get("rejected", 0) + rejected}
        manifest.files |= facts
        manifest.stages["convert"] = {
            "val": self.options.val,
            "test": self.options.test,
            "records": manifest.counts["positions"] + manifest.counts["rejected"],
            "positions": manifest.counts["positions"],
            "rejected": manifest.counts["rejected"],
        }
        manifest.save(self.store.path)

    def _result(
        self, sources: list[_Source], skipped: int, duplicates: list[npt.NDArray[np.int64]]
    ) -> ConvertResult:
        return ConvertResult(
            sources=len(sources),
            skipped=skipped,
            records=sum(s.facts.records for s in sources),
            positions=sum(s.facts.positions for s in sources),
            rejected=sum(s.facts.rejected for s in sources),
            games=sum(len(d) for d in duplicates),
            duplicate_games=int(sum((d >= 0).sum() for d in duplicates)),
            reasons=_reasons(sources),
            failed_files=_failed(sources),
            notes=[f"{s.file.name}: {note}" for s in sources for note in s.facts.notes],
        )


_NO_HASHES: Final = np.empty((0, 16), np.uint8)


def _game_hashes(source: _Source) -> npt.NDArray[np.uint8]:
    """Return the hashes of the games that a source owns: uint8 (G, 16)."""
    if not (source.owns_games and source.facts.games):
        return _NO_HASHES
    batches = source.spool.batches("games", ["game_hash"])
    return np.concatenate([binary_matrix(batch.column("game_hash")) for batch in batches])


def _other_size(found: int | None, expected: int | None) -> str:
    return f"found a {found} x {found} board; expected {expected} x {expected}, the size of this store"


def _check_whole(source: _Source, written: dict[str, FileFacts]) -> None:
    """See that every position of the spool was written.

    Raises:
        StoreError: some were not.
    """
    rows = sum(facts.rows for name, facts in written.items() if name.startswith("positions/"))
    if rows != source.facts.positions:
        raise StoreError(
            "the spool of this source has lost positions",
            path=source.spool.folder,
            found=f"{rows:,}",
            expected=f"{source.facts.positions:,}",
            cure="Remove the folder and run the command again.",
        )


def _publish_source(
    store: Path, spool: Spool, assigned: Assignment, duplicate_of: npt.NDArray[np.int64], owns_games: bool
) -> dict[str, FileFacts]:
    """Worker: write one source's parts; the facts by path relative to the store."""
    name = f"part-{assigned.source_id:06d}.parquet"
    facts = {f"positions/{name}": publish_positions(spool, store / "positions" / name, assigned)}
    if owns_games:
        facts[f"games/{name}"] = publish_games(spool, store / "games" / name, assigned, duplicate_of)
    return facts


def _source_table(sources: list[_Source]) -> pa.Table:
    rows: list[dict[str, Any]] = [
        {
            "source_id": s.source_id,
            "name": s.file.name,
            "bytes": s.file.bytes,
            "sha256": s.file.sha256,
            "format": s.facts.format,
            "value_sense": s.sense,
            "value_sense_evidence": json.dumps(
                {"chains": s.facts.votes.chains, "winners": s.facts.votes.winners, "given": s.sense_given}
            ),
            "records": s.facts.records,
            "positions": s.facts.positions,
            "games": s.facts.games,
            "rejected": s.facts.rejected,
            "header": json.dumps(s.facts.header, sort_keys=True),
            "notes": json.dumps(s.facts.notes) if s.facts.notes else None,
        }
        for s in sources
    ]
    return pa.Table.from_pylist(rows, schema=sources_schema())


def _rejected_table(source: _Source) -> pa.Table:
    """Return what was rejected of a source: ``rejected_schema``."""
    if source.facts.failure is None:
        table = pa.Table.from_batches(source.spool.batches("rejected"), REJECTED)
    else:
        reason, detail = source.facts.failure
        table = pa.table({"record": [None], "reason": [reason], "detail": [detail]}, schema=REJECTED)
    ids = pa.array(np.full(table.num_rows, source.source_id, np.int32))
    return table.add_column(0, rejected_schema().field("source_id"), ids)


def _reasons(sources: list[_Source]) -> dict[str, int]:
    """Count the rejected records by reason, most frequent first."""
    counts: Counter[str] = Counter()
    for source in sources:
        for entry in _rejected_table(source)["reason"].value_counts().to_pylist():
            counts[entry["values"]] += entry["counts"]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _failed(sources: list[_Source]) -> dict[str, str]:
    """Return the reason of each file that was rejected as a whole, by name."""
    return {s.file.name: ": ".join(s.facts.failure) for s in sources if s.facts.failure}
