"""Stores to damage, and helpers that update the manifest after a damage, so that digests agree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store
from hexdata.verify.store import _Verification
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore

SEED = 7

Failures = Callable[..., dict[str, str]]
Change = Callable[[pa.Table], pa.Table]
Rewrite = Callable[[Path, str, Change], None]
Edit = Callable[[pa.Table, str, int, Any], pa.Table]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store with all stages. Read-only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("exported") / "store")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    return store


@pytest.fixture
def store(exported: Path, copy_store: CopyStore) -> Path:
    """A copy of the odd store with all stages, to damage."""
    return copy_store(exported)


@pytest.fixture(scope="session")
def failures() -> Failures:
    """Return ``failures(store, quality=False)``: detail of each failed check by name.

    Measuring the quality takes as long as the other checks of small stores together, so it is passed unless
    asked for, or ``HEXDATA_TESTS=full``.
    """

    def failures(store: Path, *, quality: bool = FULL) -> dict[str, str]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if not quality:
                monkeypatch.setattr(_Verification, "_quality", lambda self: "not measured")
            return {check.name: check.detail for check in verify_store(store).checks if not check.ok}

    return failures


@pytest.fixture(scope="session")
def rewrite() -> Rewrite:
    """Return ``rewrite(store, name, change)``, which changes a Parquet file and updates the manifest."""

    def rewrite(store: Path, name: str, change: Change) -> None:
        manifest = Manifest.load(store)
        table = change(pq.read_table(store / name))
        folder, before = name.split("/")[0], manifest.files[name].rows
        manifest.files[name] = write_parquet(store / name, table.schema, [table])
        if folder in manifest.counts:
            manifest.counts[folder] += table.num_rows - before
        for stage, made_of in (("shuffle", ("positions", "games")), ("export", ("shuffled",))):
            if stage in manifest.stages:
                manifest.stages[stage]["of"] = manifest.digest(*made_of)
        manifest.save(store)

    return rewrite


@pytest.fixture(scope="session")
def edit() -> Edit:
    """Return ``edit(table, name, row, value)``, which returns the table with one value changed."""

    def edit(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
        index = table.schema.get_field_index(name)
        field = table.schema.field(index)
        values = table[name].to_pylist()
        values[row] = value
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        return table.set_column(index, field, pa.chunked_array([pa.array(values, kind).cast(field.type)]))

    return edit
