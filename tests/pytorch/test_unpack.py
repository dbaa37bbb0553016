"""Tests of ``unpack`` and ``expand_policy`` against plain definitions and the fields of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.loader import Loader
from tests.pairs import FULL

torch = pytest.importorskip("torch")

from hexdata.torch import expand_policy, unpack  # noqa: E402 - only where PyTorch is

DTYPES = [torch.float32, torch.float16, torch.uint8, torch.bfloat16, torch.float64]


def random_boards(n: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random packed boards, with random spare bits, and players to move."""
    rng = np.random.default_rng([n, size])
    packed = rng.integers(0, 256, (size, (2 * n * n + 7) // 8), np.uint8)
    return packed, rng.integers(0, 2, size, np.uint8)


@given(st.integers(3, 32), st.integers(0, 6), st.sampled_from(DTYPES), st.booleans())
def test_unpack_equals_the_plain_definition(n, size, dtype, third):
    """Cell i of the first two planes is bit i, from the highest bit of byte 0."""
    packed, player = random_boards(n, size)
    plain = np.zeros((size, 2 + third, n * n))
    for board, row, red in zip(plain, packed.tolist(), player, strict=True):
        for i in range(2 * n * n):
            board[i // (n * n), i % (n * n)] = row[i // 8] >> (7 - i % 8) & 1
        board[2:] = red
    boards = unpack(torch.from_numpy(packed), player_to_move=player if third else None, dtype=dtype)
    assert boards.dtype == dtype
    assert boards.is_contiguous()
    assert torch.equal(boards.to(torch.float64), torch.from_numpy(plain).view(boards.shape))


@pytest.mark.skipif(not FULL, reason="importing the compiler takes 10 s")
def test_compiled_code_returns_the_same_boards():
    """In one graph."""
    packed, player = map(torch.from_numpy, random_boards(13, 9))
    compiled = torch.compile(unpack, backend="eager", fullgraph=True, dynamic=False)
    for moves in (None, player):
        boards = compiled(packed, 13, player_to_move=moves)
        assert torch.equal(boards, unpack(packed, 13, player_to_move=moves))


@pytest.mark.parametrize("final", ["zeros", "uniform"])
@pytest.mark.parametrize("board", ["float32", "uint8"])
def test_an_expanded_batch_equals_the_unpacked_one(trmph_store: Path, board: Any, final: Any) -> None:
    options: dict[str, Any] = {"planes": 3, "final_policy": final, "symmetry": True}
    options["fields"] = ("board", "policy", "move", "player_to_move", "policy_mask")
    finals = 0
    packed = Loader(trmph_store, board="packed", **options)
    for batch, whole in zip(packed, Loader(trmph_store, board=board, **options), strict=True):
        finals += np.count_nonzero(~whole["policy_mask"])
        boards = unpack(batch["board"], player_to_move=batch["player_to_move"], dtype=getattr(torch, board))
        assert boards.numpy().tobytes() == whole["board"].tobytes()
        policy = expand_policy(batch["move"], whole["policy"].shape[1], final_policy=final)
        assert policy.numpy().tobytes() == whole["policy"].tobytes()
    assert finals > 20
    half = expand_policy(np.array([0, 65535], np.uint16), 9, final_policy="uniform", dtype=torch.bfloat16)
    assert torch.equal(half, torch.tensor([[1.0] + [0.0] * 8, [1 / 9] * 9], dtype=torch.bfloat16))
