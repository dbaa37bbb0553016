"""Loops over a loader that stop at random batches, and a check of what each of them receives."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Steps = list[list[int]]
WAYS = ("zip", "break", "islice", "next", "raise")
"""Ways to stop a loop after a number of batches. All except "next" drop the iterator."""


def run_loop(loader: Any, stop: int | None, way: str) -> tuple[Steps, Any]:
    """Run a loop for ``stop`` batches (None: to its end); return the ids and the state in the last body."""
    got: Steps = []
    state = loader.state_dict()

    def body(batch: Any) -> None:
        nonlocal state
        got.append(batch["position_id"].tolist())
        state = loader.state_dict()

    if stop is None:
        for batch in loader:
            body(batch)
    elif way == "zip":
        for _, batch in zip(range(stop), loader):  # noqa: B905 - the loader is longer
            body(batch)
    elif way == "islice":
        for batch in itertools.islice(loader, stop):
            body(batch)
    elif way == "next":
        batches = iter(loader)
        for _ in range(stop):
            body(next(batches))
        HELD.append(batches)
    elif stop:
        _leave(loader, stop, way, body)
    return got, state


HELD: list[Iterator[Any]] = []
"""References to iterators that were left, as PyTorch Lightning keeps them."""


def _leave(loader: Any, stop: int, way: str, body: Callable[[Any], None]) -> None:
    try:
        for number, batch in enumerate(loader, start=1):
            body(batch)
            if number == stop and way == "break":
                break
            if number == stop:
                raise InterruptedError
    except InterruptedError:
        pass


def check_loops(
    make: Callable[[], Any], expected: Callable[[int], Steps], seed: int, loops: int, *, resume: bool = True
) -> int:
    """Run loops that stop at random, resume some of them in a new loader, and check every batch.

    All loops together deliver the epochs 0, 1 … batch by batch. No loop is empty: it receives the batches
    that it requests, up to the end of an epoch.

    Args:
        make: Returns a new loader at the beginning of epoch 0.
        expected: Returns the batches of an epoch.
        seed: Seed of the random stops.
        loops: Number of loops.
        resume: Whether to continue some loops in new loaders.

    Returns:
        The number of loops that took exactly the last batch of an epoch and no more.
    """
    rng = random.Random(seed)
    loader = make()
    length = len(loader)
    epoch, batch, exact = 0, 0, 0
    for _ in range(loops):
        if batch == length:
            epoch, batch = epoch + 1, 0
        rest = length - batch
        stop = rng.choice([None, 0, 1, rest, rest, rest, rng.randint(0, rest)])
        way = rng.choice(WAYS)
        inside = rng.random() < 0.5
        got, state = run_loop(loader, stop, way)
        count = rest if stop is None else stop
        assert got == expected(epoch)[batch : batch + count], (epoch, batch, stop, way)
        batch += count
        at_end = batch == length
        exact += at_end and stop is not None
        if not (at_end and way == "next" and stop is not None):
            assert loader.epoch == epoch + at_end
        if resume and rng.random() < 0.5:
            saved = json.loads(json.dumps(state if inside else loader.state_dict()))
            loader = make()
            loader.load_state_dict(saved)
            assert loader.epoch == epoch + at_end
        HELD.clear()
    return exact
