"""The manifest: read back unchanged; refused if it is foreign, corrupt or of another version.

Damage of any JSON file is in ``tests/promises/test_hostile_json.py``.
"""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from hexdata.errors import StoreError
from hexdata.store.files import FileFacts, canonical_json
from hexdata.store.manifest import MANIFEST_NAME, Manifest

FIRST, SECOND = "positions/part-000000.parquet", "positions/part-000001.parquet"
FACTS = {"rows": 1, "bytes": 1, "sha256": "0" * 64}
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
    "policies": {"train": 0},
}
PICKLES = {"of": "0" * 64, "order": "shuffled", "positions": 0, "rejected": 0, "files": 0, "level": 0}


@pytest.fixture
def manifest():
    return Manifest(
        board_size=13,
        counts={"games": 7, "positions": 14, "rejected": 0, "sources": 0},
        files={name: FileFacts(7, 70, "0" * 64) for name in ("games/part-000001.parquet", SECOND, FIRST)},
        stages={"convert": {"val": 0.05, "test": 0, "records": 14, "positions": 14, "rejected": 0}},
    )


def test_a_manifest_is_read_back_unchanged_and_one_that_no_reader_accepts_is_not_published(
    tmp_path, manifest
):
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    manifest.stages["convert"]["unknown"] = 1
    with pytest.raises(StoreError, match="unknown"):
        manifest.save(tmp_path)
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before


@pytest.mark.parametrize("name", ["schema_version", "order_version"])
def test_another_version_is_refused(tmp_path, manifest, name):
    manifest.save(tmp_path)
    content = json.loads((tmp_path / MANIFEST_NAME).read_bytes())
    for found in (0, 3, None, "1", True):
        (tmp_path / MANIFEST_NAME).write_text(json.dumps({**content, name: found}))
        with pytest.raises(StoreError, match=f"another {name}"):
            Manifest.load(tmp_path)


TARGETS = (
    ["weight", "visits"],
    ["visits"] * 2,
    ["policy"],
    ["extra.a b"],
    ["extra.A", "extra.a"],
    ["extra."],
)
NAMES = (
    *("positions/../../x.parquet", "manifest.json", "pickles/original/../x.pkl.gz", "positions/x.parquet\n"),
    *("pickles/original/a/./x.pkl.gz", "pickles/original//x.pkl.gz", "pickles/original/..\\x.pkl.gz"),
    *("pickles/original/a\\..\\..\\x.pkl.gz", "pickles/original/a\0x.pkl.gz"),
)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("files", {FIRST: {"rows": 1}}, r"at files\[\.\.\.\]: .*field bytes"),
        ("files", {FIRST: FACTS, SECOND: {**FACTS, "rows": "1); COPY"}}, r"files\[\.\.\.\]\.rows: .*got str"),
        ("files", {FIRST: {**FACTS, "bytes": 1 << 63}}, r"files\[\.\.\.\]\.bytes: .*<= 4611686018427387904"),
        *(("files", {name: FACTS}, "key in .*files") for name in NAMES),
        ("board_size", None, "positions but no board_size"),
        ("counts", {"position": 14}, "key in .*counts"),
        ("stages", {"konvert": {}}, "at stages: .*field konvert"),
        ("stages", {"shuffle": {**SHUFFLE, "splits": {"train": 14.0}}}, "stages.shuffle.splits"),
        ("stages", {"shuffle": {**SHUFFLE, "sqlits": {}}}, "stages.shuffle: .*field sqlits"),
        ("stages", {"shuffle": {**SHUFFLE, "buckets": {"train": 10**9}}}, "stages.shuffle.buckets"),
        ("stages", {"shuffle": {**SHUFFLE, "choices": {"x; y": "y"}}}, "key in .*stages.shuffle.choices"),
        ("stages", {"pickles-shuffled": PICKLES}, "without the stage shuffle"),
        ("stages", {"pickles-shuffled": {**PICKLES, "of": "0"}}, "stages.pickles-shuffled.of"),
        *(("targets", targets, "targets") for targets in TARGETS),
        *(("stages", {"shuffle": SHUFFLE | {"targets": targets}}, "targets") for targets in TARGETS),
    ],
)
def test_a_wrong_value_is_named(tmp_path, manifest, key, value, said):
    """The digest is that of the wrong content."""
    manifest.save(tmp_path)
    content = json.loads((tmp_path / MANIFEST_NAME).read_bytes()) | {key: value}
    del content["digest"]
    content["digest"] = hashlib.sha256(canonical_json(content)).hexdigest()
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(StoreError) as caught:
        Manifest.load(tmp_path)
    assert caught.value.path == str(tmp_path / MANIFEST_NAME)
    assert re.search(said, caught.value.detail())
