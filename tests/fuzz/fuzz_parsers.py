"""Fuzzing of the parsers that read bytes from strangers, compared with other readers of the same bytes.

``TARGETS`` are the pickle interpreter, compared with Python's unpickler; lines of TRMPH, compared with a
regular expression; members of shards, compared with tarfile and NumPy; both manifests; SQL expressions, which
DuckDB must evaluate twice to the same value. A parser may only raise an error of hexdata.

    fuzz_parsers.py CORPUS -runs=1000000           coverage-guided; needs atheris, arguments of libFuzzer
    fuzz_parsers.py --plain COUNT SEED [TARGET …]  random mutations, with any Python
    fuzz_parsers.py FILE                           one input of CORPUS

The first byte of an input of CORPUS selects the target. Each run prints the number of inputs, of accepted
inputs and the processor time by target. A failing input of ``--plain`` is written to the current folder.
"""

from __future__ import annotations

import io
import json
import random
import re
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS.parent)]

try:
    import atheris
except ImportError:
    atheris = None

INSTRUMENTED = [
    *("hexdata.board", "hexdata.formats", "hexdata.selection", "hexdata.shards", "hexdata.store.manifest"),
    *("hexdata.store.sql_tree", "hexdata.strict_json"),
]
with atheris.instrument_imports(include=INSTRUMENTED) if atheris else nullcontext():
    from hexdata.board import check_no_repeats, parse_moves, split_trmph
    from hexdata.errors import ConfigError, FormatError, StoreError
    from hexdata.formats.legacy import unpickler  # noqa: F401 - instrumented here
    from hexdata.selection.expression import check_expression
    from hexdata.shards.block_check import check_block
    from hexdata.shards.manifest import ShardManifest
    from hexdata.shards.tar_members import MemberReader
    from hexdata.store.manifest import Manifest

from differential import DifferentError, TooLargeError, ours, theirs  # noqa: E402
from pickle_mutations import Mutator  # noqa: E402
from pickle_mutations import seeds as pickle_seeds  # noqa: E402

from hexdata.convert import ConvertOptions, convert_sources  # noqa: E402
from hexdata.demo.games import make_games  # noqa: E402
from hexdata.export import ExportOptions, export_shards  # noqa: E402
from hexdata.formats.trmph import write_trmph  # noqa: E402
from hexdata.shuffle import ShuffleOptions, shuffle_store  # noqa: E402
from hexdata.store.files import canonical_json  # noqa: E402
from hexdata.store.manifest import _digest  # noqa: E402
from hexdata.store.session import QUERY_ERRORS, duckdb_session  # noqa: E402

OPTIONS = ["-timeout=120", "-rss_limit_mb=2500", "-max_len=6000", "-len_control=0"]
COLUMNS = {
    "board": "BLOB",
    "extra": "STRUCT(komi DOUBLE, visits INTEGER)",
    "flags": "VARCHAR[]",
    "move": "USMALLINT",
    "value": "FLOAT",
    "winner": "VARCHAR",
}
EXPRESSIONS = [
    "value > 0.5 AND winner = 'RED'",
    "CASE WHEN move IS NULL THEN 0 ELSE move % 13 END",
    "try_cast(winner AS integer) BETWEEN 1 AND 2",
    "extra.komi * 2 - abs(extra.visits)",
    "lower(winner) IN ('red', 'blue') OR NOT (value < 0)",
    "octet_length(board) // 2",
    "list_contains(flags, 'no-chain')",
    "(SELECT 1)",
    "random() < 0.5",
    "read_text('/etc/passwd')",
    "now()",
    "sum(value) OVER ()",
    "1; DROP TABLE x",
    "'a' || chr(65) -- comment",
    "value::DECIMAL(4, 1) = $$1$$",
    "list_transform(flags, x -> x)",
    "COLUMNS(*)",
    "value AS x",
    "1) FROM (SELECT 2",
]
WORDS = [word for text in EXPRESSIONS for word in re.findall(r"\w+|\W", text)]
NUMBERS = [0, 1, 2, 127, 128, 255]
_LINE = re.compile(r"(?:https?://[^\s#]*)?#([0-9]{1,3}),((?:[a-z]{1,2}[1-9][0-9]?)*)(?:\s.*)?", re.DOTALL)


class Parsers:
    """The parsers, their seeds and the folder and session that they need.

    Args:
        scratch: Empty folder.
        stack: Keeps the DuckDB session open.
    """

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        self.folder = scratch / "manifest"
        self.folder.mkdir()
        self.connection = stack.enter_context(duckdb_session(memory=64 << 20, threads=1))
        self.empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in COLUMNS.items())
        self.seeds = self._seeds(scratch)
        self.mutators: dict[int, Any] = {}

    @staticmethod
    def _seeds(scratch: Path) -> dict[str, list[bytes]]:
        """Return valid inputs of each target."""
        (scratch / "games").mkdir()
        store = scratch / "store"
        write_trmph(scratch / "games" / "a.trmph", list(make_games(6, 1, 3)), 3)
        convert_sources(scratch / "games", store, ConvertOptions(workers=1))
        shuffle_store(store, ShuffleOptions(seed=7, threads=1))
        export_shards(store, ExportOptions(workers=1, shard_size=4, block_size=2))
        lines = (scratch / "games" / "a.trmph").read_bytes().splitlines()
        return {
            "pickle": pickle_seeds(),
            "trmph": [*lines, b"http://www.trmph.com/hex/board#3,a1b1a2b2a3 1", b"#13,a1b1c13m13 r"],
            "shard": [path.read_bytes() for path in sorted((store / "shards").glob("*.tar"))[:3]],
            "shard-manifest": [(store / "shards" / "manifest.json").read_bytes()],
            "manifest": [(store / "manifest.json").read_bytes()],
            "sql": [text.encode() for text in EXPRESSIONS],
        }

    def pickle(self, raw: bytes) -> bool:
        """Compare an accepted pickle with Python's reading."""
        try:
            examples, rest = ours(raw)
        except (FormatError, TooLargeError):
            return False
        try:
            their_examples, their_rest, _ = theirs(raw)
        except TooLargeError:
            return False
        except Exception as error:
            raise DifferentError(f"Python does not read what hexdata does: {error!r}") from error
        if (examples, rest) != (their_examples, their_rest):
            raise DifferentError("Python reads other values")
        return True

    def trmph(self, raw: bytes) -> bool:
        """Compare the moves of an accepted line with those that a regular expression finds."""
        try:
            text = raw.decode()
            parts = split_trmph(text)
            moves = parse_moves(parts.moves, parts.board_size)
            check_no_repeats(moves, parts.board_size)
        except (FormatError, UnicodeDecodeError):
            return False
        found = _LINE.fullmatch(text.strip())
        if found is None or int(found[1]) != parts.board_size:
            raise DifferentError("the regular expression finds no game")
        cells = []
        for letters, row in re.findall(r"([a-z]+)([0-9]+)", found[2]):
            column = 0
            for letter in letters:
                column = column * 26 + ord(letter) - 96
            cells.append((int(row) - 1) * parts.board_size + column - 1)
        if cells != moves.tolist() or len(set(cells)) != len(cells):
            raise DifferentError(f"moves {moves.tolist()} and not {cells}")
        return True

    def shard(self, raw: bytes) -> bool:
        """Compare the members of an accepted shard with those that tarfile and NumPy read."""
        arrays = {}
        members = MemberReader(io.BytesIO(raw).read, 0, len(raw), len(raw), "shard")
        try:
            while header := members.next_header():
                arrays[header.name] = members.read_array()
            blocks: dict[str, dict[str, Any]] = {}
            for name, array in arrays.items():
                key, _, field = name.removesuffix(".npy").partition(".")
                blocks.setdefault(key, {})[field] = array
            complete = True
        except FormatError:
            return False
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            for member in archive:
                data = archive.extractfile(member)
                assert data is not None
                expected = np.load(io.BytesIO(data.read()), allow_pickle=False)
                found = arrays[member.name]
                if found.dtype != expected.dtype or found.shape != expected.shape:
                    raise DifferentError(f"{member.name}: {found.dtype} {found.shape}")
                if found.tobytes() != expected.tobytes():
                    raise DifferentError(f"{member.name}: other numbers")
        try:
            for key, block in blocks.items():
                check_block(block, "shard", key)
        except FormatError:
            complete = False
        return complete

    def shard_manifest(self, raw: bytes) -> bool:
        """Write an accepted manifest again, and read the same."""
        try:
            manifest = ShardManifest.loads(raw, "manifest.json")
        except StoreError:
            return False
        again = ShardManifest.loads(manifest.dumps(), "manifest.json")
        if again != manifest or json.loads(raw)["digest"] != manifest.digest:
            raise DifferentError("a manifest changes when it is written again")
        return True

    def manifest(self, raw: bytes) -> bool:
        """Write an accepted manifest again, and read the same."""
        path = self.folder / "manifest.json"
        path.write_bytes(raw)
        try:
            manifest = Manifest.load(self.folder)
        except StoreError:
            return False
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in manifest.files):
            raise DifferentError("a file outside of the store")
        return True

    def sql(self, raw: bytes) -> bool:
        """Evaluate an accepted expression for one row twice, in parentheses."""
        try:
            text = raw.decode()
            expression = check_expression(self.connection, "--where", text, COLUMNS)
        except (ConfigError, UnicodeDecodeError):
            return False
        query = f"SELECT [{expression.sql}], 7 FROM (SELECT {self.empty})"
        if len(self.connection.extract_statements(query)) != 1:
            raise DifferentError("several statements")
        try:
            first, second = (self.connection.sql(query).fetchall() for _ in range(2))
        except QUERY_ERRORS:
            return True
        if repr(first) != repr(second) or len(first) != 1 or len(first[0]) != 2 or first[0][1] != 7:
            raise DifferentError(f"{first} and {second}")
        if not expression.columns <= COLUMNS.keys():
            raise DifferentError(f"columns {expression.columns}")
        return True

    def mutated(self, target: str, rng: random.Random) -> bytes:
        """Return a random mutation of a seed."""
        if target == "pickle" and rng.random() < 0.7:
            number = rng.randrange(4)
            if number not in self.mutators:
                self.mutators[number] = iter(Mutator(rng.getrandbits(32)))
            mutation: bytes = next(self.mutators[number])
            return mutation
        seeds = self.seeds[target]
        raw = bytearray(rng.choice(seeds))
        if target in ("manifest", "shard-manifest") and rng.random() < 0.7:
            return _altered_json(bytes(raw), rng)
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            start = rng.randrange(len(raw) + 1)
            kind = rng.randrange(7)
            if kind == 0 and target == "sql":
                raw[start:start] = rng.choice(WORDS).encode()
            elif kind <= 1:
                raw[start : start + 1] = bytes([rng.choice(NUMBERS)])
            elif kind == 2 and start < len(raw):
                raw[start] ^= 1 << rng.randrange(8)
            elif kind == 3:
                del raw[start : start + rng.choice((1, 2, 8, 64, 512))]
            elif kind == 4:
                raw[start:start] = raw[start : start + rng.choice((1, 2, 8, 64, 512))]
            elif kind == 5:
                other = rng.choice(seeds)
                raw[start : start + 8] = other[start : start + rng.choice((1, 4, 16))]
            elif start < len(raw):
                raw[start] = rng.randrange(256) if target != "sql" else rng.randrange(32, 127)
        return bytes(raw)


VALUES = [None, True, -1, 0, 1, 1.5, 1e308, 2**31, 2**63, "", "x", "../x", "/etc/passwd", [], {}, [[]], "|O"]


def _altered_json(raw: bytes, rng: random.Random) -> bytes:
    """Return a manifest with one or two other values, keys or files, with a valid digest most of the time."""
    content = json.loads(raw)
    for _ in range(rng.choice((1, 1, 2))):
        node = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and rng.random() < 0.8:
                node = node[key]
                continue
            kind = rng.randrange(5)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, dict):
                node[rng.choice(["x", "../../x", "positions/part-000009.parquet"])] = node.pop(key)
            elif kind == 2 and isinstance(node[key], int):
                node[key] += rng.choice((-1, 1))
            else:
                node[key] = rng.choice(VALUES)
            break
    if rng.random() < 0.8 and isinstance(content, dict) and "digest" in content:
        del content["digest"]
        content["digest"] = _digest(content)
    return canonical_json(content)


TARGETS: dict[str, Callable[[Parsers, bytes], bool]] = {
    "pickle": Parsers.pickle,
    "trmph": Parsers.trmph,
    "shard": Parsers.shard,
    "shard-manifest": Parsers.shard_manifest,
    "manifest": Parsers.manifest,
    "sql": Parsers.sql,
}


class Counts:
    """Numbers of inputs and processor time by target."""

    def __init__(self) -> None:
        self.inputs: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def run(self, parsers: Parsers, target: str, raw: bytes) -> None:
        """Check one input."""
        begin = time.process_time()
        self.inputs[target] += 1
        self.accepted[target] += TARGETS[target](parsers, raw)
        self.seconds[target] += time.process_time() - begin  # type: ignore[assignment]

    def report(self) -> None:
        """Print one line per target."""
        for name, count in self.inputs.items():
            seconds = self.seconds[name]
            print(f"{name}: {count:,} inputs, {self.accepted[name]:,} accepted, {seconds:.0f} s of CPU time")
        print(f"together: {self.inputs.total():,} in {time.process_time():.0f} s", flush=True)


def run_plain(count: int, seed: int, targets: list[str]) -> Counts:
    """Check ``count`` random mutations of the seeds of each target.

    Raises:
        Exception: That of the first failing input, which is written to the current folder.
    """
    counts = Counts()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hexdata-fuzz-")))
        parsers = Parsers(scratch, stack)
        for target in targets:
            rng = random.Random(f"{seed} {target}")
            for done in range(count):
                raw = parsers.mutated(target, rng)
                try:
                    counts.run(parsers, target, raw)
                except Exception:
                    path = Path(f"failing-{target}-{seed}-{done}")
                    path.write_bytes(raw)
                    print(f"{path}: {raw[:300]!r}", flush=True)
                    raise
    return counts


def run_guided(arguments: list[str]) -> None:
    """Run libFuzzer; it ends the process."""
    folder = Path(next(argument for argument in arguments if not argument.startswith("-")))
    scratch = Path(tempfile.mkdtemp(prefix="hexdata-fuzz-"))
    parsers = Parsers(scratch, ExitStack())
    names = list(TARGETS)
    if not folder.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(names):
            for item, raw in enumerate(parsers.seeds[name]):
                (folder / f"seed-{name}-{item}").write_bytes(bytes([number]) + raw)
    counts = Counts()

    def check(raw: bytes) -> None:
        if raw and raw[0] < len(names):
            counts.run(parsers, names[raw[0]], raw[1:])
            if counts.inputs.total() % 100_000 == 0:
                counts.report()

    atheris.Setup([sys.argv[0], *OPTIONS, *arguments], check)
    atheris.Fuzz()


def main(arguments: list[str]) -> None:
    """Run what the arguments ask for."""
    if arguments[:1] == ["--plain"]:
        count, seed, *targets = arguments[1:]
        run_plain(int(count), int(seed), targets or list(TARGETS)).report()
    elif not arguments or atheris is None:
        raise SystemExit(__doc__)
    else:
        run_guided(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
