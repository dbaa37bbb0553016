"""Flips bits in every kind of file, then runs verify and every command that reads the file.

    python tests/simulation/rot.py store positions/part-000000.parquet --at 1234 --bit 5
    python tests/simulation/rot.py store positions/part-000000.parquet
    python tests/simulation/rot.py all --share 1/4
    python tests/simulation/rot.py all --list

The first line is one case: it is named by the scenario, the file, the offset of the byte, and the bit (8 for
all bits). Without ``--at``, each byte is altered in turn; of a file larger than ``--most`` bytes, as many
bytes, spread evenly. The seed chooses the bit.

``verify`` must name the file, unless verify does not cover it (``NOT_VERIFIED``). Each command must end with
an error of hexdata, or give the bytes that it gives without the change, with the exceptions of
``may_differ``. The commands that read a file are found first: their result changes, or is an error, if the
file contains noise.

A command that hashes a whole file before it uses it finds every change in the same way, so it runs for every
k-th byte only (``Reader.every``), as do slow ones; the seed chooses which, so that each night takes others.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

import numpy as np  # noqa: E402

from hexdata.cards import CARDS  # noqa: E402
from hexdata.convert import ConvertOptions, convert_sources  # noqa: E402
from hexdata.demo import DemoOptions, make_legacy  # noqa: E402
from hexdata.demo.games import make_games  # noqa: E402
from hexdata.errors import HexdataError  # noqa: E402
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards  # noqa: E402
from hexdata.formats.trmph import write_trmph  # noqa: E402
from hexdata.loader import Loader  # noqa: E402
from hexdata.shuffle import ShuffleOptions, shuffle_store  # noqa: E402
from hexdata.sql.database import DATABASE_NAME  # noqa: E402
from hexdata.verify import check_round_trip, verify_store  # noqa: E402
from tests.kill_stage import kill_before_change  # noqa: E402
from tests.legacy_pickles import example, save_pickle, top_level  # noqa: E402
from tests.simulation.commands import forget_databases  # noqa: E402
from tests.simulation.sharing import Group  # noqa: E402

STORE: Final = Path("store")
ALL_BITS: Final = 8
"""In place of a bit: all bits of the byte are flipped."""
NOT_VERIFIED: Final = {
    f"store/{DATABASE_NAME}": "only views; every stage writes it again",
    **{f"store/{name}": "a description for other programs; every stage writes it again" for name in CARDS},
    "store/logs/*": "records of past runs, which no result depends on",
    "store/.work/*": "unfinished work, which the stage checks when it is resumed",
    "store/.*.tmp": "an unfinished file, which the next run removes",
    "store/*/.*.tmp": "an unfinished file, which the next run removes",
    "store/*/*/.*.tmp": "an unfinished file, which the next run removes",
    "demo/*": "a demo is no store",
    "sources/*": "compared by `verify --round-trip`",
    "cache/*": "a copy outside of the store",
}
"""Files that verify does not cover, and why."""
INFORMATIVE: Final = ("store/logs/*",)
"""Files without a digest, of which info and report may show other times and sizes."""
_REWRITTEN: Final = tuple(f"store/{name}" for name in (DATABASE_NAME, *CARDS, "logs/*", ".lock"))
"""Files that each stage writes without reading them."""
_CONVERT: Final = ConvertOptions(workers=1, max_reject_rate=0.5, val=0, test=0)
_SHUFFLE: Final = ShuffleOptions(seed=1, threads=1, buckets=2)
_EXPORT: Final = ExportOptions(workers=1, block_size=8, shard_size=16)


# --- commands that read --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A command whose result must not depend on a changed byte.

    Attributes:
        name: Name of the command.
        run: Runs it in the current folder, and returns its result.
        writes: It may change files, so it runs in a copy.
        every: It is run for every k-th byte.
    """

    name: str
    run: Callable[[], bytes]
    writes: bool = False
    every: int = 1


_UNCHANGED: Final[dict[bytes, bytes]] = {}
"""The digest of the altered file, and its digest without the change. A stage may leave the file as it is."""


def _published(*folders: str) -> bytes:
    """Return the digest of the files in some folders that are not hidden, except logs."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            parts = path.relative_to(folder).parts
            if path.name in (DATABASE_NAME, *CARDS):  # a note says if they were not written
                continue
            if path.is_file() and "logs" not in parts and not any(part[0] == "." for part in parts):
                digest = hashlib.sha256(path.read_bytes()).digest()
                total.update(f"{path}\0".encode() + _UNCHANGED.get(digest, digest))
    return total.digest()


def _stage(run: Callable[[], object], *folders: str) -> Callable[[], bytes]:
    """Return a reader's function for a stage: its result is all published files."""

    def run_stage() -> bytes:
        run()
        return _published(*(folders or ("store",)))

    return run_stage


def _load(**options: Any) -> Callable[[], bytes]:
    """Return a reader's function for a loader: its result is all batches of an epoch."""

    def load() -> bytes:
        total = hashlib.sha256()
        fields = ("board", "policy", "value", "position_id", "game_id", "value_sample_tier", "visits")
        loader = Loader("store", batch_size=16, fields=fields, **options)
        for batch in loader:
            for name, array in sorted(batch.items()):
                total.update(name.encode() + np.ascontiguousarray(array).tobytes())
        total.update(str(loader.epoch_digest).encode())
        return total.digest()

    return load


def _sql() -> bytes:
    from hexdata.sql import run_query

    text = io.StringIO()
    for view in ("positions", "games", "sources", "rejected", "shuffled", "shards"):
        with run_query(STORE, f"SELECT * FROM {view}", threads=1) as result:
            for batch in result.batches:
                text.write(repr(batch.to_pylist()))
    return text.getvalue().encode()


def _show() -> bytes:
    from hexdata.show import ShowOptions, find

    found = [find("store", ShowOptions(game=0)), find("store", ShowOptions(position=3))]
    shard = next(Path("store").glob("shards/train-*.tar"), None)
    if shard is not None:
        found.append(find(f"{shard}:3"))
    return "".join(each.svg() for each in found).encode()


def _info() -> bytes:
    from hexdata.info import store_info

    facts = store_info("store")
    if facts.missing:
        raise HexdataError(f"damaged: {facts.missing}")
    return repr(facts).encode()


def _quality() -> bytes:
    from hexdata.quality import measure_quality

    return repr(measure_quality("store")).encode()


def _report() -> bytes:
    from hexdata.report import write_report

    write_report("store", "page.html")
    return re.sub(rb"\d{4}-\d\d-\d\d.*?Z|[\d.]+ s\b|[\d.]+ MB", b"", Path("page.html").read_bytes())


def _browse() -> bytes:
    """Return the answers of a page, from an index that exists or is built."""
    from hexdata.browse.app import make_app
    from hexdata.browse.library import BrowseLimits, Library

    library = Library(STORE, BrowseLimits(threads=1), lambda _: None)
    try:
        app = make_app(library, "store")
        return b"\n".join(_get(app, library, path) for path in _PAGES)
    finally:
        library.close()


def _get(app: Any, library: Any, path: str) -> bytes:
    """Return the answer of an app to a request, as its server does."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    name, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": name, "raw_path": name.encode(), "root_path": ""}
    scope |= {"query_string": query.encode(), "headers": [(b"host", b"localhost")], "http_version": "1.1"}
    scope |= {"scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    while True:
        library.wait()
        sent.clear()
        asyncio.run(app(scope, receive, send))
        if sent[0]["status"] != 503:
            break
    body = b"".join(message.get("body", b"") for message in sent)
    if sent[0]["status"] in (400, 404):
        raise HexdataError(str(json.loads(body)["error"]))
    if sent[0]["status"] != 200:
        raise RuntimeError(f"status {sent[0]['status']}: {body!r}")
    return body


_PAGES: Final = (
    "/api/store",
    "/api/list?table=games&start=0&count=10",
    "/api/list?table=positions&start=0&count=100",
    "/api/openings?moves=",
    "/api/game?game=0",
)


def _round_trip() -> bytes:
    results = check_round_trip("store", "sources")
    wrong = [result for result in results if not result.ok]
    if wrong:
        raise HexdataError(str(wrong))
    return repr(results).encode()


# --- scenarios ----------------------------------------------------------------------------------------


def _write_sources() -> None:
    """Write games as text, one of them wrong, and a pickle with results of a search."""
    folder = Path("sources")
    folder.mkdir()
    write_trmph(folder / "games.trmph", make_games(2, 3, 5), 5)
    with (folder / "games.trmph").open("a") as file:
        file.write("no game\n")
    examples = [
        example(0, ply, total=9, visits=100 + ply, root_value=ply / 8, policy=_policy(ply))
        for ply in range(9)
    ]
    save_pickle(folder / "search.pkl.gz", top_level(examples))


def _policy(ply: int) -> np.ndarray[Any, Any] | None:
    """Return the policy of a search in a game along the columns a and b; None for its last position."""
    if ply == 8:
        return None
    policy = np.zeros(25, "f4")
    policy[[ply // 2 * 5 + ply % 2, 24]] = 0.75, 0.25
    return policy


def _convert() -> None:
    convert_sources([Path("sources")], STORE, _CONVERT)


def _append() -> None:
    write_trmph("more.trmph", make_games(2, 4, 5), 5)
    convert_sources([Path("more.trmph")], STORE, _CONVERT)


def _shuffle(seed: int = 1) -> None:
    shuffle_store(STORE, ShuffleOptions(seed=seed, threads=1, buckets=2))


def _export(block_size: int = 8, **options: Any) -> None:
    export_shards(STORE, ExportOptions(workers=1, block_size=block_size, shard_size=16, **options))


def _pickles(order: str) -> None:
    export_pickles(STORE, PicklesOptions(order=order, workers=1))  # type: ignore[arg-type]


def _demo() -> None:
    make_legacy("demo", DemoOptions(games=8))


def _prepare_converted() -> None:
    _write_sources()
    _convert()


def _prepare_store() -> None:
    _prepare_converted()
    _shuffle()
    _export()
    _pickles("original")
    _pickles("shuffled")
    _browse()


def _prepare_samples() -> None:
    """One sample per position."""
    _prepare_converted()
    shuffle_store(STORE, ShuffleOptions(seed=1, threads=1, buckets=2))
    _export(layout="samples")


def _interrupted(prepare: Callable[[], None], run: Callable[[], None], moment: int) -> Callable[[], None]:
    """Return a function that makes files and kills a command before its ``moment``-th change on disk."""

    def prepare_interrupted() -> None:
        prepare()
        child = os.fork()
        if not child:
            forget_databases()
            kill_before_change(moment)
            run()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"the command ended before its change {moment}")

    return prepare_interrupted


_LOADS: Final = tuple(
    Reader(f"load {mode}, {check}", _load(mode=mode, check=check), every=1 if check == "sizes" else 5)
    for mode in ("games", "exact", "stream")
    for check in ("sizes", "digests")
)
_VIEWS: Final = (
    Reader("sql", _sql, every=5),
    Reader("show", _show, every=3),
    Reader("info", _info, every=5),
    Reader("browse", _browse, every=20),
    Reader("report", _report, writes=True, every=200),
)
_STAGES: Final = (
    Reader("convert more", _stage(_append), writes=True, every=10),
    Reader("shuffle again", _stage(lambda: _shuffle(2)), writes=True, every=10),
    Reader("shuffle the same", _stage(_shuffle), writes=True, every=10),
    Reader("export again", _stage(lambda: _export(4)), writes=True, every=10),
    Reader("export the same", _stage(_export), writes=True, every=10),
    Reader("pickles original", _stage(lambda: _pickles("original")), writes=True, every=10),
    Reader("pickles shuffled", _stage(lambda: _pickles("shuffled")), writes=True, every=10),
    Reader("round trip", _round_trip, writes=True, every=10),
)


@dataclass(frozen=True)
class Scenario:
    """Files, and the commands that may read them.

    Attributes:
        prepare: Makes the files in the current folder.
        readers: The commands.
        files: Patterns of the files to alter.
        unfinished: Only files that the manifest does not list are altered.
    """

    prepare: Callable[[], None]
    readers: tuple[Reader, ...]
    files: tuple[str, ...] = ("*",)
    unfinished: bool = False


def _resumes(
    stage: str, run: Callable[[], None], *moments: int, prepare: Callable[[], None]
) -> dict[str, Scenario]:
    """Return a scenario for each moment at which a stage is killed; the reader is the same command."""
    folder = "demo" if stage == "demo" else "store"
    reader = Reader(f"{stage} the same", _stage(run, folder), writes=True)
    return {
        f"{stage}-{moment}": Scenario(_interrupted(prepare, run, moment), (reader,), (f"{folder}/*",), True)
        for moment in moments
    }


def _prepare_shuffled() -> None:
    _prepare_converted()
    _shuffle()


SCENARIOS: Final = {
    "store": Scenario(_prepare_store, (*_LOADS, *_VIEWS, *_STAGES)),
    "samples": Scenario(
        _prepare_samples,
        _VIEWS,  # the loader does not read samples
        ("store/shuffled/*", "store/shards/*", "store/manifest.json"),
    ),
    **_resumes("convert", _convert, 14, 24, prepare=_write_sources),
    **_resumes("shuffle", _shuffle, 8, 12, prepare=_prepare_converted),
    **_resumes("export", _export, 4, prepare=_prepare_shuffled),
    **_resumes("pickles", lambda: _pickles("original"), 4, prepare=_prepare_shuffled),
    **_resumes("demo", _demo, 7, prepare=lambda: None),
}


# --- one changed byte ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flip:
    """A changed byte: in place of a path, ``file`` may have stars for folders whose names are digests."""

    scenario: str
    file: str
    at: int
    bit: int

    def __str__(self) -> str:
        return f"{self.scenario} {self.file} --at {self.at} --bit {self.bit}"


@dataclass(frozen=True)
class Outcome:
    """What a command did: "same", "error", "other" bytes, or "bare" (no error of hexdata)."""

    kind: str
    text: str = ""


class Bench:
    """The files of a scenario in a folder, and what each command reads.

    Args:
        scenario: Name of the scenario.
        folder: Folder for all files, which is replaced.
    """

    def __init__(self, scenario: str, folder: Path) -> None:
        self.name, self.scenario = scenario, SCENARIOS[scenario]
        self.place, self.copy = folder / "files", folder / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        self.place.mkdir(parents=True)
        os.chdir(self.place)
        os.environ["HEXDATA_CACHE"] = str(self.place / "cache")
        self.scenario.prepare()
        self.listed = self._listed()
        self.paths = {_general(path): path for path in self._paths()}
        self.expected: dict[str, bytes] = {}
        for reader in self.scenario.readers:
            outcomes = {self._run(reader) for _ in range(2)}
            if len(outcomes) > 1:
                raise RuntimeError(f"{reader.name} gives different results for the same files")
            self.expected[reader.name] = outcomes.pop()
        self._reads: dict[str, list[Reader]] = {}

    def _listed(self) -> set[str]:
        path = STORE / "manifest.json"
        names = json.loads(path.read_bytes())["files"] if path.exists() else {}
        return {f"store/{name}" for name in names} | {"store/manifest.json", "store/shards/manifest.json"}

    def _paths(self) -> Iterator[str]:
        """Yield the paths of the files to alter: the smallest of each kind."""
        found: dict[str, tuple[int, str]] = {}
        for path in sorted(Path().rglob("*")):
            name, size = str(path), path.stat().st_size
            if not path.is_file() or not size or name.endswith(".tmp"):
                continue
            if not any(fnmatch.fnmatch(name, pattern) for pattern in self.scenario.files):
                continue
            if self.scenario.unfinished and name in self.listed:
                continue
            kind = re.sub(r"\d+", "0", _general(name))
            found[kind] = min(found.get(kind, (size, name)), (size, name))
        yield from (name for _, name in found.values())

    def readers(self, file: str) -> list[Reader]:
        """Return the commands that read a file."""
        if file not in self._reads:
            path = self.paths[file]
            content = Path(path).read_bytes()
            self._write(path, content, random.Random(file).randbytes(len(content)))
            reads = {r.name for r in self.scenario.readers if self.outcome(r).kind != "same"}
            Path(path).write_bytes(content)
            # A file that is made again may have been read, although the result is the same.
            if file.startswith("cache/"):
                reads.add("browse")
            if self.scenario.unfinished and not any(fnmatch.fnmatch(path, each) for each in _REWRITTEN):
                reads |= {reader.name for reader in self.scenario.readers}
            self._reads[file] = [reader for reader in self.scenario.readers if reader.name in reads]
        return self._reads[file]

    def is_verified(self, file: str) -> bool:
        """Return whether verify covers a file."""
        return not self.scenario.unfinished and self.paths[file] in self.listed

    def outcome(self, reader: Reader) -> Outcome:
        """Run a command and compare its result with that without a change."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = self._run(reader)
        except HexdataError as error:
            return Outcome("error", str(error))
        except Exception:  # noqa: BLE001 - the caller reports it
            return Outcome("bare", traceback.format_exc())
        return Outcome("same" if result == self.expected[reader.name] else "other")

    def _run(self, reader: Reader) -> bytes:
        if not reader.writes:
            return reader.run()
        shutil.rmtree(self.copy, ignore_errors=True)
        _copy_tree(self.place, self.copy)
        os.chdir(self.copy)
        try:
            return reader.run()
        finally:
            os.chdir(self.place)

    def check(self, flip: Flip, readers: list[Reader]) -> Iterator[tuple[str, str]]:
        """Alter a byte, run verify and commands, restore the byte, and yield (outcome, what is wrong)."""
        path = self.paths[flip.file]
        content = Path(path).read_bytes()
        altered = bytearray(content)
        altered[flip.at] ^= 0xFF if flip.bit == ALL_BITS else 1 << flip.bit
        self._write(path, content, bytes(altered))
        try:
            if self.is_verified(flip.file):
                yield self._verify(path)
            for reader in readers:
                found = self.outcome(reader)
                allowed = ("same", "error", "other") if may_differ(reader.name, path) else ("same", "error")
                wrong = "" if found.kind in allowed else f"{reader.name}: {found.text or 'other output'}"
                yield f"{reader.name}: {found.kind}", wrong
        finally:
            Path(path).write_bytes(content)

    def _write(self, path: str, content: bytes, altered: bytes) -> None:
        """Write a file with other content."""
        _UNCHANGED.clear()
        _UNCHANGED[hashlib.sha256(altered).digest()] = hashlib.sha256(content).digest()
        Path(path).write_bytes(altered)

    def _verify(self, path: str) -> tuple[str, str]:
        try:
            result = verify_store(STORE)
            text = "; ".join(check.detail for check in result.checks if not check.ok)
        except HexdataError as error:
            text = str(error)
        except Exception:  # noqa: BLE001
            return "verify: bare", f"verify: {traceback.format_exc()}"
        if path in text:
            return "verify: named", ""
        return "verify: not named", f"verify does not name the file: {text or 'no error'}"


def may_differ(reader: str, path: str) -> bool:
    """Return whether a command may give other output if a byte of a file was changed.

    A loader compares only the sizes of shards and of positions by default.
    """
    if any(fnmatch.fnmatch(path, pattern) for pattern in INFORMATIVE):
        return True
    return reader.endswith(", sizes") and ("positions/" in path or path.endswith(".tar"))


def _general(name: str) -> str:
    """Return a path with stars for the folders of a cache."""
    parts = name.split("/")
    return "/".join(
        "*" if parts[0] == "cache" and re.fullmatch("[0-9a-f]{16,}", part) else part for part in parts
    )


def _copy_tree(source: Path, target: Path) -> None:
    """Copy a folder. Files that only renaming replaces become links, which is faster."""

    def copy(one: str, other: str) -> str:
        if "/." in other or "/logs/" in other:
            shutil.copyfile(one, other)
        else:
            os.link(one, other)
        return other

    shutil.copytree(source, target, copy_function=copy)


# --- many changed bytes -----------------------------------------------------------------------------------


def offsets(size: int, most: int, seed: str) -> list[int]:
    """Return all offsets of a file, or ``most`` that are spread evenly."""
    if size <= most:
        return list(range(size))
    draw = random.Random(seed)
    return [int((number + draw.random()) * size / most) for number in range(most)]


def flips(
    bench: Bench, file: str, seed: int, most: int, step: int = 1
) -> Iterator[tuple[Flip, list[Reader]]]:
    """Yield the changes of a file, with the commands to run; none if no command and not verify reads it."""
    readers = bench.readers(file)
    if not readers and not bench.is_verified(file):
        return
    size = Path(bench.paths[file]).stat().st_size
    for number, at in enumerate(offsets(size, most, f"{seed} {bench.name} {file}")):
        if number % step != seed % step:
            continue
        draw = random.Random(f"{seed} {bench.name} {file} {at}")
        bit = draw.choice([*range(8), ALL_BITS])
        chosen = [reader for reader in readers if (number // step + seed) % reader.every == 0]
        yield Flip(bench.name, file, at, bit), chosen


@dataclass
class Tally:
    """What the changes of one file led to."""

    counts: Counter[str]
    seconds: Counter[str]


def run_share(
    names: list[str],
    folder: Path,
    report: Callable[[Flip, str], None],
    *,
    seed: int = 0,
    most: int = 8192,
    step: int = 1,
    share: tuple[int, int] = (1, 1),
    only: str | None = None,
    until: float = float("inf"),
) -> dict[tuple[str, str], Counter[str]]:
    """Check a share of all changes in this process and its children, and return counts by scenario and file.

    Args:
        names: Names of scenarios.
        folder: Folder for the files, on a disk in memory.
        report: Called with each failure.
        seed: Seed of the bits, and of the bytes of large files.
        most: Most bytes of a file.
        step: Only every ``step``-th byte is altered.
        share: (k, n): the k-th of n equal shares of the changes, from 1.
        only: The only file to alter. Default: all.
        until: Time of ``time.monotonic`` after which no change is begun. Default: never.
    """
    load_libraries()
    totals: dict[tuple[str, str], Counter[str]] = {}
    for name in names:
        bench = Bench(name, folder / name)
        for file in [only] if only else list(bench.paths):
            cases = list(flips(bench, file, seed, most, step))[share[0] - 1 :: share[1]]
            totals[name, file] = counts = _run_cases(bench, cases, report, until)
            print(f"{name} {file}: {dict(sorted(counts.items()))}", flush=True)
        os.chdir(folder)
        shutil.rmtree(folder / name)
    return totals


class ScanGroup(Group):
    """The changed bytes of a scenario, up to ``_TOGETHER`` of a file in each task.

    Args:
        name: Name of the scenario.
        folder: Folder for the files, which is removed at the end.
        seed: Seed of the bits, and of the bytes of large files.
        step: Only every ``step``-th byte is altered.
        most: Most bytes of a file.
    """

    def __init__(self, name: str, folder: Path, seed: int, step: int, most: int = 8192) -> None:
        super().__init__()
        self.name, self.folder, self._seed, self._step, self._most = name, folder, seed, step, most

    def prepare(self) -> tuple[dict[str, Any], int]:
        bench = Bench(self.name, self.folder / "prepare")
        sizes = {file: Path(path).stat().st_size for file, path in bench.paths.items()}
        tasks = [
            (file, first)
            for file, size in sizes.items()
            for first in range(0, -(-min(size, self._most) // self._step), _TOGETHER)
        ]
        return {"tasks": tasks}, len(tasks)

    def begin(self, job: int) -> Callable[[int], dict[str, Any]]:
        warnings.simplefilter("ignore")
        load_libraries()
        bench = Bench(self.name, self.folder / f"job-{job}")
        cases: dict[str, list[tuple[Flip, list[Reader]]]] = {}

        def check(number: int) -> dict[str, Any]:
            assert self.facts is not None
            file, first = self.facts["tasks"][number]
            if file not in cases:
                cases[file] = list(flips(bench, file, self._seed, self._most, self._step))
            failures: list[dict[str, str]] = []

            def report(flip: Flip, wrong: str) -> None:
                failures.append({"case": str(flip), "wrong": wrong[-3000:]})

            counts = _run_cases(bench, cases[file][first : first + _TOGETHER], report, float("inf"))
            counts["cases"] = counts.pop("flips", 0)
            return {"file": file, "counts": counts, "failures": failures}

        return check

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


_TOGETHER: Final = 200
"""Changes in one child process, which damaged bytes may crash."""


def _run_cases(
    bench: Bench,
    cases: list[tuple[Flip, list[Reader]]],
    report: Callable[[Flip, str], None],
    until: float,
) -> Counter[str]:
    counts: Counter[str] = Counter()
    content = {file: Path(path).read_bytes() for file, path in bench.paths.items()}
    while cases and time.monotonic() < until:
        part, cases = cases[:_TOGETHER], cases[_TOGETHER:]
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                for flip, readers in part:
                    if time.monotonic() > until:
                        break
                    found = list(bench.check(flip, readers))
                    pipe.write(json.dumps(found) + "\n")
                    pipe.flush()
            os._exit(0)
        os.close(writing)
        done = 0
        with os.fdopen(reading) as pipe:
            for line in pipe:
                for outcome, wrong in json.loads(line):
                    counts[outcome] += 1
                    if wrong:
                        report(part[done][0], wrong)
                done += 1
        _, status = os.waitpid(child, 0)
        counts["flips"] += done
        if status and done < len(part):
            flip = part[done][0]
            report(flip, f"the process died: status {status}")
            counts["flips"] += 1
            counts["died"] += 1
            Path(bench.paths[flip.file]).write_bytes(content[flip.file])
            cases = part[done + 1 :] + cases
    return counts


def load_libraries() -> None:
    """Import what the children need."""
    import duckdb  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.compute
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401

    import hexdata.browse.app
    import hexdata.formats.legacy
    import hexdata.info
    import hexdata.quality
    import hexdata.report
    import hexdata.show
    import hexdata.sql  # noqa: F401


def main() -> int:
    """Run the cases that the command line selects; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenario", choices=[*SCENARIOS, "all"])
    parser.add_argument("file", nargs="?", help="default: each")
    parser.add_argument("--at", type=int, help="offset of the byte; default: each")
    parser.add_argument("--bit", type=int, choices=range(9), default=ALL_BITS, help="with --at; 8: all bits")
    parser.add_argument("--most", type=int, default=8192, help="most bytes of a file")
    parser.add_argument("--step", type=int, default=1, help="alter every k-th byte only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", default="1/1", help="K/N: the K-th of N equal shares")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no change after this time")
    parser.add_argument("--folder", type=Path, help="default: in memory, if there is such a disk")
    parser.add_argument("--list", action="store_true", help="print the files and their readers, and end")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(prefix="hexdata-rot-", dir=options.folder or (memory if memory.is_dir() else None))
    )
    warnings.simplefilter("ignore")
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    failures = 0

    def report(flip: Flip, wrong: str) -> None:
        nonlocal failures
        failures += 1
        print(f"FAILED {flip}\n    " + wrong[-3000:].replace("\n", "\n    "), flush=True)

    begin = time.monotonic()
    try:
        if options.list:
            _print_files(names, folder)
        elif options.at is not None:
            load_libraries()
            bench = Bench(names[0], folder / names[0])
            flip = Flip(names[0], options.file, options.at, options.bit)
            for outcome, wrong in bench.check(flip, bench.readers(options.file)):
                print(outcome)
                if wrong:
                    report(flip, wrong)
        else:
            part, parts = map(int, options.share.split("/"))
            chosen: dict[str, Any] = {"seed": options.seed, "most": options.most, "step": options.step}
            chosen["until"] = begin + 60 * options.minutes
            totals = run_share(names, folder, report, share=(part, parts), only=options.file, **chosen)
            print(
                f"{sum(counts['flips'] for counts in totals.values()):,} changed bytes in {len(totals)} files"
            )
    finally:
        os.chdir("/")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{failures} failed; {time.monotonic() - begin:.0f} s")
    return int(failures > 0)


def _print_files(names: list[str], folder: Path) -> None:
    load_libraries()
    for name in names:
        bench = Bench(name, folder / name)
        for file, path in bench.paths.items():
            verified = "verify" if path in bench.listed else "not verified"
            readers = [reader.name for reader in bench.readers(file)]
            print(
                f"{name} {file}: {Path(path).stat().st_size:,} bytes, {verified}; read by {readers}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
