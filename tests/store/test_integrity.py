"""Damaged files: a damaged input is refused and named, a damaged output is written again."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.convert import convert_sources
from hexdata.errors import HexdataError, StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.selection import SelectionOptions
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.store.integrity import find_damage, rebuild_command
from hexdata.verify import verify_store
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph, StoreBytes

SHUFFLE = ShuffleOptions(seed=3, buckets=4, where="position_id >= 0", threads=1)
SHARDS = ExportOptions(shard_size=256, block_size=64, workers=1)
ROTS = 40 if FULL else 12

Stage = Callable[[Path], Any]
STAGES: dict[str, tuple[str, Stage]] = {
    "shuffle": ("shuffled", lambda store: shuffle_store(store, SHUFFLE)),
    "shards": ("shards", lambda store: export_shards(store, SHARDS)),
    "original": (
        "pickles/original",
        lambda store: export_pickles(store, PicklesOptions(order="original", workers=1)),
    ),
    "shuffled": ("pickles/shuffled", lambda store: export_pickles(store, PicklesOptions(workers=1))),
}
"""Each stage with the folder that it writes."""


@pytest.fixture(scope="module")
def inputs(demo_trmph: DemoTrmph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files of games."""
    folder = tmp_path_factory.mktemp("inputs")
    demo_trmph(folder, files=2, games=40)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store through all stages. Read only: copy it."""
    store = tmp_path_factory.mktemp("whole") / "store"
    convert_sources(inputs, store)
    for _, run in STAGES.values():
        run(store)
    return store


def flip(path: Path, random_: random.Random) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    path.write_bytes(data)


def _error_of(run: Callable[..., object], *args: object) -> HexdataError | None:
    try:
        run(*args)
    except HexdataError as error:
        return error
    return None


@pytest.mark.parametrize("stage", STAGES)
def test_a_damaged_output_is_written_again(
    stage: str, whole: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    """Only damaged files are written, with the same bytes; files derived from them are kept."""
    folder, run = STAGES[stage]
    store = copy_store(whole)
    names = sorted(Store.open(store).manifest.files_in(folder))
    flip(store / names[0], random.Random(1))
    (store / names[-1]).unlink()
    kept = {name: (store / name).stat().st_ino for name in names[1:-1]}
    result = run(store)
    assert not result.already_done
    assert store_bytes(store) == store_bytes(whole)
    if not any(name.endswith("manifest.json") for name in (names[0], names[-1])):
        assert {name: (store / name).stat().st_ino for name in kept} == kept
    assert run(store).already_done
    assert verify_store(store).ok


def test_a_damaged_shard_manifest_is_written_again(
    whole: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    store = copy_store(whole)
    flip(store / "shards" / "manifest.json", random.Random(1))
    assert not export_shards(store, SHARDS).already_done
    assert store_bytes(store) == store_bytes(whole)


READS = {
    "shuffle": ("positions", "games", "sources"),
    "shards": ("shuffled",),
    "original": ("positions", "games", "sources"),
    "shuffled": ("shuffled", "games", "sources"),
}
"""The folders that each stage reads."""


@pytest.mark.parametrize("stage", READS)
def test_a_flipped_bit_in_an_input_is_refused_and_named(
    stage: str, whole: Path, copy_store: CopyStore, store_bytes: StoreBytes, tmp_path: Path
) -> None:
    """One random bit of each file that a stage reads: the file is named and nothing is published."""
    folder, run = STAGES[stage]
    random_ = random.Random(f"rot of {stage}")
    store = copy_store(whole)
    manifest = Store.open(store).manifest
    names = [name for read in READS[stage] for name in manifest.files_in(read)]
    rots = [*names, *random_.choices(names, k=max(ROTS - len(names), 0))]
    shutil.rmtree(store / folder)  # so that the stage has something to write
    for name in rots:
        content = (store / name).read_bytes()
        before = store_bytes(store)
        flip(store / name, random_)
        with pytest.raises(StoreError, match="altered") as caught:
            run(store)
        assert caught.value.path == str(store / name)
        assert "`hexdata " in str(caught.value)
        (store / name).write_bytes(content)
        assert store_bytes(store) == before
    run(store)
    assert store_bytes(store) == store_bytes(whole)


def test_several_damaged_inputs_are_counted(whole: Path, copy_store: CopyStore) -> None:
    store = copy_store(whole)
    for name in Store.open(store).manifest.files_in("shuffled"):
        (store / name).unlink()
    with pytest.raises(
        StoreError, match=r"missing, and \d+ other files are damaged or missing.*hexdata verify"
    ):
        export_shards(store, ExportOptions(shard_size=64, block_size=64, workers=1))


@pytest.mark.parametrize("folder", ["games", "sources"])
def test_convert_refuses_damaged_tables(
    folder: str, whole: Path, inputs: Path, copy_store: CopyStore
) -> None:
    """They cannot be written again in place, and nothing is added to them."""
    store = copy_store(whole)
    name = next(iter(Store.open(store).manifest.files_in(folder)))
    flip(store / name, random.Random(1))
    with pytest.raises(StoreError, match=r"altered.*Restore the file from a copy, or convert") as caught:
        convert_sources(inputs, store)
    assert caught.value.path == str(store / name)


@pytest.mark.parametrize("missing", [False, True])
def test_convert_refuses_positions_that_are_missing_or_cut(
    missing: bool, whole: Path, inputs: Path, copy_store: CopyStore
) -> None:
    """It does not read them, so it does not compute their digests."""
    store = copy_store(whole)
    path = store / next(iter(Store.open(store).manifest.files_in("positions")))
    content = path.read_bytes()
    path.unlink()
    if not missing:
        path.write_bytes(content[:-1])
    with pytest.raises(
        StoreError, match=r"missing or has another size.*Restore the file from a copy"
    ) as caught:
        convert_sources(inputs, store)
    assert caught.value.path == str(path)


def test_an_unreadable_file_is_named(
    whole: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> tuple[int, str]:
        raise OSError(5, "Input/output error")

    store = copy_store(whole)
    monkeypatch.setattr("hexdata.store.integrity.digest_file", failing)
    opened = Store.open(store)
    for name, error in find_damage(opened, opened.manifest.files).items():
        assert f"{store / name}: the file cannot be read; found Input/output error. Check the disk." in str(
            error
        )


def test_commands_have_the_options_that_files_were_made_with(whole: Path, inputs: Path) -> None:
    store = Store.open(whole)
    command = {name.split("/")[0]: rebuild_command(store, name) for name in store.manifest.files}
    assert command["shuffled"] == (f"hexdata shuffle {whole} --seed 3 --buckets 4 --where 'position_id >= 0'")
    assert command["shards"] == (f"hexdata export {whole} --shard-size 256 --block-size 64 --layout blocks")
    assert command["positions"] == f"hexdata convert INPUT... {whole}-again --val 0.05 --test 0.01"
    assert rebuild_command(store, "pickles/original/x") == (
        f"hexdata export {whole} --format pickle --order original --level 6"
    )


def test_every_choice_of_a_shuffle_is_a_command_line_option() -> None:
    """The commands spell each choice like the command line."""
    from typer.testing import CliRunner

    from hexdata.cli import app

    shown = CliRunner().invoke(app, ["shuffle", "--help"], terminal_width=200).output
    for name in (*SelectionOptions.__dataclass_fields__, "seed", "buckets"):
        assert f"--{name.replace('_', '-')}" in shown


def test_the_commands_shown_write_the_files_again(
    whole: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    from typer.testing import CliRunner

    from hexdata.cli import app

    store = copy_store(whole)
    for folder in ("shuffled", "shards", "pickles/original", "pickles/shuffled"):
        opened = Store.open(store)
        name = next(iter(opened.manifest.files_in(folder)))
        flip(store / name, random.Random(2))
        words = shlex.split(rebuild_command(opened, name))[1:]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert store_bytes(store) == store_bytes(whole)


@pytest.mark.parametrize("name", ["a store with a long name " * 8, "-dash", "new\nline", "q'uote", "$(id)"])
def test_verify_lists_commands_that_can_be_copied(
    name: str,
    whole: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One per line, unwrapped, in running order, for any store name."""
    from typer.testing import CliRunner

    from hexdata.cli import app

    if shutil.which("bash") is None:
        pytest.skip("no bash")
    store = copy_store(whole, name)
    monkeypatch.chdir(tmp_path)
    manifest = Store.open(store).manifest
    for folder in ("shards", "pickles/original", "shuffled"):
        flip(store / min(manifest.files_in(folder)), random.Random(4))
    found = CliRunner().invoke(app, ["verify", f"./{name}"])
    assert found.exit_code == 1
    printed = found.stdout.partition("in this order:\n")[2]
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  hexdata ")]
    assert [line.split()[1] for line in lines] == ["shuffle", "export", "export"]
    for line in lines:
        split = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
        words = [os.fsdecode(word) for word in split.stdout.split(b"\0")[1:-1]]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert store_bytes(store) == store_bytes(whole)


@pytest.mark.parametrize("name", ["positions/part-000000.parquet", "manifest.json"])
def test_a_pipe_instead_of_a_file_does_not_block(name: str, whole: Path, copy_store: CopyStore) -> None:
    store = copy_store(whole)
    (store / name).unlink()
    os.mkfifo(store / name)
    with pytest.raises(StoreError, match="Not a regular file") as caught:
        shuffle_store(store, ShuffleOptions(seed=4, threads=1))
    assert caught.value.path == str(store / name)


def test_a_resumed_stage_does_not_keep_files_damaged_meanwhile(
    whole: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    """A bucket, a shard and a pickle that were finished before the interruption are hashed again."""

    class Stop:
        def __init__(self) -> None:
            self.left = 2

        def begin(self, stage: str, total: int | None, unit: str) -> None:
            self.counting = stage in ("sort", "export", "pickles-original", "pickles-shuffled")

        def advance(self, amount: int) -> None:
            self.left -= self.counting and amount > 0
            if not self.left:
                raise KeyboardInterrupt

        def note(self, message: str) -> None:
            pass

    stages: list[tuple[str, Callable[..., Any], Any]] = [
        ("shuffled", shuffle_store, SHUFFLE),
        ("shards", export_shards, SHARDS),
        ("pickles/original", export_pickles, PicklesOptions(order="original", workers=1)),
        ("pickles/shuffled", export_pickles, PicklesOptions(workers=1)),
    ]
    for folder, run, options in stages:
        store = copy_store(whole, folder.replace("/", "-"))
        shutil.rmtree(store / folder)
        with pytest.raises(KeyboardInterrupt):
            run(store, options, Stop())
        written = sorted(path for path in (store / folder).rglob("*") if path.is_file())
        assert written
        for path in written:
            flip(path, random.Random(3))
        run(store, options)
        assert store_bytes(store) == store_bytes(whole)
