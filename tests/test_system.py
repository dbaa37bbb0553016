"""Locks and other calls of the operating system, on this system and, simulated, on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hexdata import system

PACKAGE = Path(system.__file__).parent


def test_a_lock_excludes_other_files_that_are_open(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with system.locked(path) as is_held:
            assert is_held
            with system.locked(path, wait=False) as is_held_twice:
                assert not is_held_twice


WINDOWS = '''
"""Runs hexdata with the branches for Windows: locks are simulated by flock, and Unix modules are missing."""
import builtins, contextlib, ctypes, errno, fcntl, importlib, os, pkgutil, shutil, signal, sys, types
from pathlib import Path

import duckdb, jinja2, loky, numpy, psutil, pyarrow.parquet, rich.console, typer
import tarfile, tempfile, concurrent.futures, multiprocessing, upath, zlib_ng.zlib_ng

def locking(descriptor, mode, count):
    assert (os.lseek(descriptor, 0, os.SEEK_CUR), count) == (1 << 30, 1)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_UN, fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB)[mode])
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "another process has locked a part of the file")

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2)
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
        memory_info=lambda: types.SimpleNamespace(peak_wset=1, rss=1), create_time=lambda: 1.0,
        children=lambda recursive: []),
    Error=psutil.Error, pid_exists=psutil.pid_exists, virtual_memory=psutil.virtual_memory)
import hexdata.temporary
from hexdata import Loader
from hexdata.errors import StoreLockedError
from hexdata.convert import convert_sources, ConvertOptions
from hexdata.demo.games import make_games
from hexdata.store import Store
from hexdata.export import ExportOptions, export_shards
from hexdata.export.pickles import PicklesOptions, export_pickles
from hexdata.formats.trmph import write_trmph
from hexdata.browse.library import BrowseOptions, Library
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage.local import _TEMPORARY_SUFFIX
from hexdata.verify import verify_store

folder = Path(sys.argv[1])
hexdata.temporary._SEMAPHORES = folder  # those of running tests would seem to be abandoned
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
library = Library(folder / "store", BrowseOptions(), lambda _: None)
assert library.current().splits
library.close()
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
assert system.has_ended(2**22 + 1) and not system.has_ended(os.getppid())
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
