"""Inputs and stores in object stores: the same names, bytes and errors as on a disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.convert.inputs import find_sources
from hexdata.convert.spool import ReadOptions, read_source
from hexdata.engine.node_check import open_node_check
from hexdata.errors import (
    EngineError,
    HexdataError,
    InputError,
    RejectRateError,
    SourceChangedError,
    StoreError,
)
from hexdata.formats.trmph import write_trmph
from hexdata.progress import Silent
from hexdata.retry import RetryPolicy
from hexdata.storage import address, as_path, storage_of
from hexdata.store import Store
from tests.conftest import DERIVED
from tests.convert.kill_convert import running_processes
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from upath import UPath

    from hexdata.storage import AnyPath
    from tests.conftest import StoreBytes
    from tests.convert.conftest import Make
    from tests.object_store import ObjectStore

KILL_CONVERT = Path(__file__).parent / "kill_convert.py"
ROOT = Path(__file__).parents[2]
OPTIONS = ConvertOptions(workers=1, max_reject_rate=1.0)


@pytest.fixture
def legacy(make: Make) -> Path:
    """Source files of every kind, and files beside them that are not sources."""
    games = make.games(12)
    examples = make.tuples(chain.from_iterable(make.dicts(games[:3])))
    make.write("a b.pkl.gz", [*examples, (examples[0][0] + 2, None, 0.0)])
    mixed = list(chain.from_iterable(make.dicts(games[3:6])))
    make.write("sub/shuffled_[0]*?.pkl.gz", mixed[::-1], shuffling_stats={"source_files": ["x"]})
    without_ids = [dict(e, metadata={**e["metadata"], "game_id": None}) for e in mixed[::-1]]
    make.write("sub/ü#%41.pkl.gz", without_ids, shuffling_stats={"source_files": ["y"]})
    write_trmph(make.folder / "sub" / "games.trmph", games[6:], make.n)
    make.write_bytes("broken.pkl.gz", b"not a pickle")
    make.write_bytes(".hidden/c.pkl.gz", b"not looked at")
    make.write_bytes("sub/processing_stats.json", b"hearsay that is no JSON")
    return make.folder


@pytest.fixture
def few(make: Make) -> Path:
    """Three small source files."""
    make.v2("a.pkl.gz", make.games(2))
    make.write_bytes("broken.pkl.gz", b"not a pickle")
    write_trmph(make.folder / "games.trmph", make.games(2, start=2), make.n)
    return make.folder


def put(folder: Path, target: UPath) -> UPath:
    """Copy a folder into an object store."""
    for path in folder.rglob("*"):
        if path.is_file():
            target.fs.pipe_file(f"{target.path}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return target


def bytes_of(store: UPath) -> dict[str, str]:
    """Return the SHA-256 of each object of a dataset, by its path relative to the store."""
    names = {path[len(store.path) + 1 :]: path for path in store.fs.find(store.path)}
    return {
        name: hashlib.sha256(store.fs.cat_file(path)).hexdigest()
        for name, path in names.items()
        if not name.startswith((".", "logs/"))
    }


def bytes_here(store: Path, store_bytes: StoreBytes) -> dict[str, str]:
    return {name: digest for name, digest in store_bytes(store).items() if name not in DERIVED}


@pytest.fixture
def expected(legacy: Path, tmp_path: Path, store_bytes: StoreBytes) -> dict[str, str]:
    """The digests of the files of a store on disk, converted from ``legacy``."""
    convert_sources(legacy, tmp_path / "expected", OPTIONS)
    return bytes_here(tmp_path / "expected", store_bytes)


@pytest.fixture
def expected_of_few(few: Path, tmp_path: Path, store_bytes: StoreBytes) -> dict[str, str]:
    """The digests of the files of a store on disk, converted from ``few``."""
    convert_sources(few, tmp_path / "expected", OPTIONS)
    return bytes_here(tmp_path / "expected", store_bytes)


def files_left(tmp_path: Path) -> set[str]:
    """Return the local folders that still contain files of an object store."""
    cache = tmp_path / "hexdata-cache"
    return {path.relative_to(cache).parts[0] for path in cache.rglob("*") if path.is_file()} - {"locks"}


# --- the same bytes -----------------------------------------------------------------------------------


def test_the_bytes_equal_those_on_a_disk(
    bucket: UPath, legacy: Path, expected: dict[str, str], tmp_path: Path, store_bytes: StoreBytes
) -> None:
    remote = put(legacy, bucket / "legacy")
    convert_sources(str(remote), tmp_path / "store", OPTIONS)
    assert bytes_here(tmp_path / "store", store_bytes) == expected
    for inputs, name in ((legacy, "from a disk"), (remote, "st[o]re")):
        result = convert_sources(inputs, bucket / name, OPTIONS)
        assert bytes_of(bucket / name) == expected
        assert result.failed_files.keys() == {"legacy/broken.pkl.gz"}
        again = convert_sources(inputs, bucket / name, OPTIONS)
        assert (again.sources, again.skipped) == (0, result.sources)
    assert files_left(tmp_path) == set()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray is not installed")
def test_the_bytes_equal_those_on_a_disk_with_ray(
    bucket: UPath, legacy: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """In a new process, whose cluster inherits the environment variables of the object store."""
    put(legacy, bucket / "legacy")
    command = [sys.executable, "-m", "hexdata", "convert", f"{bucket}legacy", f"{bucket}store"]
    options = ["--engine", "ray", "--workers", "1", "--max-reject-rate", "1", "--json"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert bytes_of(bucket / "store") == expected
    left = {path.rpartition("/")[2] for path in bucket.fs.find((bucket / "store").path)}
    assert {name for name in left if name.startswith(".")} == {".lock"}
    assert not [path for path in bucket.fs.find((bucket / "store").path) if "/.work/" in path]
    assert files_left(tmp_path) == set()


def test_a_store_is_extended_from_disk_and_from_objects(
    bucket: UPath, make: Make, tmp_path: Path, store_bytes: StoreBytes
) -> None:
    first, second = make.v2("one/a.pkl.gz", make.games(2)), make.v2("two/b.pkl.gz", make.games(2, start=2))
    convert_sources(first, tmp_path / "store", OPTIONS)
    convert_sources(second, tmp_path / "store", OPTIONS)
    put(make.folder, bucket / "legacy")
    convert_sources(first, bucket / "store", OPTIONS)
    result = convert_sources(
        [first, f"{bucket}legacy/two", as_path(f"{bucket}legacy/two/b.pkl.gz")], bucket / "store", OPTIONS
    )
    assert (result.sources, result.skipped) == (1, 1)
    assert bytes_of(bucket / "store") == bytes_here(tmp_path / "store", store_bytes)


# --- inputs -----------------------------------------------------------------------------------------

NAMES = st.text("a.[*?] ü#%", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
OBJECT_NAMES = (
    st.lists(NAMES, min_size=1, max_size=3)
    .map("/".join)
    .flatmap(lambda name: st.sampled_from([name, f"{name}.trmph", f"{name}.PKL.GZ"]))
)


def names(inputs: Iterable[AnyPath], store: AnyPath) -> list[str]:
    return [source.name for source in find_sources(list(inputs), store).sources]


@settings(max_examples=40)
@given(object_names=st.sets(OBJECT_NAMES, min_size=1, max_size=6))
def test_names_and_order_equal_those_on_a_disk(
    object_names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the in-memory object store of fsspec."""
    pytest.importorskip("upath", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("tree") / "self play"
    remote = as_path(f"memory://{folder.parent.name}-{os.urandom(4).hex()}/self play")
    assert not isinstance(remote, Path)
    for location in sorted(object_names):
        if any(other != location and f"{other}/".startswith(f"{location}/") for other in object_names):
            continue  # on a disk, a name is a file or a folder
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).write_bytes(b"x")
        remote.fs.pipe_file(f"{remote.path}/{location}", b"x")
    try:
        found = names([folder], folder / "none")
    except InputError:
        with pytest.raises(InputError, match="no files to convert"):
            find_sources([remote], folder / "none")
        return
    assert names([remote], remote / "none") == found
    skipped = find_sources([folder], folder / "none").skipped
    assert find_sources([remote], remote / "none").skipped == skipped


def test_objects_that_are_not_sources_are_skipped(bucket: UPath, tmp_path: Path) -> None:
    """Hidden objects, companions of the legacy tools, objects that mark folders, and the store itself."""
    keys = ("b.pkl", "sub/a.pkl", ".c", ".d/e.pkl", "file_lookup_1.json", "store/f.pkl", "README")
    for key in ("inside/g.pkl", *(f"in/{name}" for name in keys)):
        bucket.fs.pipe_file(bucket.path + key, b"#5,a1b2 b\n")
    for key in ("in/", "in/empty/"):
        bucket.fs.call_s3("put_object", Bucket=bucket.path.strip("/"), Key=key, Body=b"")
    assert names([bucket / "in"], bucket / "in" / "store") == ["in/b.pkl", "in/sub/a.pkl"]
    assert find_sources([bucket / "in"], tmp_path).skipped == {"in/README": "unknown-name"}
    assert names([bucket / "in"], tmp_path) == ["in/b.pkl", "in/store/f.pkl", "in/sub/a.pkl"]
    assert names([bucket / "in" / ".c", bucket / "in" / "sub"], tmp_path) == ["in/.c", "sub/a.pkl"]
    here = bucket.path.strip("/")
    assert names([bucket], bucket / "in") == [f"{here}/inside/g.pkl"]
    both = [bucket / "in" / "b.pkl", bucket / "in"]
    assert names(both, bucket / "in" / "store") == ["in/b.pkl", "in/sub/a.pkl"]
    bucket.fs.pipe_file(bucket.path + "in/x", b"x")
    with pytest.raises(InputError, match="in/x: this file has no known format"):
        names([bucket / "in" / "x"], tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.pkl").touch()
    with pytest.raises(InputError, match="two inputs have the same name"):
        find_sources([bucket / "in", tmp_path / "in"], tmp_path)


@pytest.mark.parametrize("key", ["in//a", "in/../a", "in/./a", "in/a/"])
def test_an_object_key_that_is_not_a_path_is_an_error(bucket: UPath, tmp_path: Path, key: str) -> None:
    bucket.fs.call_s3("put_object", Bucket=bucket.path.strip("/"), Key=key, Body=b"x")
    with pytest.raises(InputError, match=r"s3://.*in/.*: this object key is not a valid file path"):
        find_sources([bucket / "in"], tmp_path)


def test_a_missing_input_is_an_error(bucket: UPath, tmp_path: Path) -> None:
    bucket.fs.call_s3("put_object", Bucket=bucket.path.strip("/"), Key="empty/", Body=b"")
    for location, message in (
        (bucket / "none", "no such file or folder"),
        (as_path("s3://no-bucket-of-this-name/in"), "no such"),
        (bucket / "empty", "no files to convert"),
    ):
        with pytest.raises(HexdataError, match=f"{location}: .*{message}"):
            find_sources([location], tmp_path)


# --- failures -----------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a new client that tries each request only once or twice, so that the test does not wait."""
    own = {"retries": {"mode": "standard", "max_attempts": 1}, "user_agent_extra": os.urandom(6).hex()}
    monkeypatch.setitem(address._OPTIONS["s3"], "config_kwargs", own)
    monkeypatch.setattr("hexdata.storage.retry.REQUESTS", RetryPolicy(attempts=2))


def test_temporary_failures_do_not_change_the_result(
    bucket: UPath, few: Path, expected_of_few: dict[str, str], object_store: ObjectStore
) -> None:
    put(few, bucket / "legacy")
    object_store.fail(
        Fault("GET", "legacy/a.pkl", cut=100),
        Fault("GET", "games.trmph", status=500),
        Fault("HEAD", "broken", status=503),
        Fault("GET", "broken", delay=0.5),
        Fault("PUT", "positions/", status=503, lose=True),
        Fault("PUT", "games/", status=500),
        Fault("PUT", "manifest.json", status=500, lose=True),
    )
    convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    assert object_store.all_met()
    object_store.fail()
    assert bytes_of(bucket / "store") == expected_of_few


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("after", [0, 1], ids=["while it is digested", "while it is read"])
def test_an_outage_does_not_reject_a_source(
    bucket: UPath, few: Path, expected_of_few: dict[str, str], object_store: ObjectStore, after: int
) -> None:
    """A file that a disk cannot read is rejected; an object that is temporarily unavailable is not."""
    put(few, bucket / "legacy")
    object_store.fail(Fault("GET", "games.trmph", status=500, count=1000, skip=after))
    with pytest.raises(StoreError, match="the object store failed") as caught:
        convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    assert "s3://" in str(caught.value)
    assert object_store.all_met()
    object_store.fail()
    assert not (bucket / "store" / "manifest.json").exists()
    convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    assert bytes_of(bucket / "store") == expected_of_few


@pytest.mark.usefixtures("impatient")
def test_an_object_without_permission_is_rejected_like_a_file(
    bucket: UPath, few: Path, object_store: ObjectStore, tmp_path: Path
) -> None:
    put(few, bucket / "legacy")
    object_store.fail(Fault("", "games.trmph", status=403, count=1000))
    with pytest.raises(
        RejectRateError,
        match=r"legacy/games.trmph: unreadable: .*\n  Make the unreadable files readable",
    ):
        convert_sources(f"{bucket}legacy", f"{bucket}store", ConvertOptions(workers=1))
    object_store.fail(Fault("GET", "", status=403, count=1000))
    with pytest.raises(HexdataError, match=rf"{bucket}.*the object store denies access") as caught:
        convert_sources(f"{bucket}legacy", tmp_path / "store", OPTIONS)
    assert not {ACCESS_KEY, SECRET_KEY} & set(str(caught.value).split())


class Altering(Silent):
    """Replaces a source with other bytes after it was digested and before it is read."""

    def __init__(self, source: AnyPath, data: bytes) -> None:
        self.source, self.data = source, data

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        if stage == "read":
            self.source.write_bytes(self.data)


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_source_that_changes_during_the_run_is_an_error(
    bucket: UPath, make: Make, tmp_path: Path, where: str
) -> None:
    local = make.v2("a.pkl.gz", make.games(2))
    other = make.v2("other/a.pkl.gz", make.games(3)).read_bytes()
    source: AnyPath = local
    if where == "bucket":
        put(make.folder, bucket / "legacy")
        source = bucket / "legacy" / "a.pkl.gz"
    with pytest.raises(SourceChangedError, match=r"a.pkl.gz: this source changed while it was being"):
        convert_sources(source, tmp_path / "store", OPTIONS, Altering(source, other))
    assert convert_sources(source, tmp_path / "store", OPTIONS).games == 3


def test_a_changed_source_leaves_no_spool(make: Make, tmp_path: Path) -> None:
    source = make.write_bytes("broken.pkl.gz", b"not a pickle")
    with pytest.raises(SourceChangedError):
        read_source(source, tmp_path / "spool", ReadOptions(), "another version", 1, "0" * 64)
    assert not (tmp_path / "spool" / "facts.json").exists()


# --- kills -------------------------------------------------------------------------------------------


def test_killed_before_any_request_and_started_again(
    bucket: UPath, few: Path, expected_of_few: dict[str, str], tmp_path: Path
) -> None:
    """The remains of a process killed during an upload are created by hand."""
    put(few, bucket / "legacy")
    command = [sys.executable, str(KILL_CONVERT), "requests", f"{bucket}legacy", f"{bucket}killed/", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *killed, undisturbed = sorted({path.split("/")[2] for path in bucket.fs.find(bucket.path + "killed")})
    assert len(killed) > 2
    assert bytes_of(bucket / "killed" / undisturbed) == expected_of_few
    for name in killed:
        store = bucket / "killed" / name
        if (store / "manifest.json").exists():
            seen = Store.open(store)
            assert not any(
                list(seen.missing(folder)) for folder in ("positions", "games", "sources", "rejected")
            )
        upload = {"Bucket": bucket.path.strip("/"), "Key": f"killed/{name}/positions/part-000000.parquet"}
        bucket.fs.call_s3("create_multipart_upload", **upload)
        convert_sources(f"{bucket}legacy", store, OPTIONS)
        assert bytes_of(store) == expected_of_few, f"killed before request {name}"
        assert not bucket.fs.call_s3("list_multipart_uploads", Bucket=upload["Bucket"]).get("Uploads")
    assert files_left(tmp_path) == set()


def test_killed_with_workers_and_started_again(
    bucket: UPath, few: Path, expected_of_few: dict[str, str], tmp_path: Path
) -> None:
    put(few, bucket / "legacy")
    command = [sys.executable, str(KILL_CONVERT), "stage", f"{bucket}store", f"{bucket}legacy", "write"]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert psutil.wait_procs(running_processes(killed.stdout), timeout=300)[1] == []
    assert not (bucket / "store" / "manifest.json").exists()
    convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    assert bytes_of(bucket / "store") == expected_of_few
    assert files_left(tmp_path) == set()


def test_another_machine_can_continue(
    bucket: UPath, few: Path, expected_of_few: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unfinished work stays on the first machine; its uploaded objects do not disturb the second."""

    class Stopping(Silent):
        def begin(self, stage: str, total: int | None, unit: str) -> None:
            self.stage = stage

        def advance(self, amount: int) -> None:
            if amount and self.stage == "write":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_sources(few, bucket / "store", OPTIONS, Stopping())
    assert (bucket / "store" / "positions" / "part-000000.parquet").exists()
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "elsewhere"))
    convert_sources(few, bucket / "store", OPTIONS)
    assert bytes_of(bucket / "store") == expected_of_few


def test_an_object_of_another_process_is_not_overwritten(
    bucket: UPath, few: Path, expected_of_few: dict[str, str]
) -> None:
    """A process may not know yet that it has lost the lock. The next run removes its object."""
    path = bucket / "store" / "positions" / "part-000002.parquet"

    class Intruding(Silent):
        def begin(self, stage: str, total: int | None, unit: str) -> None:
            self.stage = stage

        def advance(self, amount: int) -> None:
            if amount and self.stage == "write" and not path.exists():
                path.write_bytes(b"another's")

    with pytest.raises(StoreError, match=r"000002\.parquet: the uploaded object differs from the file"):
        convert_sources(few, bucket / "store", OPTIONS, Intruding())
    assert path.read_bytes() == b"another's"
    convert_sources(few, bucket / "store", OPTIONS)
    assert bytes_of(bucket / "store") == expected_of_few


# --- other machines -----------------------------------------------------------------------------------


def test_machines_are_checked_for_access_to_objects(bucket: UPath, tmp_path: Path) -> None:
    """Makes the requests that the engine would make on other machines."""
    source, store = bucket / "in" / "a", bucket / "st[o]re"
    for path in (source, store / ".lock", store / ".engine-0123-killed", bucket / "store" / ".engine-0123"):
        path.write_bytes(b"x")
    with open_node_check([source, source.parent], store) as check:
        assert check.run("one") == {}
        check.require("one", {}, "one")
        with pytest.raises(EngineError, match=r"two does not see the same files .*found a different folder"):
            check.require("two", {}, "two")
        source.write_bytes(b"other")
        assert check.run("one") == {str(source): "a file of another size"}
        source.unlink()
        assert check.run("one").keys() == {str(source), str(source.parent)}
    left = {path.rpartition("/")[2] for path in bucket.fs.find(store.path)}
    assert left == {".lock"}
    assert (bucket / "store" / ".engine-0123").exists()


def test_a_folder_is_removed_by_its_name(bucket: UPath) -> None:
    """The name contains characters that fsspec interprets as a pattern."""
    for name in ("a[12]", "a1", "a2"):
        (bucket / name / "b").write_bytes(b"x")
    storage_of(bucket / "a[12]").remove_tree()
    assert [path.rpartition("/")[0][-2:] for path in bucket.fs.find(bucket.path)] == ["a1", "a2"]


# --- secrets ------------------------------------------------------------------------------------------


def test_credentials_are_never_printed(
    bucket: UPath, few: Path, object_store: ObjectStore, tmp_path: Path
) -> None:
    put(few, bucket / "legacy")
    convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    written = b"".join(bucket.fs.cat_file(path) for path in bucket.fs.find((bucket / "store").path))
    kept = b"".join(p.read_bytes() for p in (tmp_path / "hexdata-cache").rglob("*") if p.is_file())
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret.encode() not in written + kept


@pytest.mark.usefixtures("impatient")
def test_an_unreachable_object_store_is_an_error(
    bucket: UPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(HexdataError, match=r"s3://somewhere/in: .*does not answer") as caught:
        convert_sources("s3://somewhere/in", tmp_path / "store", OPTIONS)
    assert ACCESS_KEY not in str(caught.value)
    assert SECRET_KEY not in str(caught.value)
    assert not list(tmp_path.rglob("manifest.json"))
