"""Inputs and stores in object stores: the same names, bytes and errors as on a disk."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import HexdataError, RejectRateError, SourceChangedError, StoreError
from hexdata.formats.trmph import write_trmph
from hexdata.storage import address, as_path
from hexdata.store import Store
from tests.conftest import DERIVED
from tests.convert.conftest import Changing, flat
from tests.kit.searched import some_games, to_sidecar, to_trmph
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault
from tests.pairs import FULL

OPTIONS = ConvertOptions(workers=1, max_reject_rate=1.0)


@pytest.fixture
def few(make, bucket):
    """Three small source files on a disk, and the same ones in ``legacy`` of the bucket."""
    make.v2("a.pkl.gz", make.games(2))
    make.write_bytes("broken.pkl.gz", b"not a pickle")
    write_trmph(make.folder / "games.trmph", make.games(2, start=2), make.n)
    put(make.folder, bucket / "legacy")
    return make.folder


@pytest.fixture
def on_disk(tmp_path, store_bytes):
    """Return ``on_disk(*inputs, store=…)``: convert on a disk and return the SHA-256 of each file by name."""

    def digests(*inputs, store="on disk"):
        convert_sources(inputs, tmp_path / store, OPTIONS)
        return {name: sha for name, sha in store_bytes(tmp_path / store).items() if name not in DERIVED}

    return digests


def put(folder, target):
    """Copy a folder into an object store."""
    for path in folder.rglob("*"):
        if path.is_file():
            target.fs.pipe_file(f"{target.path}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return target


def bytes_of(store):
    """Return the SHA-256 of each object of a dataset, by its path relative to the store."""
    names = {path[len(store.path) + 1 :]: path for path in store.fs.find(store.path)}
    return {
        name: hashlib.sha256(store.fs.cat_file(path)).hexdigest()
        for name, path in names.items()
        if not name.startswith((".", "logs/"))
    }


def files_left(tmp_path):
    """Return the local files that remain of object stores."""
    return [path for path in (tmp_path / "hexdata-cache").rglob("*") if path.is_file()]


def test_the_bytes_equal_those_on_a_disk(bucket, make, on_disk, tmp_path):
    """Sources of every kind, with files beside them that are not sources."""
    games = make.games(12)
    examples = make.tuples(flat(make.dicts(games[:3])))
    make.write("a b.pkl.gz", [*examples, (examples[0][0] + 2, None, 0.0)])
    mixed = flat(make.dicts(games[3:6]))
    make.write("sub/shuffled_[0]*?.pkl.gz", mixed[::-1], shuffling_stats={"source_files": ["x"]})
    without_ids = [dict(e, metadata={**e["metadata"], "game_id": None}) for e in mixed[::-1]]
    make.write("sub/ü#%41.pkl.gz", without_ids, shuffling_stats={"source_files": ["y"]})
    write_trmph(make.folder / "sub" / "games.trmph", games[6:], make.n)
    searched = some_games(3)
    make.write_bytes("searched/a.trmph", to_trmph(searched).encode())
    make.write_bytes("searched/a.provenance.jsonl", to_sidecar(searched).encode())
    make.write_bytes("broken.pkl.gz", b"not a pickle")
    make.write_bytes(".hidden/c.pkl.gz", b"not looked at")
    make.write_bytes("sub/processing_stats.json", b"hearsay that is no JSON")
    remote = put(make.folder, bucket / "legacy")
    expected = on_disk(make.folder)
    result = convert_sources(remote, bucket / "st[o]re", OPTIONS)
    assert bytes_of(bucket / "st[o]re") == expected
    assert result.failed_files.keys() == {"legacy/broken.pkl.gz"}
    again = convert_sources(remote, bucket / "st[o]re", OPTIONS)
    assert (again.sources, again.skipped) == (0, result.sources)
    assert files_left(tmp_path) == []


def test_a_store_is_extended_from_disk_and_from_objects(bucket, make, on_disk):
    first, second = make.v2("one/a.pkl.gz", make.games(2)), make.v2("two/b.pkl.gz", make.games(2, start=2))
    on_disk(first)
    put(make.folder, bucket / "legacy")
    convert_sources(first, bucket / "store", OPTIONS)
    same = as_path(f"{bucket}legacy/two/b.pkl.gz")
    result = convert_sources([first, f"{bucket}legacy/two", same], bucket / "store", OPTIONS)
    assert (result.sources, result.skipped) == (1, 1)
    assert bytes_of(bucket / "store") == on_disk(second)


@pytest.fixture
def impatient(monkeypatch):
    """Use a new client that tries each request twice, so that the test does not wait."""
    own = {"retries": {"mode": "standard", "max_attempts": 1}, "user_agent_extra": os.urandom(6).hex()}
    monkeypatch.setitem(address._OPTIONS["s3"], "config_kwargs", own)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("after", [0, 1], ids=["while it is digested", "while it is read"])
def test_an_outage_does_not_reject_a_source(bucket, few, on_disk, object_store, after):
    """A file that a disk cannot read is rejected; an object that is temporarily unavailable is not."""
    object_store.fail(Fault("GET", "a.pkl.gz", status=500, count=1000, skip=after))
    with pytest.raises(StoreError, match="s3://"):
        convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    assert object_store.all_met()
    object_store.fail()
    assert not (bucket / "store" / "manifest.json").exists()
    convert_sources(f"{bucket}legacy", f"{bucket}store", OPTIONS)
    assert bytes_of(bucket / "store") == on_disk(few)


@pytest.mark.usefixtures("impatient", "few")
def test_an_object_without_permission_is_rejected_like_a_file(bucket, object_store, tmp_path):
    object_store.fail(Fault("", "games.trmph", status=403, count=1000))
    with pytest.raises(RejectRateError, match=r"legacy/games.trmph: unreadable: "):
        convert_sources(f"{bucket}legacy", f"{bucket}store", ConvertOptions(workers=1))
    object_store.fail(Fault("GET", "", status=403, count=1000))
    with pytest.raises(HexdataError, match=rf"{bucket}.*\(AccessDenied\)") as caught:
        convert_sources(f"{bucket}legacy", tmp_path / "store", OPTIONS)
    assert not {ACCESS_KEY, SECRET_KEY} & set(str(caught.value).split())


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_source_that_changes_during_the_run_is_an_error(bucket, few, make, tmp_path, where):
    other = make.v2("other/a.pkl.gz", make.games(3)).read_bytes()
    source = few / "a.pkl.gz" if where == "disk" else bucket / "legacy" / "a.pkl.gz"
    progress = Changing("read", lambda: source.write_bytes(other))
    with pytest.raises(SourceChangedError, match=r"a.pkl.gz: this source changed while it was being"):
        convert_sources(source, tmp_path / "store", OPTIONS, progress)
    assert convert_sources(source, tmp_path / "store", OPTIONS).games == 3


def test_a_second_name_of_a_source_changes_nothing(few, tmp_path):
    """A backup with hard links is such a name, and changes the time of the status of the file."""
    progress = Changing("read", lambda: (tmp_path / "name").hardlink_to(few / "a.pkl.gz"))
    assert convert_sources(few / "a.pkl.gz", tmp_path / "store", OPTIONS, progress).games == 2


def test_killed_before_any_request_and_started_again(bucket, few, on_disk, tmp_path):
    script, root = Path(__file__).parent / "kill_convert.py", Path(__file__).parents[2]
    command = [
        sys.executable,
        str(script),
        "requests",
        f"{bucket}legacy",
        f"{bucket}killed/",
        "11" if FULL else "17",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr
    *killed, undisturbed = sorted({path.split("/")[2] for path in bucket.fs.find(bucket.path + "killed")})
    expected = on_disk(few)
    assert len(killed) > 2
    assert bytes_of(bucket / "killed" / undisturbed) == expected
    for name in killed:
        store = bucket / "killed" / name
        if (store / "manifest.json").exists():
            seen = Store.open(store)
            assert not [*seen.missing("positions"), *seen.missing("games"), *seen.missing("sources")]
        convert_sources(f"{bucket}legacy", store, OPTIONS)
        assert bytes_of(store) == expected, f"killed before request {name}"
    assert files_left(tmp_path) == []


def test_another_machine_can_continue(bucket, few, on_disk, monkeypatch, tmp_path):
    """Unfinished work stays on the first machine; its objects do not disturb one with other splits."""

    def stop():
        raise KeyboardInterrupt

    options = replace(OPTIONS, test=0.9)
    with pytest.raises(KeyboardInterrupt):
        convert_sources(few, bucket / "store", options, Changing("write", stop, advanced=True))
    assert (bucket / "store" / "games" / "part-000000.parquet").exists()
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "elsewhere"))
    convert_sources(few, bucket / "store", OPTIONS)
    assert bytes_of(bucket / "store") == on_disk(few)
