"""What several tests of the promises use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.stages import Commands, running_commands


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    """A process that runs command lines."""
    with running_commands() as running:
        yield running
