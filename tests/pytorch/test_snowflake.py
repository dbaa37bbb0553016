"""The lines of ``docs/howto/snowflake.md``: their batches are those that the trainer of Snowflake expects."""

from __future__ import annotations

import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from tests.test_documents import blocks_of

torch = pytest.importorskip("torch")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "snowflake.md"


def test_the_batches_are_those_of_the_trainer(trmph_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``create_datasets`` of Snowflake has the body of the page."""
    batches, body = (block.text for block in blocks_of(PAGE) if block.language == "python")
    module = types.ModuleType("hex_ai.hexdata_batches")
    exec(batches, vars(module))
    monkeypatch.setitem(sys.modules, "hex_ai", types.ModuleType("hex_ai"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = {}
    lines = textwrap.indent(textwrap.dedent(body), "    ")
    exec(f"def create_datasets(data_dirs, batch_size=256, random_seed=None):\n{lines}", names)
    train, val = names["create_datasets"]([str(trmph_store)], batch_size=100)
    assert (train.batch_size, val.batch_size) == (100, 100)
    assert not hasattr(train.dataset, "reset")
    size = train.loader.loader.board_size
    for batches in (train, val):
        for _ in range(2):  # the trainer iterates again for each epoch
            sizes = []
            for board, policy, value, stage in batches:
                assert board.dtype == policy.dtype == value.dtype == stage.dtype == torch.float32
                stones = board[:, :2].flatten(1).sum(dim=1)
                torch.testing.assert_close(stage, stones / size**2)
                assert set(value.unique().tolist()) <= {-1.0, 1.0}
                assert board.shape == (len(value), 3, size, size)
                assert policy.shape == (len(value), size * size)
                assert value.shape == (len(value), 1)
                sizes.append(len(value))
            assert sum(sizes) == batches.loader.loader.positions
    assert len(val.loader) >= 1
