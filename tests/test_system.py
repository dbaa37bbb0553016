"""Locks and other calls of the operating system, on this system and, simulated, on Windows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata import system

PACKAGE = Path(system.__file__).parent
UNIX_ONLY = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"}


def test_only_one_module_imports_modules_of_one_system() -> None:
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        found = names & (UNIX_ONLY | {"msvcrt", "winreg", "_winapi"})
        assert path == PACKAGE / "system.py" or not found, path


def test_a_lock_excludes_other_files_that_are_open(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("wb") as first, path.open("rb") as second, path.open("rb") as third:
        system.lock_file(first)
        with pytest.raises(BlockingIOError):
            system.lock_file(second, shared=True)
        system.unlock_file(first)
        system.lock_file(second, shared=True)
        system.lock_file(third.fileno(), shared=True)
        with pytest.raises(BlockingIOError):
            system.lock_file(first)


WINDOWS = '''
"""Runs hexdata with the branches for Windows: locks are simulated by flock, and Unix modules are missing."""
import builtins, ctypes, errno, fcntl, importlib, os, pkgutil, signal, sys, types
from pathlib import Path

import duckdb, jinja2, loky, matplotlib.pyplot, numpy, psutil, pyarrow.parquet, rich.console, tenacity, typer
import tarfile, tempfile, concurrent.futures, multiprocessing, upath, zlib_ng.zlib_ng

state = {"error": 0}

def lock_file_ex(handle, flags, reserved, low, high, overlapped):
    where = overlapped._obj
    assert (where.offset_high << 32) + where.offset == 1 << 62 and (low.value, high.value) == (1, 0)
    kind = fcntl.LOCK_EX if flags.value & 2 else fcntl.LOCK_SH
    try:
        fcntl.flock(handle.value, kind | (fcntl.LOCK_NB if flags.value & 1 else 0))
    except BlockingIOError:
        state["error"] = 33
        return 0
    return 1

def unlock_file_ex(handle, reserved, low, high, overlapped):
    fcntl.flock(handle.value, fcntl.LOCK_UN)
    return 1

ctypes.WinDLL = lambda name, use_last_error: types.SimpleNamespace(
    LockFileEx=lock_file_ex, UnlockFileEx=unlock_file_ex)
ctypes.get_last_error = lambda: state["error"]
sys.modules["msvcrt"] = types.SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)
os.O_BINARY = os.O_NOINHERIT = 0
real_import = builtins.__import__

def guarded_import(name, globals=None, *rest):
    if name in {"fcntl", "resource", "termios"} and (globals or {}).get("__name__", "").startswith("hexdata"):
        raise ModuleNotFoundError(name)
    return real_import(name, globals, *rest)

builtins.__import__ = guarded_import
platform, sys.platform = sys.platform, "win32"
import hexdata.system
sys.platform = platform  # other libraries run on the real system
hexdata.system.sys = types.SimpleNamespace(platform="win32")
for module in pkgutil.walk_packages(hexdata.__path__, "hexdata."):
    needs_extra = ("hexdata.torch", "hexdata.webdataset", "hexdata.engine.ray", "hexdata.__main__")
    if not module.name.startswith(needs_extra):
        importlib.import_module(module.name)
from hexdata import system

system.psutil = types.SimpleNamespace(
    Process=lambda: types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(peak_wset=1)),
    pid_exists=psutil.pid_exists)
from hexdata import Loader
from hexdata.errors import StoreLockedError
from hexdata.convert import convert_sources, ConvertOptions
from hexdata.demo.games import make_games
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store

folder = Path(sys.argv[1])
write_trmph(folder / "games.trmph", make_games(40, 1, 7), 7)
convert_sources(folder / "games.trmph", folder / "store", ConvertOptions(workers=1))
shuffle_store(folder / "store")
export_shards(folder / "store", ExportOptions(workers=1, block_size=64, shard_size=512))
assert verify_store(folder / "store").ok
positions = sum(len(batch["value"]) for batch in Loader(folder / "store", split="train", mode="exact"))
with Store.open(folder / "store").writing("convert"):
    try:
        shuffle_store(folder / "store")
    except StoreLockedError as error:
        print(positions, error)
assert system.has_ended(2**22 + 1) and not system.has_ended(os.getpid())
'''


def test_all_stages_run_with_the_branches_for_windows(tmp_path: Path) -> None:
    script = tmp_path / "windows.py"
    script.write_text(WINDOWS)
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    assert "another process is writing to this store" in done.stdout
