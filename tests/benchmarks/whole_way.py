"""Runs a large store the whole way, from legacy pickles to checked shards, and prints a table of the stages.

Usage: ``python tests/benchmarks/whole_way.py FOLDER --positions 97000000``. FOLDER must not exist. The
sources are copies of a few generated files that differ in the time in their gzip headers, so that hexdata
reads each of them as a new file. Only one batch of sources exists at a time; it is removed once converted.
After an interruption, the same command with ``--resume`` goes on after the last finished stage or batch.

Memory is the resident memory of a stage and its child processes, summed 50 times a second; shared pages count
in each process. Written bytes are those of the whole stage, as counted by the operating system.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import pickle
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from watched import watch

from hexdata.board import unpack_boards
from hexdata.demo import DIALECTS
from hexdata.demo.games import make_games
from hexdata.formats.legacy.writer import write_legacy
from hexdata.formats.trmph import TrmphReader, write_trmph
from hexdata.order import derive_key, sort_key
from hexdata.pool import available_memory

BASES: Final = 6
"""Generated files, in turn of each dialect of the demo; all others are copies of them."""
SEED: Final = 7
SAMPLED_SHARDS: Final = 24
"""Number of shards whose positions are compared with the sources."""
ROWS_PER_BLOCK: Final = 32
"""Number of compared positions per block of these shards."""


@dataclass(frozen=True)
class Base:
    """A generated legacy file."""

    path: Path
    positions: int
    layout: str


@dataclass(frozen=True)
class Stage:
    """What a command took."""

    name: str
    seconds: float
    processor_seconds: float
    peak: int
    written: int
    disk: int
    """Size of the store afterwards."""


class Progress:
    """The stages that a run has finished, kept in a file so that an interrupted run can go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stages = [Stage(**stage) for stage in json.loads(path.read_bytes())] if path.exists() else []
        self._next = 0

    def once(self, run: Callable[[], Stage]) -> Stage:
        """Return the next stage of an earlier run, or run it and record it."""
        if self._next == len(self._stages):
            self._stages.append(run())
            content = json.dumps([asdict(stage) for stage in self._stages])
            part = self._path.with_suffix(".part")
            part.write_text(content)
            part.replace(self._path)
        self._next += 1
        return self._stages[self._next - 1]


def make_bases(folder: Path, positions: int, board_size: int) -> list[Base]:
    """Write legacy files of at least ``positions`` positions each, with different games."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    bases = []
    games = make_games(sys.maxsize, SEED, board_size)
    layouts = list(DIALECTS)
    for number in range(BASES):
        chosen, count = [], 0
        for game in games:
            chosen.append(game)
            count += len(game.moves) + 1
            if count >= positions:
                break
        layout = layouts[number % len(layouts)]
        raw, path = folder / "games.trmph", folder / f"base_{number}.pkl.gz"
        write_trmph(raw, chosen, board_size)
        with TrmphReader(raw) as reader, path.open("wb") as file:
            batches = (as_processed(batch.positions, layout) for batch in reader.batches())
            header = {"source_file": "data/games.trmph"}
            dialect = DIALECTS[layout]
            write_legacy(file, batches, board_size=board_size, dialect=dialect, header=header, level=1)
        raw.unlink()
        bases.append(Base(path, count, layout))
    return bases


def as_processed(batch: pa.RecordBatch, layout: str) -> pa.RecordBatch:
    """Give positions the form in which the legacy tool wrote them, as the demo does.

    Tuples keep the order of their games. Dicts are shuffled within each game and have more columns.
    """
    if layout == "v1-tuples":
        return batch
    line = batch["line_idx"].to_numpy()
    key = derive_key(SEED, "order within games")
    batch = batch.take(pa.array(np.lexsort((sort_key(batch["record"].to_numpy(), key), line))))
    tiers = pc.min_element_wise(pc.divide(batch["position_in_game"], pa.scalar(5, pa.uint16())), 3)
    columns = {
        "file_idx": pa.array(np.zeros(len(batch), np.int32)),
        "value_sample_tier": tiers.cast(pa.uint8()),
        "metadata": pa.array(['{"source_file": "data/games.trmph"}'] * len(batch)),
    }
    for name, column in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch


def copies(bases: Sequence[Base], positions: int) -> list[Base]:
    """Return the base of each source file until there are at least ``positions`` positions."""
    files, count = [], 0
    while count < positions:
        base = bases[len(files) % len(bases)]
        files.append(base)
        count += base.positions
    return files


def write_copies(folder: Path, files: Sequence[tuple[int, Base]]) -> int:
    """Copy bases into a folder, each with its number as the time in its gzip header; return their size."""
    folder.mkdir(exist_ok=True)
    size = 0
    for number, base in files:
        content = bytearray(base.path.read_bytes())
        content[4:8] = (number + 1).to_bytes(4, "little")
        (folder / f"file_{number:06d}_processed.pkl.gz").write_bytes(content)
        size += len(content)
    return size


def run_stage(name: str, command: Sequence[str], store: Path) -> Stage:
    """Run a hexdata command and return what it took.

    Raises:
        CalledProcessError: It failed.
    """
    done = watch([sys.executable, "-m", "hexdata", *command], stdout=sys.stderr)
    return Stage(name, done.seconds, done.processor_seconds, done.peak, done.written, size_of(store))


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def joined(name: str, stages: Sequence[Stage]) -> Stage:
    """Return the sum of several runs of a stage, with their largest memory."""
    return Stage(
        name,
        sum(stage.seconds for stage in stages),
        sum(stage.processor_seconds for stage in stages),
        max(stage.peak for stage in stages),
        sum(stage.written for stage in stages),
        stages[-1].disk,
    )


def convert(options: argparse.Namespace, files: Sequence[Base], progress: Progress) -> Iterator[Stage]:
    """Convert the sources in batches, and remove each batch afterwards."""
    numbered = iter(enumerate(files))
    per_batch = -(-len(files) // options.batches)
    while batch := list(islice(numbered, per_batch)):
        yield progress.once(partial(convert_batch, options, batch))


def convert_batch(options: argparse.Namespace, batch: Sequence[tuple[int, Base]]) -> Stage:
    """Write a batch of sources, convert it and remove it."""
    folder = options.folder / f"sources-{batch[0][0]:06d}"
    print(f"{write_copies(folder, batch) / 1e9:.2f} GB of sources", file=sys.stderr)
    command = ["convert", str(folder), str(options.folder / "store"), "--memory", options.memory]
    stage = run_stage("convert", command, options.folder / "store")
    shutil.rmtree(folder)
    return stage


def check_shards(store: Path, files: Sequence[Base]) -> dict[str, Any]:
    """Check all position ids, and compare a sample of positions with the pickles that they are from.

    Reads the shards with ``tarfile`` and NumPy, and the bases with ``pickle``.

    Returns:
        The numbers of positions and of compared positions.
    """
    manifest = json.loads((store / "shards" / "manifest.json").read_bytes())
    total = sum(base.positions for base in files)
    begins = np.cumsum([0, *(base.positions for base in files)])
    sources = pq.read_table(store / "sources", columns=["source_id", "name"]).to_pydict()
    order = [name for _, name in sorted(zip(sources["source_id"], sources["name"], strict=True))]
    assert [int(Path(name).name[5:11]) for name in order] == list(range(len(files))), (
        "the sources are in another order"
    )
    examples = {base.path: read_examples(base) for base in set(files)}
    key = derive_key(manifest["seed"], "shuffle")
    seen = np.zeros(-(-total // 8), np.uint8)
    compared = 0
    for split, entries in manifest["splits"].items():
        shards = entries["shards"]
        sampled = set(np.linspace(0, len(shards) - 1, SAMPLED_SHARDS).astype(int).tolist())
        last = -1
        for number, shard in enumerate(shards):
            for block in read_blocks(store / "shards" / shard["name"], number in sampled):
                ids = block["position_id"]
                keys = sort_key(ids, key)
                assert int(keys[0]) > last, f"{split}: the order is wrong before {shard['name']}"
                assert (keys[1:] > keys[:-1]).all(), f"{split}: the order is wrong in {shard['name']}"
                last = int(keys[-1])
                bits = np.left_shift(np.uint8(1), (ids & 7).astype(np.uint8))
                assert not (seen[ids >> 3] & bits).any(), "a position occurs twice"
                np.bitwise_or.at(seen, ids >> 3, bits)
                if "board" in block:
                    compared += compare(block, files, begins, examples, manifest["board_size"])
    found = int(np.bitwise_count(seen).sum())
    assert found == total, f"{found:,} of {total:,} positions"
    return {"positions": found, "compared": compared}


def read_examples(base: Base) -> list[Any]:
    """Return the examples of a generated file, which is safe to unpickle."""
    with gzip.open(base.path) as file:
        examples: list[Any] = _Unpickler(file).load()["examples"]
    return examples


class _Unpickler(pickle.Unpickler):
    """Reads enums of the legacy project as their values."""

    def find_class(self, module: str, name: str) -> Any:
        return (lambda value: value) if module.startswith("hex_ai") else super().find_class(module, name)


def read_blocks(path: Path, whole: bool) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the arrays of each block of a shard, or only those of ``position_id``."""
    block: dict[str, npt.NDArray[Any]] = {}
    key = ""
    with tarfile.open(path) as tar:
        for member in tar:
            number, field, _ = member.name.split(".")
            if number != key and block:
                yield block
                block = {}
            key = number
            if whole or field == "position_id":
                file = tar.extractfile(member)
                assert file is not None
                block[field] = np.load(io.BytesIO(file.read()))
    yield block


def compare(
    block: Mapping[str, npt.NDArray[Any]],
    files: Sequence[Base],
    begins: npt.NDArray[np.int64],
    examples: Mapping[Path, list[Any]],
    n: int,
) -> int:
    """Compare some positions of a block with the examples that they are from; return their number."""
    rows = np.linspace(0, len(block["board"]) - 1, ROWS_PER_BLOCK).astype(int)
    planes = unpack_boards(block["board"][rows], n)
    sources = np.searchsorted(begins, block["position_id"][rows], side="right") - 1
    for row, source, board in zip(rows.tolist(), sources.tolist(), planes, strict=True):
        base = files[source]
        example = examples[base.path][int(block["position_id"][row] - begins[source])]
        stated, policy, value = fields_of(example)
        assert np.array_equal(stated[:2], board), f"position {block['position_id'][row]}: another board"
        move = int(block["move"][row])
        moves = np.flatnonzero(policy)
        assert moves.tolist() == ([] if move == 65_535 else [move]), "another policy"
        expected = 1.0 - value if base.layout == "v1-tuples" else value
        assert block["value"][row] in (np.float32(expected), np.float32(1.0 - expected)), "another value"
    return len(rows)


def fields_of(example: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], float]:
    """Return the board, the policy and the value of an example of any layout."""
    if isinstance(example, dict):
        return example["board"], example["policy"], float(example["value"])
    return example[0], example[1], float(example[2])


def table(stages: Sequence[Stage], positions: int) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| stage | seconds | positions/s | processor seconds | peak memory | written | store afterwards |"
    yield "|---|---|---|---|---|---|---|"
    for stage in stages:
        yield (
            f"| `{stage.name}` | {stage.seconds:,.0f} | {positions / stage.seconds:,.0f} | "
            f"{stage.processor_seconds:,.0f} | {stage.peak / 1e6:,.0f} MB | {stage.written / 1e9:.1f} GB | "
            f"{stage.disk / 1e9:.1f} GB |"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the sources and the store")
    parser.add_argument("--positions", type=int, default=97_000_000)
    parser.add_argument("--per-file", type=int, default=128_000, help="positions per source file")
    parser.add_argument("--batches", type=int, default=1, help="batches in which the sources are converted")
    parser.add_argument("--board-size", type=int, default=13)
    parser.add_argument("--memory", default="1GB", help="memory of each stage, all processes together")
    parser.add_argument("--free-buckets", action="store_true", help="remove each bucket during export")
    parser.add_argument("--resume", action="store_true", help="go on after an interruption")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Run all stages and print the table."""
    options = parse(arguments)
    options.folder.mkdir(parents=True, exist_ok=options.resume)
    progress = Progress(options.folder / "stages.json")
    store = options.folder / "store"
    bases = make_bases(options.folder / "bases", options.per_file, options.board_size)
    files = copies(bases, options.positions)
    positions = sum(base.positions for base in files)
    print(f"{len(files):,} files, {positions:,} positions, load {os.getloadavg()[0]:.1f}", flush=True)
    batches = []
    for stage in convert(options, files, progress):
        batches.append(stage)
        print(f"batch {len(batches)}: {stage.seconds:,.0f} s, {stage.peak / 1e6:,.0f} MB", flush=True)
    stages = [joined("convert", batches)]
    print(*table(stages, positions), sep="\n", flush=True)

    def run(name: str, *arguments: str) -> None:
        stages.append(progress.once(lambda: run_stage(name, [name, str(store), *arguments], store)))
        print(list(table(stages[-1:], positions))[-1], flush=True)

    memory = ["--memory", options.memory]
    run("shuffle", *memory)
    run("export", *memory, *(["--free-buckets"] if options.free_buckets else []))
    run("verify", *memory)
    begin = time.perf_counter()
    checked = check_shards(store, files)
    print(f"checked {checked} in {time.perf_counter() - begin:,.0f} s", flush=True)
    run("report", "--output", str(options.folder / "report.html"))
    fits = size_of(store / "shards") < available_memory()
    run("load", "--mode", "exact" if fits else "stream")
    print(f"{len(files):,} files, {positions:,} positions\n", *table(stages, positions), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
