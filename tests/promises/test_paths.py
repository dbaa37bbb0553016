"""Every command and every kind of path: the error names what is there, and its advice works."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexdata import Loader, PositionDataset
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import HexdataError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.demo_games import demo_games
from tests.kit.command_line import hexdata_run

KINDS: dict[str, str] = {
    "shards": "shards",
    "shards of a store": "shards",
    "a shard": "beside shards",
    "the folder above a store": "contains a store",
    "a table of a store": "part of a store",
    "a pickle export": "part of a store",
    "a folder of games": "can be converted",
    "a pickle": "can be converted",
    "a text of games": "can be converted",
    "an interrupted convert": "interrupted",
    "a store without its manifest": "damaged",
    "an altered manifest": "altered",
    "a newer store": "schema_version",
    "a config": "config",
    "another file": "a file",
    "an empty folder": "empty",
    "nothing": "no such",
    "a misspelled store": "Did you mean",
}
"""Kind of a path, and a word of the error that names it."""

COMMANDS = {
    "info": (),
    "verify": (),
    "shuffle": (),
    "export": (),
    "sql": ("SELECT 1",),
    "show": ("0",),
    "browse": (),
    "report": (),
    "load": (),
    "load --mode exact": (),
    "load --mode stream": (),
    "load --mode games": (),
}
READERS: dict[str, Callable[..., Any]] = {
    "Loader": Loader,
    "stream": lambda path: Loader(path, mode="stream"),
    "PositionDataset": PositionDataset,
}
LOADABLE = ("shards", "shards of a store")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A path of each kind, in a folder whose name has a space."""
    root = tmp_path_factory.mktemp("my paths")
    games = root / "games"
    games.mkdir()
    write_trmph(games / "a.trmph", demo_games(12, seed=1, board_size=5), 5)
    store = root / "above" / "a store"
    convert_sources(games, store, ConvertOptions(workers=1))
    shuffle_store(store, ShuffleOptions(buckets=2, threads=1))
    export_shards(store, ExportOptions(workers=1, shard_size=64, block_size=32))
    export_pickles(store, PicklesOptions(workers=1))
    (root / "copy").mkdir()
    shutil.copytree(store / "shards", root / "copy" / "shards")
    pickle = next((store / "pickles").rglob("*.pkl.gz"))
    (root / "a pickle").mkdir()
    shutil.copy(pickle, root / "a pickle" / "games.pkl.gz")
    for name in ("without", "altered", "newer"):
        shutil.copytree(store, root / name)
    (root / "without" / "manifest.json").unlink()
    shutil.rmtree(root / "without" / "shards")
    manifest = (store / "manifest.json").read_text()
    (root / "altered" / "manifest.json").write_text(manifest.replace('"rejected": 0', '"rejected": 1'))
    (root / "newer" / "manifest.json").write_text(re.sub(r'("schema_version": )\d+', r"\g<1>99", manifest))
    (root / "empty").mkdir()
    (root / "run.toml").write_text(f'store = "{root}/by run"\n[convert]\ninputs = ["{games}"]\nworkers = 1\n')
    (root / "notes.dat").write_bytes(b"nothing of ours")
    interrupted = root / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        convert_sources(games, interrupted, ConvertOptions(workers=1, val=0.3), Stop())
    return {
        "shards": root / "copy" / "shards",
        "shards of a store": store / "shards",
        "a shard": next((root / "copy" / "shards").glob("*.tar")),
        "the folder above a store": root / "above",
        "a table of a store": next((store / "positions").iterdir()),
        "a pickle export": store / "pickles" / "shuffled",
        "a folder of games": games,
        "a pickle": root / "a pickle" / "games.pkl.gz",
        "a text of games": games / "a.trmph",
        "an interrupted convert": interrupted,
        "a store without its manifest": root / "without",
        "an altered manifest": root / "altered",
        "a newer store": root / "newer",
        "a config": root / "run.toml",
        "another file": root / "notes.dat",
        "an empty folder": root / "empty",
        "nothing": root / "none",
        "a misspelled store": root / "above" / "a stroe",
    }


class Stop(Silent):
    """A user who presses Ctrl-C when the first positions are written."""

    def begin(self, name: str, total: int | None, unit: str) -> None:
        if name == "write":
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_names_what_is_at_a_path(kind: str, paths: dict[str, Path]) -> None:
    for line, arguments in COMMANDS.items():
        verb, *options = line.split()
        if (verb == "load" and kind in LOADABLE and options != ["--mode", "games"]) or (
            verb == "info" and kind == "an interrupted convert"
        ):
            assert hexdata_run(verb, paths[kind], *options).status == 0
            continue
        if verb == "show" and kind == "a shard":
            continue  # SHARD.tar has another form
        ran = hexdata_run(verb, paths[kind], *arguments, *options)
        assert ran.status in (1, 2), line
        assert KINDS[kind] in ran.err, line
        assert "Traceback" not in ran.err, line


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_names_what_is_at_a_path(kind: str, reader: str, paths: dict[str, Path]) -> None:
    if kind in LOADABLE:
        READERS[reader](paths[kind])
        return
    with pytest.raises(HexdataError) as caught:
        READERS[reader](paths[kind])
    assert KINDS[kind] in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("another file", "nothing")])
def test_the_advice_works(kind: str, paths: dict[str, Path], tmp_path: Path) -> None:
    """A command of the advice runs as it is printed, and a path that it names can be used.

    It may change what is at the path, so this test has a copy.
    """
    root = paths["a config"].parent
    copy = shutil.copytree(root, tmp_path / "my paths")
    paths = {each: copy / path.relative_to(root) for each, path in paths.items()}
    error = hexdata_run("sql", paths[kind], "SELECT 1").err
    if meant := re.search(r"Did you mean (.*)\?\n", error):
        used = shlex.split(meant[1])
        assert len(used) == 1
        verb = "load" if kind == "a shard" else "info"
        assert hexdata_run(verb, *used).status == 0
        return
    command = re.search("`hexdata (.*)`", error)
    if kind in ("a newer store", "an altered manifest"):
        assert "onvert the sources" in error
        return
    assert command, error
    words = shlex.split(command[1])
    if "INPUT..." in words:
        words[words.index("INPUT...")] = str(paths["a folder of games"])
    ran = hexdata_run(*words)
    assert ran.status == 0, (words, ran.err)
    if words[0] == "convert":
        assert hexdata_run("info", words[-1] if "--val" not in words else words[2]).status == 0
