"""Test of the code of ``docs/howto/jax.md``, which runs where JAX is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.loader import Loader
from hexdata.order import Permutation, derive_key

jnp = pytest.importorskip("jax.numpy")

PAGE = Path(__file__).parents[2] / "docs/howto/jax.md"
GAMES = 40
BATCH = 256


@pytest.fixture
def recipe(tmp_path, monkeypatch, demo_trmph) -> dict[str, Any]:
    """Return the names that the code of the page defines, after running it."""
    demo_trmph(tmp_path / "games", games=GAMES, files=1)
    convert_sources([tmp_path / "games"], tmp_path / "converted", ConvertOptions(workers=1))
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], str(PAGE), "exec"), names)
    return names


def test_every_batch_equals_that_of_the_loader(recipe):
    plain = Loader("converted", mode="games", batch_size=BATCH, seed=1)
    games = recipe["load_games"](plain)
    for epoch in range(2):
        order = recipe["order_of"](plain.positions, 1, epoch)
        for step, expected in enumerate(plain):
            indices = np.arange(step * BATCH, min((step + 1) * BATCH, plain.positions), dtype=np.uint32)
            batch = recipe["make_batch"](games, order(jnp.asarray(indices)), plain.board_size)
            assert [*batch] == [*expected]
            for name, array in expected.items():
                assert np.asarray(batch[name]).dtype == array.dtype
                assert np.asarray(batch[name]).tobytes() == array.tobytes()


@pytest.mark.parametrize("n", [65_536, 65_537, 97_321_456, (1 << 31) - 1])
def test_the_order_equals_the_permutation(recipe, n):
    indices = np.concatenate([np.arange(2000), n - 1 - np.arange(2000)])
    rows = recipe["order_of"](n, 3, 5)(jnp.asarray(indices.astype(np.uint32)))
    assert np.asarray(rows).tolist() == Permutation(n, derive_key(3, "epoch", 5))[indices].tolist()
