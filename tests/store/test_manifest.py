"""The manifest: read back unchanged; refused if it is foreign, corrupt or of another version."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexdata.errors import StoreError
from hexdata.store.files import FileFacts
from hexdata.store.manifest import MANIFEST_NAME, Manifest

GAMES = "games/part-000001.parquet"
FIRST, SECOND = "positions/part-000000.parquet", "positions/part-000001.parquet"
SHUFFLE = {
    "of": "0" * 64,
    "seed": 10**40,
    "order_version": 1,
    "positions": 14,
    "rejected": 0,
    "splits": {"train": 14},
    "buckets": {"train": 1},
    "choices": {"where": "move > 3"},
    "left_out": {},
}


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        board_size=13,
        counts={"games": 7, "positions": 14, "rejected": 0, "sources": 0},
        files={name: FileFacts(7, 70, "0" * 64) for name in (GAMES, SECOND, FIRST)},
        stages={"convert": {"val": 0.05, "test": 0, "records": 14, "positions": 14, "rejected": 0}},
    )


def saved(folder: Path, manifest: Manifest) -> dict[str, Any]:
    manifest.save(folder)
    content: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_bytes())
    return content


def test_a_manifest_is_read_back_unchanged(tmp_path: Path, manifest: Manifest) -> None:
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest


@pytest.mark.parametrize("key", ["files", "kinds"])
def test_text_that_utf8_cannot_encode_is_refused(tmp_path: Path, manifest: Manifest, key: str) -> None:
    """Its digest cannot be computed."""
    content = saved(tmp_path, manifest) | {key: {"\ud800": 1}}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(StoreError, match=r"text that UTF-8 cannot encode; found '\\ud800'"):
        Manifest.load(tmp_path)


def test_the_bytes_depend_only_on_the_content(tmp_path: Path, manifest: Manifest) -> None:
    manifest.save(tmp_path)
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    manifest.files = dict(reversed(manifest.files.items()))
    manifest.save(tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before


def test_files_of_a_folder_are_sorted(manifest: Manifest) -> None:
    assert list(manifest.files_in("positions")) == [FIRST, SECOND]
    assert list(manifest.files_in("pos")) == []


def test_the_digest_identifies_the_content(manifest: Manifest) -> None:
    before = manifest.digest("positions", "games")
    manifest.files["shuffled/train/bucket-000000.parquet"] = FileFacts(1, 1, "1" * 64)
    assert manifest.digest("positions", "games") == before
    manifest.files[FIRST] = FileFacts(7, 70, "1" * 64)
    assert manifest.digest("positions", "games") != before


def test_an_unreadable_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a hexdata store: a file"):
        Manifest.load(Path(__file__))  # the path is a file
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        Manifest.load(tmp_path)


def test_a_folder_without_a_manifest_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no manifest.*hexdata convert"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("name", ["schema_version", "order_version"])
@pytest.mark.parametrize("found", [0, 3, None, "1", True])
def test_another_version_is_refused(tmp_path: Path, manifest: Manifest, name: str, found: object) -> None:
    content = saved(tmp_path, manifest)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**content, name: found}))
    with pytest.raises(StoreError, match=f"another {name}"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "\ufeff{}", "[]", "{}", '{"kind": "hexdata shards"}', "[" * 200_000, '{"a": 1, "a": 1}']
)
def test_an_invalid_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match="the manifest is n") as caught:
        Manifest.load(tmp_path)
    assert caught.value.path == str(tmp_path / MANIFEST_NAME)


def load_altered(folder: Path, manifest: Manifest, change: Callable[[dict[str, Any]], object]) -> StoreError:
    """Return the error for a manifest that was altered and has no digest."""
    content = saved(folder, manifest)
    del content["digest"]
    change(content)
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(StoreError) as caught:
        Manifest.load(folder)
    assert caught.value.path == str(folder / MANIFEST_NAME)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", ["board_size", "counts", "files", "stages"])
def test_a_missing_entry_is_named(tmp_path: Path, manifest: Manifest, name: str) -> None:
    error = load_altered(tmp_path, manifest, lambda content: content.pop(name))
    assert error.reason == f"the manifest lacks the key {name}"


@pytest.mark.parametrize(
    "targets",
    [
        ["weight", "visits"],
        ["visits", "visits"],
        ["policy"],
        ["extra.a b"],
        ["extra.A", "extra.a"],
        ["extra."],
    ],
)
def test_invalid_targets_are_refused(tmp_path: Path, manifest: Manifest, targets: list[str]) -> None:
    error = load_altered(tmp_path, manifest, lambda content: content.update(targets=targets))
    assert error.reason == "the manifest has invalid targets"
    shuffle = SHUFFLE | {"targets": targets}
    error = load_altered(tmp_path, manifest, lambda content: content["stages"].update(shuffle=shuffle))
    assert error.reason == "the manifest has invalid targets"


def test_targets_are_required(tmp_path: Path, manifest: Manifest) -> None:
    manifest.targets = ("extra.a", "visits")
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path).targets == ("extra.a", "visits")
    error = load_altered(tmp_path, manifest, lambda content: content.pop("targets"))
    assert error.reason == "the manifest lacks the key targets"


FACTS = {"rows": 1, "bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("files", [], "wrong value of files"),
        ("files", {FIRST: {"rows": 1}}, rf"lacks the key files.{FIRST}.bytes"),
        ("files", {FIRST: 3}, "wrong value of files"),
        (
            "files",
            {FIRST: {**FACTS, "rows": "1, 1); COPY"}},
            r"files.*rows; found '1, 1\); COPY'",
        ),
        ("files", {FIRST: {**FACTS, "bytes": -1}}, "wrong value of files.*bytes"),
        ("files", {FIRST: {**FACTS, "bytes": 1 << 63}}, "wrong value of files.*bytes"),
        ("files", {FIRST: {**FACTS, "sha256": "'" * 64}}, "wrong value of files.*sha256"),
        ("files", {"positions/../../x.parquet": FACTS}, r"unknown key in files; found positions/\.\./"),
        ("files", {"/etc/x.parquet": FACTS}, "unknown key in files"),
        ("files", {"manifest.json": FACTS}, "unknown key in files"),
        ("files", {FIRST + "\n": FACTS}, "unknown key in files"),
        ("files", {"pickles/original/../x.pkl.gz": FACTS}, "unknown key in files"),
        ("files", {"pickles/original/a/./x.pkl.gz": FACTS}, "unknown key in files"),
        ("files", {"pickles/original//x.pkl.gz": FACTS}, "unknown key in files"),
        ("files", {"pickles/original/a\0x.pkl.gz": FACTS}, "unknown key in files"),
        ("board_size", "13", "wrong value of board_size; found '13'"),
        ("board_size", 10**7, "wrong value of board_size; found 10000000"),
        ("board_size", None, "positions but no board_size"),
        ("counts", {"position": 14}, "unknown key in counts; found position"),
        ("counts", {"games": 0, "positions": True, "rejected": 0, "sources": 0}, "counts.positions"),
        ("stages", {"konvert": {}}, "unknown key in stages; found konvert"),
        ("stages", {"shuffle": {**SHUFFLE, "splits": {"train": 14.0}}}, "stages.shuffle.splits.train"),
        ("stages", {"shuffle": {**SHUFFLE, "sqlits": {}}}, "unknown key in stages.shuffle; found sqlits"),
        ("stages", {"shuffle": {**SHUFFLE, "buckets": {"train": 10**9}}}, "stages.shuffle.buckets.train"),
        ("stages", {"shuffle": {**SHUFFLE, "choices": {"x": "y"}}}, "unknown key in stages.shuffle.choices"),
        (
            "stages",
            {"pickles-shuffled": {**dict.fromkeys(("positions", "rejected", "files", "level"), 0)}},
            "lacks the key stages.pickles-shuffled.of",
        ),
        (
            "stages",
            {
                "pickles-shuffled": {
                    **dict.fromkeys(("positions", "rejected", "files", "level"), 0),
                    "of": "0" * 64,
                    "order": "shuffled",
                }
            },
            "without the stage shuffle",
        ),
        ("more", 1, "unknown key; found more"),
    ],
)
def test_a_wrong_value_is_named(
    tmp_path: Path, manifest: Manifest, key: str, value: object, said: str
) -> None:
    error = load_altered(tmp_path, manifest, lambda content: content.update({key: value}))
    assert re.search(said, error.detail()), error.detail()


@pytest.mark.parametrize("name", [".hidden", "..a", "a..", "...", "a b", "ключ", "a\x1bb"])
def test_a_pickle_may_have_any_plain_name(tmp_path: Path, manifest: Manifest, name: str) -> None:
    manifest.files[f"pickles/original/{name}/{name}.pkl.gz"] = FileFacts(1, 1, "0" * 64)
    manifest.stages["shuffle"] = SHUFFLE
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest


def test_a_damaged_manifest_is_named(tmp_path: Path, manifest: Manifest) -> None:
    manifest.stages["shuffle"] = SHUFFLE
    manifest.save(tmp_path)
    path = tmp_path / MANIFEST_NAME
    sound = path.read_bytes()
    errors = []
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        try:
            assert Manifest.load(tmp_path) == manifest  # only white space was changed
        except StoreError as error:
            errors.append(error)
    assert len(errors) > 0.7 * len(sound)
    assert {error.path for error in errors} == {str(path)}
    assert [e for e in errors if not re.search("manifest|another (schema|order)_version", e.reason)] == []


def test_a_manifest_without_a_digest_is_accepted(tmp_path: Path, manifest: Manifest) -> None:
    content = saved(tmp_path, manifest)
    del content["digest"]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    assert Manifest.load(tmp_path) == manifest
    content["counts"]["positions"] += 1
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({**content, "digest": "0" * 64}))
    with pytest.raises(StoreError, match="the manifest was altered or is damaged"):
        Manifest.load(tmp_path)
