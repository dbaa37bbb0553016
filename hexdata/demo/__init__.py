"""Generated legacy files for demonstrations: legal games in every layout of the legacy pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.checks import check_fields, check_seed
from hexdata.demo.games import make_games
from hexdata.engine import LOCAL
from hexdata.errors import ConfigError, StoreError
from hexdata.formats.legacy import DIALECTS, write_legacy
from hexdata.formats.trmph import TrmphReader, write_trmph
from hexdata.games.findings import TIER_SIZES
from hexdata.json_models import Count
from hexdata.order import derive_key, sort_key
from hexdata.progress import SILENT, Progress
from hexdata.storage import local_path, storage_of, translate_errors
from hexdata.storage.errors import add_path_to_error
from hexdata.store.files import Ledger, write_bytes
from hexdata.system import default_workers
from hexdata.temporary import temporary_folder

__all__ = ["DemoOptions", "DemoResult", "make_legacy"]

BOARD_SIZE: Final = 13
FOLDER: Final = "the folder of a demo"
"""Name of the folder in error messages."""
LAYOUTS: Final = ("v1-tuples", "v2-dicts", "v2-enums", "trmph")
"""Subfolders of a demo; each contains ``FILES_PER_LAYOUT`` files with different games."""
FILES_PER_LAYOUT: Final = 2

PROCESSED_AT: Final = "2025-09-08T12:00:00.000000"
"""Constant creation time in the headers, so that the files are reproducible."""
WORKER_MEMORY: Final = 200 << 20
"""Approximate memory of a process that writes one file, in bytes."""
LEDGER_NAME: Final = ".demo.json"
"""Name of the file in a demo's folder that records the finished files."""
_BEGUN: Final = "begun"
"""First entry of the ledger in a demo's folder."""

Layout = Literal["v1-tuples", "v2-dicts", "v2-enums", "trmph"]


@dataclass(frozen=True)
class DemoOptions:
    """Options of :func:`make_legacy`.

    Attributes:
        games: Number of games. Default 1500.
        seed: Seed of the games. Default 7. Game i of a seed does not depend on ``games``.
    """

    games: int = 1_500
    seed: int = 7

    def __post_init__(self) -> None:
        check_fields(self, {"games": 1})
        check_seed(self.seed)


@dataclass(frozen=True)
class DemoResult:
    """Numbers of games, positions and files of a demo."""

    games: int
    positions: int
    files: int
    already_done: bool = False
    """Whether the folder already contained all files."""


@dataclass(frozen=True)
class _File:
    """One file to write, with games ``start`` … ``start + games - 1`` of the seed."""

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
    """Write generated games as legacy files below ``folder``. Each game is in one of the layouts.

    If the folder contains the same demo, complete or interrupted, existing files are kept.

    Args:
        folder: Local folder that is new, empty, or contains the same demo.
        options: Number of games and seed. Default None: the defaults of :class:`DemoOptions`.
        progress: Receives progress reports.

    Raises:
        ConfigError: The folder is a remote address, or contains another demo or other files.
        BudgetError: The disk is full.
    """
    options = options or DemoOptions()
    target = local_path(folder, FOLDER)
    files = _files(options)
    with translate_errors(target):
        ledger = _open_ledger(target, options)
        progress.begin("make games", options.games, "games")
        progress.advance(sum(file.games for file in files if file.name in ledger.done))
        todo = [file for file in files if file.name not in ledger.done]
        with _temporaries_removed(target), temporary_folder("demo") as scratch:
            tasks = [(file, target, scratch) for file in todo]
            workers = default_workers()
            for index, positions in LOCAL.run(_write, tasks, workers=workers, memory=WORKER_MEMORY):
                ledger.finish(todo[index].name, positions)
                progress.advance(todo[index].games)
    positions = sum(ledger.done[file.name] for file in files)
    return DemoResult(options.games, positions, len(files), already_done=not todo)


@contextmanager
def _temporaries_removed(folder: Path) -> Iterator[None]:
    """Remove the temporary files of killed workers at the end."""
    try:
        yield
    finally:
        storage_of(folder).remove_unfinished()


def _open_ledger(folder: Path, options: DemoOptions) -> Ledger:
    """Open the ledger of finished files, or create it in a new folder; check that it is of the same demo."""
    path = folder / LEDGER_NAME
    # A run that was interrupted at its start leaves at most the temporary file of the ledger.
    others = (name for name in storage_of(folder).names() if not name.startswith(f".{path.name}."))
    if not path.exists() and any(others):
        raise ConfigError("the folder contains other files", path=folder, hint="Use a new folder.")
    try:
        ledger = Ledger(path, "demo", asdict(options), Count)
    except StoreError as error:
        raise ConfigError(
            "the demo in this folder is damaged", path=folder, hint="Remove the folder."
        ) from error
    # Before any other file: a folder that has files but no ledger is refused.
    if not path.exists():
        ledger.finish(_BEGUN, 0)
    if _BEGUN not in ledger.done:
        raise ConfigError(
            "the folder contains another demo",
            path=folder,
            expected=f"{options.games} games of seed {options.seed}",
            hint="Use another folder, or remove this one.",
        )
    # Only after the checks above, because another folder must remain as it is.
    storage_of(folder).remove_unfinished()
    return ledger


def _files(options: DemoOptions) -> list[_File]:
    """Divide the games evenly between the files."""
    count = FILES_PER_LAYOUT * len(LAYOUTS)
    bounds = [options.games * i // count for i in range(count + 1)]
    return [
        _File(LAYOUTS[i // FILES_PER_LAYOUT], i, bounds[i], bounds[i + 1] - bounds[i], options.seed)
        for i in range(count)
    ]


def _write(file: _File, folder: Path, scratch: Path) -> int:
    """Write one file in a worker and return its number of positions."""
    games = list(make_games(file.games, file.seed, BOARD_SIZE, file.start))
    positions = sum(len(game.moves) + 1 for game in games)
    # All layouts start from a text of the games, as in the legacy pipeline, so the reader makes the
    # positions.
    raw = scratch / file.raw_name
    with add_path_to_error(raw):
        write_trmph(raw, games, BOARD_SIZE)
    if file.layout == "trmph":
        write_bytes(folder / file.name, raw.read_bytes())
        return positions
    with storage_of(folder / file.name).publish() as target:
        write_legacy(
            cast("BinaryIO", target),
            _processed(raw, file),
            board_size=BOARD_SIZE,
            dialect=DIALECTS[file.layout[3:]],  # after "v1-" or "v2-"
            header=_header(file, positions),
            level=1,
        )
    return positions


def _header(file: _File, positions: int) -> dict[str, object]:
    """Return the top-level keys that the legacy tool wrote."""
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
    """Yield the positions of a raw file in the form that the legacy tool gave them."""
    key = derive_key(file.seed, "demo", "tiers", file.number)
    with TrmphReader(raw) as reader:
        for batch in reader.batches():
            positions = batch.positions
            if file.layout == "v1-tuples":  # without metadata, in the older value convention: 1.0 if blue won
                yield _replace(positions, {"value": pc.subtract(1.0, positions.column("value"))})
            else:
                yield _as_dicts(positions, file, key)


def _as_dicts(batch: pa.RecordBatch, file: _File, key: int) -> pa.RecordBatch:
    """Return plies shuffled within each game, the first of them in the lower value sample tiers."""
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
        metadata = json.dumps({"source_file": f"data/{file.raw_name}"})
        columns["metadata"] = pa.array([metadata] * len(line), pa.string())
    return _replace(batch, columns)


def _replace(batch: pa.RecordBatch, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    for name, column in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), batch.schema.field(name), column)
    return batch
