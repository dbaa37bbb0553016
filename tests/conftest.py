"""Small stores for all tests: one converted from generated games, one with every unusual value."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings

from hexdata import retry as retries
from hexdata.board import pack_boards
from hexdata.cards import CARDS
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats.trmph import write_trmph
from hexdata.policy import SparsePolicies
from hexdata.schema import games_schema, positions_schema, rejected_schema, sources_schema
from hexdata.sql import DATABASE_NAME
from hexdata.storage import as_path
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from tests.demo_games import demo_games
from tests.kit.batches import one_source_a_part
from tests.kit.stages import files_of
from tests.kit.whole import STAGES
from tests.legacy_pickles import install_enums
from tests.object_store import ObjectStore, environment, serving
from tests.pairs import FULL

if TYPE_CHECKING:
    from upath import UPath

settings.register_profile(
    "busy machine",
    deadline=None,
    max_examples=100 if FULL else 30,
    derandomize=not FULL,  # the same examples in each run, so that no run fails by chance
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy machine")

if not FULL:
    # PyTorch's threads wait busily for each other, which takes several times the CPU time of tiny networks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background processes with SIGINT ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

BOARD_SIZE = 5
CELLS = BOARD_SIZE * BOARD_SIZE

DemoTrmph = Callable[..., list[Path]]
DERIVED = frozenset({DATABASE_NAME, *CARDS})
"""Files that a stage writes from the manifest, and only on a disk. They are not in the manifest."""

StoreBytes = Callable[[Path], dict[str, str]]
WriteOddStore = Callable[..., Path]
CopyStore = Callable[..., Path]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while tests are imported, a fifth of that time, nor later look for it among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module")
def hex_ai() -> Iterator[None]:
    """Make the package ``hex_ai`` importable, in which pickles find the legacy enums."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_enums(monkeypatch)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Let the stages see one core, so that they start no processes where a test sets no number."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
        yield


@pytest.fixture(scope="session", autouse=not FULL)
def no_waits_for_the_disk() -> Iterator[None]:
    """Skip the syncs of this process, which wait some milliseconds each for what no test can observe."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", os.fstat)  # which refuses a closed file too
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waits_before_attempts() -> Iterator[None]:
    """Repeat operations on local disks in this process without a wait."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(retries, "_DISK", replace(retries._DISK, first_wait=0.0))
        yield


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """Serve S3 on loopback, with the environment variables that select it and none of the user's."""
    for library in ("moto.moto_server.werkzeug_app", "s3fs"):
        pytest.importorskip(library, exc_type=ImportError)
    from botocore.retries.standard import ExponentialBackoff
    from s3fs import S3FileSystem

    with serving() as store, pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_PROFILE", raising=False)
        patch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.02)  # between attempts of a request
        for name, value in environment(store).items():
            patch.setenv(name, value)
        yield store
        for system in list(S3FileSystem._cache.values()):
            if system._s3 is not None:
                S3FileSystem.close_session(system.loop, system._s3)
        S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UPath:
    """Create an empty bucket for this test; local files of object stores are below ``tmp_path``."""
    object_store.fail()
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "hexdata-cache"))
    path = as_path(f"s3://test-{os.urandom(6).hex()}")
    assert not isinstance(path, Path)
    with contextlib.suppress(FileExistsError):  # created by an attempt whose answer was late
        path.fs.mkdir(path.path.strip("/"))
    object_store.requests()
    return path


@pytest.fixture(scope="session")
def demo_trmph() -> DemoTrmph:
    """Return ``demo_trmph(folder, games, files, board_size=7, seed=1)``: writes TRMPH files."""

    def make(folder: Path, games: int, files: int, board_size: int = 7, seed: int = 1) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        made = demo_games(games, seed, board_size)
        paths = [folder / f"demo-{number:02d}.trmph" for number in range(files)]
        for number, path in enumerate(paths):
            write_trmph(path, made[number::files], board_size)
        return paths

    return make


@pytest.fixture(scope="session")
def store_bytes() -> StoreBytes:
    """Return ``store_bytes(store)``: the SHA-256 of each file of the dataset, by relative path.

    Hidden files and logs are not included.
    """

    return files_of


@pytest.fixture(scope="session")
def trmph_store(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    """A store of 80 games from three sources, one with a rejected record. Read only: copy it."""
    folder = tmp_path_factory.mktemp("trmph")
    paths = demo_trmph(folder / "games", games=80, files=3)
    with paths[1].open("a") as file:
        file.write("#7,a1zz9 b\n")
    with one_source_a_part():
        convert_sources([folder / "games"], folder / "store", ConvertOptions(workers=1, val=0.15, test=0.1))
    return folder / "store"


@pytest.fixture(scope="session")
def shuffled_store(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trmph_store`` after a shuffle with the options of ``tests.kit.whole``. Read only: copy it."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("shuffled") / "store")
    STAGES["shuffle"](store)
    return store


@pytest.fixture(scope="session")
def whole_store(shuffled_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trmph_store`` after all stages, with the options of ``tests.kit.whole``. Read only: copy it."""
    store = shutil.copytree(shuffled_store, tmp_path_factory.mktemp("whole") / "store")
    for stage in ("shards", "original", "shuffled"):
        STAGES[stage](store)
    return store


@pytest.fixture(scope="session")
def shards(whole_store: Path) -> Path:
    """The shards of ``whole_store``. Read only: copy them."""
    return whole_store / "shards"


@pytest.fixture
def one_source_a_batch() -> Iterator[None]:
    """Convert each source as if it were large."""
    with one_source_a_part():
        yield


def stones(cells: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint8]:
    """Return the planes uint8 (N, 2, n, n) of cells (N, n, n): 1 is blue, 2 is red."""
    return np.stack([cells == 1, cells == 2], axis=1).astype(np.uint8)


@pytest.fixture(scope="session")
def odd_store(tmp_path_factory: pytest.TempPathFactory, write_odd_store: WriteOddStore) -> Path:
    """A store of 900 positions in three parts: dense policies, unknown games, nulls. Read only: copy it."""
    return write_odd_store(tmp_path_factory.mktemp("odd") / "store", 900, 3)


@pytest.fixture(scope="session")
def write_odd_store() -> WriteOddStore:
    """Return ``write_odd_store(path, positions, sources, targets=())``: writes a store by hand.

    The optional columns are null in the second source. The path is returned.
    """

    def write(store: Path, count: int, sources: int, targets: tuple[str, ...] = ()) -> Path:
        positions = odd_positions(count, targets)
        manifest = Manifest(board_size=BOARD_SIZE, targets=targets)
        size = count // sources
        parts = {
            f"positions/part-{part:06d}.parquet": positions.slice(size * part, size)
            for part in range(sources)
        }
        if sources > 1:
            second = parts["positions/part-000001.parquet"]
            for name in targets:
                index, field = second.schema.get_field_index(name), second.schema.field(name)
                second = second.set_column(index, field, pa.nulls(size, field.type))
            parts["positions/part-000001.parquet"] = second
        parts["games/part-000000.parquet"] = _games_of(positions)
        parts["sources/part-000000.parquet"] = _sources_of(sources, size)
        parts["rejected/part-000000.parquet"] = _rejected_of(sources)
        for name, table in parts.items():
            manifest.files[name] = write_parquet(store / name, table.schema, [table])
            folder = name.split("/")[0]
            manifest.counts[folder] = manifest.counts.get(folder, 0) + table.num_rows
        records = {"records": count + sources, "positions": count, "rejected": sources}
        manifest.stages["convert"] = {"val": 0.1, "test": 0.1, **records}
        manifest.save(store)
        return store

    return write


def odd_positions(count: int, targets: tuple[str, ...] = ()) -> pa.Table:
    """Return rows of ``positions_schema`` with nulls in every nullable column, in different rows."""
    rng = np.random.default_rng(count)

    def some(values: npt.ArrayLike, every: int) -> pa.Array:
        return pa.array(np.asarray(values), mask=rng.integers(0, every, count) == 0)

    ids = np.arange(count)
    known = ids // 20 % 7 != 3
    game = np.zeros(count, np.int64)
    game[known] = np.unique(ids[known] // 20, return_inverse=True)[1]
    dense = np.array([rng.random(CELLS, np.float32) for i in ids if i % 4 == 1]).reshape(-1, CELLS)
    dense[:, ::3] = 0
    dense[1::5] = 0
    policies = SparsePolicies.from_dense(dense).to_arrow(ids % 4 == 1)
    winners = pa.array([(None, "RED", "BLUE")[i // 30 % 3] for i in ids]).dictionary_encode()
    columns = {
        "position_id": ids,
        "game_id": pa.array(game, mask=~known),
        "position_in_game": some(ids % 20, 9),
        "total_positions": some(20 + ids % 2, 8),
        "board": [
            row.tobytes() for row in pack_boards(stones(rng.integers(0, 3, (count, BOARD_SIZE, BOARD_SIZE))))
        ],
        "move": some(rng.integers(0, CELLS, count), 5),
        "policy": policies,
        "value": rng.random(count),
        "player_to_move": ids % 2,
        "value_sample_tier": some(ids % 4, 6),
        "winner": winners,
        "metadata": [
            json.dumps({"ключ": i % 50}, ensure_ascii=False) if i % 3 else None for i in ids.tolist()
        ],
    }
    columns |= {
        name: some(rng.integers(0, 1000, count) if name == "visits" else rng.random(count), 7)
        for name in targets
    }
    if "extra.odd" in targets:  # values whose bits are easily lost
        columns["extra.odd"] = pa.array([(None, -0.0, 0.0, 0.1, -1e300)[i % 5] for i in ids])
    schema = positions_schema(BOARD_SIZE, targets)
    arrays = [pa.array(columns[name]) if name != "winner" else winners for name in schema.names]
    return pa.table(
        [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)], schema=schema
    )


def _games_of(positions: pa.Table) -> pa.Table:
    known = positions["game_id"].drop_null().value_counts().to_pylist()
    counts = {entry["values"]: entry["counts"] for entry in known}
    splits = {game: "test" if game % 10 == 9 else "val" if game % 10 == 4 else "train" for game in counts}
    games = [
        {
            "game_id": game,
            "source_id": 0,
            "positions": count,
            "game_hash": _hash_in(splits[game], hashlib.sha256(bytes([game])).digest()[:16]),
            "split": splits[game],
            "provenance": "metadata",
        }
        for game, count in sorted(counts.items())
    ]
    return pa.Table.from_pylist(games, schema=games_schema())


def _hash_in(split: str, game_hash: bytes) -> bytes:
    """Return a hash in the given split if val and test are 0.1 each; only its first byte differs."""
    first = {"test": 0x18, "val": 0x30, "train": 0x40 + game_hash[0] % 0xC0}[split]
    return bytes([first]) + game_hash[1:]


def _rejected_of(sources: int) -> pa.Table:
    rejected = [{"source_id": i, "record": i, "reason": "cells", "detail": "found 2"} for i in range(sources)]
    return pa.Table.from_pylist(rejected, schema=rejected_schema())


def _sources_of(count: int, positions: int) -> pa.Table:
    counts = {"records": positions + 1, "positions": positions, "rejected": 1, "games": 0}
    sources = [
        {"source_id": i, "name": f"source-{i}", "bytes": 0, "sha256": f"{i:064x}", "format": "made", **counts}
        for i in range(count)
    ]
    return pa.Table.from_pylist(sources, schema=sources_schema())


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files of this test and of its child processes."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    multiprocessing.util.get_temp_dir()  # kept for later tests: the path of a socket must be short
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def copy_store(tmp_path: Path) -> CopyStore:
    """Return ``copy_store(store, name="store")``: a copy that the test may change."""

    def copy(store: Path, name: str = "store") -> Path:
        return shutil.copytree(store, tmp_path / name)

    return copy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB; skip the test if this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may mount nothing")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # an exception may still hold an open file
