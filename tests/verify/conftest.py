"""A store to damage, and the checks that fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hexdata.verify
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import verify_store
from tests.pairs import FULL
from tests.verify.altered import SEED, Altered

if TYPE_CHECKING:
    from tests.conftest import CopyStore

Failures = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store with all stages. Read only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("exported") / "store")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    return store


@pytest.fixture
def store(exported: Path, copy_store: CopyStore) -> Altered:
    """A copy of the odd store with all stages, to damage."""
    return Altered(copy_store(exported))


@pytest.fixture(scope="session")
def failures() -> Failures:
    """Return ``failures(store, *checks)``: detail of each failed check by name.

    Only these checks run, and those that they depend on; without names, all but the slow measurements.
    """
    every = hexdata.verify._checks

    def failures(store: Path, *names: str) -> dict[str, str]:
        def checks(*arguments: Any) -> Iterator[tuple[str, Any]]:
            for name, check in every(*arguments):
                is_wanted = name in (*names, "files", "tables") or name.endswith(" stage")
                if FULL or (is_wanted if names else name not in ("shuffle quality", "input order")):
                    yield name, check

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(hexdata.verify, "_checks", checks)
            return {check.name: check.detail for check in verify_store(store).checks if not check.ok}

    return failures
