"""The allowlist of names that a legacy pickle may import, each with a placeholder that runs no code.

Nothing that a pickle names is imported or called. An array becomes its dtype, shape and bytes; an enum member
becomes the name of its class and its value. All other names are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from hexdata.errors import FormatError, Reason, UnsafePickleError

DTYPE_CODES: Final = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
"""Bools, integers and floats. Arrays of objects would contain pickles."""
_MAX_DIMENSIONS: Final = 8
"""Boards have three dimensions. With a limit, the product of the lengths stays a small integer."""
OBJECTS: Final = "Where the file is made, write an array of objects as a list: array.tolist()."
"""Hint of the errors for NumPy arrays of objects, which contain pickles."""
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
    """NumPy type string: the byte order, then one of ``DTYPE_CODES``."""
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
    """An allowed global, as of :func:`find_global`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def plain(value: Any) -> Any:
    """Return the number of a NumPy scalar; any other value unchanged."""
    return value.value if isinstance(value, PickledScalar) else value


def is_number(value: object) -> bool:
    """Return whether a value of a pickle is an integer or a float, also of NumPy; a bool is neither."""
    return isinstance(plain(value), (int, float)) and not isinstance(plain(value), bool)


def kind_of(value: object) -> str:
    """Return a description of the type of a value. Never contains its content."""
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
    return "None" if value is None else type(value).__name__


def layout_of(value: object, depth: int = 4) -> str:
    """Return the layout of an object of a pickle in words: types, keys and shapes, but no content."""
    if isinstance(value, dict) and depth:
        keys = [f"{str(key)[:40]!r}: {layout_of(each, depth - 1)}" for key, each in [*value.items()][:8]]
        return f"a dict of {len(value):,} ({', '.join(keys)})"
    if isinstance(value, tuple) and depth:
        return f"({', '.join(layout_of(each, depth - 1) for each in value[:8])})"
    if isinstance(value, list) and depth:
        return f"a list of {len(value):,}" + (f" of {layout_of(value[0], depth - 1)}" if value else "")
    return kind_of(value)


def unsafe(reason: str, found: object, code: Reason, hint: str = NOT_RUN) -> UnsafePickleError:
    """Return the error for a pickle that could run code."""
    return UnsafePickleError(reason, code, found, hint=hint)


_CORES: Final = ("numpy._core", "numpy.core")
"""The package was renamed in NumPy 2."""
ENUMS: Final = frozenset(
    f"hex_ai.{module}.{enum}" for module in ("enums", "value_utils") for enum in ("Player", "Winner")
)
"""Enums of the legacy tool, whose members are read and written by name and value."""
_NAMES: Final = frozenset(
    [
        *((f"{core}.multiarray", name) for core in _CORES for name in ("_reconstruct", "scalar")),
        *((f"{core}.numeric", "_frombuffer") for core in _CORES),
        *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"), ("collections", "deque")),
        *((module, name) for module, _, name in (enum.rpartition(".") for enum in ENUMS)),
    ]
)


def find_global(module: str, name: str) -> AllowedGlobal:
    """Return the placeholder of a global.

    Raises:
        UnsafePickleError: "torch-tensors" for a name of PyTorch, "unsafe-global" for another name that is not
            allowed.
    """
    if (module, name) in _NAMES:
        return AllowedGlobal(module, name)
    found = f"{module}.{name}"[:200]
    if module.partition(".")[0] == "torch":
        reason = "PyTorch tensors, which hexdata does not read: where the file is made, write tensor.numpy()"
        raise unsafe(reason, found, Reason.TORCH_TENSORS)
    reason = "a name of a program: where the file is made, write lists, tuples, dicts and arrays of NumPy"
    raise unsafe(reason, found, Reason.UNSAFE_GLOBAL)


def call(function: object, args: Any) -> object:
    """Return the placeholder for the result of ``function(*args)``, as a REDUCE opcode requests.

    Args:
        function: Object that the pickle calls.
        args: Its arguments, which can be anything. Only those that NumPy and pickle write are accepted.

    Raises:
        UnsafePickleError: "unsafe-call", "unsafe-dtype" or "unsafe-array".
        FormatError: "corrupt-array" or "corrupt-pickle".
    """
    if not isinstance(function, AllowedGlobal) or not isinstance(args, tuple):
        raise unsafe("calls an object that may not be called", kind_of(function), Reason.UNSAFE_CALL)
    match function.name, args:
        case "_reconstruct", (AllowedGlobal(name="ndarray"), tuple() as shape, kind) if _are(
            [*shape, kind], 0, b"b"
        ):
            return PickledArray()  # which BUILD fills in
        case "_frombuffer", (payload, dtype, shape, "C" | "F" as order):  # an array of protocol 5
            if not payload:
                raise FormatError("an empty array in a buffer, which NumPy refuses", Reason.CORRUPT_ARRAY)
            return _checked(PickledArray(), dtype, shape, payload, fortran=order == "F")
        case "scalar", (dtype, payload) if not isinstance(payload, ByteArray):
            array = _checked(PickledArray(), dtype, (), payload, fortran=False)
            return PickledScalar(array.dtype, np.frombuffer(array.payload, array.dtype)[0].item())
        case "dtype", (str() as code, 0, 1) if code in DTYPE_CODES:
            return PickledDtype(code)
        case "dtype", (code, *_) if not (isinstance(code, str) and code in DTYPE_CODES):
            found = code[:20] if isinstance(code, str) else kind_of(code)
            hint = f"{OBJECTS} {NOT_RUN}" if found.startswith("O") else NOT_RUN
            reason = "a dtype that is neither bool, integer nor float"
            raise unsafe(reason, found, Reason.UNSAFE_DTYPE, hint)
        # Any other encoding would be a call of a codec that the file chooses.
        case "encode", (str() as text, "latin1" | "latin-1"):  # bytes of protocols 0 to 2
            return text.encode("latin-1")
        case "Player" | "Winner", (int() | str() as value,) if not isinstance(value, bool):
            return EnumValue(str(function), value)
        # The maximum length of a deque is left out: it had no more items when it was pickled.
        case "deque", () | ((), int()):
            return []
    raise unsafe(f"calls {function} with other arguments than NumPy", _kinds(args), Reason.UNSAFE_CALL)


def _kinds(args: tuple[Any, ...]) -> str:
    return f"({', '.join(kind_of(arg) for arg in args[:8])})"


def build(target: object, state: object) -> None:
    """Fill in an array or a dtype that was just created, as a BUILD opcode requests.

    Args:
        target: The array or dtype.
        state: Its state, as NumPy pickles it.

    Raises:
        UnsafePickleError: "unsafe-call", "unsafe-dtype" or "unsafe-array".
        FormatError: "corrupt-array".
    """
    # Only once for each object: a second BUILD would change an array that an example has already.
    if isinstance(target, PickledArray) and not target.dtype and isinstance(state, tuple) and len(state) == 5:
        version, shape, dtype, fortran, payload = state
        if not _are([version], 1) or type(fortran) is not bool or isinstance(payload, ByteArray):
            raise unsafe("an array with another state than NumPy's", _kinds(state), Reason.UNSAFE_ARRAY)
        _checked(target, dtype, shape, payload, fortran=fortran)
    elif isinstance(target, PickledDtype) and not target.order and isinstance(state, tuple):
        if target.used:
            raise unsafe("changes the dtype of an existing array", kind_of(target), Reason.UNSAFE_DTYPE)
        order = state[1] if len(state) > 1 else None
        # NumPy writes "|" for items of one byte, which have no order.
        orders = ("|",) if target.code[1:] == "1" else ("<", ">")
        # The rest is the version, and a structure, a shape and flags that plain dtypes do not have.
        if order not in orders or not _are([state[0], *state[2:]], 3, None, None, None, -1, -1, 0):
            raise unsafe("uses a structured or object dtype", _kinds(state), Reason.UNSAFE_DTYPE)
        target.order = str(order)
    else:
        raise unsafe("sets the state of an object that has none", kind_of(target), Reason.UNSAFE_CALL)


def _are(values: list[Any], *expected: object) -> bool:
    """Return whether values are equal to others and of the same types: True is not 1, and -1.0 is not -1."""
    return values == [*expected] and [*map(type, values)] == [*map(type, expected)]


def _checked(
    array: PickledArray, dtype: object, shape: object, payload: object, *, fortran: bool
) -> PickledArray:
    """Fill in ``array`` and return it, after checking that dtype, shape and payload agree."""
    if not isinstance(dtype, PickledDtype):
        raise unsafe("an array without a plain dtype", kind_of(dtype), Reason.UNSAFE_DTYPE)
    if not isinstance(payload, bytes):
        raise unsafe("an array whose cells are not bytes", kind_of(payload), Reason.UNSAFE_ARRAY)
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_length, shape)):
        raise FormatError("an array's shape is not a tuple of lengths", Reason.CORRUPT_ARRAY)
    size = prod(shape) * int(dtype.code[1:])
    if len(payload) != size:
        raise FormatError(f"{len(payload):,} bytes in an array {shape} of {dtype.name}", Reason.CORRUPT_ARRAY)
    dtype.used = True
    array.dtype, array.shape, array.payload, array.fortran = dtype.name, shape, payload, fortran
    return array


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
