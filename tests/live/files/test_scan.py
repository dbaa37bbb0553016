"""Tests of folders that several links lead to: each file in them is delivered once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hexdata.live.chunk import SCANNED
from hexdata.live.files.provider import PATTERNS, FilePathProvider
from hexdata.live.files.scan import PrefixCache, WatchedDirectory
from hexdata.live.pipeline import Pipeline
from tests.live.number_stages import until

pytestmark = pytest.mark.usefixtures("no_thread_survives")


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A directory with two links to a folder outside, and one to a subfolder of that."""
    (tmp_path / "elsewhere" / "sub").mkdir(parents=True)
    folder = tmp_path.resolve() / "in"
    folder.mkdir()
    (folder / "z").symlink_to(tmp_path / "elsewhere")
    (folder / "b").symlink_to(tmp_path / "elsewhere")
    (folder / "y").symlink_to(tmp_path / "elsewhere" / "sub")
    (folder / ".hidden").symlink_to(tmp_path / "elsewhere")
    return folder


@pytest.mark.parametrize("polling", [False, True])
def test_a_file_reached_by_several_links_is_delivered_once(
    linked: Path, polling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = linked.with_name("elsewhere")
    (elsewhere / "0.trmph").write_text("x")
    provider = FilePathProvider(linked, settle=0.05, rescan=0.1, force_polling=polling)
    found: list[str] = []

    def take_until(count: int) -> bool:
        file = pipeline.take(0)
        found.extend([file.name] if file not in (None, SCANNED) else [])
        return len(found) >= count

    with Pipeline([provider], [(2, "block")]) as pipeline:
        pipeline.start()
        until(lambda: take_until(1))
        (elsewhere / "1.trmph").write_text("x")
        (elsewhere / "sub" / "2.trmph").write_text("x")
        (elsewhere / ".3.trmph.tmp").write_text("x")
        (elsewhere / ".3.trmph.tmp").rename(elsewhere / "3.trmph")
        (linked / "a").symlink_to(elsewhere)
        until(lambda: take_until(4))
        scans: list[object] = []
        update = provider._delivered.update
        monkeypatch.setattr(
            provider._delivered,
            "update",
            lambda scan: (scans.append(scan), update(scan)),
        )
        until(lambda: take_until(5) or len(scans) > 5)
    assert sorted(found) == ["b/0.trmph", "b/1.trmph", "b/3.trmph", "b/sub/2.trmph"]


def test_an_outside_folder_keeps_its_prefix_while_its_link_exists(linked: Path) -> None:
    directory = WatchedDirectory(linked, PATTERNS)
    elsewhere = linked.with_name("elsewhere")
    (elsewhere / "sub" / "0.trmph").write_text("x")

    def scanned_names() -> list[str]:
        return sorted(directory.scan(linked, threading.Event()).names)

    def prefixes_of(*folders: str) -> set[str | None]:
        prefixes = PrefixCache(directory)
        return {prefixes.prefix(str(linked / folder)) for folder in folders}

    assert directory.prefix_of(str(linked / ".hidden")) is None
    assert prefixes_of("z/sub") == {"z/sub/"}  # reported before it was scanned
    assert scanned_names() == ["z/sub/0.trmph"]
    assert prefixes_of("z/sub", "y", "b/sub", ".hidden/sub") == {"z/sub/"}
    assert prefixes_of("z/sub/.hidden") == {None}
    (linked / "z").unlink()
    assert scanned_names() == ["b/sub/0.trmph"]
    assert prefixes_of("y", "b/sub") == {"b/sub/"}
    (linked / "b").unlink()
    assert scanned_names() == ["y/0.trmph"]
