"""Fuzzing of the parsers that read bytes from strangers, compared with other readers of the same bytes.

A parser may only raise an error of hexdata, and what it accepts must equal what another reader finds. The
targets are listed in ``TARGETS``; the docstring of each names what it compares.

    fuzz_parsers.py TARGET CORPUS [-runs=1000000 …]  guided by coverage; needs atheris, options of libFuzzer
    fuzz_parsers.py TARGET FILE                      one input, such as a failing one
    fuzz_parsers.py --merge TARGET CORPUS            adds CORPUS to the committed inputs, without those that
                                                     reach no new code
    fuzz_parsers.py --sample SECONDS SEED [TARGET …] the committed inputs and random changes of them, without
                                                     atheris; SECONDS of processor time for all changes

Each run prints the number of inputs by result and the processor time. Without coverage, a failing input is
written to ``failing-TARGET-SEED-NUMBER`` in the current folder; libFuzzer writes ``crash-…``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
for _folder in (str(HERE.parents[1]), str(HERE)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

try:
    import atheris
except ImportError:
    atheris = None

__all__ = ["TARGETS", "Counts", "committed", "main", "sample", "target_class"]


class Entry(NamedTuple):
    """Where a target is, and the modules and packages whose coverage guides the fuzzer."""

    module: str
    name: str
    instrumented: tuple[str, ...]


_LEGACY = "hexdata.formats.legacy"
_JSON = "hexdata.strict_json"
_INTERPRETER = tuple(f"{_LEGACY}.{name}" for name in ("unpickler", "opcodes", "memo", "allowlist", "buffer"))
TARGETS = {
    "pickle": Entry("pickle_targets", "PickleTarget", _INTERPRETER),
    "pickle-rows": Entry("pickle_targets", "PickleRowsTarget", (_LEGACY,)),
    "selfplay": Entry("pickle_targets", "SelfPlayTarget", (f"{_LEGACY}.games",)),
    "trmph": Entry("text_targets", "TrmphTarget", ("hexdata.board",)),
    "hexworld": Entry(
        "text_targets",
        "HexWorldTarget",
        ("hexdata.formats.hexworld", "hexdata.formats.games", "hexdata.board"),
    ),
    "sgf": Entry("text_targets", "SgfTarget", ("hexdata.formats.sgf", "hexdata.formats.games")),
    "text-file": Entry(
        "text_targets",
        "TextFileTarget",
        ("hexdata.formats.games", "hexdata.formats.trmph", "hexdata.formats.hexworld"),
    ),
    "run-header": Entry("text_targets", "RunHeaderTarget", ("hexdata.formats.run_header",)),
    "member": Entry("binary_targets", "MemberTarget", ("hexdata.shards.tar_members",)),
    "shard": Entry(
        "binary_targets", "ShardTarget", ("hexdata.shards.tar_members", "hexdata.shards.block_check")
    ),
    "npz": Entry("binary_targets", "NpzTarget", ("hexdata.formats.npz", "hexdata.formats.katago")),
    "gzip": Entry("binary_targets", "GzipTarget", ("hexdata.formats.gunzip",)),
    "json": Entry("json_targets", "JsonTarget", (_JSON,)),
    "manifest": Entry("json_targets", "ManifestTarget", ("hexdata.store.manifest", _JSON)),
    "shard-manifest": Entry("json_targets", "ShardManifestTarget", ("hexdata.shards.manifest", _JSON)),
    "ledger": Entry("json_targets", "LedgerTarget", ("hexdata.store.ledger", _JSON)),
    "journal": Entry("json_targets", "JournalTarget", ("hexdata.store.journal", _JSON)),
    "state": Entry("json_targets", "StateTarget", ("hexdata.loader.checkpoint", "hexdata.checks", _JSON)),
    "config": Entry("json_targets", "ConfigTarget", ("hexdata.pipeline", "hexdata.config", "hexdata.checks")),
    "live-config": Entry("json_targets", "LiveConfigTarget", ("hexdata.live.options", "hexdata.checks")),
    "expression": Entry(
        "sql_targets", "ExpressionTarget", ("hexdata.selection.expression", "hexdata.store.sql_tree")
    ),
    "query": Entry("sql_targets", "QueryTarget", ("hexdata.sql.check", "hexdata.store.sql_tree")),
    "browse": Entry("sql_targets", "BrowseTarget", ("hexdata.browse.app", "hexdata.browse.listing")),
    "source": Entry("source_target", "SourceTarget", ("hexdata.formats",)),
}

CORPUS = HERE / "corpus"
OPTIONS = ("-rss_limit_mb=3000", "-len_control=0", "-print_final_stats=1", "-verbosity=1")
STRUCTURED = 0.8
"""Share of inputs of a guided run that the target mutates, and libFuzzer the others."""
VALID = 0.4
"""Share of inputs that are changes of accepted ones. Most of those that libFuzzer chooses are refused."""


def target_class(name: str) -> Any:
    """Return the class of a target."""
    return getattr(importlib.import_module(TARGETS[name].module), TARGETS[name].name)


class Counts:
    """Numbers of inputs by result, and processor time."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.seconds = 0.0

    def line(self, name: str) -> str:
        """Return the counts as text."""
        results = ", ".join(f"{count:,} {result}" for result, count in sorted(self.results.items()))
        return f"{name}: {self.results.total():,} inputs: {results}; {self.seconds:.1f} s of CPU time"


# Committed inputs


def committed(name: str) -> list[bytes]:
    """Return the committed inputs of a target: each line of its file is one, compressed."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [zlib.decompress(base64.b85decode(line)) for line in lines]


def write_committed(name: str, inputs: Sequence[bytes]) -> None:
    """Write the committed inputs of a target, the smallest first."""
    lines = [
        base64.b85encode(zlib.compress(raw, 9)).decode() for raw in sorted(inputs, key=lambda r: (len(r), r))
    ]
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(line + "\n" for line in lines))


# Runs without coverage


def sample(names: Sequence[str], seconds: float, seed: int, most: int = 1 << 62) -> dict[str, Counts]:
    """Check the committed inputs of each target, then random changes of them and of the seeds.

    Args:
        names: Targets.
        seconds: Processor time of the changes of all targets together.
        seed: Seed of the changes.
        most: Maximum number of changed inputs of each target.

    Raises:
        Exception: That of the first failing input, which is written to the current folder.
    """
    found = {}
    for name in names:
        counts = found[name] = Counts()
        rng = random.Random(f"{seed} {name}")
        with ExitStack() as stack:
            target = target_class(name)(_scratch(stack), stack)
            inputs = [*committed(name), *target.seeds()]
            for number, raw in enumerate(inputs):
                _check(counts, target, raw, f"failing-{name}-{number}")
            deadline = time.process_time() + seconds / len(names)
            for number in range(most):
                if time.process_time() > deadline:
                    break
                raw = target.mutate(rng.choice(inputs), rng)
                _check(counts, target, raw, f"failing-{name}-{seed}-{number}")
    return found


def _check(counts: Counts, target: Any, raw: bytes, path: str) -> None:
    """Check one input. If it fails, write it to a file."""
    begin = time.process_time()
    try:
        counts.results[target.check(raw)] += 1
    except Exception:
        Path(path).write_bytes(raw)
        print(f"{path}: {raw[:300]!r}", flush=True)
        raise
    counts.seconds += time.process_time() - begin


def _scratch(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hexdata-fuzz-")))


# Runs guided by coverage


def import_instrumented(prefixes: Sequence[str]) -> None:
    """Import modules and packages with instrumentation, and what they import without it."""
    root = HERE.parents[1]
    files = [path.relative_to(root).with_suffix("") for path in (root / "hexdata").rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in files]
    others = [name for name in modules if not f"{name}.".startswith(tuple(f"{p}." for p in prefixes))]
    with atheris.instrument_imports(include=["hexdata"], exclude=others):
        for prefix in prefixes:
            importlib.import_module(prefix)


def run_guided(name: str, arguments: list[str]) -> None:
    """Run libFuzzer; it ends the process. Every second, counts are written to CORPUS.json."""
    folder = Path(next(argument for argument in arguments if not argument.startswith("-")))
    import_instrumented(TARGETS[name].instrumented)
    stack = ExitStack()
    scratch = Path(tempfile.mkdtemp(prefix="hexdata-fuzz-"))
    target = target_class(name)(scratch, stack)
    if not folder.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        merging = any(argument.startswith("-merge") for argument in arguments)
        for raw in [*target.seeds(), *([] if merging else committed(name))]:
            (folder / hashlib.sha1(raw).hexdigest()).write_bytes(raw)
    both = importlib.import_module("fuzz_target").BOTH
    accepted: deque[bytes] = deque(maxlen=256)
    counts = Counts()
    path = folder.with_name(f"{folder.name}-{time.time_ns()}.json")
    due = time.monotonic() + 1

    def check(raw: bytes) -> None:
        nonlocal due
        result = target.check(raw)
        counts.results[result] += 1
        if result == both:
            accepted.append(raw)
        if time.monotonic() > due and not folder.is_file():
            due = time.monotonic() + 1
            path.write_text(json.dumps({"results": counts.results, "seconds": time.process_time()}))

    def mutate(raw: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if accepted and rng.random() < VALID:
            raw = rng.choice(accepted)
        if rng.random() < STRUCTURED:
            found = target.mutate(raw, rng)
            if found and len(found) <= max_size:
                return found
        return atheris.Mutate(raw, max_size)  # type: ignore[no-any-return]

    timeout = 0 if name == "source" else 1200  # that target has its own alarm
    options = [*OPTIONS, f"-timeout={timeout}", f"-max_len={target.max_len}"]
    if target.words:
        quoted = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words if word]
        (scratch / "words").write_text("".join(f'"{word}"\n' for word in quoted))
        options.append(f"-dict={scratch / 'words'}")
    options += arguments
    program = scratch / "program"  # libFuzzer starts it again to merge
    command = shlex.join([sys.executable, __file__, name])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o700)
    atheris.Setup([str(program), *options], check, custom_mutator=mutate)
    atheris.Fuzz()


def merge(name: str, corpus: Path) -> None:
    """Keep the smallest inputs that cover what the committed inputs and a corpus cover beyond the seeds."""
    with tempfile.TemporaryDirectory(prefix="hexdata-fuzz-") as folder:
        merged, before = Path(folder, "merged"), Path(folder, "before")
        before.mkdir()
        for number, raw in enumerate(committed(name)):
            (before / str(number)).write_bytes(raw)
        command = [sys.executable, __file__, name, str(merged), "-merge=1", str(before), str(corpus)]
        subprocess.run(command, check=True)
        found = {path.read_bytes() for path in merged.iterdir()}
    with ExitStack() as stack:
        found.difference_update(target_class(name)(_scratch(stack), stack).seeds())
    write_committed(name, [*found])


def main(arguments: list[str]) -> None:
    """Run what the arguments ask for."""
    kind, *others = arguments or [""]
    if kind == "--sample":
        seconds, seed, *names = others
        for name, counts in sample(names or [*TARGETS], float(seconds), int(seed)).items():
            print(counts.line(name))
    elif kind == "--merge":
        merge(others[0], Path(others[1]))
    elif kind in TARGETS and others and Path(others[0]).is_file():
        with ExitStack() as stack:
            print(target_class(kind)(_scratch(stack), stack).check(Path(others[0]).read_bytes()))
    elif kind in TARGETS and others and atheris is not None:
        run_guided(kind, others)
    else:
        raise SystemExit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
