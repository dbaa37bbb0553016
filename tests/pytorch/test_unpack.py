"""Tests of ``unpack`` and ``expand_policy`` against plain definitions and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.board import unpack_boards
from hexdata.errors import ConfigError

torch = pytest.importorskip("torch")

from hexdata.torch import expand_policy, unpack  # noqa: E402 - only where PyTorch is

DTYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.uint8: np.uint8,
    torch.bfloat16: None,
    torch.float64: np.float64,
}


def plain_unpack(packed: np.ndarray, n: int, player: np.ndarray | None) -> np.ndarray:
    """Return boards as float64: cell i of the two planes is bit i, from the highest bit of byte 0."""
    boards = np.zeros((len(packed), 2 if player is None else 3, n * n))
    for board, row in zip(boards, packed.tolist(), strict=True):
        for i in range(2 * n * n):
            board[i // (n * n), i % (n * n)] = row[i // 8] >> (7 - i % 8) & 1
    for number, red in enumerate([] if player is None else player.tolist()):
        boards[number, 2] = 1.0 if red else 0.0
    return boards.reshape(*boards.shape[:2], n, n)


def random_boards(n: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random packed boards, with random spare bits, and players to move."""
    rng = np.random.default_rng([n, size])
    packed = rng.integers(0, 256, (size, (2 * n * n + 7) // 8), np.uint8)
    return packed, rng.integers(0, 2, size, np.uint8)


@given(st.integers(3, 32), st.integers(0, 6), st.sampled_from([*DTYPES]), st.booleans())
def test_unpack_equals_the_plain_definition(n, size, dtype, third):
    packed, player = random_boards(n, size)
    boards = unpack(torch.from_numpy(packed), player_to_move=player if third else None, dtype=dtype)
    plain = plain_unpack(packed, n, player if third else None)
    assert boards.dtype == dtype
    assert boards.is_contiguous()
    assert boards.shape == plain.shape
    assert torch.equal(boards.to(torch.float64), torch.from_numpy(plain))
    if DTYPES[dtype] and not third:
        assert boards.numpy().tobytes() == unpack_boards(packed, n, DTYPES[dtype]).tobytes()


@pytest.mark.parametrize("n", [5, 8, 13])
@pytest.mark.parametrize("third", [False, True])
def test_compiled_code_returns_the_same_boards(n, third):
    """Compiled code uses bit shifts in one graph; eager code on the CPU uses NumPy."""
    packed, player = map(torch.from_numpy, random_boards(n, 9))
    moves = player if third else None
    torch.compiler.reset()
    compiled = torch.compile(unpack, backend="eager", fullgraph=True, dynamic=False)
    for dtype in DTYPES:
        boards = compiled(packed, n, player_to_move=moves, dtype=dtype)
        assert torch.equal(boards, unpack(packed, n, player_to_move=moves, dtype=dtype))


@pytest.mark.parametrize(
    ("packed", "size", "message"),
    [
        (np.zeros((4, 43), np.int16), None, "int16 of shape"),
        (np.zeros(43, np.uint8), None, r"shape \(43,\)"),
        (np.zeros((4, 42), np.uint8), None, r"\(4, 42\)"),
        (np.zeros((4, 2), np.uint8), None, r"\(4, 2\)"),
        (np.zeros((4, 43), np.uint8), 11, "expected uint8 .* for n = 11"),
        (np.zeros((4, 2, 13, 13), np.uint8), 13, "Make the loader with board='packed'"),
    ],
)
def test_invalid_packed_boards_are_refused(packed, size, message):
    with pytest.raises(ConfigError, match=message):
        unpack(packed, size)


@pytest.mark.parametrize("final", ["zeros", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expand_policy_is_one_hot(final, dtype):
    move = np.array([0, 65535, 8, 3, 65535], np.uint16)
    policy = expand_policy(move, 9, final_policy=final, dtype=dtype)
    rest = 0.0 if final == "zeros" else 1 / 9
    plain = [[rest] * 9 if cell == 65535 else [float(i == cell) for i in range(9)] for cell in move]
    assert torch.equal(policy, torch.tensor(plain, dtype=dtype))
    assert expand_policy(move[:0], 9).shape == (0, 9)


def test_unknown_final_policies_are_refused():
    with pytest.raises(ConfigError, match="unknown final_policy; found 'skip'"):
        expand_policy(np.zeros(1, np.uint16), 9, final_policy="skip")  # type: ignore[arg-type]
