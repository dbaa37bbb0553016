"""Parametrization in which every two values of two parameters occur together, in few cases.

``HEXDATA_TESTS=full`` runs all combinations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["FULL", "every_pair", "paired"]

FULL = os.environ.get("HEXDATA_TESTS") == "full"
"""Whether the tests run all combinations of their parameters."""


def every_pair(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with few combinations that contain all pairs of values.

    Most faults depend on one value or on two, so these combinations find them.
    """
    return pytest.mark.parametrize(",".join(parameters), paired(*parameters.values()))


def paired(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations, of one value of each parameter, that contain all pairs of values."""
    values = [tuple(each) for each in parameters]
    chosen = choose([len(each) for each in values])
    return [tuple(each[i] for each, i in zip(values, case, strict=True)) for case in chosen]


def choose(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return combinations of indices below the sizes; each is the one that contains most new pairs."""
    every = list(product(*map(range, sizes)))
    if FULL or len(sizes) < 3:
        return every
    pairs = {case: set(combinations(enumerate(case), 2)) for case in every}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)
