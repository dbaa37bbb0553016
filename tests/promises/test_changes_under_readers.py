"""Data that change while they are open: a reader delivers the old positions once each, or an error.

Every reader of ``tests.kit.readers`` is crossed with every writer below, at several moments.
"""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hexdata import ConvertOptions, ExportOptions, HexdataError, ShuffleOptions
from hexdata.convert import convert_sources
from hexdata.export import export_shards
from hexdata.shuffle import shuffle_store
from tests.kit.readers import READERS, SPAWNED, Pairs, Reader, pairs_of
from tests.pairs import FULL, every_pair

LAYOUT = ExportOptions(shard_size=64, block_size=16, workers=1)
WHOLE = ConvertOptions(workers=1, val=0, test=0)


def write_games(path: Path, seed: int, count: int = 14) -> None:
    """Write games of fixed lengths, so that stores of different games have files of the same layout."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(count):
            cells = random.permutation(25)[: 8 + number]
            moves = "".join(f"{'abcde'[cell % 5]}{cell // 5 + 1}" for cell in cells)
            file.write(f"#5,{moves} {'br'[number % 2]}\n")


def make(folder: Path, seed: int) -> Path:
    write_games(folder / "in" / "a.trmph", seed)
    convert_sources([folder / "in"], folder / "store", WHOLE)
    reshuffle(folder / "store", 1)
    return folder / "store"


def reshuffle(store: Path, seed: int) -> None:
    shuffle_store(store, ShuffleOptions(seed=seed, threads=1))
    export_shards(store, LAYOUT)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "another shuffle": lambda store, made: reshuffle(store, 2),
    "only a shuffle": lambda store, made: shuffle_store(store, ShuffleOptions(seed=2, threads=1)),
    "another block size": lambda store, made: export_shards(
        store, ExportOptions(shard_size=64, block_size=32, workers=1)
    ),
    "more games": lambda store, made: convert_sources([made / "more"], store, WHOLE),
}
"""Changes of a store by a command."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, another store of the same layout, and the first store after each command."""
    folder = tmp_path_factory.mktemp("changes")
    make(folder / "first", 1)
    make(folder / "another store", 2)
    write_games(folder / "more" / "b.trmph", 3)
    for name, command in COMMANDS.items():
        command(shutil.copytree(folder / "first" / "store", folder / name / "store"), folder)
    return folder


def become(name: str, store: Path, made: Path) -> None:
    """Rename every file of another store into its place, and remove those that it does not have."""
    new = made / name / "store"
    for path in sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file()):
        if not (store / path).exists() or (store / path).read_bytes() != (new / path).read_bytes():
            (store / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(new / path, (store / path).with_name(".new"))
            (store / path).with_name(".new").rename(store / path)
    for path in [path for path in store.rglob("*") if path.is_file()]:
        if not (new / path.relative_to(store)).exists():
            path.unlink()


def replace_shards_only(store: Path, made: Path) -> None:
    """Exchange the shards as an export does that has not written its manifest yet."""
    for path in (made / "another store" / "store" / "shards").glob("*.tar"):
        shutil.copyfile(path, store / "shards" / ".new")
        (store / "shards" / ".new").rename(store / "shards" / path.name)


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    **{name: partial(become, name) for name in (*COMMANDS, "another store")},
    "other shards": replace_shards_only,
    "nothing is left": lambda store, made: shutil.rmtree(store),
}
"""Changes of a store, given another folder, ``made``."""
MOMENTS = ("opened", "asked", "begun", "between epochs", "copied")


def check(reader: Reader, store: Path, write: Callable[[], object], moment: str) -> bool:
    """Read an epoch across a change, and return whether it was delivered.

    Args:
        reader: The reader.
        store: The store.
        write: Makes the change.
        moment: When it is made: after opening, after the epoch was asked for, after two batches, after an
            epoch, or before a pickled copy is opened.
    """
    whole = dict(pair for batch in reader.batches(reader.open(store)) for pair in pairs_of(batch))
    opened = reader.open(store)
    found: Pairs = []
    batches = None
    if moment == "between epochs":
        assert {pair for batch in reader.batches(opened) for pair in pairs_of(batch)} == whole.items()
    if moment in ("asked", "begun"):
        batches = reader.batches(opened)
        for batch in itertools.islice(batches, 2 * (moment == "begun")):
            found += pairs_of(batch)
    data = pickle.dumps(opened) if moment == "copied" else b""
    write()
    try:
        if moment == "copied":
            opened = pickle.loads(data)
        for batch in batches or reader.batches(opened):
            found += pairs_of(batch)
    except HexdataError:
        assert all(whole.get(position) == board for position, board in found)
        return False
    counts = Counter(position for position, _ in found)
    assert all(whole.get(position) == board for position, board in found)
    assert not reader.once or counts == Counter(whole.keys())
    return True


@every_pair(name=READERS, writer=WRITERS, moment=MOMENTS)
def test_whole_or_refused(made: Path, tmp_path: Path, name: str, writer: str, moment: str) -> None:
    store = shutil.copytree(made / "first" / "store", tmp_path / "store")
    delivered = check(READERS[name], store, lambda: WRITERS[writer](store, made), moment)
    if "games" in name and moment != "copied":  # games mode has read everything
        assert delivered


@pytest.mark.parametrize("name", READERS)
def test_shards_of_the_same_layout_within_an_epoch(made: Path, tmp_path: Path, name: str) -> None:
    """Names, sizes, headers and manifest stay the same; only the digests of the shards differ."""
    store = shutil.copytree(made / "first" / "store", tmp_path / "store")
    shards = len(list((store / "shards").glob("*.tar")))
    assert shards > 2
    check(READERS[name], store, lambda: replace_shards_only(store, made), "begun")


@pytest.mark.parametrize("name", SPAWNED if FULL else ["exact"])
@pytest.mark.parametrize("writer", ["another store", "another shuffle"] if FULL else ["another store"])
def test_whole_or_refused_in_spawned_workers(made: Path, tmp_path: Path, name: str, writer: str) -> None:
    """The workers are started after the change."""
    pytest.importorskip("torch")
    store = shutil.copytree(made / "first" / "store", tmp_path / "store")
    reader, plain = SPAWNED[name], READERS[name]
    whole = dict(pair for batch in plain.batches(plain.open(store)) for pair in pairs_of(batch))
    opened = reader.open(store)
    WRITERS[writer](store, made)
    found: Pairs = []
    try:
        for batch in opened:
            found += pairs_of(batch)
    except HexdataError:
        assert all(whole.get(position) == board for position, board in found)
        return
    assert sorted(found) == sorted(whole.items())


FLIPS = {"positions": 9, "games": 5, "shards": 9} if FULL else {"positions": 2, "games": 1, "shards": 2}


@pytest.mark.parametrize("folder", FLIPS)
@pytest.mark.parametrize("name", ["games", "exact", "stream", "pipe", "dataset of shards"])
def test_a_flipped_bit_is_never_delivered(made: Path, tmp_path: Path, name: str, folder: str) -> None:
    """The file is damaged before it is opened, and after the loader was opened but before its first batch.

    What is read into memory when it is opened is not affected by later changes.
    """
    reader, in_memory = READERS[name], name in ("games", "exact", "dataset of shards")
    store = shutil.copytree(made / "first" / "store", tmp_path / "store")
    whole = dict(pair for batch in reader.batches(reader.open(store)) for pair in pairs_of(batch))
    reads = folder in ("positions", "games") if name == "games" else folder == "shards"
    paths = sorted(path for path in (store / folder).iterdir() if path.suffix in (".parquet", ".tar"))
    random = np.random.default_rng(0)
    for path, before in itertools.product(paths, [True, False]):
        data = path.read_bytes()
        for offset in random.integers(0, len(data), FLIPS[folder]).tolist():
            opened = None if before else reader.open(store)
            path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :])
            found: dict[int, bytes] = {}
            refusal = ""
            try:
                for batch in reader.batches(reader.open(store) if opened is None else opened):
                    found |= dict(pairs_of(batch))
            except HexdataError as error:
                refusal = str(error)
            assert found.items() <= whole.items()
            assert (path.name in refusal) == (reads and (before or not in_memory)), offset
            path.write_bytes(data)
