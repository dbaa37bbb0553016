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
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from hexdata.batch import Batch, BoardForm, FinalPolicy
from hexdata.checks import as_tuple, check_location, check_same_options, check_versions
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.live.metrics import COMMON_METRICS
from hexdata.live.options import LiveOptions, load_live_config, make_pipeline, watched_path
from hexdata.live.stage import check_seconds
from hexdata.live.state import decode_state, encode_state
from hexdata.live.wait_reason import find_wait_reason
from hexdata.order import ORDER_VERSION

__all__ = ["LiveLoader"]

_STATE_VERSION: Final = 3
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
        check_location("directory", directory)
        options = config if isinstance(config, LiveOptions) else _read_config(config)
        shared: dict[str, object] = {
            "seed": seed,
            "batch_size": batch_size,
            "split": split,
            "pool_size": pool_size,
        }
        shared |= {"reuse": reuse, "reservoir": reservoir, "watch": watch}
        shared |= {"rank": rank, "world_size": world_size}
        batch = {"fields": as_tuple(fields), "planes": planes, "board": board, "final_policy": final_policy}
        batch |= {"tier_probability": as_tuple(tier_probability), "symmetry": symmetry}
        self.options = replace(
            options, **_without_none(shared), batch=replace(options.batch, **_without_none(batch))
        )
        self.directory = watched_path(directory)
        self.warn_after = check_seconds("warn_after", warn_after, math.inf)
        self.timeout = None if timeout is None else check_seconds("timeout", timeout, math.inf)
        self.delivered = 0
        """Number of batches delivered since the beginning of the run."""
        self._pipeline = make_pipeline(self.options, self.directory)
        self._running = False
        self._closed = False
        self._warned = False

    # --- iteration ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, as dicts of NumPy arrays, until the input ends.

        Raises:
            HexdataError: The loader is closed, or no batch was delivered for ``timeout`` seconds.
            Exception: A stage raised it.
        """
        while True:
            try:
                batch = self._next()
            except StopIteration:
                return
            yield batch

    def _next(self) -> Batch:
        self._start()
        start, outputs = time.monotonic(), self._output_counts()
        while True:
            waited = time.monotonic() - start
            limits = [self.timeout] if self._warned else [self.timeout, self.warn_after]
            left = [limit - waited for limit in limits if limit is not None]
            batch: Batch | None = self._pipeline.take(max(0.0, min([*left, _LONGEST_WAIT])))
            if batch is not None:
                self.delivered += 1
                return batch
            self._check_wait(time.monotonic() - start, outputs)

    def _check_wait(self, waited: float, outputs: list[int]) -> None:
        """Warn after ``warn_after`` seconds without a batch.

        Raises:
            HexdataError: ``waited`` has reached ``timeout``.
        """
        if not self._warned and waited >= self.warn_after:
            self._warned = True
            message = f"{self.directory}: no batch for {waited:.0f} seconds: {self._describe_wait(outputs)}"
            warnings.warn(message, stacklevel=4)
        if self.timeout is not None and waited >= self.timeout:
            raise HexdataError(
                f"no batch for {waited:.0f} seconds",
                path=self.directory,
                found=self._describe_wait(outputs),
                hint="Check that games are written to it, or use LiveLoader(timeout=None) to wait forever.",
            )

    def _output_counts(self) -> list[int]:
        """Return the number of outputs of each stage."""
        return [queue.accepted for queue in self._pipeline.queues]

    def _describe_wait(self, outputs: list[int]) -> str:
        """Return why no batch was delivered, as text.

        If the metrics do not show why, the text names the stage that has input but no output, and the fill
        level of the reservoir.

        Args:
            outputs: Result of :meth:`_output_counts` at the start of the wait.
        """
        reason = find_wait_reason(self._pipeline.metrics(), self.notes(), self.options)
        if reason is not None:
            return reason
        now, metrics = self._output_counts(), list(self._pipeline.metrics().items())
        index = len(metrics) - 1
        while index and now[index - 1] == outputs[index - 1] and not metrics[index - 1][1]["queued"]:
            index -= 1
        name, own = metrics[index]
        parts = [f"{name} has produced nothing" if index else f"{name} has found nothing new"]
        counts = [f"{key} {value:,.10g}" for key, value in own.items() if key not in COMMON_METRICS]
        parts += [f"its counts are {', '.join(counts)}"] if counts else []
        parts += [
            f"{other} holds {more['held']:,.0f} of {more['size']:,.0f} positions"
            for other, more in metrics
            if "held" in more and other != name
        ]
        return "; ".join(parts)

    def _start(self) -> None:
        if self._closed:
            raise HexdataError("the loader is closed", hint="Create a new loader and load the state.")
        if not self._running:
            self._running = True
            self._pipeline.start()

    # --- metrics and state ----------------------------------------------------------------------------

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
        if self._closed:
            raise HexdataError("the loader is closed", hint="Call state_dict() before close().")
        pipeline = encode_state(self._pipeline.state())
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
        if self._closed:
            raise HexdataError("the loader is closed", hint="Create a new loader.")
        expected = self._compared_options()
        is_state = isinstance(state, Mapping) and {"version", "order_version"} <= state.keys()
        if is_state:
            state = dict(state)
            check_versions(state, expected)
        names = [*expected, "delivered", "pipeline"]
        if not is_state or set(names) != state.keys():
            found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)[:80]
            raise ConfigError(
                "not the state of a live loader", found=found, expected=f"a dict of {', '.join(names)}"
            )
        check_same_options(state, expected, [name for name in expected if "version" not in name], "loader")
        stages = decode_state(state["pipeline"])
        if not isinstance(stages, dict) or stages.keys() != {stage.name for stage in self.options.stages}:
            raise StoreError("the state of a live pipeline is damaged", found=repr(stages)[:80])
        pipeline = make_pipeline(self.options, self.directory)
        pipeline.load_state(stages)
        self._pipeline.close()
        self._pipeline, self._running, self.delivered = pipeline, False, state["delivered"]

    def _compared_options(self) -> dict[str, Any]:
        """Return the versions, and the options on which the batches depend."""
        options = self.options
        return {
            "version": _STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": options.seed,
            "split": options.split,
            "val": options.val,
            "test": options.test,
            "pool_size": options.pool_size,
            "reservoir": options.reservoir,
            "batch_size": options.batch_size,
            "rank": options.rank,
            "world_size": options.world_size,
            "batch": {name: _plain(value) for name, value in asdict(options.batch).items()},
            "stages": [
                [
                    stage.kind,
                    {
                        name: _plain(value)
                        for name, value in sorted(stage.arguments.items())
                        if name != "threads"
                    },
                ]
                for stage in options.stages
                if stage.kind != "FilePathProvider"  # its options may differ between runs
            ],
        }

    # --- closing --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all stages and wait for their threads. Further calls do nothing.

        Raises:
            HexdataError: A thread has not ended.
        """
        self._closed = True
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise HexdataError(
            "a live loader cannot be sent to another process",
            hint="Create one in that process, or iterate in this one.",
        )


def _read_config(path: str | Path | None) -> LiveOptions:
    if path is None:
        return LiveOptions()
    check_location("config", path)
    return load_live_config(path)


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return an option as a state stores it: functions by name, tuples as lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value
