"""The unpickler on malicious and damaged pickles: no code runs, memory is bounded, errors name the fault."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import sys
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from hexdata.errors import FormatError, UnsafePickleError
from hexdata.formats import open_source
from hexdata.formats.legacy import DEFAULT_LIMITS, LegacyLimits, LegacyReader


def read(path, limits=DEFAULT_LIMITS):
    with LegacyReader(path, limits=limits) as file:
        return sum(batch.records for batch in file.batches())


@pytest.fixture
def refused(tmp_path):
    """Return the error for a file with these bytes, or with this object pickled."""

    def refused(content, limits=DEFAULT_LIMITS, packed=False):
        raw = content if isinstance(content, bytes) else pickle.dumps(content, 4)
        path = tmp_path / "a.pkl"
        path.write_bytes(gzip.compress(raw, 9, mtime=0) if packed else raw)
        with pytest.raises(FormatError) as caught:
            read(path, limits)
        assert caught.value.path == str(path)
        return caught.value

    return refused


def file_with(opcodes):
    """Return a valid file with opcodes that push one value, the value of a key after the examples."""
    return b"\x80\x04}(X\x08\x00\x00\x00examples]X\x01\x00\x00\x00a" + opcodes + b"u."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


class Calls:
    """An object that is pickled as a call of ``function(*args)``."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


# No code runs


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, ["touch {}"]), f"{os.system.__module__}.system"),
        ((eval, ["open('{}', 'w')"]), "builtins.eval"),
        ((exec, ["open('{}', 'w')"]), "builtins.exec"),
        ((getattr, ["{}", "upper"]), "builtins.getattr"),
        ((np.load, ["{}"]), "numpy.load"),
    ],
)
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("where", ["examples", "header"])
def test_forbidden_calls_are_refused(refused, tmp_path, call, name, protocol, where):
    trap = tmp_path / "trap"
    function, args = call
    call = Calls(function, *(arg.format(trap) for arg in args))
    content = {"examples": [call] if where == "examples" else [], "x": call}
    error = refused(pickle.dumps(content, protocol))
    assert isinstance(error, UnsafePickleError)
    assert error.code == "unsafe-global"
    assert name in str(error).replace("__builtin__", "builtins")
    assert not trap.exists()


class Odd:
    pass


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_instances_are_refused(refused, protocol):
    error = refused(pickle.dumps({"examples": [Odd()]}, protocol))
    assert isinstance(error, UnsafePickleError)


DTYPE = b"cnumpy\ndtype\n"
F4 = DTYPE + b"(" + text("f4") + b"\x89\x88tR"


@pytest.mark.parametrize(
    ("opcodes", "code"),
    [
        (b"P12\n", "unsafe-opcode"),
        (b"I1\nQ", "unsafe-opcode"),
        (b"(ios\nsystem\n", "unsafe-opcode"),
        (b"(cnumpy\nndarray\no", "unsafe-opcode"),
        (b"cnumpy\nndarray\n)\x81", "unsafe-opcode"),
        (b"\x82\x01", "unsafe-opcode"),
        (b"\x83\x01\x00", "unsafe-opcode"),
        (b"\x84\x01\x00\x00\x00", "unsafe-opcode"),
        (b"\x97", "unsafe-opcode"),
        (b"\x8f", "unsafe-opcode"),
        (b"cnumpy\nndarray\n)R", "unsafe-call"),
        (b"cnumpy\nndarray\n}b", "unsafe-call"),
        (b"K\x01)R", "unsafe-call"),
        (b"}}b", "unsafe-call"),
        (b"chex_ai.enums\nPlayer\n(K\x01K\x02tR", "unsafe-call"),
        (b"chex_ai.enums\nPlayer\n(K\x01tR}b", "unsafe-call"),
        (b"c_codecs\nencode\n(" + text("a") + text("rot13") + b"tR", "unsafe-call"),
        (b"cnumpy._core.multiarray\n_reconstruct\n(K\x01K\x00tR", "unsafe-call"),
        (DTYPE + b"(" + text("O8") + b"\x89\x88tR", "unsafe-dtype"),
        (DTYPE + b"(" + text("V8") + b"\x89\x88tR", "unsafe-dtype"),
        (DTYPE + b"(]tR", "unsafe-dtype"),
        (F4 + b"(K\x03" + text("|") + b"N(" + text("a") + b"t}K\x10K\x10K\x3ftb", "unsafe-dtype"),  # fields
        (F4 + b"(K\x03" + text("|") + b"(K\x01tNNK\x10K\x10K\x00tb", "unsafe-dtype"),  # a subarray
        (F4 + (b"(K\x03" + text("<") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb") * 2, "unsafe-call"),
        (b"X\x01\x00\x00\x00a)K\x01s", "corrupt-pickle"),
        (b"}()K\x01u", "corrupt-pickle"),
        (b"}(" + b"\x8a\x09" + b"\xff" * 8 + b"\x00K\x01u", "corrupt-pickle"),
        (b"}(K\x01u", "corrupt-pickle"),
        (b"]]", "corrupt-pickle"),
        (b"h\xc8", "corrupt-pickle"),
        (b"K\x01q\x05q\x05", "corrupt-pickle"),
        (b"\xff", "corrupt-pickle"),
        (b"R", "unsafe-call"),
        (b"\x8c\x02\xff\xff", "corrupt-pickle"),
        (b"Iabc\n", "corrupt-pickle"),
        (b"Fabc\n", "corrupt-pickle"),
        (b"gabc\n", "corrupt-pickle"),
        (b"\x80\x06", "corrupt-pickle"),
    ],
)  # fmt: skip
def test_other_operations_are_refused(refused, opcodes, code):
    error = refused(file_with(opcodes))
    assert error.code == code
    assert isinstance(error, UnsafePickleError) == code.startswith("unsafe")
    assert "byte " in str(error)


def array_opcodes(shape, payload):
    made = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
    return made + b"(K\x01" + shape + F4 + b"\x89" + payload + b"tb"


@pytest.mark.parametrize(
    ("shape", "payload", "code"),
    [
        (b"(K\x02K\x02t", b"C\x0f" + bytes(15), "corrupt-array"),
        (b"(J\xff\xff\xff\xffJ\xff\xff\xff\xfft", b"C\x04" + bytes(4), "corrupt-array"),
        (b"(" + b"K\x01" * 40 + b"t", b"C\x04" + bytes(4), "corrupt-array"),
        (b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft", b"C\x04" + bytes(4), "corrupt-array"),
        (b"K\x01", b"C\x04" + bytes(4), "corrupt-array"),
        (b"K\x01\x85", b"]", "unsafe-array"),
        (b"K\x01\x85", text("abcd"), "unsafe-array"),
    ],
)
def test_inconsistent_arrays_are_refused(refused, shape, payload, code):
    assert refused(file_with(array_opcodes(shape, payload))).code == code


def test_a_valid_array_is_accepted(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(file_with(array_opcodes(b"K\x01\x85", b"C\x04" + bytes(4))))
    assert read(path) == 0


# Limits


@pytest.mark.parametrize(
    ("opcodes", "code"),
    [
        (b"B\xff\xff\xff\xff", "limit-array"),
        (b"\x8e" + b"\xff" * 7 + b"\x7f", "limit-array"),
        (b"\x96" + b"\xff" * 8, "limit-array"),
        (b"X\xff\xff\xff\xff", "limit-text"),
        (b"\x8d" + b"\xff" * 8, "limit-text"),
        (b"\x8b\xff\xff\xff\x7f", "limit-integer"),
        (b"\x8a\xff" + bytes(255), "limit-integer"),
        (b"I" + b"9" * 900 + b"\n", "limit-integer"),
        (b"I" + b"9" * 5_000, "limit-text"),
    ],
)
def test_a_false_length_allocates_no_memory(refused, opcodes, code):
    tracemalloc.start()
    error = refused(file_with(opcodes))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.code == code
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("opcodes", "code", "limits"),
    [
        (b"(" * 3_000_000, "limit-stack", {}),
        (b"N" * 3_000_000, "limit-stack", {}),
        (b"]" + b"Na" * 1_000_000, "limit-items", {"items": 1 << 20}),
        (b"]" + b"N\x94a" * 1_000_000, "limit-memo", {"memo": 100_000}),
        (b"]" + (b"B\x00\x00\x01\x00" + bytes(65_536) + b"a") * 40, "limit-held", {"held_bytes": 1 << 20}),
        (b")" + b"\x85" * 200, "limit-nesting", {}),
    ],
)
def test_limits_bound_what_a_pickle_may_build(refused, opcodes, code, limits):
    assert refused(file_with(opcodes), replace(DEFAULT_LIMITS, **limits)).code == code


def test_a_value_that_contains_itself_is_refused(refused):
    assert refused(file_with(b"]q\x64h\x64a")).code == "limit-nesting"


def test_exponentially_nested_header_is_refused(refused):
    """Thirty tuples, each containing the previous one twice: a billion values in two hundred bytes."""
    doubling = b"".join(b"h%c\x86q%c" % (place, place + 1) for place in range(100, 130))
    assert refused(file_with(b")q\x64" + doubling)).code == "limit-header"


def test_exponentially_nested_metadata_rejects_one_record(tmp_path):
    value = []
    for _ in range(40):
        value = [value, value]
    planes = np.zeros((2, 3, 3), "f4")
    example = {"board": planes, "policy": None, "value": 1.0, "metadata": {"zoo": value}}
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"examples": [example]}))
    with LegacyReader(path) as file:
        (batch,) = file.batches()
    assert [item.reason for item in batch.rejected] == ["metadata-size"]


def test_deep_nesting_does_not_recurse(refused):
    depth = 300_000
    assert refused(file_with(b"]" * 30_000 + b"a" * 29_999)).code == "limit-nesting"
    assert refused(file_with(b")" + b"\x85" * depth)).code == "limit-nesting"


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"decompressed_bytes": 100_000}, "limit-size"),
        ({"ratio": 20, "ratio_floor": 100_000}, "limit-ratio"),
        ({}, "limit-array"),
    ],
)
def test_gzip_bombs(refused, limits, code):
    bomb = file_with(b"\x8e" + struct.pack("<Q", 1 << 24) + bytes(1 << 24))
    if limits:
        bomb = b"\x80\x04}(" + text("examples") + b"](" + b"}" * 4_000_000
    assert refused(bomb, replace(DEFAULT_LIMITS, **limits), packed=True).code == code


def test_limits_are_positive():
    with pytest.raises(ValueError, match="stack must be positive"):
        LegacyLimits(stack=0)


# Damage


def sound():
    examples = [(np.zeros((2, 3, 3), "f4"), np.zeros(9, "f4"), 0.5) for _ in range(20)]
    return pickle.dumps({"examples": examples, "source_file": "a"}, 4)


@pytest.mark.parametrize("packed", [True, False])
def test_truncation_at_any_byte_is_refused(refused, tmp_path, packed):
    raw = gzip.compress(sound(), mtime=0) if packed else sound()
    path = tmp_path / "a.pkl"
    for length in [*range(2, 40), *range(40, len(raw), 37), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(FormatError) as caught:
            read(path)
        assert caught.value.code == "truncated", length
        assert "byte " in str(caught.value)
    path.write_bytes(raw)
    assert read(path) == 20


def test_damaged_gzip(refused, tmp_path):
    packed = bytearray(gzip.compress(sound(), mtime=0))
    packed[-6] ^= 1  # of the checksum
    error = refused(bytes(packed))
    assert error.code == "corrupt-gzip"
    assert "byte " in str(error)
    packed[12:40] = bytes(28)
    assert refused(bytes(packed)).code == "corrupt-gzip"


def test_two_gzip_members_are_one_stream(tmp_path):
    path, raw = tmp_path / "a.pkl", sound()
    path.write_bytes(gzip.compress(raw[:500]) + gzip.compress(raw[500:]) + bytes(100))
    assert read(path) == 20


@pytest.mark.parametrize("more", [b"\n", sound()])
def test_data_after_the_pickle_is_refused(refused, more):
    error = refused(sound() + more, packed=True)
    assert error.code == "trailing-data"
    assert f"byte {len(sound())}" in str(error)


def test_a_missing_file_raises_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        LegacyReader(tmp_path / "none.pkl")


# Known ways around scanners of pickles

SYSTEM = b"cos\nsystem\n"
EVASIONS = {
    "STACK_GLOBAL with names from the memo": text("os") + b"\x940" + text("system") + b"\x940h\x00h\x01\x93",
    "STACK_GLOBAL beside other names": text("numpy") + b"\x940" + text("os") + text("system") + b"\x93",
    "STACK_GLOBAL with lines in the name": text("numpy\ndtype") + text("os\nsystem") + b"\x93",
    "STACK_GLOBAL with a name that is no text": b"K\x01" + text("system") + b"\x93",
    "an attribute of an allowed module": text("numpy") + text("dtype.__init__.__globals__") + b"\x93",
    "an attribute of an allowed class": text("numpy") + text("ndarray.tofile") + b"\x93",
    "a submodule by its attribute": text("numpy") + text("f2py.os.system") + b"\x93",
    "a longer module": text("numpy.os") + text("system") + b"\x93",
    "a module in other letters": text("NumPy") + text("dtype") + b"\x93",
    "a module with a blank": text("numpy ") + text("dtype") + b"\x93",
    "a module that looks the same": b"\x8c\x06n\xd1\x83mpy" + text("dtype") + b"\x93",
    "a codec that runs code": b"c_codecs\nencode\n(" + text("x") + text("unicode_escape") + b"tR",
    "a function beside an allowed one": b"c_codecs\nlookup\n" + text("utf-8") + b"\x85R",
    "a loader of pickles": b"cnumpy\nload\n" + text("a.npy") + b"\x85R",
    "a nested pickle": b"cpickle\nloads\n" + b"C\x01." + b"\x85R",
    "a nested pickle by its C module": b"c_pickle\nloads\n" + b"C\x01." + b"\x85R",
    "a function by operator": b"coperator\nattrgetter\n" + text("system") + b"\x85R",
    "a partial function": b"cfunctools\npartial\n" + SYSTEM + b"\x85R",
    "getattr of builtins": b"cbuiltins\ngetattr\n(" + SYSTEM + text("__call__") + b"tR",
    "builtins by its old name": b"c__builtin__\neval\n" + text("1") + b"\x85R",
    "a module that is rarely listed": b"ctimeit\ntimeit\n" + text("1") + b"\x85R",
    "a package manager": b"cpip\nmain\n]\x85R",
    "a test runner of NumPy": b"cnumpy.testing._private.utils\nrunstring\n(" + text("1") + b"}tR",
    "a compiler of NumPy": b"cnumpy.f2py.crackfortran\ngetlincoef\n(" + text("1") + b"}tR",
    "INST": b"(" + text("true") + b"ios\nsystem\n",
    "OBJ": b"(" + SYSTEM + text("true") + b"o",
    "NEWOBJ": SYSTEM + text("true") + b"\x85\x81",
    "NEWOBJ_EX": SYSTEM + text("true") + b"\x85}\x92",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x01",
    "EXT4": b"\x84\x01\x01\x01\x01",
    "PERSID": b"Pos.system\n",
    "BINPERSID": text("os.system") + b"Q",
    "BUILD of attributes": b"cnumpy\nndarray\n}" + text("__setstate__") + SYSTEM + b"sb",
    "a call that is removed again": SYSTEM + text("true") + b"\x85R0N",
    "a call below a mark that is removed": b"(" + SYSTEM + text("true") + b"\x85R1N",
    "a call of an earlier global": SYSTEM + b"q\x630N0h\x63" + text("true") + b"\x85R",
    "a protocol within the pickle": b"\x80\x00" + SYSTEM + text("true") + b"\x85R",
    "a frame around the call": b"\x95\x10\0\0\0\0\0\0\0" + SYSTEM + text("true") + b"\x85R",
}  # fmt: skip


@pytest.mark.parametrize("name", EVASIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_known_evasions_of_scanners_are_refused(refused, monkeypatch, name, packed):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    error = refused(file_with(EVASIONS[name]), packed=packed)
    assert error.code in ("unsafe-global", "unsafe-opcode", "unsafe-call", "corrupt-pickle")
    assert isinstance(error, UnsafePickleError) or error.code == "corrupt-pickle"


@pytest.mark.parametrize("tail", [b"garbage", b"\xff", SYSTEM + b"(tR."])
def test_a_call_is_refused_although_the_rest_is_damaged(refused, tail):
    """Python would run the call before it finds the damage, which is all that some scanners report."""
    raw = file_with(SYSTEM + text("true") + b"\x85R")
    assert refused(raw[:-2] + tail).code == "unsafe-global"


@pytest.mark.parametrize(
    "magic", [b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"7z\xbc\xaf\x27\x1c", b"\x89HDF\r\n"]
)
def test_a_pickle_in_another_container_is_refused(refused, magic):
    assert refused(magic + file_with(SYSTEM + text("true") + b"\x85R")).code not in ("", None)


def test_a_second_pickle_in_the_file_is_refused(refused):
    first = pickle.dumps({"examples": []}, 4)
    assert refused(first + file_with(SYSTEM + text("true") + b"\x85R")).code != ""


# Published bypasses of picklescan (mmaitre314/picklescan), fickling (trailofbits/fickling) and modelscan
# (protectai/modelscan): names GHSA-… are security advisories of these projects, also CVE-2025-10155 to 10157,
# CVE-2026-22606 to 22609 and CVE-2026-14534. Other names are files of their tests.

GADGETS = {
    "GHSA-4r9r-ch6f-vxmx": "torch.utils.bottleneck.__main__ run_cprofile",
    "GHSA-86cj-95qr-2p4f": "torch._dynamo.guards GuardBuilder.get",
    "GHSA-f4x7-rfwp-v3xw": "torch.fx.experimental.symbolic_shapes ShapeEnv.evaluate_guards_expression",
    "GHSA-f745-w6jp-hpxx": "torch.utils.collect_env run",
    "GHSA-jhph-76pp-mggw": "torch.utils.collect_env run_and_read_all",
    "GHSA-h3qp-7fh3-f8h4": "torch.utils.data.datapipes.utils.decoder basichandlers",
    "GHSA-vr7h-p6mm-wpmh": "torch.jit.unsupported_tensor_ops execWrapper",
    "GHSA-vv6j-3g6g-2pvj": "torch.utils._config_module ConfigModule.load_config",
    "GHSA-5qwp-399c-mjwf": "trace Trace.run",
    "GHSA-g344-hcph-8vgg": "trace Trace.runctx",
    "GHSA-x696-vm39-cp64": "profile Profile.run",
    "GHSA-6vqj-c2q5-j97w": "profile Profile.runctx",
    "GHSA-f54q-57x4-jg88": "lib2to3.pgen2.grammar Grammar.loads",
    "GHSA-3vg9-h568-4w9m": "idlelib.debugobj ObjectTreeItem.SetText",
    "GHSA-6w4w-5w54-rjvr": "idlelib.autocomplete AutoComplete.get_entity",
    "GHSA-7cq8-mj8x-j263": "idlelib.autocomplete AutoComplete.fetch_completions",
    "GHSA-cj3c-v495-4xqh": "code InteractiveInterpreter.runcode",
    "GHSA-8r4j-24qv-fmq9": "idlelib.calltip Calltip.fetch_tip",
    "GHSA-9xph-j2h6-g47v": "idlelib.calltip get_entity",
    "GHSA-4whj-rm5r-c2v8": "torch.utils.bottleneck.__main__ run_autograd_prof",
    "GHSA-xp4f-hrf8-rxw7": "ensurepip _run_pip",
    "GHSA-p9w7-82w4-7q8m": "lib2to3.pgen2.pgen ParserGenerator.make_label",
    "GHSA-m869-42cg-3xwr": "idlelib.run Executive.runcode",
    "GHSA-j343-8v2j-ff7w": "idlelib.pyshell ModifiedInterpreter.runcommand",
    "GHSA-3gf5-cxq9-w223": "idlelib.pyshell ModifiedInterpreter.runcode",
    "GHSA-fqq6-7vqf-w3fg": "doctest debug_script",
    "GHSA-9w88-8rmg-7g2p": "cProfile runctx",
    "GHSA-49gj-c84q-6qm9, GHSA-p523-jq9w-64x9": "cProfile run",
    "GHSA-7wx9-6375-f5wh": "profile run",
    "GHSA-q77w-mwjj-7mqx, GHSA-f7qq-56ww-84cr": "asyncio.unix_events _UnixSubprocessTransport._start",
    "GHSA-v7x6-rv5q-mhwc, malicious21": "timeit timeit",
    "GHSA-m273-6v24-x4m4": "distutils.file_util write_file",
    "GHSA-4675-36f9-wf6r, GHSA-q5qq-mvfm-j35x": "ctypes CDLL",
    "GHSA-84r2-jw7c-4r5q, GHSA-5hvc-6wx8-mvv4": "pydoc locate",
    "GHSA-84r2-jw7c-4r5q": "operator methodcaller",
    "GHSA-vqmv-47xg-9wpr, GHSA-r7v6-mfhq-g3m2": "pty spawn",
    "GHSA-r8g5-cgf2-4m4m": "numpy.f2py.crackfortran getlincoef",
    "GHSA-955r-x9j8-7rhh": "_operator methodcaller",
    "GHSA-46h3-79wf-xr6c": "_operator attrgetter",
    "GHSA-vvpj-8cmc-gx39": "pkgutil resolve_name",
    "GHSA-g38g-8gr9-h9xp, GHSA-5hwf-rc88-82xm": "uuid _get_command_stdout",
    "GHSA-g38g-8gr9-h9xp _osx_support": "_osx_support _read_output",
    "GHSA-g38g-8gr9-h9xp _aix_support": "_aix_support _read_cmd_output",
    "GHSA-g38g-8gr9-h9xp imaplib": "imaplib IMAP4_stream",
    "GHSA-g38g-8gr9-h9xp _pyrepl": "_pyrepl.pager pipe_pager",
    "GHSA-g38g-8gr9-h9xp test": "test.support.script_helper assert_python_ok",
    "GHSA-565g-hwwr-4pp3": "marshal loads",
    "GHSA-565g-hwwr-4pp3 types": "types FunctionType",
    "GHSA-wfq2-52f7-7qvj": "runpy run_path",
    "GHSA-wfq2-52f7-7qvj run_module": "runpy run_module",
    "GHSA-q5qq-mvfm-j35x importlib": "importlib import_module",
    "GHSA-q5qq-mvfm-j35x code": "code InteractiveInterpreter",
    "GHSA-q5qq-mvfm-j35x multiprocessing": "multiprocessing.util spawnv_passfds",
    "GHSA-h4rm-mm56-xf63": "builtins __import__",
    "GHSA-mxhj-88fx-4pcv": "smtplib SMTP",
    "GHSA-5j3x-jp52-966f": "pathlib os.system",
    "GHSA-cffv-grgg-g429": "ast parse",
    "GHSA-6ggj-6f2q-f7mx": "_interpreters create",
    "GHSA-6ggj-6f2q-f7mx _xxsubinterpreters": "_xxsubinterpreters create",
    "GHSA-m6fh-58r7-x697": "_posixsubprocess fork_exec",
    "GHSA-m6fh-58r7-x697 site": "site execsitecustomize",
    "GHSA-m6fh-58r7-x697 atexit": "atexit _run_exitfuncs",
    "malicious3": "http.client HTTPSConnection",
    "malicious7": "socket create_connection",
    "malicious8": "subprocess run",
    "malicious9": "sys exit",
    "malicious14": "runpy _run_code",
    "malicious15": "bdb Bdb.run",
    "malicious16": "pip main",
    "malicious17": "torch._inductor.codecache compile_file",
    "malicious18": "pydoc pipepager",
    "malicious19": "functools partial",
    "malicious20": "venv create",
    "malicious22": "numpy.testing._private.utils runstring",
    "types_CodeType": "types CodeType",
    "cloudpickle_codeinjection": "cloudpickle.cloudpickle _make_function",
    "io_FileIO": "io FileIO",
    "urllib_request_urlopen": "urllib.request urlopen",
    "logging_FileHandler": "logging FileHandler",
    "sys_module_override_sploit": "sys modules",
    "CVE-2025-10157": "ctypes.util find_library",
    "modelscan issue 330": "numpy __builtins__",
    "modelscan issue 330, size": "numpy size",
    "fickling __future__": "__future__ _ssl.RAND_bytes",
}
"""A function that a scanner did not know, by source."""


@pytest.mark.parametrize("source", GADGETS)
def test_functions_that_scanners_missed_are_refused(refused, source):
    module, name = GADGETS[source].split()
    before = set(sys.modules)
    line = module.encode() + b"\n" + name.encode() + b"\n"
    arguments = text("x") + b"\x85"
    pushed = [b"c" + line, text(module) + text(name) + b"\x93", text(module) + b"\x94" + text(name) + b"\x93"]
    calls = [each + arguments + b"R0N" for each in pushed]  # the result is not used
    calls += [b"(" + pushed[1] + text("x") + b"o0N"]  # OBJ, as in GHSA-mxhj-88fx-4pcv
    calls += [pushed[1] + arguments + b"\x81", b"(" + text("x") + b"i" + line, pushed[0]]
    for opcodes in calls:
        error = refused(file_with(opcodes))
        assert isinstance(error, UnsafePickleError)
        assert error.code in ("unsafe-global", "unsafe-opcode", "torch-tensors")
    assert set(sys.modules) == before


def string(value):
    return b"S'" + value.encode() + b"'\n"


CALL = text("ls") + b"\x85R"
SHELL = SYSTEM + CALL
STRUCTURES = {
    "malicious0: globals, compile, eval and getattr of __builtin__": b"c__builtin__\nglobals\n(tRp100\n0N",
    "malicious10: INST of exec": b"(" + text("1") + b"i__builtin__\nexec\n",
    "malicious11, issue 22: STACK_GLOBAL with memo numbers out of order": (
        b"Vos\np92\n0Vsystem\np93\n0Vtorch\np90\n0VLongStorage\np91\n0g92\ng93\n\x93" + CALL
    ),
    "malicious12: attrgetter of an imported module": (
        text("operator") + text("attrgetter") + b"\x93" + text("system") + b"\x85R"
    ),
    "GHSA-9gvj-pp9x-gcfr, malicious23: STACK_GLOBAL with STRING": string("os")
    + string("system")
    + b"\x93"
    + CALL,
    "BINSTRING as the names of STACK_GLOBAL": b"T\x02\0\0\0osU\x06system\x93" + CALL,
    "keyerror-exploit: a reference that does not exist after the call": SHELL
    + b"0"
    + text("os")
    + b"\x94h\xc8h\0\x93",
    "type-confusion-exploit: a number as a module after the call": SHELL
    + b"0J\x2a\0\0\0\x94"
    + text("os")
    + b"\x93",
    "broken_model: an opcode without its argument after the call": SHELL + b"X",
    "fickling issue 138: an invalid opcode after the call": SHELL + b"\xfe",
    "fickling pull 108: OBJ without PROTO": b"(cpty\nspawn\n" + text("id") + b"o",
    "fickling issue 125: names of STACK_GLOBAL that are computed": (
        b"coperator\nitemgetter\n(K\x01K\x02tR(" + text("xos") + b"tR" + text("system") + b"\x93"
    ),
    "fickling issue 188: a tuple without a mark": SYSTEM + b"t",
    "modelscan issue 330: BUILD of a function of NumPy": (
        text("numpy") + text("ndarray") + b"\x93}}" + text("shape") + SYSTEM + b"s\x86b"
    ),
    "modelscan issue 330: a method that BUILD replaced": (
        text("numpy") + text("dtype") + b"\x93N}" + text("__reduce__") + SYSTEM + b"s\x86b"
    ),
    "_codecs.encode as a step to exec": b"c_codecs\nencode\n(" + text("1") + text("zlib_codec") + b"tR",
    "_codecs.encode of an object": b"c_codecs\nencode\n(]" + text("latin1") + b"tR",
    "dup and memo of a global": SYSTEM + b"2\x94" + CALL,
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("packed", [False, True])
def test_structures_that_scanners_missed_are_refused(refused, monkeypatch, name, packed):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    error = refused(file_with(STRUCTURES[name]), packed=packed)
    assert isinstance(error, UnsafePickleError) or error.code == "corrupt-pickle"


HIDDEN = b"(" + SHELL + b"1"
FRAMES = {
    "CPython issue 154848: a call within the bytes after a frame": (
        b"\x95\x02\0\0\0\0\0\0\0B\x40\0\0\0\0\0" + HIDDEN.ljust(0x3E, b"N")
    ),
    "a frame that ends in a text": b"\x95\x03\0\0\0\0\0\0\0\x8c\x14" + b"A" * 20,
    "a frame that ends in the name of a module": b"\x95\x04\0\0\0\0\0\0\0cmacos\nsystem\n",
    "a frame that ends in the name of a function": b"\x95\x07\0\0\0\0\0\0\0cos\nsystem\n",
    "a frame that ends in an integer": b"\x95\x02\0\0\0\0\0\0\0J\x07\0\0\0",
    "a frame that begins in another frame": b"\x95\x1e\0\0\0\0\0\0\0N\x95\x02\0\0\0\0\0\0\0N0",
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_two_unpicklers_read_differently_are_refused(refused, name):
    assert refused(file_with(FRAMES[name])).code in ("corrupt-pickle", "unsafe-global")


def zipped(raw, name="data.pkl", **changes):
    """Return a zip archive; ``changes`` are offsets in its directory, where a byte is inverted."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, raw)
    found = bytearray(buffer.getvalue())
    for offset in changes.values():
        found[found.find(b"PK\x01\x02") + offset] ^= 0xFF
    return bytes(found)


@pytest.mark.parametrize(
    ("name", "raw"),
    {
        "malicious1.zip": zipped(file_with(SHELL)),
        "malicious1_wrong_ext.zip": zipped(file_with(SHELL), "data.txt"),
        "malicious1_crc.zip, CVE-2025-10156": zipped(file_with(SHELL), crc=16),
        "malicious1_central_directory.zip": zipped(file_with(SHELL), name_size=28),
        "malicious1_0x1.zip: encrypted": zipped(file_with(SHELL), flags=8),
        "an array of KataHex that is a pickle": zipped(file_with(SHELL), "globalInputNC.npy"),
        "malicious6: a second pickle": pickle.dumps({"examples": []}) + file_with(SHELL),
        "pytorch_magic_bypass: the second of several pickles": pickle.dumps(1001, 2) + file_with(SHELL),
        "bad_pytorch": b"\x89PNG\r\n\x1a\n" + file_with(SHELL),
        "object_array.npy": b"\x93NUMPY\x01\0v\0" + b"{'descr': '|O', }".ljust(118) + file_with(SHELL),
        "malicious-invalid-bytes": file_with(SHELL)[:-1] + b"\n\n\t\t",
    }.items(),
)
def test_containers_that_scanners_missed_are_refused(tmp_path, monkeypatch, name, raw):
    """CVE-2025-10155 is a pickle with another extension: the content decides, not the name."""
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    for extension in ("pkl", "bin", "pt", "pth", "txt", "npz"):
        path = tmp_path / f"a.{extension}"
        path.write_bytes(raw)
        with pytest.raises(FormatError), open_source(path) as reader:
            list(reader.batches())
