"""Runs a large store the whole way, from legacy pickles to checked shards, and prints a table of the stages.

Usage: ``python tests/benchmarks/whole_way.py FOLDER --positions 97000000``. FOLDER must not exist. The
sources are copies of the pickles of a demo that differ in the time in their gzip headers, so that hexdata
reads each of them as a new file.

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
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from watched import watch

from hexdata.board import unpack_boards
from hexdata.demo import DemoOptions, make_legacy
from hexdata.order import derive_key, sort_key
from hexdata.system import available_memory

BASES: Final = 6
"""Number of pickles of a demo; two of its eight files are texts."""
GAMES_PER_BASE: Final = 1_800
POSITIONS_PER_GAME: Final = 69
SAMPLED_SHARDS: Final = 24
"""Number of shards whose positions are compared with the sources."""
ROWS_PER_BLOCK: Final = 32
"""Number of compared positions per block of these shards."""

Arrays = Mapping[str, npt.NDArray[Any]]


class Unpickler(pickle.Unpickler):
    """Reads enums of the legacy project as their values. The files are generated, so they are safe."""

    def find_class(self, module: str, name: str) -> Any:
        return (lambda value: value) if module.startswith("hex_ai") else super().find_class(module, name)


def read_examples(path: Path) -> list[Any]:
    """Return the examples of a pickle."""
    with gzip.open(path) as file:
        examples: list[Any] = Unpickler(file).load()["examples"]
    return examples


def write_sources(folder: Path, bases: list[Path], counts: list[int], positions: int) -> list[int]:
    """Copy bases in turn until there are enough positions; return the number of the base of each source."""
    folder.mkdir()
    chosen: list[int] = []
    while positions > 0:
        base = len(chosen) % len(bases)
        content = bytearray(bases[base].read_bytes())
        content[4:8] = (len(chosen) + 1).to_bytes(4, "little")  # the time in the gzip header
        (folder / f"file_{len(chosen):06d}_processed.pkl.gz").write_bytes(content)
        chosen.append(base)
        positions -= counts[base]
    return chosen


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_stage(store: Path, positions: int, name: str, *arguments: object) -> None:
    """Run a command of hexdata, with the options in its name, and print its row of the table."""
    done = watch([sys.executable, "-m", "hexdata", *name.split(), *map(str, arguments)], stdout=sys.stderr)
    print(
        f"| `{name}` | {done.seconds:,.0f} | {positions / done.seconds:,.0f} | "
        f"{done.processor_seconds:,.0f} | {done.peak / 1e6:,.0f} MB | {done.written / 1e9:.1f} GB | "
        f"{size_of(store) / 1e9:.1f} GB |",
        flush=True,
    )


def check_shards(store: Path, examples: list[list[Any]], sources: list[int]) -> str:
    """Check all position ids, and compare a sample of positions with the pickles that they are from.

    Reads the shards with ``tarfile`` and NumPy, and the bases with ``pickle``.
    """
    manifest = json.loads((store / "shards" / "manifest.json").read_bytes())
    begins = np.cumsum([0, *(len(examples[base]) for base in sources)])
    read = pq.read_table(store / "sources", columns=["source_id", "name"]).sort_by("source_id")
    numbers = [int(Path(name).name[5:11]) for name in read["name"].to_pylist()]
    assert numbers == list(range(len(sources))), "the sources are in another order"
    key = derive_key(manifest["seed"], "shuffle")
    seen = np.zeros(int(begins[-1]), bool)
    compared = 0
    for shards in manifest["splits"].values():
        sampled = set(np.linspace(0, len(shards) - 1, SAMPLED_SHARDS).astype(int).tolist())
        last = -1
        for number, shard in enumerate(shards):
            for block in read_blocks(store / "shards" / shard["name"], number in sampled):
                ids = block["position_id"]
                keys = sort_key(ids, key)
                assert int(keys[0]) > last, f"the order is wrong before {shard['name']}"
                assert (keys[1:] > keys[:-1]).all(), f"the order is wrong in {shard['name']}"
                last = int(keys[-1])
                assert not seen[ids].any(), "a position occurs twice"
                seen[ids] = True
                rows = np.linspace(0, len(ids) - 1, ROWS_PER_BLOCK).astype(int) if "board" in block else []
                for row in rows:
                    source = int(np.searchsorted(begins, ids[row], side="right")) - 1
                    example = examples[sources[source]][int(ids[row] - begins[source])]
                    compare(block, int(row), example, manifest["board_size"])
                compared += len(rows)
    assert seen.all(), f"{np.count_nonzero(seen):,} of {len(seen):,} positions"
    return f"{len(seen):,} positions found once and in order, {compared:,} compared"


def read_blocks(path: Path, whole: bool) -> Iterator[Arrays]:
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


def compare(block: Arrays, row: int, example: Any, n: int) -> None:
    """Compare a position of a block with the example that it is from."""
    position = f"position {block['position_id'][row]}"
    # Tuples are from the older tool, whose values are 1.0 if blue won.
    is_dict = isinstance(example, dict)
    board, policy, value = (example[name] for name in ("board", "policy", "value")) if is_dict else example
    assert np.array_equal(board[:2], unpack_boards(block["board"][[row]], n)[0]), f"{position}: another board"
    move = int(block["move"][row])
    moves = np.flatnonzero(policy).tolist()
    assert moves == ([] if move == 65_535 else [move]), f"{position}: another policy"
    expected = np.float32(value if is_dict else 1.0 - value)
    assert block["value"][row] == expected, f"{position}: another value"


def main() -> None:
    """Run all stages and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder for the sources and the store")
    parser.add_argument("--positions", type=int, default=97_000_000)
    options = parser.parse_args()
    folder, store = options.folder, options.folder / "store"
    folder.mkdir(parents=True)
    games = min(GAMES_PER_BASE, -(-options.positions // (BASES * POSITIONS_PER_GAME)))
    make_legacy(folder / "bases", DemoOptions(games=8 * games))
    bases = sorted((folder / "bases").rglob("*.pkl.gz"))
    assert len(bases) == BASES
    counts = [len(read_examples(path)) for path in bases]
    sources = write_sources(folder / "sources", bases, counts, options.positions)
    positions = sum(counts[base] for base in sources)
    size = size_of(folder / "sources") / 1e9
    print(f"{len(sources):,} files, {size:.2f} GB, {positions:,} positions, load {os.getloadavg()[0]:.1f}")
    print("| stage | seconds | positions/s | processor seconds | peak memory | written | store afterwards |")
    print("|---|---|---|---|---|---|---|", flush=True)
    run_stage(store, positions, "convert", folder / "sources", store)
    for name in ("shuffle", "export", "verify"):
        run_stage(store, positions, name, store)
    print(check_shards(store, [read_examples(path) for path in bases], sources), flush=True)
    run_stage(store, positions, "report", store, "--output", folder / "report.html")
    fits = size_of(store / "shards") < available_memory()
    for mode in ("games", "exact", "stream") if fits else ("games", "stream"):
        run_stage(store, positions, f"load --mode {mode}", store)


if __name__ == "__main__":
    main()
