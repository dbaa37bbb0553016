"""The allowlist of names that a legacy pickle may import, each with a placeholder that runs no code.

Nothing that a pickle names is imported or called. An array becomes its dtype, shape and bytes; an enum member
becomes the name of its class and its value. All other names are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from hexdata.errors import FormatError, Reason, UnsafePickleError

__all__ = [
    "AllowedGlobal",
    "ByteArray",
    "EnumValue",
    "PickledArray",
    "PickledDtype",
    "PickledScalar",
    "build",
    "call",
    "find_global",
    "is_number",
    "kind_of",
    "shortened",
]

_DTYPE_CODES: Final = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
_MAX_DIMENSIONS: Final = 8
_LONGEST_NAME: Final = 80
"""Maximum number of characters of a name from the file in a message."""
NOT_RUN: Final = "No code of the file was run. Do not load this file with pickle.load."
"""Hint of the errors for unsafe pickles."""


@dataclass(slots=True)
class PickledDtype:
    """A bool, integer or float dtype. A BUILD opcode sets its byte order once, after it is created."""

    code: str
    """Kind and item size in bytes, such as "f4"."""
    order: str = ""
    """``<``, ``>`` or ``|``; empty before BUILD sets it."""
    used: bool = False
    """True if an array uses the dtype. Setting its byte order then would change that array in NumPy."""

    @property
    def name(self) -> str:
        """NumPy type string, such as "<f4"."""
        return (self.order or "<") + self.code


@dataclass(slots=True)
class PickledArray:
    """An array of the pickle. ``dtype`` is empty before BUILD fills in the array."""

    dtype: str = ""
    """NumPy type string: the byte order, then one of ``_DTYPE_CODES``."""
    shape: tuple[int, ...] = ()
    payload: bytes = b""
    """Bytes of the cells: product(shape) * itemsize."""
    fortran: bool = False
    """True if the cells are in Fortran order, where the first index changes fastest."""


class ByteArray(bytes):
    """A bytearray of the pickle. No allowed opcode can change it, so it is immutable here."""


@dataclass(frozen=True, slots=True)
class EnumValue:
    """A member of one of the legacy enums."""

    kind: str
    """Module and class of the enum, such as "hex_ai.enums.Player"."""
    value: int | str


@dataclass(frozen=True, slots=True)
class PickledScalar:
    """A NumPy scalar."""

    dtype: str
    value: bool | int | float


@dataclass(frozen=True, slots=True)
class AllowedGlobal:
    """An allowed global. ``make`` creates the result of calling it; None if it must not be called."""

    module: str
    name: str
    make: Callable[[AllowedGlobal, tuple[Any, ...]], object] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def is_number(value: object) -> bool:
    """Return whether a value of a pickle is an integer or a float, also of NumPy; a bool is neither."""
    if isinstance(value, PickledScalar):
        value = value.value
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def kind_of(value: object) -> str:
    """Return a description of the type of a value, for messages. Never contains its content."""
    if isinstance(value, PickledArray):
        return f"an array {value.dtype} {value.shape}"
    if isinstance(value, EnumValue):
        return value.kind
    if isinstance(value, PickledScalar):
        return f"a NumPy scalar {value.dtype}"
    if isinstance(value, AllowedGlobal):
        return str(value)
    if isinstance(value, ByteArray):
        return "bytearray"
    if isinstance(value, bytes):
        return "bytes"  # the fast path uses a subclass with another name
    return "None" if value is None else type(value).__name__


def shortened(name: str) -> str:
    """Return a name from a file for a message, shortened to 80 characters."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _unsafe(reason: str, found: object, code: Reason) -> UnsafePickleError:
    return UnsafePickleError(reason, code=code, found=found, hint=NOT_RUN)


# Functions that return the result of calling a name. The arguments are from the pickle and can be anything.


def _make_array(name: AllowedGlobal, args: tuple[Any, ...]) -> PickledArray:
    """Return the result of ``_reconstruct(ndarray, (0,), b"b")``, an empty array that BUILD fills in."""
    of_array = len(args) == 3 and isinstance(args[0], AllowedGlobal) and args[0].name == "ndarray"
    if not of_array or not _is_exactly(args[1], (0,)) or not _is_exactly(args[2], b"b"):
        raise _unsafe(f"calls {name} with other arguments than NumPy", _kinds(args), Reason.UNSAFE_CALL)
    return PickledArray()


def _make_dtype(name: AllowedGlobal, args: tuple[Any, ...]) -> PickledDtype:
    """Return the result of a call such as ``dtype("f4", False, True)``."""
    code = args[0] if args else None
    if not isinstance(code, str) or code not in _DTYPE_CODES:
        found = code[:20] if isinstance(code, str) else _kinds(args)
        raise _unsafe(f"uses a {name} that is neither bool, integer nor float", found, Reason.UNSAFE_DTYPE)
    if not any(_is_exactly(args[1:], flags) for flags in ((False, True), (0, 1))):
        raise _unsafe(f"calls {name} with other arguments than NumPy", _kinds(args), Reason.UNSAFE_CALL)
    return PickledDtype(str(code))


def _make_frombuffer(name: AllowedGlobal, args: tuple[Any, ...]) -> PickledArray:
    """Return the result of ``_frombuffer(buffer, dtype, shape, order)``: an array of protocol 5."""
    if len(args) != 4 or args[3] not in ("C", "F"):
        raise _unsafe(f"calls {name} with other arguments than NumPy", _kinds(args), Reason.UNSAFE_CALL)
    payload, dtype, shape, order = args
    if not payload:
        raise FormatError("an empty array in a buffer, which NumPy refuses", code=Reason.CORRUPT_ARRAY)
    return _checked(PickledArray(), dtype, shape, payload, fortran=order == "F")


def _make_scalar(name: AllowedGlobal, args: tuple[Any, ...]) -> PickledScalar:
    """Return the result of ``scalar(dtype, payload)``."""
    if len(args) != 2:
        raise _unsafe(f"calls {name} with other arguments than NumPy", _kinds(args), Reason.UNSAFE_CALL)
    if isinstance(args[1], ByteArray):
        raise _unsafe(f"calls {name} with other arguments than NumPy", _kinds(args), Reason.UNSAFE_CALL)
    array = _checked(PickledArray(), args[0], (), args[1], fortran=False)
    return PickledScalar(array.dtype, np.frombuffer(array.payload, array.dtype)[0].item())


def _make_bytes(name: AllowedGlobal, args: tuple[Any, ...]) -> bytes:
    """Return the result of ``_codecs.encode(text, "latin1")``: bytes of protocols 0 to 2."""
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        raise _unsafe(f"calls {name} with other arguments than pickle", _kinds(args), Reason.UNSAFE_CALL)
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        raise FormatError("a byte string with characters above 255", code=Reason.CORRUPT_PICKLE) from None


def _make_enum(name: AllowedGlobal, args: tuple[Any, ...]) -> EnumValue:
    """Return the result of a call such as ``Player(1)``."""
    if len(args) != 1 or isinstance(args[0], bool) or not isinstance(args[0], (int, str)):
        raise _unsafe(f"calls {name} with other arguments than pickle", _kinds(args), Reason.UNSAFE_CALL)
    return EnumValue(str(name), args[0])


def _kinds(args: tuple[Any, ...]) -> str:
    return f"({', '.join(kind_of(arg) for arg in args[:8])})"


_NAMES: Final[Mapping[tuple[str, str], AllowedGlobal]] = {
    (name.module, name.name): name
    for name in (
        *(
            AllowedGlobal(f"{core}.{module}", function, make)
            for core in ("numpy._core", "numpy.core")
            for module, function, make in (
                ("multiarray", "_reconstruct", _make_array),
                ("multiarray", "scalar", _make_scalar),
                ("numeric", "_frombuffer", _make_frombuffer),
            )
        ),
        AllowedGlobal("numpy", "ndarray"),
        AllowedGlobal("numpy", "dtype", _make_dtype),
        AllowedGlobal("_codecs", "encode", _make_bytes),
        *(
            AllowedGlobal(module, enum, _make_enum)
            for module in ("hex_ai.enums", "hex_ai.value_utils")
            for enum in ("Player", "Winner")
        ),
    )
}


def find_global(module: object, name: object) -> AllowedGlobal:
    """Return the placeholder of a global.

    Args:
        module: Name of the module, as the pickle has it.
        name: Name of the class or function, as the pickle has it.

    Raises:
        UnsafePickleError: "torch-tensors" for a name of PyTorch, "unsafe-global" for another name that is not
            allowed.
        FormatError: "corrupt-pickle", if ``module`` or ``name`` is not text.
    """
    if not isinstance(module, str) or not isinstance(name, str):
        raise FormatError("a global whose module or name is not text", code=Reason.CORRUPT_PICKLE)
    found = _NAMES.get((module, name))
    if found is not None:
        return found
    full_name = f"{module}.{name}"[:200]
    if module.partition(".")[0] == "torch":
        raise _unsafe(
            "a file of stacked PyTorch tensors (boards, policies, values), which hexdata does not read",
            full_name,
            Reason.TORCH_TENSORS,
        )
    raise _unsafe("imports a name that is not allowed", full_name, Reason.UNSAFE_GLOBAL)


def call(function: object, args: object) -> object:
    """Return the placeholder for the result of ``function(*args)``, as a REDUCE opcode requests.

    Args:
        function: Object that the pickle calls.
        args: Its arguments.

    Raises:
        UnsafePickleError: "unsafe-call", "unsafe-dtype" or "unsafe-array".
        FormatError: "corrupt-array" or "corrupt-pickle".
    """
    if not isinstance(function, AllowedGlobal) or function.make is None or not isinstance(args, tuple):
        raise _unsafe("calls an object that may not be called", kind_of(function), Reason.UNSAFE_CALL)
    return function.make(function, args)


def build(target: object, state: object) -> None:
    """Fill in an array or a dtype that was just created, as a BUILD opcode requests.

    Args:
        target: The array or dtype.
        state: Its state, as NumPy pickles it.

    Raises:
        UnsafePickleError: "unsafe-call", "unsafe-dtype" or "unsafe-array".
        FormatError: "corrupt-array".
    """
    if isinstance(target, PickledArray) and not target.dtype and isinstance(state, tuple) and len(state) == 5:
        version, shape, dtype, fortran, payload = state
        if not _is_exactly(version, 1) or type(fortran) is not bool or isinstance(payload, ByteArray):
            raise _unsafe(
                "sets the state of an array in another way than NumPy", _kinds(state), Reason.UNSAFE_ARRAY
            )
        _checked(target, dtype, shape, payload, fortran=fortran)
    elif isinstance(target, PickledDtype) and not target.order and isinstance(state, tuple):
        if target.used:
            raise _unsafe("changes the dtype of an existing array", kind_of(target), Reason.UNSAFE_DTYPE)
        order = state[1] if len(state) > 1 else None
        orders = ("|",) if target.code[1:] == "1" else ("<", ">")
        if order not in orders or not _is_exactly(state[:1] + state[2:], _PLAIN_STATE):
            raise _unsafe("uses a structured or object dtype", _kinds(state), Reason.UNSAFE_DTYPE)
        target.order = str(order)
    else:
        raise _unsafe("sets the state of an object that has none", kind_of(target), Reason.UNSAFE_CALL)


_PLAIN_STATE: Final = (3, None, None, None, -1, -1, 0)
"""State of a bool, integer or float dtype as NumPy pickles it, without the byte order."""


def _is_exactly(value: object, expected: object) -> bool:
    """Return whether two values are equal and of the same type: True is not 1, and -1.0 is not -1."""
    if isinstance(value, tuple) and isinstance(expected, tuple):
        return len(value) == len(expected) and all(map(_is_exactly, value, expected))
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected and isinstance(value, bool) == isinstance(expected, bool)
    if isinstance(value, bytes) and isinstance(expected, bytes):
        return value == expected and not isinstance(value, ByteArray)
    return value is expected


def _checked(
    array: PickledArray, dtype: object, shape: object, payload: object, *, fortran: bool
) -> PickledArray:
    """Fill in ``array`` and return it, after checking that dtype, shape and payload agree."""
    if not isinstance(dtype, PickledDtype):
        raise _unsafe("an array without a plain dtype", kind_of(dtype), Reason.UNSAFE_DTYPE)
    if not isinstance(payload, bytes):
        raise _unsafe("an array whose cells are not bytes", kind_of(payload), Reason.UNSAFE_ARRAY)
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_length, shape)):
        raise FormatError("an array's shape is not a tuple of lengths", code=Reason.CORRUPT_ARRAY)
    size = prod(shape) * int(dtype.code[1:])
    if len(payload) != size:
        raise FormatError(
            f"an array {dtype.name} {shape} with the wrong number of bytes",
            code=Reason.CORRUPT_ARRAY,
            found=f"{len(payload):,}",
            expected=f"{size:,}",
        )
    dtype.used = True
    array.dtype, array.shape, array.payload, array.fortran = dtype.name, shape, payload, fortran
    return array


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
