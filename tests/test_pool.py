"""Number of workers of a stage, from cores and memory."""

from __future__ import annotations

import os

import pytest

from hexdata.convert import ConvertOptions
from hexdata.errors import BudgetError, ConfigError
from hexdata.export import ExportOptions, PicklesOptions
from hexdata.pool import LEADER_MEMORY, default_workers


def test_there_is_a_worker_for_each_core_we_may_use() -> None:
    assert 1 <= default_workers() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("options", [ConvertOptions, ExportOptions, PicklesOptions])
def test_a_budget_that_cannot_be_kept_is_refused(options) -> None:
    each = options.WORKER_MEMORY
    with pytest.raises(BudgetError, match="too little memory for 1 worker"):
        options(memory=each - 1)
    of_three = LEADER_MEMORY + 3 * each
    with pytest.raises(BudgetError, match="too little memory for 3 workers"):
        options(memory=of_three - 1, workers=3)
    assert options(memory=of_three, workers=3).processes(cores=2) == 3
    assert options(memory=of_three).processes(cores=9) == 3
    assert options(memory=9 * each).processes(cores=2) == 2
    assert options(memory=2 * each).processes(cores=9) == 1, "the process that leads two workers counts too"
    with pytest.raises(ConfigError, match="workers"):
        options(workers=0)
