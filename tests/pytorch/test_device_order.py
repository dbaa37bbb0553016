"""Tests of ``hexdata.torch.order`` against ``hexdata.order``."""

from __future__ import annotations

import numpy as np
import pytest

from hexdata.order import Permutation, derive_key, sort_key

torch = pytest.importorskip("torch")

from hexdata.torch import order as device_order  # noqa: E402 - only where PyTorch is

CPU = torch.device("cpu")
KEYS = [0, (1 << 64) - 1, derive_key(3, "epoch", 0), derive_key(3, "epoch", 1)]
SMALL = [0, 1, 2, 3, 169, 65_535, 65_536]
POWERS = [17, 20, 31, 32, 33, 48, 61]
LARGE = [65_537, 97_321_456, *((1 << power) + change for power in POWERS for change in (-1, 0, 1)), 1 << 62]


@pytest.mark.parametrize("key", KEYS)
def test_sort_keys_equal_those_of_numpy(key):
    random = np.random.default_rng(1)
    ids = np.concatenate([np.arange(1000), random.integers(-(1 << 63), 1 << 63, 1000)]).astype(np.int64)
    keys = device_order.sort_key(torch.from_numpy(ids.reshape(2, -1)), key)
    assert keys.numpy().view(np.uint64).tolist() == sort_key(ids.reshape(2, -1), key).tolist()


@pytest.mark.parametrize("shift", [1, 31, 62, 63])
def test_a_right_shift_fills_with_zeros(shift):
    numbers = np.random.default_rng(shift).integers(-(1 << 63), 1 << 63, 1000)
    shifted = device_order.shift_right(torch.from_numpy(numbers), shift)
    assert (shifted.numpy() == (numbers.view(np.uint64) >> np.uint64(shift)).view(np.int64)).all()


@pytest.mark.parametrize("n", SMALL)
@pytest.mark.parametrize("key", KEYS)
def test_a_small_permutation_equals_that_of_numpy(n, key):
    taken = device_order.DevicePermutation(n, key, CPU).take(torch.arange(n))
    assert taken.dtype == torch.int64
    assert (taken.numpy() == Permutation(n, key).slice(0, n)).all()


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("n", LARGE)
def test_a_large_permutation_equals_that_of_numpy(n, passes, monkeypatch):
    random = np.random.default_rng(n)
    indices = np.concatenate([np.arange(500), n - 1 - np.arange(500), random.integers(0, n, 1000)])
    for key in KEYS:
        permutation = device_order.DevicePermutation(n, key, CPU)
        monkeypatch.setattr(permutation, "_passes", passes)  # as on a CPU, as on an accelerator
        taken = permutation.take(torch.from_numpy(indices.reshape(4, -1)))
        assert (taken.numpy() == Permutation(n, key)[indices.reshape(4, -1)]).all()


def test_taking_does_not_change_the_indices():
    for n in (1000, 70_000, 1 << 40):
        indices = torch.arange(1000)
        device_order.DevicePermutation(n, 5, CPU).take(indices)
        assert torch.equal(indices, torch.arange(1000))
