"""The unpickler on malicious and damaged pickles: no code runs, memory is bounded, errors name the fault."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import time
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import FormatError, UnsafePickleError
from hexdata.formats.legacy import LegacyReader
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, LegacyLimits
from hexdata.formats.legacy.unpickler import Memo
from tests.fuzz.pickles import check_file
from tests.kit.sources import read_source


def refused(path: Path, raw: bytes, limits: LegacyLimits = DEFAULT_LIMITS) -> FormatError:
    """Return the error for a file with these bytes."""
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "system", lambda command: pytest.fail(command))
        patch.setattr(LegacyReader, "limits", limits)
        with pytest.raises(FormatError) as caught:
            read_source(path)
    assert caught.value.path == str(path)
    return caught.value


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def file_with(opcodes: bytes) -> bytes:
    """Return a valid file with opcodes that push one value, the value of a key after the examples."""
    return b"\x80\x04}(X\x08\x00\x00\x00examples]X\x01\x00\x00\x00a" + opcodes + b"u."


# Files that are refused, by the code of the error

SYSTEM = b"cos\nsystem\n"
CALL = text("ls") + b"\x85R"
SHELL = SYSTEM + CALL
DTYPE = b"cnumpy\ndtype\n"
F4 = DTYPE + b"(" + text("f4") + b"\x89\x88tR"
STATE = b"(K\x03X\x01\x00\x00\x00%sNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
RECONSTRUCT = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
CELLS = b"(K\x01(K\x01th\x00\x89C\x04abcdtb"
ARRAY = RECONSTRUCT + b"(K\x00tC\x01btR"
HIDDEN = b"(" + SHELL + b"1"


def array_of(shape: bytes, payload: bytes) -> bytes:
    return RECONSTRUCT + b"K\x00\x85C\x01btR(K\x01" + shape + F4 + b"\x89" + payload + b"tb"


OPCODES: dict[str, tuple[bytes, ...]] = {
    "unsafe-opcode": (
        *(
            b"P12\n",
            b"K\x01Q",
            b"(ios\nsystem\n",
            b"(cnumpy\nndarray\no",
            b"cnumpy\nndarray\n)\x81",
            b"\x82\x01",
        ),
        *(b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"\x97", b"\x8f"),
        *(b"I01\n", b"L1L\n", b"F1\n", b"Va\n", b"]p1\n", b"g1\n", b"(l", b"(d"),  # protocol 0
        # INST, OBJ, NEWOBJ and NEWOBJ_EX of a function
        *(b"(" + text("true") + b"ios\nsystem\n", b"cnumpy\nndarray\n}\x85}\x92"),
    ),
    "unsafe-call": (
        *(b"cnumpy\nndarray\n)R", b"cnumpy\nndarray\n}b", b"K\x01)R", b"}}b", b"R"),
        *(b"chex_ai.enums\nPlayer\n(K\x01K\x02tR", b"chex_ai.enums\nPlayer\n(K\x01tR}b"),
        *(b"c_codecs\nencode\n(" + text("a") + text(codec) + b"tR" for codec in ("rot13", "unicode_escape")),
        b"c_codecs\nencode\n(]" + text("latin1") + b"tR",
        b"cnumpy._core.multiarray\n_reconstruct\n(K\x01K\x00tR",
        F4 + STATE % b"<" * 2,  # the dtype told twice
        DTYPE + b"(X\x02\x00\x00\x00f4\x89\x89tR" + STATE % b"<",  # no copy
    ),
    "unsafe-dtype": (
        *(DTYPE + b"(" + text(code) + b"\x89\x88tR" for code in ("O8", "V8")),
        DTYPE + b"(]tR",
        F4 + b"(K\x03" + text("|") + b"N(" + text("a") + b"t}K\x10K\x10K\x3ftb",  # fields
        F4 + b"(K\x03" + text("|") + b"(K\x01tNNK\x10K\x10K\x00tb",  # a subarray
        b"(" + F4 + b"q\x00" + ARRAY + CELLS + b"h\x00" + STATE % b">" + b"t",  # told after its use
        F4 + (STATE % b"<").replace(b"K\x03", b"K\x04"),  # of another version
        F4 + STATE % b"|",  # of no order
    ),
    "unsafe-array": (
        array_of(b"K\x01\x85", b"]"),
        array_of(b"K\x01\x85", text("abcd")),
        b"(" + F4 + b"q\x00" + ARRAY + CELLS.replace(b"(K\x01(", b"(K\x02(") + b"t",  # of another version
        b"(" + F4 + b"q\x00" + ARRAY + CELLS.replace(b"\x89", b"K\x00") + b"t",  # an order that is no bool
    ),
    "corrupt-array": (
        array_of(b"(K\x02K\x02t", b"C\x0f" + bytes(15)),
        *(
            array_of(b"(" + n * 2 + b"t", b"C\x04" + bytes(4))
            for n in (b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f")
        ),
        array_of(b"(" + b"K\x01" * 40 + b"t", b"C\x04" + bytes(4)),
        array_of(b"K\x01", b"C\x04" + bytes(4)),
    ),
    "corrupt-pickle": (
        *(
            b"X\x01\x00\x00\x00a)K\x01s",
            b"}()K\x01u",
            b"}(\x8a\x09" + b"\xff" * 8 + b"\x00K\x01u",
            b"}(K\x01u",
        ),
        *(b"]]", b"h\xc8", b"K\x01q\x05q\x05", b"\xff", b"\x8c\x02\xff\xff"),
        *(b"\x80\x06", b"\x8d" + b"\xff" * 8),
        # What the two unpicklers of Python read differently: memo numbers, frames
        *(b"]q\x05X\x01\x00\x00\x00b\x94h\x06\x86", b"]\x94X\x01\x00\x00\x00bq\x06h\x06\x86"),
        b"\x95\x03\0\0\0\0\0\0\0\x8c\x14" + b"A" * 20,  # a frame that ends in a text
        # In an integer, in the first frame and in the second
        *(at + b"\x95\x02\0\0\0\0\0\0\0J\x07\0\0\0a" for at in (b"", b"\x95\x01\0\0\0\0\0\0\0]")),
        b"\x95\x1e\0\0\0\0\0\0\0N\x95\x02\0\0\0\0\0\0\0N0",  # a frame that begins in another
    ),
    "limit-array": (
        b"B\xff\xff\xff\xff",
        *(op + b"\xff" * 7 + b"\x7f" for op in (b"\x8e", b"\x96")),
        b"\x96" + b"\xff" * 8,
    ),
    "limit-text": (b"X\xff\xff\xff\xff", b"\x8d" + b"\xff" * 7 + b"\x7f", b"c" + b"9" * 5_000),
    "limit-integer": (b"\x8b\xff\xff\xff\x7f", b"\x8a\xff" + bytes(255)),
    "limit-stack": (b"(" * 200_000, b"N" * 200_000),
    "limit-nesting": (
        *(b")" + b"\x85" * depth for depth in (200, 300_000)),
        b"]" * 30_000 + b"a" * 29_999,
        b"]q\x64h\x64a",  # a list that contains itself
    ),
    # Thirty tuples, each containing the previous one twice: a billion values in two hundred bytes.
    "limit-header": (b")q\x64" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(100, 130)),),
    "unsafe": (
        # Published bypasses of picklescan, fickling and modelscan: advisories and files of their tests.
        text("os") + b"\x940" + text("system") + b"\x940h\x00h\x01\x93",  # names from the memo
        text("numpy") + text("dtype.__init__.__globals__") + b"\x93",  # an attribute
        text("numpy") + text("f2py.os.system") + b"\x93",  # a submodule by its attribute
        text("NumPy") + text("dtype") + b"\x93",
        b"cnump\\x79\ndtype\n" + text("f4") + b"\x85R",
        SYSTEM + text("true") + b"\x85}\x92",
        b"Pos.system\n",
        b"cnumpy\nndarray\n}" + text("__setstate__") + SYSTEM + b"sb",
        b"(" + SYSTEM + text("true") + b"\x85R1N",  # a call below a mark that is removed
        b"\x95\x10\0\0\0\0\0\0\0" + SYSTEM + text("true") + b"\x85R",
        # malicious11, issue 22: memo numbers out of order
        b"Vos\np92\n0Vsystem\np93\n0Vtorch\np90\n0VLongStorage\np91\n0g92\ng93\n\x93" + CALL,
        b"S'os'\nS'system'\n\x93" + CALL,  # GHSA-9gvj-pp9x-gcfr, malicious23
        SHELL + b"0" + text("os") + b"\x94h\xc8h\0\x93",  # keyerror-exploit
        SHELL + b"0J\x2a\0\0\0\x94" + text("os") + b"\x93",  # type-confusion-exploit
        SHELL + b"X",  # broken_model
        b"coperator\nitemgetter\n(K\x01K\x02tR("
        + text("xos")
        + b"tR"
        + text("system")
        + b"\x93",  # fickling 125
        SYSTEM + b"t",  # fickling issue 188
        text("numpy") + text("ndarray") + b"\x93}}" + text("shape") + SYSTEM + b"s\x86b",  # modelscan 330
        *(SYSTEM + text("true") + b"\x85R" + tail for tail in (b"garbage", b"\xff")),
        b"K\x01" + text("system") + b"\x93",
        # CPython issue 154848: a call within the bytes after a frame; frames that end in names
        b"\x95\x02\0\0\0\0\0\0\0B\x40\0\0\0\0\0" + HIDDEN.ljust(0x3E, b"N"),
        b"\x95\x04\0\0\0\0\0\0\0cmacos\nsystem\n",
        b"\x95\x07\0\0\0\0\0\0\0cos\nsystem\n",
    ),
}
"""Opcodes that push one value; under "unsafe", those that would run code: unsafe or corrupt."""

FALSE_LENGTHS = ("limit-array", "limit-text", "limit-integer")
"""Limits on declared lengths, for which no memory may be reserved."""


@pytest.mark.parametrize("code", OPCODES)
def test_hostile_opcodes_are_refused(tmp_path: Path, code: str) -> None:
    for opcodes in OPCODES[code]:
        raw = file_with(opcodes)
        tracemalloc.start() if code in FALSE_LENGTHS else None
        error = refused(tmp_path / "a.pkl", raw)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20, opcodes[:80]
        tracemalloc.stop()
        is_unsafe = isinstance(error, UnsafePickleError)
        assert error.code == code or (code == "unsafe" and (is_unsafe or error.code == "corrupt-pickle")), (
            opcodes[:80]
        )
        assert is_unsafe == error.code.startswith("unsafe")
        assert "byte " in str(error) or code in ("limit-nesting", "limit-header")


def sound(protocol: int = 4, count: int = 1) -> bytes:
    return pickle.dumps(
        {"examples": [(np.zeros((2, 3, 3), "f4"), None, 0.5) for _ in range(count)], "b": 1}, protocol
    )


def zipped(raw: bytes, name: str = "data.pkl", offset: int | None = None) -> bytes:
    """Return a zip archive, in whose directory the byte at ``offset`` is inverted."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, raw)
    found = bytearray(buffer.getvalue())
    if offset is not None:
        found[found.find(b"PK\x01\x02") + offset] ^= 0xFF
    return bytes(found)


EXAMPLE = pickle.dumps({"board": None, "policy": None, "value": "t"}, 4)
EXAMPLE = (
    EXAMPLE[EXAMPLE.index(b"}") : -1]
    .replace(b"\x94", b"")
    .replace(b"\x8c\x01t", b"\x8c\x01t" + b"\x94" * 400_000)
)
FILES: dict[str, tuple[bytes, str]] = {
    "a frame that ends after the pickle": (
        b"\x80\x04\x95\xff\xff\0\0\0\0\0\0" + sound(3)[2:],
        "corrupt-pickle",
    ),
    "frames within one another": (
        sound(3)[:2] + b"\x95\x14\0\0\0\0\0\0\0" * 2 + sound(3)[2:],
        "corrupt-pickle",
    ),
    "a stack below its mark": (file_with(b"}K\x01(K\x02s0")[:-2] + b"tu.", "corrupt-pickle"),
    "examples in two places": (sound(3)[:-2] + b"X\x01\x00\x00\x00ch\x02u.", "shared-payload"),
    "examples that contain themselves": (b"\x80\x04}\x8c\x08examples]\x94h\x00as.", "shared-payload"),
    "games that contain themselves": (b"\x80\x02}X\x05\0\0\0games]q\x00h\x00as.", "shared-payload"),
    "many memo numbers in one example": (b"\x80\x04}\x8c\x08examples](" + EXAMPLE + b"es.", "limit-memo"),
    "a line after the pickle": (sound() + b"\n", "trailing-data"),
    "a second pickle": (pickle.dumps({"examples": []}) + file_with(SHELL), "trailing-data"),
    "pytorch_magic_bypass": (pickle.dumps(1001, 2) + file_with(SHELL), ""),
    "malicious1.zip": (zipped(file_with(SHELL)), ""),
    "malicious1_crc.zip, CVE-2025-10156": (zipped(file_with(SHELL), offset=16), ""),
    "malicious1_central_directory.zip": (zipped(file_with(SHELL), offset=28), ""),
    "malicious1_0x1.zip: encrypted": (zipped(file_with(SHELL), offset=8), ""),
    "an array of KataHex that is a pickle": (zipped(file_with(SHELL), "globalInputNC.npy"), ""),
    "bad_pytorch": (b"\x89PNG\r\n\x1a\n" + file_with(SHELL), ""),
    "object_array.npy": (b"\x93NUMPY\x01\0v\0" + b"{'descr': '|O', }".ljust(118) + file_with(SHELL), ""),
    "malicious-invalid-bytes": (file_with(SHELL)[:-1] + b"\n\n\t\t", "unsafe-global"),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    """CVE-2025-10155 is a pickle with another extension: the content decides, not the name."""
    raw, code = FILES[name]
    for extension in ("pkl", "pt", "txt", "npz")[: 1 if len(raw) > 10_000 else 4]:
        error = refused(tmp_path / f"a.{extension}", raw)
        assert error.code == code or not code
    if code == "trailing-data":
        assert refused(tmp_path / "a.pkl.gz", gzip.compress(raw)).code == code


@pytest.mark.parametrize(
    ("opcodes", "code", "limits"),
    [
        (b"]" + b"Na" * 200_000, "limit-items", {"items": 1 << 18}),
        (b"]" + b"N\x94a" * 200_000, "limit-memo", {"memo": 100_000}),
        (b"]" + (b"B\x00\x00\x01\x00" + bytes(65_536) + b"a") * 40, "limit-held", {"held_bytes": 1 << 20}),
        (b"](" + b"}" * 4_000_000, "limit-size", {"decompressed_bytes": 100_000}),
        (b"](" + b"}" * 4_000_000, "limit-ratio", {"ratio": 20, "ratio_floor": 100_000}),
        (b"\x8e" + struct.pack("<Q", 1 << 24) + bytes(1 << 24), "limit-array", {}),
    ],
)
def test_limits_bound_what_a_pickle_may_build(
    tmp_path: Path, opcodes: bytes, code: str, limits: dict[str, int]
) -> None:
    raw = gzip.compress(file_with(opcodes), 9, mtime=0)
    assert refused(tmp_path / "a.pkl", raw, replace(DEFAULT_LIMITS, **limits)).code == code  # type: ignore[arg-type]


def test_objects_beyond_the_limit_of_the_memo_are_dropped_in_linear_time() -> None:
    memo = Memo(replace(DEFAULT_LIMITS, memo_bytes=1 << 20))
    for number in range(200_000):
        memo.put(str(number))
    begun = time.process_time()
    memo.end_example()
    assert time.process_time() - begun < 3
    assert memo[199_999] == "199999"


@pytest.mark.parametrize("packed", [True, False])
def test_truncation_at_any_byte_is_refused(tmp_path: Path, packed: bool) -> None:
    raw = gzip.compress(sound(count=20), mtime=0) if packed else sound(count=20)
    for length in [*range(2, 40), *range(40, len(raw), 61), len(raw) - 1]:
        (tmp_path / "a.pkl").write_bytes(raw[:length])
        with pytest.raises(FormatError) as caught, LegacyReader(tmp_path / "a.pkl") as reader:
            list(reader.batches())
        assert (caught.value.code, "byte " in str(caught.value)) == ("truncated", True), length


# What is shared, as Python reads it


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_examples_and_the_header_may_share(tmp_path: Path, protocol: int) -> None:
    planes, ids, zoo = np.zeros((2, 3, 3), "f4"), (3, 4), {"zoo": [1, {"a": 2}]}
    example = {"board": planes, "policy": None, "value": 1.0}
    examples: list[Any] = [example | {"metadata": {"game_id": ids}}]
    mutable = [example | {"metadata": zoo}]
    for content, code in (
        ({"before": ids, "examples": examples, "after": [ids, zoo, zoo["zoo"]]}, ""),
        ({"before": zoo, "examples": [], "after": [zoo]}, "shared-payload"),
        ({"before": ids, "examples": examples}, ""),
        ({"before": zoo, "examples": mutable, "after": zoo}, "shared-payload"),
        ({"examples": examples, "hexdata:dialect": {"F": [examples, np.inf]}}, "shared-payload"),
        ({"examples": (none := []), "more": none}, "shared-payload"),
    ):
        (tmp_path / "a").write_bytes(pickle.dumps(content, protocol))
        assert check_file(tmp_path / "a") == (code, 0)


def test_a_run_that_shares_a_mutable_object_is_refused(tmp_path: Path) -> None:
    """Runs are converted after the examples, when later values may refer to the object again."""
    example = {"board": np.zeros((2, 3, 3), "f4"), "policy": None, "value": 0.5, "metadata": {"zoo": "text"}}
    raw = pickle.dumps(
        {"before": {}, "examples": [dict(example, board=example["board"].copy()) for _ in range(20)]}, 4
    )
    at = raw.rindex(b"h")
    assert refused(tmp_path / "a", raw[: at + 1] + b"\x02" + raw[at + 2 :]).code == "shared-payload"
