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
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
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
from hexdata.cli import main
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats.trmph import write_trmph
from hexdata.policy import SparsePolicies
from hexdata.schema import games_schema, positions_schema, rejected_schema, sources_schema
from hexdata.sql import DATABASE_NAME
from hexdata.storage import as_path, lock, retry
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from tests.demo_games import demo_games
from tests.legacy_pickles import install_enums
from tests.object_store import (
    NO_RCLONE,
    SERVER,
    SERVERS,
    ObjectStore,
    environment,
    find_rclone,
    serving,
)
from tests.pairs import FULL

if TYPE_CHECKING:
    from upath import UPath

settings.register_profile(
    "busy machine",
    deadline=None,
    max_examples=100 if FULL else 30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background processes with SIGINT ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

KILL_STAGE = Path(__file__).parent / "kill_stage.py"
BOARD_SIZE = 5
CELLS = BOARD_SIZE * BOARD_SIZE

DemoTrmph = Callable[..., list[Path]]
DERIVED = frozenset({DATABASE_NAME, *CARDS})
"""Files that a stage writes from the manifest, and only on a disk. They are not in the manifest."""

StoreBytes = Callable[[Path], dict[str, str]]
WriteOddStore = Callable[..., Path]
CopyStore = Callable[..., Path]
RunCli = Callable[..., subprocess.CompletedProcess[str]]
KillAtEveryChange = Callable[..., list[Path]]


@pytest.fixture(scope="module")
def hex_ai() -> Iterator[None]:
    """Make the package ``hex_ai`` importable, in which pickles find the legacy enums."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_enums(monkeypatch)
        yield


SLOW_FILES = frozenset(
    [
        "browse/test_browser.py",
        "browse/test_index.py",
        "browse/test_server.py",
        "cli/test_bar.py",
        "cli/test_browse.py",
        "cli/test_cli.py",
        "cli/test_convert_folder.py",
        "cli/test_disk.py",
        "cli/test_live_command.py",
        "cli/test_load.py",
        "cli/test_memory.py",
        "cli/test_mistakes.py",
        "cli/test_output.py",
        "cli/test_real_data.py",
        "cli/test_report.py",
        "cli/test_sql.py",
        "convert/test_chains.py",
        "convert/test_companions.py",
        "convert/test_convention.py",
        "convert/test_expanding.py",
        "convert/test_growing.py",
        "convert/test_ids.py",
        "convert/test_interruption.py",
        "convert/test_max_positions.py",
        "convert/test_objects.py",
        "convert/test_quality.py",
        "convert/test_real_data.py",
        "convert/test_rejections.py",
        "convert/test_salvage.py",
        "convert/test_splits.py",
        "convert/test_targets.py",
        "convert/test_variants.py",
        "demo/test_make_legacy.py",
        "draw/test_svg.py",
        "engine/test_local.py",
        "engine/test_ray.py",
        "engine/test_stages.py",
        "export/test_disk.py",
        "export/test_free_buckets.py",
        "export/test_pickles.py",
        "export/test_pickles_shuffled.py",
        "export/test_shards_stage.py",
        "formats/test_legacy_differential.py",
        "formats/test_legacy_fastpath.py",
        "formats/test_legacy_fuzz.py",
        "formats/test_legacy_unpickler.py",
        "formats/test_legacy_writer.py",
        "formats/test_trmph.py",
        "live/files/test_provider.py",
        "live/test_chunk_source_loader.py",
        "live/test_end_to_end.py",
        "live/test_prometheus.py",
        "loader/test_epoch_ends.py",
        "loader/test_games_converted.py",
        "loader/test_games_faults.py",
        "loader/test_games_mode.py",
        "loader/test_games_promises.py",
        "loader/test_loader.py",
        "loader/test_mixture.py",
        "loader/test_objects.py",
        "loader/test_row_filter.py",
        "loader/test_search_columns.py",
        "loader/test_stream.py",
        "loader/test_targets.py",
        "loader/test_weights.py",
        "loader/test_where_by_epoch.py",
        "promises/test_advice.py",
        "promises/test_conservation.py",
        "promises/test_hostile_texts.py",
        "promises/test_nothing_left_behind.py",
        "promises/test_canary.py",
        "promises/test_endless.py",
        "promises/test_hostile_filters.py",
        "promises/test_temporary_errors.py",
        "promises/test_paths.py",
        "promises/test_small_files.py",
        "promises/test_changes_under_readers.py",
        "promises/test_loader_contract.py",
        "pytorch/test_device_loader.py",
        "pytorch/test_device_order.py",
        "pytorch/test_epochs.py",
        "pytorch/test_games_mode.py",
        "pytorch/test_loader.py",
        "pytorch/test_mixture.py",
        "pytorch/test_ranks.py",
        "pytorch/test_snowflake.py",
        "pytorch/test_transform.py",
        "pytorch/test_unpack.py",
        "pytorch/test_webdataset.py",
        "pytorch/test_weights.py",
        "pytorch/test_where_by_epoch.py",
        "promises/test_without_extras.py",
        "quality/test_quality.py",
        "report/test_browser.py",
        "report/test_facts.py",
        "report/test_page.py",
        "report/test_sentences.py",
        "selection/test_balance.py",
        "selection/test_placement.py",
        "selection/test_select.py",
        "selection/test_shuffle.py",
        "shards/test_block_check.py",
        "shards/test_cache.py",
        "shards/test_format.py",
        "shards/test_mapped.py",
        "shards/test_read_ahead.py",
        "shards/test_reader.py",
        "shards/test_sources.py",
        "shuffle/test_disk.py",
        "shuffle/test_killed.py",
        "shuffle/test_objects.py",
        "shuffle/test_plan.py",
        "shuffle/test_resume.py",
        "shuffle/test_shuffle.py",
        "shuffle/test_wide.py",
        "simulation/test_objects.py",
        "sql/test_catalog.py",
        "sql/test_database.py",
        "sql/test_macros.py",
        "sql/test_run.py",
        "sql/test_targets.py",
        "sql/test_write.py",
        "storage/test_error_texts.py",
        "storage/test_objects.py",
        "storage/test_silence.py",
        "store/test_disk_errors.py",
        "store/test_hostile_json.py",
        "store/test_hostile_json_texts.py",
        "store/test_integrity.py",
        "store/test_journal.py",
        "store/test_links.py",
        "store/test_objects.py",
        "store/test_parquet.py",
        "store/test_session.py",
        "test_documents.py",
        "test_errors.py",
        "test_layers.py",
        "test_notebooks.py",
        "test_object_stores.py",
        "test_order.py",
        "test_packages.py",
        "test_pipeline.py",
        "test_second_server.py",
        "test_system.py",
        "verify/test_bad_tables.py",
        "verify/test_damage.py",
        "verify/test_reading.py",
        "verify/test_roundtrip.py",
        "verify/test_shards.py",
        "verify/test_shuffled.py",
        "verify/test_values.py",
        "verify/test_verify_store.py",
        "verify/test_without_buckets.py",
    ]
)
"""Test files, relative to this folder, of which all tests have the mark "slow"."""


SEVERAL_CORES = (
    "engine/",
    "live/",
    "loader/test_map_ahead.py",
    "loader/test_threads.py",
    "pytorch/",
    "shards/test_read_ahead.py",
    "shuffle/",
)
"""Folders and files, relative to this folder, of tests that use every core also beside other tests."""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Bind a worker of pytest-xdist, and the processes that its test starts, to one core.

    The other cores have workers of their own. The stages then start no workers where a test sets no number.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if CORES and worker:
        uses_all = _file_of(item).startswith(SEVERAL_CORES)
        os.sched_setaffinity(0, CORES if uses_all else {CORES[int(worker[2:]) % len(CORES)]})


def _file_of(item: pytest.Item) -> str:
    """Return the file of a test, relative to this folder; empty for other files, such as notebooks."""
    folder = Path(__file__).parent
    return item.path.relative_to(folder).as_posix() if item.path.is_relative_to(folder) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow files if only quick tests are selected: the imports take as long as many tests."""
    folder = Path(__file__).parent
    is_slow = (
        collection_path.is_relative_to(folder)
        and collection_path.relative_to(folder).as_posix() in SLOW_FILES
    )
    return True if is_slow and config.option.markexpr == "not slow" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, and exempt the tests and modules from it afterwards.

    It then runs less often than by default, because it would look at all objects every few tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(2_000, 20, 50)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow files, and expect a note about each store of a server without conditions."""
    for item in items:
        if _file_of(item) in SLOW_FILES:
            item.add_marker("slow")
        if SERVER == "rclone":
            item.add_marker(pytest.mark.filterwarnings(f"ignore:.*{NO_CONDITIONS}:UserWarning"))


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


NO_CONDITIONS = "does not support conditional requests"
"""Part of the note about such a store."""
needs_conditions = pytest.mark.skipif(SERVER == "rclone", reason="rclone ignores the conditions of requests")


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """Serve S3 on loopback, with the environment variables that select it and none of the user's."""
    assert SERVER in SERVERS
    for library in ("moto.moto_server.werkzeug_app", "s3fs"):
        pytest.importorskip(library, exc_type=ImportError)
    if SERVER == "rclone" and find_rclone() is None:
        pytest.skip(NO_RCLONE)
    from s3fs import S3FileSystem

    with serving() as store, pytest.MonkeyPatch.context() as patch:
        if SERVER == "rclone":
            patch.setattr(lock, "SETTLE_SECONDS", 0.0)
        patch.delenv("AWS_PROFILE", raising=False)
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
    monkeypatch.setattr(retry, "_silence", retry._Silence())  # without the silence of an earlier test
    monkeypatch.setattr(retry, "REQUESTS", replace(retry.REQUESTS, first_wait=0.02, jitter=0.02))
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

    def digests(store: Path) -> dict[str, str]:
        paths = {path.relative_to(store): path for path in sorted(store.rglob("*")) if path.is_file()}
        return {
            place.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for place, path in paths.items()
            if place.parts[0] != "logs" and not any(part.startswith(".") for part in place.parts)
        }

    return digests


@pytest.fixture(scope="session")
def trmph_store(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    """A store of 80 games from three sources, one with a rejected record. Read only: copy it."""
    folder = tmp_path_factory.mktemp("trmph")
    paths = demo_trmph(folder / "games", games=80, files=3)
    with paths[1].open("a") as file:
        file.write("#7,a1zz9 b\n")
    convert_sources([folder / "games"], folder / "store", ConvertOptions(workers=1, val=0.15, test=0.1))
    return folder / "store"


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

    The second source has none of the optional columns. The path is returned.
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
            lacking = parts["positions/part-000001.parquet"].drop_columns([*targets])
            parts["positions/part-000001.parquet"] = lacking
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
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no charts, which take most of the time of a report."""
    monkeypatch.setattr(
        "hexdata.report.charts.draw_chart", lambda *_, **__: '<svg role="img" aria-label="none"></svg>'
    )


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
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Return ``run_cli(*arguments)``: runs ``hexdata`` in this process, which saves the start of another."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.argv", ["hexdata", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, code, output, errors)

    return run


@pytest.fixture
def kill_at_every_change(tmp_path: Path) -> KillAtEveryChange:
    """Return ``kill(stage, store, options, every=1)``: copies in which the stage was killed.

    There is one copy for each file that the stage renames or removes, killed right before that, and for each
    time that it appends to its ledger, killed in the middle of it; or for every k-th of these moments.
    """

    def kill(stage: str, store: Path, options: dict[str, Any], every: int = 1) -> list[Path]:
        folder = tmp_path / "killed"
        asked = {"stage": stage, "options": options, "every": every}
        command = [sys.executable, str(KILL_STAGE), str(store), str(folder), json.dumps(asked)]
        subprocess.run(command, check=True, timeout=600)
        return sorted(folder.iterdir())

    return kill


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
