"""Stores for the page: one with hostile names, duplicates and rejections, shuffled, and its address."""

from __future__ import annotations

import json
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
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.demo_games import demo_games

HOSTILE = """<script>window.hurt = 1</script>"&'<img src=x onerror="window.hurt = 2"> ключ.trmph"""
SIZE = 5


class Page:
    """The address of a page, and its answers."""

    def __init__(self, address: str) -> None:
        self.address = address

    def request(self, path: str, headers: dict[str, str] | None = None, **facts: Any) -> tuple[int, Any, Any]:
        """Return status, headers and body. Waits while the index is built."""
        address = f"{self.address}{path}?{urllib.parse.urlencode(facts)}"
        for _ in range(1_000):
            try:
                request = urllib.request.Request(address, headers=headers or {})
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.headers, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    body = error.read()
                if error.code != 503:
                    return error.code, error.headers, body
            time.sleep(0.02)
        raise AssertionError("the index is not finished")

    def get(self, path: str, **facts: Any) -> Any:
        """Return the JSON of a successful answer."""
        status, _, body = self.request(path, **facts)
        assert status == 200, body
        return json.loads(body)

    def errors(self, path: str, **facts: Any) -> list[str]:
        """Return the lines of an error."""
        status, _, body = self.request(path, **facts)
        assert status in (400, 404), body
        return json.loads(body)["error"]

    def listed(self, **facts: Any) -> Any:
        """Return a complete list."""
        for _ in range(1_000):
            if (page := self.get("api/list", **facts))["complete"]:
                return page
            time.sleep(0.02)
        raise AssertionError("the list is not finished")


@pytest.fixture(scope="session")
def browsed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shuffled store of 45 games: hostile names, rotated duplicates, two rejected lines. Read only."""
    folder = tmp_path_factory.mktemp("browse")
    source = folder / "in"
    source.mkdir()
    write_trmph(source / "a.trmph", demo_games(40, 1, SIZE), SIZE)
    lines = (source / "a.trmph").read_text().splitlines()
    again = []
    for line in lines[:5]:
        moves, winner = line.split(",")[1].split()
        rotated = transform_moves(parse_moves(moves, SIZE), SIZE, Symmetry.ROTATION)
        again.append(f"#{SIZE},{format_moves(rotated, SIZE)} {winner}")
    bad = ["#5,<script>window.hurt = 3</script> b", "#5,a1a1a1 b"]
    (source / HOSTILE.replace("/", "\\")).write_text("\n".join([*again, *bad]) + "\n")
    convert_sources([source], folder / "store", ConvertOptions(workers=1, max_reject_rate=1, val=0.2))
    shuffle_store(folder / "store", ShuffleOptions(threads=1, seed=3))
    return folder / "store"


@pytest.fixture(autouse=True)
def browse_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HEXDATA_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def page(browsed_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of the store."""
    for library in ("starlette", "uvicorn"):
        pytest.importorskip(library)
    from hexdata.browse import serving

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEXDATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        with serving(browsed_store) as address:
            yield Page(address)
