"""Messages for common mistakes: what is wrong, and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hexdata.cli.app import _plain
from hexdata.live import LiveOptions
from hexdata.live.wait_reason import find_wait_reason
from tests.cli.test_cli import hexdata_run
from tests.conftest import CopyStore, DemoTrmph


def test_files_that_are_converted_again_are_one_line(demo_trmph: DemoTrmph, tmp_path: Path) -> None:
    demo_trmph(tmp_path / "games", games=4, files=2)
    arguments = ("convert", tmp_path / "games", tmp_path / "store", "--workers", "1")
    assert "positions" in hexdata_run(*arguments).out
    again = hexdata_run(*arguments)
    assert (again.status, again.out) == (0, "")
    assert again.err == "note: 2 files already in the store; nothing to convert\n"
    assert hexdata_run(*arguments, "--json").facts["skipped"] == 2
    demo_trmph(tmp_path / "games", games=9, files=3, seed=5)
    assert "already in the store" not in hexdata_run(*arguments).err


def test_stages_that_are_complete_are_one_line(
    demo_trmph: DemoTrmph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo_trmph(Path("games"), games=8, files=1)
    Path("run.toml").write_text(
        'store = "store"\n[convert]\ninputs = ["games"]\nworkers = 1\n[shuffle]\nbuckets = 2\nthreads = 1\n'
    )
    first = hexdata_run("run", "run.toml")
    assert first.out.count("store/") == 2
    assert "already complete" not in first.out
    again = hexdata_run("run", "run.toml")
    assert again.out.startswith("store: already complete: convert, shuffle\n")
    assert "positions/s" not in again.out
    assert [stage["kept"] for stage in hexdata_run("run", "run.toml", "--json").facts["stages"]] == [
        True,
        True,
    ]
    with Path("run.toml").open("a") as file:
        file.write("seed = 5\n")
    assert "already complete: convert\n" in hexdata_run("run", "run.toml").out


def test_a_demo_refuses_a_store(trmph_store: Path) -> None:
    before = sorted(path.name for path in trmph_store.iterdir())
    ran = hexdata_run("demo", trmph_store)
    assert ran.status == 2
    assert "the folder of a demo cannot be a store" in ran.err
    assert f"`hexdata info {trmph_store}`" in ran.err
    assert sorted(path.name for path in trmph_store.iterdir()) == before


@pytest.mark.parametrize("command", [("info",), ("verify",), ("shuffle",), ("sql", "SELECT 1"), ("browse",)])
def test_a_store_in_a_subfolder_or_above_is_named(trmph_store: Path, command: tuple[str, ...]) -> None:
    name, *arguments = command
    for path in (trmph_store.parent, trmph_store / "games"):
        ran = hexdata_run(name, path, *arguments)
        assert ran.status == 1
        assert ran.err.startswith(f"hexdata: {path}: not a hexdata store: a ")
        assert ran.err.endswith(f" Did you mean {trmph_store}?\n")


def test_a_missing_folder_and_a_file_are_no_stores(tmp_path: Path) -> None:
    (tmp_path / "games.trmph").write_text("#5,a1 b\n")
    assert "there is no such folder or file" in hexdata_run("info", tmp_path / "none").err
    ran = hexdata_run("info", tmp_path / "games.trmph")
    assert f"hexdata convert {tmp_path}/games.trmph {tmp_path}/games-store" in ran.err


def test_a_read_only_store_is_named_with_a_remedy(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may write anywhere, so the answer of the system is replaced."""
    store = copy_store(trmph_store)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: False)
    ran = hexdata_run("shuffle", store)
    assert ran.status == 1
    assert "the store is read-only; found no permission to write to its folder" in ran.err
    assert f"`chmod -R u+w {store}`" in ran.err
    assert hexdata_run("info", store).status == 0


def test_live_names_the_files_that_it_waits_for() -> None:
    metrics = {
        "FilePathProvider": {"files": 0},
        "ChunkSourceLoader": {"busy": 0},
        "ShufflingChunkPool": {"chunks": 0},
    }
    reason = find_wait_reason(metrics, {}, LiveOptions())
    assert reason is not None
    assert "waiting for files named " in reason
    assert "*.trmph" in reason
    assert " or *.tar" in reason


def test_hexdata_alone_shows_help_on_lines() -> None:
    ran = hexdata_run()
    assert "\\n" not in ran.out + ran.err
    assert "\n  convert " in ran.out + ran.err


def test_arguments_of_sql_in_the_wrong_order(trmph_store: Path) -> None:
    ran = hexdata_run("sql", "SELECT 1", trmph_store)
    assert (ran.status, ran.err) == (
        2,
        "hexdata: the store comes first; found SELECT 1; expected hexdata sql STORE QUERY\n",
    )


def test_a_query_file_without_its_option(
    trmph_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.sql").write_text("SELECT 1")
    ran = hexdata_run("sql", trmph_store, "my.sql")
    assert ran.status == 2
    assert "Use -f my.sql." in ran.err


@pytest.mark.parametrize(
    "arguments", [("sql", "SELECT", "1"), ("load", "--where", "move", "5"), ("shuffle", "--where", "a", "b")]
)
def test_an_unquoted_query_is_recognized(trmph_store: Path, arguments: tuple[str, ...]) -> None:
    name, *words = arguments
    ran = hexdata_run(name, trmph_store, *words)
    assert ran.status == 2
    assert "Quote a query" in ran.err


def test_a_store_is_no_directory_to_watch(trmph_store: Path) -> None:
    ran = hexdata_run("live", trmph_store, "--seconds", "1")
    assert (ran.status, "a store" in ran.err) == (2, True)


def test_a_size_without_a_unit_is_refused(trmph_store: Path) -> None:
    assert hexdata_run("shuffle", trmph_store, "--memory", "2G", "--dry-run").status == 0
    ran = hexdata_run("shuffle", trmph_store, "--memory", "2", "--dry-run")
    assert (ran.status, "such as 1GB" in ran.err) == (2, True)


def test_a_wrong_field_and_a_wrong_choice_have_a_suggestion(trmph_store: Path) -> None:
    ran = hexdata_run("load", trmph_store, "--fields", "bord")
    assert ran.status == 2
    assert ran.err.endswith("extra.NAME. Did you mean 'board'?\n")
    ran = hexdata_run("load", trmph_store, "--mode", "exat")
    assert ran.err.splitlines()[-1] == (
        "Error: Invalid value for '--mode': 'exat' is not one of 'games', 'exact', 'stream'. "
        "Did you mean 'exact'?"
    )
    assert "Did you mean" not in hexdata_run("load", trmph_store, "--mode", "zzz").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shuffle", "store", "--buckets", "0"), "'--buckets': expected at least 1"),
        (("shuffle", "store", "--buckets", "x"), "'--buckets': expected a whole number"),
        (("load", "store", "--batch-size", "1.5"), "'--batch-size': expected a whole number"),
        (("convert", "in", "store", "--max-reject-rate", "2"), "'--max-reject-rate': expected at most 1"),
        (("convert", "in", "store", "--max-reject-rate", "x"), "'--max-reject-rate': expected a number"),
        (("show", "store", "abc"), "'POSITION_ID': expected a whole number"),
    ],
)
def test_wrong_numbers_are_named_in_plain_words(arguments: tuple[str, ...], message: str) -> None:
    ran = hexdata_run(*arguments)
    assert ran.status == 2
    assert ran.err.splitlines()[-1] == f"Error: Invalid value for {message}"


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ("Invalid value for '--seed': 'x' is not a valid integer.", "'--seed': expected a whole number"),
        ("Invalid value for '--ply': 'x' is not a valid integer range.", "'--ply': expected a whole number"),
        ("Invalid value for '--val': 'x' is not a valid float range.", "'--val': expected a number"),
        ("Invalid value for '--ply': -1 is not in the range x>=0.", "'--ply': expected at least 0"),
        ("Invalid value for '--val': 2.0 is not in the range 0<=x<=1.", "'--val': expected 0 to 1"),
        ("Invalid value for 'A': no file: Input should be valid", "'A': no file: Input should be valid"),
    ],
)
def test_messages_of_older_releases_of_typer(message: str, plain: str) -> None:
    assert _plain(message) == f"Invalid value for {plain}"


def test_training_from_a_folder_that_is_no_store(
    trmph_store: Path, copy_store: CopyStore, tmp_path: Path
) -> None:
    store = copy_store(trmph_store)
    ran = hexdata_run("load", store.parent, "--mode", "exact")
    assert ran.err.endswith(f"a folder that contains a store. Did you mean {store}?\n")
    assert "there is no such folder or file. Check the path" in hexdata_run("load", tmp_path / "none").err
    ran = hexdata_run("load", store / "shards", "--mode", "exact")
    assert ran.err.endswith(f"there is no such folder or file. Did you mean {store}?\n")


def test_a_store_is_no_source(trmph_store: Path, tmp_path: Path) -> None:
    ran = hexdata_run("convert", trmph_store, tmp_path / "new")
    assert ran.status == 1
    assert "This folder is a store: pass the files or folders from which it was converted." in ran.err


def test_a_foreign_file_is_named(trmph_store: Path, tmp_path: Path) -> None:
    ran = hexdata_run("convert", trmph_store / "games" / "part-000000.parquet", tmp_path / "new")
    assert "found a Parquet file; expected a pickle" in ran.err
