"""Paths and addresses given by users, and arguments that accept local paths only."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from hexdata.demo import DemoOptions, make_legacy
from hexdata.errors import ConfigError
from hexdata.live import LiveLoader, load_live_config, make_pipeline
from hexdata.live.options import LiveOptions
from hexdata.live.trial import run_live_trial
from hexdata.loader import LoaderOptions, SplitOptions
from hexdata.pipeline import DemoSection, demo_config, load_config
from hexdata.storage import as_path

needs_s3 = pytest.mark.skipif(find_spec("s3fs") is None, reason="the extra s3 is not installed")

LOCAL = {"games": "games", "/games/a b": "/games/a b", "C:/games": "C:/games"}
OBJECTS = {
    **dict.fromkeys(("s3://b/a/c", "s3://b/a/c/", "S3://b/a/c", "s3:/b/a/c", "s3a://b/a/c"), "s3://b/a/c"),
    "s3://b/a b [x]*?#%20": "s3://b/a b [x]*?#%20",
    "s3://b": "s3://b/",
}
REFUSED = {
    "ftp://host/a": "found ftp://; expected s3://",
    "s3://": "needs a bucket",
    "s3://[b/a": "no valid bucket",
    "file://me:geheim@host/a": "found file://; expected s3://",
    "s3://me:geheim@bucket/a": "^credentials do not belong in an address",
    "s3://me:ge/heim@bucket/a": "^credentials do not belong in an address",
    "abfss://games@account.dfs.core.windows.net/a": "^an account does not belong in an address",
}


@pytest.mark.parametrize("text", LOCAL)
def test_paths_of_this_machine(text):
    assert as_path(text) == Path(LOCAL[text])


@needs_s3
@pytest.mark.parametrize("text", OBJECTS)
def test_an_object_has_one_address(text):
    """By which its lock and the work that is kept for it are found."""
    assert not isinstance(as_path(text), Path)
    assert str(as_path(text)) == OBJECTS[text]


@needs_s3
@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match=REFUSED[text]) as caught:
        as_path(text)
    assert "heim" not in str(caught.value)


REFUSING = {
    "hexdata.demo.make_legacy(folder)": make_legacy,
    "hexdata.pipeline.demo_config(folder)": lambda place: demo_config(place, DemoOptions()),
    "hexdata.pipeline.load_config(path)": load_config,
    "hexdata.live.load_live_config(path)": load_live_config,
    "hexdata.live.make_pipeline(directory)": lambda place: make_pipeline(LiveOptions(), place),
    "hexdata.live.LiveLoader(directory)": LiveLoader,
    "hexdata.live.LiveLoader(config)": lambda place: LiveLoader(".", config=place),
    "hexdata.loader.LoaderOptions(cache)": lambda place: LoaderOptions(cache=place),
    "hexdata.loader.SplitOptions(cache)": lambda place: SplitOptions(cache=place),
}
"""By the parameters of public functions that are annotated as a ``Path``."""
FURTHER = {"DemoSection": lambda place: DemoSection(folder=place), "run_live_trial": run_live_trial}


@pytest.mark.parametrize("name", [*REFUSING, *FURTHER])
def test_an_address_is_refused_and_no_folder_of_its_name_is_made(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for place in ("s3://bucket/games", "gs:/b/c"):
        with pytest.raises(ConfigError, match=f"can only be on this machine; found {place}; expected a path"):
            (REFUSING | FURTHER)[name](place)
    assert list(tmp_path.iterdir()) == []


def test_every_public_parameter_that_is_a_path_takes_addresses_or_refuses_them():
    """Not of storage, which works on paths of either kind, nor of modules that take loaders."""
    documented = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    kinds = {}
    for path in re.findall(r"automodule:: (hexdata\S*)", documented):
        if path not in {"hexdata.storage", "hexdata.torch", "hexdata.webdataset"}:
            module = import_module(path)
            for thing in (getattr(module, name) for name in module.__all__):
                if callable(thing) and getattr(thing, "__module__", "").startswith("hexdata"):
                    for each in inspect.signature(thing).parameters.values():
                        name = f"{module.__name__}.{thing.__name__}({each.name})"
                        kinds[name] = str(each.annotation)
    local = {name for name, kind in kinds.items() if re.search(r"\bPath\b", kind)}
    assert local == REFUSING.keys()
    assert sum("AnyPath" in kind for kind in kinds.values()) > 10
