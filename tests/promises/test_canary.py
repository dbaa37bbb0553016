"""The secret of an address is printed nowhere and written nowhere."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import hexdata
from hexdata.cli import main
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import HexdataError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.info import store_info
from hexdata.loader import Loader, Mixture, PositionDataset
from hexdata.retry import RetryPolicy
from hexdata.shards import sources
from hexdata.shards.sources import make_source
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import run_query
from hexdata.storage import address
from tests.demo_games import demo_games
from tests.kit.addresses import ADDRESSES, SECRET, is_hidden
from tests.kit.command_line import hexdata_run
from tests.pairs import FULL

COMMANDS = [
    "info {}",
    "verify {}",
    "load {}",
    "load {} --mode games",
    "load {} --mode exact",
    "load {} --cache copies",
    "load st --cache {}",
    "sql {} SELECT+1",
    "sql st SELECT+1 --parquet {}",
    "show {} 0",
    "convert {} new",
    "convert in {}",
    "shuffle {}",
    "export {}",
    "export {} --format pickle",
    "report {}",
    "report st --output {}",
    "browse {} --no-open",
    "live {}",
    "demo {}",
    "run {}",
    "run load.toml",
    "run load.yaml",
    "run load.json",
    "run convert.toml",
    "run broken.yaml",
    "verify st --round-trip {}",
    "info st {}",
]
CONFIGS = {
    "load.toml": 'store = {quoted}\nsteps = ["load"]\n[load]\n',
    "load.yaml": "store: {quoted}\nload: {{}}\n",
    "load.json": '{{"store": {quoted}, "load": {{}}}}',
    "convert.toml": 'store = "new"\n[convert]\ninputs = [{quoted}]\n',
    "broken.yaml": "store: {quoted}\n  load: [\n{text}\n",
}
READERS: dict[str, Callable[[str], object]] = {
    "Loader": Loader,
    "Loader in stream mode": lambda text: next(iter(Loader(text, mode="stream"))),
    "PositionDataset": PositionDataset,
    "Mixture": lambda text: Mixture({"a": Loader(text), "b": Loader(text)}),
    "read_position": lambda text: hexdata.read_position(text, 0),
    "run_query": lambda text: run_query(text, "SELECT 1").__enter__(),
    "verify_store": hexdata.verify_store,
    "store_info": store_info,
    "convert_sources": lambda text: convert_sources([text], "new"),
    "shuffle_store": shuffle_store,
    "LiveLoader": hexdata.LiveLoader,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up after one attempt."""
    monkeypatch.setattr(sources, "_RETRY", RetryPolicy(attempts=1))
    config = {**address._OPTIONS["s3"]["config_kwargs"], "retries": {"total_max_attempts": 1}}
    monkeypatch.setitem(address._OPTIONS["s3"], "config_kwargs", config)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a source and a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.trmph").write_text("#5,a1b2c3 r\n" * 3)
    convert_sources([tmp_path / "in"], tmp_path / "st")
    return tmp_path


def texts_of(error: BaseException) -> Iterator[str]:
    """Yield every text of an error and of its causes and contexts, shown or not."""
    one: BaseException | None = error
    seen: set[int] = set()
    pending = [error]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield from (str(one), repr(one), repr(one.args))
        if isinstance(one, HexdataError):
            yield repr(vars(one))
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
    yield "".join(traceback.format_exception(error))


def files_with_secret(folder: Path) -> list[str]:
    """Return the files that contain the secret, in their names or bytes, except the configs of the test."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name not in CONFIGS
        and (
            not is_hidden(str(path.relative_to(folder)))
            or (path.is_file() and SECRET.encode() in path.read_bytes())
        )
    ]


@pytest.mark.parametrize("form", ADDRESSES)
def test_no_command_tells_a_secret(
    folder: Path, form: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    address = ADDRESSES[form]
    for name, content in CONFIGS.items():
        (folder / name).write_text(content.format(quoted=json.dumps(address), text=address))
    caplog.set_level(logging.DEBUG)
    told = {}
    for line in COMMANDS if FULL else COMMANDS[list(ADDRESSES).index(form) % 3 :: 3]:
        words = [word.format(address).replace("+", " ") for word in line.split()]
        monkeypatch.setattr("sys.argv", ["hexdata", *words])
        with suppress(SystemExit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main()
        printed = "".join(capfd.readouterr()) + caplog.text
        caplog.clear()
        if not is_hidden(printed):
            told[line] = printed
    assert told == {}
    assert files_with_secret(folder) == []


@pytest.mark.parametrize("form", ADDRESSES)
def test_no_error_of_the_library_contains_a_secret(folder: Path, form: str) -> None:
    told = {}
    for name in READERS if FULL else list(READERS)[list(ADDRESSES).index(form) % 3 :: 3]:
        read = READERS[name]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                read(ADDRESSES[form])
            except Exception as error:  # noqa: BLE001 - any error will do
                texts = [*texts_of(error), *texts_of(pickle.loads(pickle.dumps(error)))]
            else:
                texts = []
        texts += [str(each.message) for each in caught]
        if found := [text for text in texts if not is_hidden(text)]:
            told[name] = found
    assert told == {}
    assert files_with_secret(folder) == []


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a small store. Read-only."""
    folder = tmp_path_factory.mktemp("shards")
    write_trmph(folder / "a.trmph", demo_games(12, 1, 5), 5)
    convert_sources([folder / "a.trmph"], folder / "store", ConvertOptions(workers=1))
    shuffle_store(folder / "store", ShuffleOptions(threads=1))
    export_shards(folder / "store", ExportOptions(workers=1))
    return folder / "store" / "shards"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server(shards: Path) -> Iterator[str]:
    """The address of a web server of the shards."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(shards))) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


@pytest.mark.parametrize("form", ["{server}/{{name}}?sig={secret}", "pipe:cat {shards}/{{name}} # {secret}"])
def test_a_loader_that_works_shows_no_secret(
    shards: Path, server: str, form: str, caplog: Any, tmp_path: Path
) -> None:
    address = form.format(server=server, shards=shards, secret=SECRET)
    caplog.set_level(logging.DEBUG)
    loader = Loader(address, batch_size=16)
    states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    assert len(states) > 1
    assert is_hidden(repr(states) + repr(loader) + repr(loader.options) + repr(loader.manifest) + caplog.text)
    assert is_hidden(repr(make_source(address)))
    for output in ([], ["--json"], ["--cache", tmp_path / "copies"]):
        done = hexdata_run("load", address, "--batch-size", 16, *output)
        assert done.status == 0
        assert is_hidden(done.out + done.err)
    assert files_with_secret(tmp_path) == []


@pytest.mark.parametrize("form", ["{server}/{{name}}?sig={secret}", "pipe:cat {shards}/{{name}} # {secret}"])
def test_errors_of_a_loader_that_has_opened_show_no_secret(shards: Path, server: str, form: str) -> None:
    loader = Loader(form.format(server=server, shards=shards, secret=SECRET), batch_size=16)
    (name,) = (shard.name for shard in loader.manifest.splits["train"])
    kept = (shards / name).read_bytes()
    for damaged in (kept[:2_000], b"x" * len(kept), None):
        (shards / name).unlink()
        if damaged is not None:
            (shards / name).write_bytes(damaged)
        try:
            with pytest.raises(HexdataError) as caught:
                list(copy.copy(loader))
        finally:
            (shards / name).write_bytes(kept)
        assert [text for text in texts_of(caught.value) if not is_hidden(text)] == []
