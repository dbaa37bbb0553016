"""Tests of games mode: every position once, for any ranks and workers, resumable; and the shared table."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.loader import Loader, Mixture, PositionDataset, combine_digests
from hexdata.loader.game_table import GameTable
from hexdata.loader.shared_arrays import SharedArrays
from hexdata.order import shuffle_indices
from tests.conftest import DemoTrmph
from tests.loader.game_stores import (
    ALL_FIELDS,
    contents,
    game_row,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)
from tests.loader.loops import check_loops

Steps = list[list[int]]

N = 5
IDS = ("position_id",)
TIMEOUT = 300
"""Seconds after which a process is assumed to hang."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 350 training positions: two thirds in 20 games, the others packed. Read only: copy it."""
    games = sample_games(30, N, seed=1)
    for game in games[::4]:
        game["moves"] = None
    whole = sample_games(30, N, seed=1)
    rows = [row for game in whole for row in position_rows(game, N)]
    folder = tmp_path_factory.mktemp("promises")
    path = write_store(folder / "store", N, games, [rows[:200], rows[200:]])
    write_shards(path, folder / "shards")
    return path


@pytest.fixture(scope="module")
def rows(store: Path) -> list[int]:
    """Position ids of all rows of train in stored order."""
    loader = Loader(store, shuffle=False, fields=IDS)
    assert loader.games is not None
    assert 0 < loader.games.game_rows < loader.positions
    found = flat(ids_of(loader))
    packed = found[loader.games.game_rows :]
    assert packed == sorted(packed) == loader.games.arrays["packed.position_id"].tolist()
    return found


def flat(steps: Steps) -> list[int]:
    return list(itertools.chain(*steps))


def ids_of(batches: Any) -> Steps:
    """Return the ids of each batch, without padding."""
    return [
        (batch["position_id"][~batch["padding"]] if "padding" in batch else batch["position_id"]).tolist()
        for batch in batches
    ]


def run_rank(loader: Loader, workers: int) -> Steps:
    """Run the rest of a rank's epoch with workers that take turns."""
    first = loader.batch
    of_worker = [loader.batches(worker, workers) for worker in range(workers)]
    steps = [ids_of([next(of_worker[step % workers])])[0] for step in range(first, len(loader))]
    assert [list(rest) for rest in of_worker] == [[]] * workers
    return steps


def run_world(
    store: Path, world_size: int, workers: int = 1, state: Any = None, epoch: int = 0, **options: Any
) -> Steps:
    """Run the rest of an epoch on every rank, and return the sorted ids of each step."""
    ranks = []
    for rank in range(world_size):
        loader = Loader(store, rank=rank, world_size=world_size, fields=IDS, **options)
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        ranks.append(run_rank(loader, workers))
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


# --- order --------------------------------------------------------------------------------------------


def test_the_order_is_pinned(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    """If this literal changes, runs cannot be repeated or resumed, and ORDER_VERSION must be increased."""
    demo_trmph(tmp_path / "raw", games=6, files=2)
    convert_sources([tmp_path / "raw"], tmp_path / "store", ConvertOptions(workers=1, val=0, test=0))
    loader = Loader(tmp_path / "store", batch_size=8, seed=1, fields=IDS)
    assert loader.options.mode == "games"
    assert loader.positions == 130
    assert ids_of(loader)[:3] == [
        [65, 1, 55, 43, 31, 124, 129, 93],
        [78, 71, 64, 119, 105, 17, 4, 76],
        [97, 70, 29, 26, 16, 52, 99, 86],
    ]
    assert ids_of(loader)[0] == [119, 40, 92, 94, 71, 111, 31, 102]
    loader = Loader(tmp_path / "store", batch_size=8, shuffle=False, fields=IDS)
    assert flat(ids_of(loader)) == list(range(130))


@pytest.mark.parametrize("epoch", [0, 1, 7])
@pytest.mark.parametrize("seed", [0, -3])
def test_the_order_equals_shuffle_indices(store: Path, rows: list[int], seed: int, epoch: int) -> None:
    loader = Loader(store, batch_size=12, seed=seed, fields=IDS)
    loader.set_epoch(epoch)
    assert flat(ids_of(loader)) == shuffle_indices(rows, seed, epoch)


def test_the_order_of_a_selection_equals_shuffle_indices(store: Path, rows: list[int]) -> None:
    everything = contents(Loader(store, fields=ALL_FIELDS))
    chosen = everything["position_id"][(everything["move"] != 65_535) & (everything["move"] < 9)].tolist()
    selected = [row for row in rows if row in chosen]
    loader = Loader(store, seed=5, where="move < 9", final_policy="skip", fields=IDS)
    assert flat(ids_of(loader)) == shuffle_indices(selected, 5, 0)


def test_the_order_with_packed_positions_is_pinned(tmp_path: Path) -> None:
    """Rows are numbered by game and ply, then by the position id of packed positions."""
    games = [game_row(0, [1, 2, 3], N), game_row(1, [4, 5], N), game_row(2, [6, 7, 8, 9], N)]
    parts = [position_rows(game, N) for game in games]
    games[1]["moves"] = None
    written = write_store(tmp_path / "store", N, games, [parts[2][::-1] + parts[1] + parts[0]])
    assert flat(ids_of(Loader(written, shuffle=False, fields=IDS))) == [
        *(8, 9, 10, 11),  # game 0
        *(4, 3, 2, 1, 0),  # game 2
        *(5, 6, 7),
    ]
    loader = Loader(written, batch_size=5, seed=1, fields=IDS)
    assert ids_of(loader) == [[9, 4, 8, 11, 1], [5, 6, 2, 7, 0], [3, 10]]
    assert ids_of(loader) == [[2, 10, 0, 4, 11], [9, 6, 7, 8, 5], [1, 3]]


def test_rows_of_games_precede_packed_positions(store: Path) -> None:
    found = contents(Loader(store, shuffle=False, fields=ALL_FIELDS))
    loader = Loader(store, shuffle=False, fields=("game_id", "position_in_game"))
    assert loader.games is not None
    batches = list(loader)
    game, ply = (
        np.concatenate([batch[name] for batch in batches]) for name in ("game_id", "position_in_game")
    )
    keys = list(zip(game[: loader.games.game_rows], ply[: loader.games.game_rows], strict=True))
    assert keys == sorted(keys)
    assert len(found["position_id"]) == loader.positions


# --- every position once ------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("remainder", "global_batch"),
    [*itertools.product(("short", "pad", "drop"), (12, 60)), ("short", 480), ("pad", 480)],
)
def test_ranks_and_workers_deliver_the_same_steps(
    store: Path, rows: list[int], shuffle: bool, remainder: Any, global_batch: int
) -> None:
    options: dict[str, Any] = {"remainder": remainder, "shuffle": shuffle}
    alone = run_world(store, 1, batch_size=global_batch, **options)
    full, rest = divmod(len(rows), global_batch)
    assert [len(step) for step in alone] == [global_batch] * full + [rest] * (remainder != "drop")
    ids = flat(alone)
    assert len(set(ids)) == len(ids)
    assert remainder == "drop" or sorted(ids) == sorted(rows)
    for world_size, workers in [(1, 3), (2, 2), (3, 1), (4, 2)]:
        batch_size = global_batch // world_size
        assert run_world(store, world_size, workers, batch_size=batch_size, **options) == alone


@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
def test_a_state_of_one_world_size_resumes_with_another(store: Path, remainder: Any) -> None:
    expected = run_world(store, 1, epoch=1, batch_size=24, remainder=remainder)
    for stop in range(0, len(expected), 3):
        loader = Loader(store, batch_size=12, world_size=2, fields=IDS, remainder=remainder)
        loader.set_epoch(1)
        for _ in itertools.islice(loader, stop):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["batch"]) == (1, stop)
        for world_size, workers in [(1, 2), (3, 1), (4, 2)]:
            options: dict[str, Any] = {"batch_size": 24 // world_size, "remainder": remainder}
            assert run_world(store, world_size, workers, state, **options) == expected[stop:]


def test_resuming_gathers_only_the_rest(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming at the last batch of a late epoch reads one batch."""
    loader = Loader(store, batch_size=12, fields=IDS)
    loader.set_epoch(1_000_000, len(loader) - 1)
    gathered: list[int] = []
    gather = GameTable.gather

    def record(self: GameTable, wanted: Any, members: Any, *rest: Any) -> Any:
        gathered.append(len(wanted))
        return gather(self, wanted, members, *rest)

    monkeypatch.setattr(GameTable, "gather", record)
    batches = ids_of(loader)
    assert [sum(gathered)] == [len(ids) for ids in batches]


def test_digests_of_ranks_combine_to_that_of_one_rank(store: Path) -> None:
    ranks = [Loader(store, batch_size=12, rank=rank, world_size=3, fields=IDS) for rank in range(3)]
    alone = Loader(store, batch_size=36, fields=IDS)
    for loader in (*ranks, alone):
        assert loader.epoch_digest is None
        for _ in loader:
            pass
    digests = [loader.epoch_digest for loader in ranks]
    assert None not in digests
    assert len(set(digests)) == 3
    assert combine_digests([digest for digest in digests if digest]) == alone.epoch_digest


def test_left_loops_continue(store: Path) -> None:
    def make() -> Loader:
        return Loader(store, batch_size=24, seed=2, fields=IDS)

    def expected(epoch: int) -> Steps:
        loader = make()
        loader.set_epoch(epoch)
        return ids_of(loader)

    check_loops(make, expected, seed=1, loops=60)


def test_set_epoch_starts_an_epoch_at_any_batch(store: Path) -> None:
    loader = Loader(store, batch_size=24, fields=IDS)
    epochs = [ids_of(loader) for _ in range(3)]
    loader.set_epoch(1, 4)
    assert ids_of(loader) == epochs[1][4:]
    assert loader.epoch_digest is None
    assert ids_of(loader) == epochs[2]


def test_ranges_can_be_taken_in_any_order(store: Path, rows: list[int]) -> None:
    loader = Loader(store, fields=IDS)
    order = shuffle_indices(rows, 0, 3)
    ranges = [(len(rows) - 3, len(rows)), (0, 2), (0, 0), (50, 250), (0, len(rows))]
    assert ids_of(loader.take(ranges, 3)) == [order[start:stop] for start, stop in ranges]
    assert next(loader.chunk_sizes()) > 0
    with pytest.raises(ConfigError, match="outside the epoch"):
        loader.take([(0, len(rows) + 1)], 0)


def test_rows_outside_the_split_are_refused(store: Path, rows: list[int]) -> None:
    table = Loader(store).games
    assert table is not None
    for row in (-1, len(rows), 1 << 40):
        with pytest.raises(IndexError, match="outside"):
            table.take(np.array([0, row]), ["fill"])


# --- other forms of delivery --------------------------------------------------------------------------


@pytest.mark.parametrize("board", ["float32", "packed", "fill"])
def test_a_dataset_delivers_the_positions_of_a_loader(store: Path, board: Any) -> None:
    options: dict[str, Any] = {"board": board, "symmetry": True, "seed": 4, "fields": ALL_FIELDS}
    dataset = PositionDataset(store, **options)
    assert dataset.options.mode == "games"
    loader = Loader(store, batch_size=len(dataset), **options)
    (batch,) = loader
    found = dataset.batch(shuffle_indices(range(len(dataset)), 4, 0))
    assert found.keys() == batch.keys()
    for name, array in batch.items():
        assert found[name].tobytes() == array.tobytes(), name
    last = dataset[-1]
    assert last["position_id"] == dataset.batch([len(dataset) - 1])["position_id"][0]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_mixture_of_games_and_shards(store: Path) -> None:
    """Every position of both is delivered once per epoch of it, with equal contents."""
    shards = store.parent / "shards"
    options: dict[str, Any] = {"batch_size": 16, "fields": ALL_FIELDS, "seed": 3}

    def make() -> Mixture:
        sources = [Loader(store, mode="games", **options), Loader(shards, mode="exact", **options)]
        return Mixture(sources, [0.5, 0.5], batch_size=16, seed=9)

    mixture = make()
    expected = contents(Loader(store, fields=ALL_FIELDS))
    index = {position: row for row, position in enumerate(expected["position_id"].tolist())}
    stopped = None
    got: Steps = []
    for step, batch in enumerate(mixture):
        own = [index[position] for position in batch["position_id"].tolist()]
        for name in ALL_FIELDS:
            assert batch[name].tobytes() == expected[name][own].tobytes(), name
        got.append(batch["position_id"].tolist())
        if step == 4:
            stopped = json.loads(json.dumps(mixture.state_dict()))
    resumed = make()
    resumed.load_state_dict(stopped)
    assert ids_of(resumed) == got[5:]


def test_loaders_in_threads_deliver_the_same(store: Path) -> None:
    """Several loaders over one table, each in its own thread."""
    loader = Loader(store, batch_size=7, fields=ALL_FIELDS, world_size=4, symmetry=True)
    ranks = [loader.for_rank(rank, 4) for rank in range(4)]
    assert all(rank.games is loader.games for rank in ranks)
    expected = [[batch["board"].tobytes() for batch in rank.batches()] for rank in ranks]
    found: list[list[bytes]] = [[] for _ in ranks]

    def run(number: int) -> None:
        for _ in range(5):
            found[number] = [batch["board"].tobytes() for batch in ranks[number].batches()]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert found == expected


# --- the table in several processes -------------------------------------------------------------------


def shared_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("hexdata-arrays-*"))


def test_copies_share_one_file(store: Path, temporary: Path) -> None:
    loader = Loader(store, batch_size=24, fields=ALL_FIELDS)
    expected = [batch["board"].tobytes() for batch in loader]
    data = pickle.dumps(loader)
    (file,) = shared_files(temporary)
    assert len(data) < 10_000
    assert pickle.dumps(loader) == data
    assert shared_files(temporary) == [file]
    copies = [pickle.loads(data) for _ in range(3)]
    again = pickle.loads(pickle.dumps(copies[0]))
    assert shared_files(temporary) == [file]
    for each in (loader, again, *copies):
        each.set_epoch(0)
        assert [batch["board"].tobytes() for batch in each] == expected
        assert not each.games.arrays["fill"].flags.writeable
    del copies, each, again
    assert shared_files(temporary) == [file]
    del loader
    assert shared_files(temporary) == []


def test_a_copy_outlives_its_owner(store: Path, temporary: Path) -> None:
    loader = Loader(store, batch_size=24, fields=ALL_FIELDS)
    data, expected = pickle.dumps(loader), ids_of(loader)
    copy = pickle.loads(data)
    del loader
    assert shared_files(temporary) == []
    assert ids_of(copy) == expected
    late = pickle.loads(data)  # reads the games again
    assert ids_of(late) == expected
    assert shared_files(temporary) == []
    assert ids_of(pickle.loads(pickle.dumps(copy))) == ids_of(late)


def test_a_copy_of_another_user_reads_the_games_again(
    store: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(store, batch_size=24, fields=IDS)
    data = pickle.dumps(loader)

    def refuse(self: SharedArrays) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SharedArrays, "arrays", refuse)
    assert ids_of(pickle.loads(data)) == ids_of(loader)


def test_a_copy_refuses_a_store_that_has_changed(
    tmp_path: Path, temporary: Path, demo_trmph: DemoTrmph
) -> None:
    demo_trmph(tmp_path / "a", games=4, files=1)
    demo_trmph(tmp_path / "b", games=4, files=1, seed=2)
    grown = tmp_path / "store"
    convert_sources([tmp_path / "a"], grown, ConvertOptions(workers=1))
    loader = Loader(grown, fields=IDS)
    data = pickle.dumps(loader)
    convert_sources([tmp_path / "b"], grown, ConvertOptions(workers=1))
    assert pickle.loads(data).positions == loader.positions
    del loader
    with pytest.raises(
        StoreError, match=r"the store has changed since the loader was made.*Make a new loader"
    ):
        pickle.loads(data)


def test_a_dataset_and_a_mixture_are_pickled(store: Path, temporary: Path) -> None:
    dataset = PositionDataset(store, fields=IDS)
    mixture = Mixture([Loader(store, batch_size=8, fields=IDS)], [1.0], batch_size=8)
    copies = pickle.loads(pickle.dumps((dataset, mixture)))
    assert len(shared_files(temporary)) == 2
    assert copies[0].batch([5, 3])["position_id"].tolist() == dataset.batch([5, 3])["position_id"].tolist()
    assert ids_of(copies[1]) == ids_of(mixture)


def test_a_forked_process_leaves_the_file(store: Path, temporary: Path) -> None:
    loader = Loader(store, batch_size=24, fields=IDS)
    data, expected = pickle.dumps(loader), ids_of(loader)
    (file,) = shared_files(temporary)
    code = f"""
import os, sys, pickle
loader = pickle.load(open(sys.argv[1], "rb"))
again = pickle.dumps(loader)
children = []
for way in range(2):
    child = os.fork()
    if not child:
        count = sum(len(batch["position_id"]) for batch in loader)
        if way:
            os._exit(0 if count == {len(flat(expected))} else 1)
        sys.exit(0 if count == {len(flat(expected))} else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""
    (temporary / "loader").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(temporary / "loader")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    assert done.stdout == "[0, 0]\n"
    assert shared_files(temporary) == [file]
    del loader
    assert shared_files(temporary) == []


OWNER = """
import os, pickle, sys, time
from hexdata.loader import Loader
loader = Loader(sys.argv[1], fields=("position_id",))
pickle.dumps(loader)
child = os.fork() if "fork" in sys.argv else 1
if not child:
    sys.exit(0)
if child > 1:
    os.waitpid(child, 0)
print(len(os.listdir(os.environ["TMPDIR"])), flush=True)
if "end" not in sys.argv:
    time.sleep(600)
"""


@pytest.mark.parametrize("options", [["end"], ["fork", "end"]])
def test_the_file_is_removed_when_its_process_ends(store: Path, temporary: Path, options: list[str]) -> None:
    """Not earlier, when a forked process ends."""
    command = [sys.executable, "-W", "ignore", "-c", OWNER, str(store), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    assert done.stdout == "1\n"
    assert shared_files(temporary) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGINT"])
def test_the_file_of_a_killed_process_is_removed_later(store: Path, temporary: Path, name: str) -> None:
    """By the next process that writes one; files of running processes remain."""
    number = getattr(signal, name, signal.SIGTERM)  # Windows has no SIGKILL
    command = [sys.executable, "-W", "ignore", "-c", OWNER, str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            loader = Loader(store, fields=IDS)
            data = pickle.dumps(loader)
            assert len(shared_files(temporary)) == 2
            process.send_signal(number)
            process.wait(TIMEOUT)
        finally:
            process.kill()
    assert len(shared_files(temporary)) == (1 if number == signal.SIGINT else 2)
    following = subprocess.run(
        [*command, "end"], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True
    )
    assert following.stdout == "2\n"  # its own file and that of the loader
    assert len(shared_files(temporary)) == 1
    assert ids_of(pickle.loads(data)) == ids_of(loader)


def test_other_files_in_the_temporary_folder_remain(store: Path, temporary: Path) -> None:
    """Only the files that an ended process itself wrote are removed."""
    command = [sys.executable, "-W", "ignore", "-c", OWNER, str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
        finally:
            process.kill()
    (left,) = shared_files(temporary)
    (temporary / "hexdata-arrays-made").touch()
    os.mkfifo(temporary / "hexdata-arrays-fifo")
    (temporary / "hexdata-arrays-folder").mkdir()
    (temporary / "data").write_bytes(b"data")
    link = left.with_name(left.name[:-16] + "0" * 16)  # another file of the same process
    link.symlink_to(temporary / "data")
    before = {path.name for path in temporary.iterdir()}
    subprocess.run([*command, "end"], stdout=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
    assert {path.name for path in temporary.iterdir()} == before - {left.name}
    assert (temporary / "data").read_bytes() == b"data"


def test_a_full_temporary_folder(store: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (small_disk / "full").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    loader = Loader(store, batch_size=24, fields=IDS)
    with pytest.raises(BudgetError, match=r"no space for the arrays.*expected [\d,]+ bytes.*Set TMPDIR"):
        pickle.dumps(loader)
    assert [path.name for path in small_disk.iterdir()] == ["full"]
    (small_disk / "full").unlink()
    assert ids_of(pickle.loads(pickle.dumps(loader))) == ids_of(loader)


def test_a_missing_temporary_folder(store: Path, temporary: Path) -> None:
    loader = Loader(store, fields=IDS)
    assert tempfile.gettempdir() == str(temporary)
    temporary.rmdir()
    with pytest.raises(
        ConfigError, match="tmp: the temporary folder cannot be written to; found No such file"
    ):
        pickle.dumps(loader)
    temporary.mkdir()
    assert ids_of(pickle.loads(pickle.dumps(loader))) == ids_of(loader)
