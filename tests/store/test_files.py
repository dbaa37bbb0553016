"""Atomic files: complete under their final name or absent, after any failure."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata.storage import storage_of
from hexdata.store.files import FileFacts, canonical_json, digest_file, write_bytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_with_its_facts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with storage_of(path).publish() as file:
        file.write(b"some ")
        file.write(memoryview(b"bytes"))
        assert file.tell() == 10
        assert not path.exists()
        facts = FileFacts.of(file, rows=3)
    assert facts == FileFacts(rows=3, bytes=10, sha256=hashlib.sha256(b"some bytes").hexdigest())
    assert digest_file(path) == (facts.bytes, facts.sha256)
    assert names(path.parent) == ["file"]


def test_a_written_file_is_closed(tmp_path: Path) -> None:
    """Python in dev mode reports a file that is flushed after the underlying file is closed."""
    with storage_of(tmp_path / "bytes").publish() as file:
        file.write(b"some bytes")
    assert file.closed
    code = """if True:
        import sys
        from pathlib import Path
        import pyarrow as pa
        from hexdata.store.parquet import write_parquet
        table = pa.table({"n": range(9)})
        write_parquet(Path(sys.argv[1]), table.schema, [table])
    """
    path = tmp_path / "rows.parquet"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code, path], check=True, capture_output=True, text=True
    )
    assert "Exception ignored" not in done.stderr
    assert path.exists()


def write_half(path: Path, error: type[BaseException]) -> None:
    with storage_of(path).publish() as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_existing_file(tmp_path: Path, error: type[BaseException]) -> None:
    write_bytes(tmp_path / "old", b"old")
    for name in ("old", "new"):
        with pytest.raises(error):
            write_half(tmp_path / name, error)
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_kill_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from hexdata.storage import storage_of\n"
        "with storage_of(Path(sys.argv[1])).publish() as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False)
    assert child.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".file.")
    assert left.read_bytes() == b"half"
    storage_of(tmp_path).remove_unfinished()
    assert names(tmp_path) == []


def test_only_temporaries_are_removed(tmp_path: Path) -> None:
    kept = [".lock", "part.tmp", ".work"]
    for name in (*kept, ".part.12.tmp"):
        write_bytes(tmp_path / "below" / name, b"")
    storage_of(tmp_path).remove_unfinished()
    assert names(tmp_path / "below") == sorted(kept)
    storage_of(tmp_path / "absent").remove_unfinished()


def test_files_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is synced before the rename, and every folder with a new name after it."""
    events: list[str] = []
    sync, replace = os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def record_replace(source: Path, target: Path) -> Path:
        events.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_replace)
    write_bytes(tmp_path / "new" / "folder" / "file", b"")
    temporary = events.pop(2)
    assert re.fullmatch(r"\.file\.\d+\.tmp", temporary)
    assert events == [tmp_path.name, "new", "rename", "folder"]


def test_a_temporary_file_is_renamed_without_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("the file or its folder was synced"))
    with storage_of(tmp_path / "file").publish(sync=False) as file:
        file.write(b"content")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"content"


def test_canonical_json_depends_only_on_the_value() -> None:
    value = {"b": [1, 2], "a": {"ключ": None, "z": 0.1}}
    turned = {"a": {"z": 0.1, "ключ": None}, "b": [1, 2]}
    assert canonical_json(value) == canonical_json(turned)
    assert json.loads(canonical_json(value)) == value
    assert canonical_json(value).endswith(b"\n")
