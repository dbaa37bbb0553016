"""A fork server that has imported PyTorch, so that its workers start in milliseconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def preloaded_fork_server() -> None:
    multiprocessing.set_forkserver_preload(["hexdata.torch"])


@pytest.fixture(scope="session", autouse=True)
def short_waits_for_workers() -> Iterator[None]:
    """Let PyTorch wait less for the workers of a DataLoader that a test left to the garbage collector."""
    utils = pytest.importorskip("torch.utils.data._utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
        yield
