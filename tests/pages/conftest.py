"""Stores for the report and for ``hexdata browse``, the page that serves one of them, and Chromium."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexdata.board import Symmetry, format_moves, parse_moves, transform_moves
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.demo_games import demo_games
from tests.kit import chromium

HOSTILE = (
    """<script>window.hurt = 1</script>"&'<img src=x onerror="window.hurt = 2"> ключ""" + "-no-break" * 12
)
SIZE = 5


class Page:
    """The address of a page, and its answers."""

    def __init__(self, address: str) -> None:
        self.address = address

    def request(self, path: str, headers: dict[str, str] | None = None, **facts: Any) -> tuple[int, Any, Any]:
        """Return status, headers and body."""
        address = f"{self.address}{path}?{urllib.parse.urlencode(facts)}"
        request = urllib.request.Request(address, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def answer(self, path: str, **facts: Any) -> tuple[int, Any]:
        """Return the status and the JSON of an answer; those of a list when it is complete or has failed."""
        for _ in range(15_000):
            status, _, body = self.request(path, **facts)
            content = json.loads(body)
            if status != 200 or content.get("complete", True):
                return status, content
            time.sleep(0.02)
        raise AssertionError("the list is not finished")

    def get(self, path: str, **facts: Any) -> Any:
        """Return the JSON of a successful answer."""
        status, content = self.answer(path, **facts)
        assert status == 200, content
        return content

    def errors(self, path: str, **facts: Any) -> list[str]:
        """Return the lines of an error."""
        status, content = self.answer(path, **facts)
        assert status in (400, 404), content
        return content["error"]


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 20 demo games after every stage, with forty buckets. Read only: copy it."""
    folder = tmp_path_factory.mktemp("demo")
    make_legacy(folder / "legacy", DemoOptions(games=20))
    convert_sources([folder / "legacy"], folder / "store", ConvertOptions(workers=1, val=0.1, test=0.05))
    shuffle_store(folder / "store", ShuffleOptions(threads=1, buckets=40, seed=3))
    export_shards(folder / "store", ExportOptions(workers=1, shard_size=2048, block_size=512))
    return folder / "store"


@pytest.fixture(scope="session")
def odd_shuffled(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store, shuffled into few buckets, without shards. Read only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("odd") / "store")
    shuffle_store(store, ShuffleOptions(threads=1, buckets=3))
    return store


@pytest.fixture(scope="session")
def browsed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shuffled store of 45 games: hostile names, rotated duplicates, two rejected lines. Read only."""
    folder = tmp_path_factory.mktemp("browse")
    source = folder / "in"
    source.mkdir()
    write_trmph(source / "a.trmph", demo_games(40, 1, SIZE), SIZE)
    again = []
    for line in (source / "a.trmph").read_text().splitlines()[:5]:
        moves, winner = line.split(",")[1].split()
        rotated = transform_moves(parse_moves(moves, SIZE), SIZE, Symmetry.ROTATION)
        again.append(f"#{SIZE},{format_moves(rotated, SIZE)} {winner}")
    bad = ["#5,<script>window.hurt = 3</script> b", "#5,a1a1a1 b"]
    (source / f"{HOSTILE.replace('/', chr(92))}.trmph").write_text("\n".join([*again, *bad]) + "\n")
    store = folder / "<b>store&lt;"
    convert_sources([source], store, ConvertOptions(workers=1, max_reject_rate=1, val=0.2))
    shuffle_store(store, ShuffleOptions(threads=1, seed=3))
    return store


@pytest.fixture(scope="session")
def page(browsed_store: Path) -> Iterator[Page]:
    """The page of the store."""
    for library in ("starlette", "uvicorn"):
        pytest.importorskip(library)
    from hexdata.browse import serving

    with serving(browsed_store) as address:
        yield Page(address)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    if chromium.missing():
        pytest.skip(chromium.missing())
    with chromium.browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
