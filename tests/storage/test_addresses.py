"""Arguments that accept local paths only: an address is refused, and no folder ``s3:`` is created."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath

import pytest

from hexdata.cli import main
from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import ConfigError, without_secrets
from hexdata.live import LiveLoader, load_live_config, make_pipeline
from hexdata.live.options import LiveOptions
from hexdata.live.trial import run_live_trial
from hexdata.loader import Loader
from hexdata.pipeline import DemoSection, demo_config, load_config
from hexdata.storage import as_path, cache_folder, local_path

ROOT = Path(__file__).parents[2]
DEMO = ("the folder of a demo", "Give a path of this machine.")
CONFIG = ("a config", "Give a path of this machine.")
WATCHED = (
    "a watched directory",
    "Convert the games of the bucket into a store, or write them to a local directory.",
)
CACHE = ("a cache of shards", "Give a folder as cache (--cache).")


REFUSING: dict[str, tuple[Callable[[str], object], tuple[str, str]]] = {
    "hexdata.demo.make_legacy(folder)": (make_legacy, DEMO),
    "hexdata.pipeline.demo_config(folder)": (lambda place: demo_config(place, DemoOptions()), DEMO),
    "hexdata.pipeline.load_config(path)": (load_config, CONFIG),
    "hexdata.live.load_live_config(path)": (load_live_config, CONFIG),
    "hexdata.live.make_pipeline(directory)": (lambda place: make_pipeline(LiveOptions(), place), WATCHED),
    "hexdata.live.LiveLoader(directory)": (LiveLoader, WATCHED),
    "hexdata.live.LiveLoader(config)": (lambda place: LiveLoader(".", config=place), CONFIG),
}
"""By the parameters of public functions that are annotated as a ``Path``."""
FURTHER: dict[str, tuple[Callable[[str], object], tuple[str, str]]] = {
    "DemoSection": (lambda place: DemoSection(folder=place), DEMO),
    "run_live_trial": (run_live_trial, WATCHED),
    "Loader(cache)": (lambda place: Loader("store", cache=place), CACHE),
}


@pytest.mark.parametrize(
    "place", ["s3://bucket/games", "S3://b", "gs:/b/c", "https://host/a", "x://y", "memory://a"]
)
@pytest.mark.parametrize("name", [*REFUSING, *FURTHER])
def test_an_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    call, (what, hint) = (REFUSING | FURTHER)[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as told:
        call(place)
    assert str(told.value) == f"{what} can only be on this machine; found {place}; expected a path. {hint}"
    assert list(tmp_path.iterdir()) == []


PUBLIC = re.findall(r"automodule:: (hexdata\S*)", (ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
NO_PATHS = {"hexdata.storage", "hexdata.torch", "hexdata.webdataset"}
"""Modules that are not checked: the first works on paths of either kind, the others take loaders."""


def public_parameters() -> Iterator[tuple[str, str]]:
    """Yield each parameter of the functions and classes that the library documents, and its annotation."""
    for module in PUBLIC:
        if module in NO_PATHS:
            continue
        room = import_module(module)
        for name in room.__all__:
            thing = getattr(room, name)
            if callable(thing) and getattr(thing, "__module__", "").startswith("hexdata"):
                for parameter in inspect.signature(thing).parameters.values():
                    yield f"{module}.{name}({parameter.name})", str(parameter.annotation)


def test_every_public_parameter_that_is_a_path_takes_addresses_or_refuses_them() -> None:
    local = {name for name, kind in public_parameters() if re.search(r"\bPath\b", kind)}
    assert local == REFUSING.keys()
    either = {name for name, kind in public_parameters() if "AnyPath" in kind}
    assert len(either) > 10


@pytest.mark.parametrize("secret", ["geheim", "ge@heim", "ge/he/im", "8/geheim", "ge+heim=="])
def test_no_secret_of_an_address_is_told(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"found s3://bucket/games; "):
        make_legacy(f"s3://me:{secret}@bucket/games")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b",
        "http://10.0.0.5:9000/bucket/a@b/manifest.json",
        'no answer of "http://host:9000/bucket", tell me@host',
    ],
)
def test_what_is_no_secret_is_told(text: str) -> None:
    assert without_secrets(text) == text


def test_the_path_of_an_address_is_refused_as_its_text_is() -> None:
    with pytest.raises(
        ConfigError, match=r"^this can only be on this machine; found memory://bucket/games; "
    ):
        local_path(as_path("memory://bucket/games"), "this")


def test_another_kind_of_path_is_taken(tmp_path: Path) -> None:
    """As of a library whose paths are no ``Path``."""
    assert local_path(PurePosixPath("games/a b"), "this") == Path("games/a b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("games", "games"),
        ("C:/games", "C:/games"),
        ("a b:c", "a b:c"),
        ("file:///games/a%20b", "/games/a b"),
        (Path("s3:/is/a/folder"), "s3:/is/a/folder"),
    ],
)
def test_a_path_of_this_machine_stays_one(text: str | Path, path: str) -> None:
    assert local_path(text, "this") == Path(path)


def test_the_environment_names_no_address_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEXDATA_CACHE", "s3://bucket/cache")
    with pytest.raises(
        ConfigError, match=r"^the folder that HEXDATA_CACHE names can only be on this machine; "
    ):
        cache_folder("shards")
    monkeypatch.setenv("HEXDATA_CACHE", tmp_path.as_uri())
    assert cache_folder("shards") == tmp_path / "shards"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("demo s3://bucket/demo", DEMO[0]),
        ("run s3://bucket/config.toml", CONFIG[0]),
        ("live s3://bucket/games", WATCHED[0]),
        ("live games --config s3://bucket/live.toml", CONFIG[0]),
        ("load https://host/shards --cache s3://bucket/cache", CACHE[0]),
    ],
)
def test_the_command_line_says_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hexdata", *line.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"hexdata: {what} can only be on this machine; found s3://bucket/")
    assert len(told.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
