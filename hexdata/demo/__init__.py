"""Legacy files out of thin air: legal games, written in every layout that the legacy pipeline had."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.demo.games import make_games
from hexdata.engine import LOCAL
from hexdata.errors import ConfigError, StoreError
from hexdata.formats.legacy.writer import write_legacy
from hexdata.formats.trmph import TrmphReader, write_trmph
from hexdata.order import derive_key, sort_key
from hexdata.pool import default_workers
from hexdata.progress import SILENT, Progress
from hexdata.remote import local_path
from hexdata.store.files import atomic_file, remove_temporaries, write_bytes
from hexdata.store.ledger import Ledger
from hexdata.store.room import naming_full, telling_full

__all__ = ["DemoOptions", "DemoResult", "make_legacy"]

BOARD_SIZE: Final = 13
FOLDER: Final = "the folder of a demo"
"""What errors call it."""
LAYOUTS: Final = ("v1-tuples", "v2-dicts", "v2-enums", "trmph")
"""Folders below the demo's; each gets ``FILES_PER_LAYOUT`` files with games of their own."""
DIALECTS: Final = {"v1-tuples": "tuples", "v2-dicts": "dicts-player", "v2-enums": "dicts-enums"}
"""How the examples of each layout of pickles are spelled."""
FILES_PER_LAYOUT: Final = 2
TIER_SIZES: Final = (5, 5, 10)
"""Positions a game of value sample tiers 0, 1 and 2; the rest is of tier 3."""
PROCESSED_AT: Final = "2025-09-08T12:00:00.000000"
"""Legacy files say when they were made; these always say the same."""
WORKER_MEMORY: Final = 200 << 20
"""Bytes that it takes to make one file, about."""
_BEGUN: Final = "begun"
"""What the mark of a demo's folder holds from the start."""

Layout = Literal["v1-tuples", "v2-dicts", "v2-enums", "trmph"]


@dataclass(frozen=True)
class DemoOptions:
    """What to make.

    Attributes:
        games: how many.
        seed: names them; game i of a seed is the same however many games are made.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    games: int = 1_500
    seed: int = 7

    def __post_init__(self) -> None:
        if self.games < 1:
            raise ConfigError("games must be at least 1", found=self.games)


@dataclass(frozen=True)
class DemoResult:
    """What was made."""

    games: int
    positions: int
    files: int


@dataclass(frozen=True)
class _File:
    """One file to be made, of the games ``start`` … ``start + games - 1`` of the seed."""

    layout: Layout
    number: int
    start: int
    games: int
    seed: int

    @property
    def name(self) -> str:
        if self.layout == "trmph":
            return f"trmph/{self.raw_name}"
        return f"{self.layout}/demo_{self.number:02d}_processed.pkl.gz"

    @property
    def raw_name(self) -> str:
        return f"demo_{self.number:02d}.trmph"


def make_legacy(
    folder: str | Path, options: DemoOptions | None = None, progress: Progress = SILENT
) -> DemoResult:
    """Write games as legacy files below ``folder``: each game once, in one of the layouts.

    A folder that holds the same demo already, whole or interrupted, keeps the files that it has.

    Args:
        folder: new, empty or a demo's; of this machine.
        options: what to make; None for what is usual.
        progress: who watches.

    Raises:
        ConfigError: the folder is an address, or holds another demo or files that are none of ours.
        BudgetError: the disk is full.
    """
    options = options or DemoOptions()
    target = local_path(folder, FOLDER)
    files = _files(options)
    with telling_full(target):
        ledger = _begin(target, options)
        progress.begin("make games", options.games, "games")
        progress.advance(sum(file.games for file in files if file.name in ledger))
        todo = [file for file in files if file.name not in ledger]
        with _tidied(target), tempfile.TemporaryDirectory(prefix="hexdata-") as scratch:
            tasks = [(file, target, Path(scratch)) for file in todo]
            workers = default_workers()
            for index, positions in LOCAL.run(_write, tasks, workers=workers, memory=WORKER_MEMORY):
                ledger.finish(todo[index].name, positions)
                progress.advance(todo[index].games)
    return DemoResult(options.games, sum(ledger[file.name] for file in files), len(files))


@contextmanager
def _tidied(folder: Path) -> Iterator[None]:
    """Remove in the end what workers were writing that have been killed, as they are when one fails."""
    try:
        yield
    finally:
        remove_temporaries(folder)


def _begin(folder: Path, options: DemoOptions) -> Ledger:
    """Mark a new folder as this demo's, or see that it is: the mark lists the files that are made."""
    mark = folder / ".demo.json"
    if not mark.exists() and folder.exists() and any(folder.iterdir()):
        raise ConfigError("this folder holds other files", path=folder, hint="Give a new folder.")
    try:
        ledger = Ledger(mark, "demo", asdict(options))
    except StoreError as error:
        raise ConfigError("this folder's demo is damaged", path=folder, hint="Remove it.") from error
    if not mark.exists():
        ledger.finish(_BEGUN, 0)
    if _BEGUN not in ledger:
        raise ConfigError(
            "this folder holds another demo",
            path=folder,
            expected=f"{options.games} games of seed {options.seed}",
            hint="Give another folder, or remove this one.",
        )
    remove_temporaries(folder)
    return ledger


def _files(options: DemoOptions) -> list[_File]:
    """Share the games out over the files, as evenly as can be."""
    count = FILES_PER_LAYOUT * len(LAYOUTS)
    bounds = [options.games * i // count for i in range(count + 1)]
    return [
        _File(LAYOUTS[i // FILES_PER_LAYOUT], i, bounds[i], bounds[i + 1] - bounds[i], options.seed)
        for i in range(count)
    ]


def _write(file: _File, folder: Path, scratch: Path) -> int:
    """Worker: make the games of one file and write it; the number of positions."""
    games = list(make_games(file.games, file.seed, BOARD_SIZE, file.start))
    positions = sum(len(game.moves) + 1 for game in games)
    raw = scratch / file.raw_name
    with naming_full(raw):
        write_trmph(raw, games, BOARD_SIZE)
    if file.layout == "trmph":
        write_bytes(folder / file.name, raw.read_bytes())
        return positions
    with atomic_file(folder / file.name) as target:
        write_legacy(
            cast(BinaryIO, target),
            _processed(raw, file),
            board_size=BOARD_SIZE,
            dialect=DIALECTS[file.layout],
            header=_header(file, positions),
            level=1,
        )
    return positions


def _header(file: _File, positions: int) -> dict[str, object]:
    """Return the top-level keys as the legacy tool of the time wrote them."""
    stats: dict[str, object] = (
        {"games_processed": file.games, "corrupted_games": 0, "error": None}
        if file.layout == "v1-tuples"
        else {"all_games": file.games, "skipped_games": 0, "file_error": None}
    )
    stats |= {
        "file_path": f"data/{file.raw_name}",
        "valid_games": file.games,
        "examples_generated": positions,
    }
    return {
        "source_file": f"data/{file.raw_name}",
        "processing_stats": stats,
        "processed_at": PROCESSED_AT,
    }


def _processed(raw: Path, file: _File) -> Iterator[pa.RecordBatch]:
    """Turn raw games into what the legacy tool made of them, as raw batches."""
    key = derive_key(file.seed, "demo", "tiers", file.number)
    with TrmphReader(raw) as reader:
        for batch in reader.batches():
            yield (_as_tuples if file.layout == "v1-tuples" else _as_dicts)(batch.positions, file, key)


def _as_tuples(batch: pa.RecordBatch, file: _File, key: int) -> pa.RecordBatch:  # noqa: ARG001 - one interface
    """Ascending plies, no metadata, and the older sense of the value: 1.0 where blue won."""
    return _replace(batch, {"value": pc.subtract(1.0, batch.column("value"))})


def _as_dicts(batch: pa.RecordBatch, file: _File, key: int) -> pa.RecordBatch:
    """Plies shuffled within each game, the first of them in the lower value sample tiers."""
    line = batch.column("line_idx").to_numpy()
    order = np.lexsort((sort_key(batch.column("record").to_numpy(), key), line))
    batch = batch.take(pa.array(order))
    line = line[order]
    rank = np.arange(len(line)) - np.searchsorted(line, line)
    tier = np.searchsorted(np.cumsum(TIER_SIZES), rank, side="right").astype(np.uint8)
    columns = {
        "file_idx": pa.array(np.full(len(line), file.number, np.int32)),
        "value_sample_tier": pa.array(tier),
    }
    if file.layout == "v2-enums":
        extra = json.dumps({"source_file": f"data/{file.raw_name}"})
        columns["extra"] = pa.array([extra] * len(line), pa.string())
    return _replace(batch, columns)


def _replace(batch: pa.RecordBatch, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    for name, column in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), column)
    return batch
