"""Loader of a live pipeline for the trainer: iteration over batches, state to resume from, and shutdown.

The options and the stages determine the content of batches.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from hexdata.batch import Batch, BoardForm, FinalPolicy
from hexdata.checks import check_count, check_location, check_positive, check_same_options, check_versions
from hexdata.errors import ConfigError, HexdataError
from hexdata.live.options import BATCH_OPTIONS, SHARED_OPTIONS, LiveOptions, load_live_config, make_pipeline
from hexdata.order import ORDER_VERSION
from hexdata.storage import local_path

_STATE_VERSION: Final = 8
"""Increased when the content of a state changes. States of other versions are refused, never converted."""
_LONGEST_WAIT: Final = 1.0
"""Longest wait in seconds: a Ctrl-C at the moment a wait begins is handled only when the wait ends."""


class LiveLoader:
    """Delivers batches of NumPy arrays from a directory to which self-play still writes games.

    Iteration continues as long as there are games to draw. A second loop continues after the last batch of
    the first. The threads start with the first batch. They end with ``close``, at the end of a ``with``
    block, or when the loader is no longer referenced.

    If the directory disappears, the loader issues a warning, waits until it is back, and continues to draw
    games from the pool.

    The same seed, options and files give the same batches with ``watch=False`` and one thread per stage.
    Arguments that are None keep the value in ``config``, or without ``config`` the default of
    ``LiveOptions``.

    Args:
        directory: Directory in which games exist or appear.
        config: A ``LiveOptions``, or the path of a file such as configs/live.toml. A file that names code of
            your own is refused; load it with ``load_live_config(path, allow_code=True)``. None (default) for
            the default pipeline.
        seed: Any integer: the seed of all draws. Default 0.
        batch_size: Positions per batch. Default 1024.
        split: "train" (default), "val" or "test".
        pool_size: Number of games in the pool: the newest. Default 100,000.
        reuse: Maximum number of times that games are drawn, per game that has entered the pool. The loader
            then waits for new games, however fast the trainer is. None (default) for no maximum.
        rank: Number of this process among those that share the games, from 0. Default 0.
        world_size: Number of processes that share the games. Each game is delivered by one of them only.
            Default 1.
        reservoir: Number of positions in the reservoir that mixes them. Default 1,000,000.
        watch: False to read only the files that exist at the start. Default True.
        fields: Names of the arrays in a batch; ``BatchOptions`` lists them with shapes and dtypes.
        planes: Number of board planes, 2 (default) or 3; the third is the player to move.
        board: Dtype of the boards: "float32" (default), "float16" or "uint8"; or "packed" for one bit per
            cell.
        final_policy: Policy of final positions: "zeros" (default), "uniform", or "skip" to omit these
            positions.
        tier_probability: Probabilities of value weight 1 for tiers 0 to 3, drawn for every batch. By default
            all weights are 1.
        symmetry: True to apply to each position one of its four symmetries, drawn for every batch. Default
            False.
        warn_after: Seconds without a batch after which one warning gives the reason. Default 60.
        timeout: Seconds without a batch after which iteration raises. None (default) waits forever.

    Raises:
        ConfigError: An option has an invalid value, or the order of the stages is invalid.

    Example:
        with LiveLoader("games/", batch_size=256) as loader:
            for batch in loader:
                train(batch["board"], batch["policy"], batch["value"])
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        config: LiveOptions | str | Path | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
        split: str | None = None,
        pool_size: int | None = None,
        reuse: float | None = None,
        reservoir: int | None = None,
        watch: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        fields: Sequence[str] | None = None,
        planes: int | None = None,
        board: BoardForm | None = None,
        final_policy: FinalPolicy | None = None,
        tier_probability: tuple[float, float, float, float] | None = None,
        symmetry: bool | None = None,
        warn_after: float = 60.0,
        timeout: float | None = None,
    ) -> None:
        given: dict[str, Any] = {name: value for name, value in locals().items() if value is not None}
        if config is not None and not isinstance(config, LiveOptions):
            check_location("config", config)
            config = load_live_config(config)
        # Arguments that are given replace the values of the config.
        options = config or LiveOptions()
        batch = {name: given[name] for name in BATCH_OPTIONS if name in given}
        shared = {name: given[name] for name in SHARED_OPTIONS if name in given}
        self.options = replace(options, **shared, batch=replace(options.batch, **batch))
        self.warn_after = check_positive("warn_after", warn_after)
        self.timeout = math.inf if timeout is None else check_positive("timeout", timeout)
        self.delivered = 0
        """Number of batches delivered since the beginning of the run."""
        self._pipeline = make_pipeline(self.options, directory)
        self.directory = local_path(directory, "a watched directory").absolute()
        self._is_closed = False
        self._has_warned = False

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, as dicts of NumPy arrays, until the input ends.

        Raises:
            HexdataError: The loader is closed, or no batch was delivered for ``timeout`` seconds.
            Exception: A stage raised it.
        """
        start = time.monotonic()
        while True:
            self._check_open()
            self._pipeline.start()  # not at creation: the caller may load a state first
            try:
                until = self.timeout if self._has_warned else min(self.warn_after, self.timeout)
                left = start + until - time.monotonic()
                batch = self._pipeline.take(min(max(left, 0.0), _LONGEST_WAIT))
            except StopIteration:
                return
            if batch is not None:
                self.delivered += 1
                yield batch
                start = time.monotonic()
                continue
            waited = time.monotonic() - start
            reason = f"no batch for {waited:.0f} seconds"
            if not self._has_warned and waited >= self.warn_after:
                self._has_warned = True
                warnings.warn(f"{self.directory}: {reason}: {self._describe_wait()}", stacklevel=2)
            if waited >= self.timeout:
                hint = "Check that games are written to it, or use LiveLoader(timeout=None) to wait forever."
                raise HexdataError(reason, path=self.directory, found=self._describe_wait(), hint=hint)

    def _describe_wait(self) -> str:
        """Return why no batch was delivered, or which stages are at work if that shows no reason."""
        busy = [name for name, found in self.metrics().items() if found["busy"]]
        return self._pipeline.wait_reason() or f"{', '.join(busy) or 'no stage'} is at work"

    def _check_open(self) -> None:
        if self._is_closed:
            raise HexdataError("the loader is closed", hint="Create a new loader and load its state.")

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of the stages and queues by stage name, as ``Pipeline.metrics`` does."""
        return self._pipeline.metrics()

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return text of the stages for people by stage name, such as names of bad files."""
        return self._pipeline.notes()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which to continue with the next batch not yet delivered.

        It consists of text, numbers, bytes, lists, tuples and dicts, so ``pickle`` and ``torch.save`` can
        store it, and ``torch.load`` with ``weights_only=True`` can load it. It contains the whole reservoir
        and the content of the queues, so it is as large as these.

        Raises:
            HexdataError: The loader is closed, or a stage has raised.
        """
        self._check_open()
        pipeline = self._pipeline.state()
        return {**self._compared_options(), "delivered": self.delivered, "pipeline": pipeline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, discarding what this loader has prepared so far.

        The files whose games were in the pool are read again. Missing files are left out and counted.

        Args:
            state: Result of :meth:`state_dict` of a loader with the same options.

        Raises:
            ConfigError: The options of the state are different, and the message names them; or it is not such
                a state.
            StoreError: The state is of another version, or damaged.
            HexdataError: The loader is closed.
        """
        self._check_open()
        expected = self._compared_options()
        if not isinstance(state, Mapping) or state.keys() != {*expected, "delivered", "pipeline"}:
            raise ConfigError("not the state of a live loader", found=repr(state)[:80])
        check_versions(state, expected)
        check_same_options(state, expected, expected, "loader")
        delivered = check_count("delivered", state["delivered"], 0)
        # A new pipeline first: with a damaged state, this loader continues as it was.
        pipeline = make_pipeline(self.options, self.directory)
        pipeline.load_state(state["pipeline"])
        self._pipeline.close()
        self._pipeline, self.delivered = pipeline, delivered

    def _compared_options(self) -> dict[str, Any]:
        """Return the versions, and the options on which the batches depend."""
        names = ("seed", "split", "val", "test", "pool_size", "reservoir", "batch_size", "rank", "world_size")
        compared = {name: getattr(self.options, name) for name in names}
        compared["batch"] = {name: repr(value) for name, value in asdict(self.options.batch).items()}
        # Without the number of threads, so that a run may continue with more or fewer.
        compared["stages"] = [
            [stage.kind, {name: _text(value) for name, value in stage.arguments.items() if name != "threads"}]
            for stage in self.options.stages
            if stage.kind != "FilePathProvider"  # its options may differ between runs
        ]
        return {"version": _STATE_VERSION, "order_version": ORDER_VERSION, **compared}

    def close(self) -> None:
        """Stop all stages and wait for their threads. Further calls do nothing.

        Raises:
            HexdataError: A thread has not ended.
        """
        self._is_closed = True
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        hint = "Create one in that process, or iterate in this one."
        raise HexdataError("a live loader cannot be sent to another process", hint=hint)


def _text(value: Any) -> str:
    """Return an argument as a state compares it. The text of a function would contain its address."""
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else repr(value)
