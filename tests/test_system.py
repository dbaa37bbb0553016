"""Locks and other calls of the operating system, on this system and, simulated, on Windows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata import system

PACKAGE = Path(system.__file__).parent


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
import builtins, contextlib, ctypes, errno, fcntl, importlib, os, pkgutil, shutil, signal, sys, types
from pathlib import Path

import duckdb, jinja2, loky, matplotlib.pyplot, numpy, psutil, pyarrow.parquet, rich.console, typer
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

def in_use(path):
    """Return whether this process has a file open or mapped, or one below a folder."""
    path = os.path.realpath(path)
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    with open("/proc/self/maps") as maps:
        names |= {line.split(None, 5)[5].rstrip() for line in maps if line.count("/")}
    return any(name == path or name.startswith(path + "/") for name in names)

def only_unused(function):
    """Refuse what Windows refuses: to remove or rename files that are in use, or to replace them."""
    def guarded(*paths, **options):
        for path in paths:
            if "dir_fd" not in options and in_use(path):
                raise PermissionError(errno.EACCES, "the file is in use", str(path))
        return function(*paths, **options)
    return guarded

if os.path.exists("/proc/self/maps"):
    for name in ("remove", "rename", "replace", "unlink"):
        setattr(os, name, only_unused(getattr(os, name)))
shutil._use_fd_functions = False  # rmtree calls the functions above
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
for module in pkgutil.walk_packages(hexdata.__path__, "hexdata.", onerror=lambda _: None):  # without PyTorch
    needs_extra = ("hexdata.torch", "hexdata.webdataset", "hexdata.engine.ray", "hexdata.__main__")
    if not module.name.startswith(needs_extra):
        importlib.import_module(module.name)
from hexdata import system

system.psutil = types.SimpleNamespace(
    Process=lambda pid=None: types.SimpleNamespace(
        memory_info=lambda: types.SimpleNamespace(peak_wset=1), create_time=lambda: 1.0),
    Error=psutil.Error, pid_exists=psutil.pid_exists)
from hexdata import Loader
from hexdata.errors import StoreLockedError
from hexdata.convert import convert_sources, ConvertOptions
from hexdata.demo.games import make_games
from hexdata.progress import SILENT
from hexdata.export import ExportOptions, export_shards
from hexdata.export.pickles import PicklesOptions, export_pickles
from hexdata.formats.trmph import write_trmph
from hexdata.browse.index import open_index
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage.local import _TEMPORARY_SUFFIX
from hexdata.store import Store
from hexdata.verify import verify_store

folder = Path(sys.argv[1])
write_trmph(folder / "games.trmph", make_games(40, 1, 7), 7)
convert_sources(folder / "games.trmph", folder / "store", ConvertOptions(workers=1))
shuffle_store(folder / "store")
export_shards(folder / "store", ExportOptions(workers=1, block_size=64, shard_size=512))
assert verify_store(folder / "store").ok
positions = sum(len(batch["value"]) for batch in Loader(folder / "store", split="train", mode="exact"))
assert sum(len(batch["value"]) for batch in Loader(folder / "store", split="train", mode="games"))
pipe = f"pipe:cat {folder}/store/shards/{{name}}"
for size, mode in (("100kB", "stream"), ("9MB", "exact"), ("9MB", "exact")):
    cached = Loader(pipe, split="train", mode=mode, cache=folder / f"cache-{size}", cache_size=size)
    for _ in range(2):
        assert sum(len(batch["value"]) for batch in cached) == positions
    del cached
    copies = list((folder / f"cache-{size}").glob("*.tar"))
    for copy in copies:
        copy.write_bytes(b"damaged")
os.environ["HEXDATA_CACHE"] = str(folder / "index")
for _ in range(2):
    assert open_index(Store.open(folder / "store"), SILENT)
shuffle_store(folder / "store", ShuffleOptions(seed=2))
export_shards(folder / "store", ExportOptions(workers=1, block_size=64, shard_size=512))
export_pickles(folder / "store", PicklesOptions(workers=1))
assert verify_store(folder / "store").ok
assert not list(folder.rglob(f".*{_TEMPORARY_SUFFIX}"))
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
    # Its simulated start time makes other processes remove its folders from a shared temporary folder.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stderr
    assert "was not written" not in done.stderr
    assert "another process is writing to this store" in done.stdout


UNIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
UNIX_NAMES = (
    *("chown", "fork", "getegid", "geteuid", "getpgid", "getuid", "killpg", "mkfifo", "openpty", "pread"),
    *("sched_getaffinity", "sched_setaffinity", "setsid", "sysconf", "uname"),
    *(
        "SIGALRM",
        "SIGCONT",
        "SIGHUP",
        "SIGKILL",
        "SIGQUIT",
        "SIGSTOP",
        "SIGUSR1",
        "pthread_sigmask",
        "setitimer",
    ),
)
"""Names of ``os`` and ``signal`` that Windows lacks."""
COLLECT = '''
"""Collects test files as Windows would: without the modules and names that only Unix has."""
import builtins, json, os, signal, sys, types
import pytest

modules, names, files = map(json.loads, sys.argv[1:])
on_windows = {module.__name__: types.ModuleType(module.__name__) for module in (os, signal)}
for module in (os, signal):
    kept = {name: value for name, value in vars(module).items() if name not in names}
    vars(on_windows[module.__name__]).update(kept)
real_import = builtins.__import__

def import_as_windows(name, globals=None, *rest, **options):
    if (globals or {}).get("__name__", "").startswith(("tests", "_pytest.outcomes")):
        if name in modules:
            raise ModuleNotFoundError(name, name=name)
        if name in on_windows:
            return on_windows[name]
    return real_import(name, globals, *rest, **options)

builtins.__import__ = import_as_windows
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *files]))
'''


def test_windows_collects_the_tests(tmp_path: Path) -> None:
    """If one file could not be imported, no test would run there."""
    root = PACKAGE.parent
    only_unix = re.compile(rf"\b({'|'.join([*UNIX_MODULES, *UNIX_NAMES])})\b")
    files = [
        path.relative_to(root)
        for path in sorted((root / "tests").rglob("*.py"))
        if not {"benchmarks", "fuzz", "conftest.py"} & {*path.parts}
        and only_unix.search(path.read_text("utf-8"))
    ]
    assert len(files) > 20
    arguments = [json.dumps(each) for each in (UNIX_MODULES, UNIX_NAMES, [*map(str, files)])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COLLECT, *arguments],
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stdout[-3000:]
