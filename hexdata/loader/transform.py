"""A function given by the user that is applied to each batch before it is delivered."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

from hexdata.batch import Batch
from hexdata.errors import ConfigError

__all__ = ["BatchTransform", "TransformFunction", "make_transform"]

TransformFunction = Callable[[Batch], Mapping[str, Any]]
"""Function from a batch to a mapping of names to arrays."""


class BatchTransform:
    """A checked transform. It can be pickled if its function can.

    Args:
        function: Called with each batch, a dict of arrays.

    Raises:
        ConfigError: ``function`` cannot be called.
    """

    def __init__(self, function: TransformFunction) -> None:
        if not callable(function):
            raise ConfigError(
                "transform cannot be used", found=repr(function), expected="a function of one argument"
            )
        self._function = function

    def __call__(self, batch: Batch, step: int, epoch: int) -> Batch:
        """Return the batch that the function returns for a batch.

        Raises:
            ConfigError: The function raised an exception, or it did not return a mapping of arrays.
        """
        record = f"batch {step} of epoch {epoch}"
        try:
            result = self._function(batch)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                "transform raised an exception",
                record=record,
                found=f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})",
            ) from error
        if not isinstance(result, Mapping):
            raise _result_error(record, type(result).__name__)
        for name, array in result.items():
            if not (isinstance(name, str) and hasattr(array, "dtype") and hasattr(array, "shape")):
                raise _result_error(record, f"{name!r}: {type(array).__name__}")
        return dict(result)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle.

        Raises:
            ConfigError: The function cannot be pickled.
        """
        try:
            ForkingPickler.dumps(self._function)
        except Exception as error:
            raise ConfigError(
                "transform cannot be sent to worker processes",
                found=f"{self._function!r}: {error}",
                expected="a function that can be pickled",
                hint="Define the function at the top level of a module, or start the workers with 'fork'.",
            ) from error
        return self.__dict__


def make_transform(function: TransformFunction | None) -> BatchTransform | None:
    """Return the option ``transform`` of a loader as a checked transform; None for none."""
    return None if function is None else BatchTransform(function)


def _result_error(record: str, found: str) -> ConfigError:
    return ConfigError(
        "transform returned no batch", record=record, found=found, expected="a mapping of names to arrays"
    )
