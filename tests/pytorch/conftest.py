"""A fork server that has imported PyTorch, so that its workers start in milliseconds."""

from __future__ import annotations

import multiprocessing

import pytest


@pytest.fixture(scope="session", autouse=True)
def preloaded_fork_server() -> None:
    multiprocessing.set_forkserver_preload(["hexdata.torch"])
