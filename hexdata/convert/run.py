"""One run of ``convert`` under the store's lock: what is decided over all sources, step by step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hexdata.convert.games import GAMES
from hexdata.convert.inputs import SourceFile, new_sources
from hexdata.convert.mixed import collection_of, resolve_collection
from hexdata.convert.options import ConvertOptions, ConvertResult
from hexdata.convert.publish import Assignment, publish_games, publish_positions
from hexdata.convert.sense import Sense, decide
from hexdata.convert.spool import REJECTED, Spool, SpoolFacts, read_source
from hexdata.errors import ConfigError, RejectRateError
from hexdata.pool import run_tasks
from hexdata.progress import Progress
from hexdata.schema import rejected_schema, sources_schema
from hexdata.store import Store
from hexdata.store.files import FileFacts, digest_file, remove_temporaries
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import write_parquet

__all__ = ["Run"]


@dataclass(frozen=True)
class _Source:
    """A source of this run with all that is known of it."""

    file: SourceFile
    spool: Spool
    facts: SpoolFacts
    sense: Sense | None = None
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
        for folder in ("positions", "games", "sources", "rejected"):
            remove_temporaries(store.path / folder)

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
        sources = self._assign(self._one_board_size(self._read(new)))
        self._check_rejected(sources)
        duplicates = self._duplicates(sources)
        if sources:
            facts = self._publish(sources, duplicates)
            self._publish_tables(sources, facts)
        return self._result(sources, len(same), duplicates)

    def _digest(self, files: list[SourceFile]) -> tuple[list[SourceFile], list[tuple[SourceFile, str]]]:
        self.progress.begin("digest", len(files), "files")
        digested = list(files)
        tasks = [(file.path,) for file in files]
        for index, (size, sha256) in run_tasks(digest_file, tasks, workers=self.options.processes()):
            digested[index] = replace(files[index], bytes=size, sha256=sha256)
            self.progress.advance(1)
        return new_sources(digested, self._known())

    def _known(self) -> dict[str, str]:
        known: dict[str, str] = {}
        for path in self.store.files("sources"):
            table = pq.read_table(path, columns=["name", "sha256"])
            known |= dict(zip(table["sha256"].to_pylist(), table["name"].to_pylist(), strict=True))
        return known

    def _read(self, files: list[SourceFile]) -> list[_Source]:
        self.progress.begin("read", sum(file.bytes for file in files), "bytes")
        folders = [self.work / file.sha256 for file in files]
        tasks = [(file.path, folder) for file, folder in zip(files, folders, strict=True)]
        facts: dict[int, SpoolFacts] = {}
        for index, found in run_tasks(read_source, tasks, workers=self.options.processes()):
            facts[index] = found
            self.progress.advance(files[index].bytes)
        return [
            self._with_sense(_Source(file, Spool(folder), facts[index]))
            for index, (file, folder) in enumerate(zip(files, folders, strict=True))
        ]

    def _with_sense(self, source: _Source) -> _Source:
        if not source.facts.positions:
            return source
        if source.facts.format == "trmph":
            return replace(source, sense="blue-is-0")  # values come from the winner, in the store's sense
        if self.options.value_sense != "auto":
            return replace(source, sense=self.options.value_sense)  # type: ignore[arg-type]
        return replace(source, sense=decide(source.facts.votes, source.file.name))

    def _one_board_size(self, sources: list[_Source]) -> list[_Source]:
        """Reject, as a whole, each source with another board size than the store's."""
        size = self.store.manifest.board_size
        size = size or next((s.facts.board_size for s in sources if s.facts.positions), None)
        self.board_size = size
        return [s if s.facts.board_size in (None, size) else self._reject(s, size) for s in sources]

    def _reject(self, source: _Source, size: int | None) -> _Source:
        detail = (
            f"found a {source.facts.board_size} x {source.facts.board_size} board; expected {size} x {size}"
        )
        facts = source.spool.reject("board-size", f"{detail}, the size of this store")
        return replace(source, facts=facts, sense=None)

    def _assign(self, sources: list[_Source]) -> list[_Source]:
        """Give ids: sources by name, positions by source and record, games by source and place."""
        manifest = self.store.manifest
        source_id = manifest.counts.get("sources", 0)
        position = manifest.counts.get("positions", 0)
        game = manifest.counts.get("games", 0)
        collections: dict[str, tuple[int, int]] = {}
        assigned = []
        for source in sources:
            first_game, owns = game, True
            if source.facts.mixed and source.facts.positions:
                name = collection_of(source.facts, source.file.sha256)
                owns = name not in collections
                if owns:
                    collections[name] = (game, self._resolve(sources, name))
                    game += collections[name][1]
                first_game = collections[name][0]
            else:
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
        spools = [
            s.spool
            for s in sources
            if s.facts.mixed and s.facts.positions and collection_of(s.facts, s.file.sha256) == name
        ]
        assert self.board_size is not None
        return resolve_collection(spools, self.board_size)

    def _check_rejected(self, sources: list[_Source]) -> None:
        """Publish nothing if too much was rejected: of the records, or of the bytes (whole files)."""
        read = [s for s in sources if not s.facts.failed]
        records = sum(s.facts.records for s in read)
        rejected = sum(s.facts.rejected for s in read)
        size = sum(s.file.bytes for s in sources)
        lost = sum(s.file.bytes for s in sources if s.facts.failed)
        rate = max(rejected / records if records else 0.0, lost / size if size else 0.0)
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
        own = [s.spool.table("games", GAMES)["game_hash"] if s.owns_games else _NO_HASHES for s in sources]
        halves = np.frombuffer(
            b"".join(b"".join(column.to_pylist()) for column in (*old, *own)), dtype=np.uint64
        ).reshape(-1, 2)
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
        plan = [[s.file.name, s.file.sha256, s.source_id, s.first_position, s.first_game] for s in sources]
        ledger = Ledger(
            self.work / "convert_progress.json", "convert", [plan, self.options.val, self.options.test]
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
            ledger.finish(source.file.sha256, {name: facts.to_json() for name, facts in written.items()})
            self.progress.advance(source.facts.positions)
        return {
            name: FileFacts(**facts)
            for source in sources
            if source.file.sha256 in ledger
            for name, facts in ledger[source.file.sha256].items()
        }

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
        for source in sources:
            source.spool.remove()
        (self.work / "convert_progress.json").unlink(missing_ok=True)

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


_NO_HASHES: Final = pa.array([], pa.binary(16))


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
                {"chains": s.facts.votes.chains, "winners": s.facts.votes.winners}
            ),
            "records": s.facts.records,
            "positions": s.facts.positions,
            "games": s.facts.games,
            "rejected": s.facts.rejected,
            "header": json.dumps(s.facts.header, sort_keys=True, ensure_ascii=False),
            "notes": json.dumps(s.facts.notes) if s.facts.notes else None,
        }
        for s in sources
    ]
    return pa.Table.from_pylist(rows, schema=sources_schema())


def _rejected_table(source: _Source) -> pa.Table:
    table = source.spool.table("rejected", REJECTED)
    ids = pa.array(np.full(table.num_rows, source.source_id, np.int32))
    return table.add_column(0, rejected_schema().field("source_id"), ids)


def _reasons(sources: list[_Source]) -> dict[str, int]:
    """Count the rejected records by reason, most frequent first."""
    counts: dict[str, int] = {}
    for source in sources:
        for batch in source.spool.batches("rejected"):
            for entry in batch.column("reason").value_counts().to_pylist():
                counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _failed(sources: list[_Source]) -> dict[str, str]:
    """Return the reason of each file that was rejected as a whole, by name."""
    failed = {}
    for source in sources:
        if source.facts.failed:
            table = source.spool.table("rejected", REJECTED)
            failed[source.file.name] = f"{table['reason'][0]}: {table['detail'][0]}"
    return failed
