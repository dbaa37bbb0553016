"""The manifest: read back as written, refused where it is foreign, of another version or corrupt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hexdata.errors import StoreError
from hexdata.store.files import FileFacts
from hexdata.store.manifest import MANIFEST_NAME, Manifest


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        board_size=13,
        counts={"positions": 7},
        files={name: FileFacts(7, 70, "0" * 64) for name in ("games/part-1", "positions/b", "positions/a")},
        stages={"convert": {"val": 0.05}},
    )


def saved(folder: Path, manifest: Manifest) -> dict[str, Any]:
    manifest.save(folder)
    content: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
    return content


def test_it_is_read_back_as_it_was(tmp_path: Path, manifest: Manifest) -> None:
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest


def test_its_bytes_depend_on_its_content_alone(tmp_path: Path, manifest: Manifest) -> None:
    manifest.save(tmp_path)
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    manifest.files = dict(reversed(manifest.files.items()))
    manifest.save(tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before


def test_files_of_a_folder_are_sorted(manifest: Manifest) -> None:
    assert list(manifest.files_in("positions")) == ["positions/a", "positions/b"]
    assert list(manifest.files_in("pos")) == []


def test_the_digest_names_the_content(manifest: Manifest) -> None:
    before = manifest.digest("positions", "games")
    manifest.files["shuffled/train/bucket"] = FileFacts(1, 1, "1" * 64)
    assert manifest.digest("positions", "games") == before
    manifest.files["positions/a"] = FileFacts(7, 70, "1" * 64)
    assert manifest.digest("positions", "games") != before


def test_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        Manifest.load(Path(__file__))  # a file is no folder
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        Manifest.load(tmp_path)


def test_a_folder_without_one_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no manifest.*hexdata convert"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("name", ["schema_version", "order_version"])
@pytest.mark.parametrize("found", [0, 2, None, "1"])
def test_another_version_is_refused(tmp_path: Path, manifest: Manifest, name: str, found: object) -> None:
    content = saved(tmp_path, manifest)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**content, name: found}))
    with pytest.raises(StoreError, match=f"another {name}"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\ufeff{}", "[]", "{}", '{"kind": "hexdata shards"}'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match="manifest is not") as caught:
        Manifest.load(tmp_path)
    assert caught.value.path == str(tmp_path / MANIFEST_NAME)


@pytest.mark.parametrize("name", ["board_size", "counts", "files", "stages"])
def test_a_missing_entry_is_named(tmp_path: Path, manifest: Manifest, name: str) -> None:
    content = saved(tmp_path, manifest)
    del content[name]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(StoreError, match=f"lacks an entry.*{name}"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("files", [[], {"positions/a": {"rows": 1}}, {"positions/a": 3}])
def test_broken_facts_are_refused(tmp_path: Path, manifest: Manifest, files: object) -> None:
    content = saved(tmp_path, manifest)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**content, "files": files}))
    with pytest.raises(StoreError, match="lacks an entry"):
        Manifest.load(tmp_path)
