"""Random damage to every kind of file: verify names the file and the command that writes it again."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import StoreLockedError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.integrity import rebuild_command
from hexdata.verify import verify_store
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph
    from tests.verify.conftest import Failures

ROTS = 300 if FULL else 75


@pytest.fixture(scope="module")
def complete(demo_trmph: DemoTrmph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all stages, pickles and a rejected game."""
    folder = tmp_path_factory.mktemp("complete")
    first, _ = demo_trmph(folder / "inputs", files=2, games=30)
    with first.open("a") as file:
        file.write("no game\n")
    store = folder / "store"
    convert_sources(folder / "inputs", store, ConvertOptions(max_reject_rate=0.5))
    shuffle_store(store, ShuffleOptions(seed=1, buckets=2, threads=1))
    export_shards(store, ExportOptions(shard_size=256, block_size=64, workers=1))
    export_pickles(store, PicklesOptions(order="original", workers=1))
    export_pickles(store, PicklesOptions(order="shuffled", workers=1))
    return store


def damage(path: Path, random_: random.Random) -> None:
    """Flip a bit, truncate or extend the file, zero a page, or remove it."""
    data = bytearray(path.read_bytes())
    at = random_.randrange(len(data))
    match random_.choice(("flip", "flip", "cut", "longer", "zero", "remove")):
        case "flip":
            data[at] ^= 1 << random_.randrange(8)
        case "cut":
            del data[at:]
        case "longer":
            data += b"x"
        case "zero":
            zeros = bytes(len(data[at : at + 4096]))
            data[at : at + 4096] = zeros if any(data[at : at + 4096]) else zeros[1:]
        case _:
            path.unlink()
            return
    path.write_bytes(data)


def test_random_damage_is_reported_with_a_command(complete: Path, failures: Failures) -> None:
    opened = Store.open(complete)
    names = sorted(opened.manifest.files)
    random_ = random.Random("rots")
    seen = set()
    for number in range(ROTS):
        name = names[number % len(names)]
        path = complete / name
        whole = path.read_bytes()
        damage(path, random_)
        found = failures(complete)
        assert list(found) == ["files"]
        assert found["files"].startswith(f"{path}: ")
        assert f"`{rebuild_command(opened, name)}`" in found["files"]
        path.write_bytes(whole)
        seen.add(name.split("/")[0])
    assert seen == {"positions", "games", "sources", "rejected", "shuffled", "shards", "pickles"}


def test_all_damaged_files_are_reported_together(
    complete: Path, copy_store: CopyStore, failures: Failures
) -> None:
    store = copy_store(complete, "several")
    opened = Store.open(store)
    damaged = sorted(opened.manifest.files)[::3]
    for name in damaged:
        damage(store / name, random.Random(name))
    (message,) = failures(store).values()
    assert f"{len(damaged)} files are damaged" in message
    for name in damaged:
        assert str(store / name) in message
        assert rebuild_command(opened, name) in message


def test_a_store_that_is_being_written_is_not_checked(complete: Path, copy_store: CopyStore) -> None:
    store = copy_store(complete)
    shutil.rmtree(store / "shuffled")
    with (
        Store.open(store).writing("shuffle"),
        pytest.raises(StoreLockedError, match=rf"being written by process {os.getpid()} \(shuffle\)"),
    ):
        verify_store(store)
    assert not verify_store(store).ok  # nobody writes any more: it is damage


def test_a_store_that_changes_during_the_checks_is_not_reported_as_damaged(
    complete: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = copy_store(complete)
    opened = Store.open(store)
    shutil.rmtree(store / "shuffled")
    changed = Store.open(store)
    changed.manifest.files = {
        n: f for n, f in changed.manifest.files.items() if not n.startswith("shuffled/")
    }
    changed.manifest.stages = {"convert": changed.manifest.stages["convert"]}
    changed.manifest.save(store)
    seen = [opened, None]
    monkeypatch.setattr("hexdata.verify.store._require_no_writer", _first_call_passes())
    monkeypatch.setattr(Store, "open", lambda path, **_: seen[0])
    with pytest.raises(StoreLockedError, match="was changed during the checks"):
        verify_store(store)


def _first_call_passes() -> object:
    from hexdata.verify import store as verify_module

    checks = [lambda store: None]
    real = verify_module._require_no_writer
    return lambda store: (checks.pop() if checks else real)(store)
