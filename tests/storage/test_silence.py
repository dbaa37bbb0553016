"""Object stores that do not answer: one layer of retries, one deadline and one message."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.cli import main
from hexdata.retry import RetryPolicy, attempts_of
from hexdata.storage import address, as_path, lock, retry, storage_of
from hexdata.storage.reading import file_system
from hexdata.storage.sending import send_body
from hexdata.storage.upload import upload
from tests.conftest import DemoTrmph
from tests.object_store import Fault

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore

TIMEOUT, DEADLINE = 0.3, 1.0
NUMBERS = itertools.count()
SILENT = "the object store does not answer in time"

Said = Callable[..., str]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use new clients with the same settings, but shorter times."""
    config = {**address._OPTIONS["s3"]["config_kwargs"], "user_agent_extra": f"silence-{next(NUMBERS)}"}
    config |= {"connect_timeout": TIMEOUT, "read_timeout": TIMEOUT}
    monkeypatch.setitem(address._OPTIONS["s3"], "config_kwargs", config)
    monkeypatch.setattr(retry, "READ_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(retry, "_silence", retry._Silence())  # without the silence of an earlier test
    policy = RetryPolicy(attempts=99, first_wait=0.05, longest_wait=0.1, deadline=DEADLINE)
    monkeypatch.setattr(retry, "REQUESTS", policy)


@pytest.fixture
def silent_endpoint(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Listen at a port and accept connections, but never read or answer."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield url


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return ``said(*words)``: the standard error of a command that fails."""

    def run(*words: object) -> str:
        monkeypatch.setattr("sys.argv", ["hexdata", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        return capsys.readouterr().err

    return run


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "line",
    [
        "convert s3://b/games {}/store",
        "convert {}/games s3://b/store",
        "shuffle s3://b/store",
        "export s3://b/store",
        "verify s3://b/store",
        "sql s3://b/store @sources",
        "show s3://b/store 17",
        "show s3://b/shards/a.tar:1",
        "report s3://b/store",
        "load s3://b/store",
    ],
)
def test_every_command_ends(
    line: str, said: Said, silent_endpoint: str, demo_trmph: DemoTrmph, tmp_path: Path
) -> None:
    demo_trmph(tmp_path / "games", games=2, files=1)
    text = said(*line.format(tmp_path).split())
    assert len(text.splitlines()) == 1
    assert SILENT in text
    assert silent_endpoint in text
    assert re.search(r", after [2-9] attempts in \d+ s\. Check the address", text), text


@pytest.mark.usefixtures("short")
def test_there_is_one_layer_of_retries(bucket: UPath, object_store: ObjectStore) -> None:
    """Each attempt is one request at the server."""
    path = as_path(str(bucket / "a"))
    object_store.requests()
    object_store.fail(Fault("HEAD", delay=600, count=999))
    with pytest.raises(OSError, match="Read timeout") as caught:
        storage_of(path).size()
    asked = [path for method, path in object_store.requests() if method == "HEAD"]
    object_store.fail()
    attempts = attempts_of(caught.value)
    assert attempts is not None
    assert len(asked) == attempts.number > 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("size", [1, 40 << 20])
def test_an_upload_that_nobody_reads(tmp_path: Path, silent_endpoint: str, size: int) -> None:
    """The timeout of the client begins only when the last byte of a request is sent."""
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    target = as_path("s3://b/a")
    assert not isinstance(target, Path)
    with pytest.raises(OSError, match=f'on endpoint URL: "{silent_endpoint}/b/a'):
        upload(file, target)


@pytest.mark.usefixtures("short")
def test_a_part_that_nobody_reads(silent_endpoint: str) -> None:
    target = as_path("s3://b/a")
    assert not isinstance(target, Path)
    with pytest.raises(
        retry.SendTimeoutError, match=f'Write timeout on endpoint URL: "{silent_endpoint}/b/a"'
    ):
        send_body(file_system(target), "put_object", bytes(32 << 20), Bucket="b", Key="a")


@pytest.mark.usefixtures("short")
def test_a_stage_that_loses_its_store_asks_for_nothing_else(
    bucket: UPath,
    object_store: ObjectStore,
    said: Said,
    demo_trmph: DemoTrmph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither to release the lock nor to remove unfinished uploads: each would wait for an answer again."""
    demo_trmph(tmp_path / "games", games=2, files=1)
    monkeypatch.setattr(lock, "RENEW_SECONDS", 3600.0)
    object_store.fail(
        Fault("PUT", "/games/", delay=600, count=99), Fault(path="/", delay=600, count=999, skip=40)
    )
    text = said("convert", tmp_path / "games", bucket / "store", "--workers", 1)
    asked = object_store.requests()
    object_store.fail()
    first = next(at for at, (method, path) in enumerate(asked) if method == "PUT" and "/games/" in path)
    attempts = re.search(r"after (\d+) attempts", text)
    assert attempts is not None
    assert [method for method, _ in asked[first:]] == ["PUT"] * int(attempts[1])
    assert SILENT in text


def test_a_request_right_after_a_long_silence_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the next file of a thread, before the stage has ended."""
    monkeypatch.setattr(retry, "REQUESTS", RetryPolicy(attempts=2, first_wait=0, longest_wait=0))
    silence = retry._Silence()
    monkeypatch.setattr(silence, "_SECONDS", -1.0)
    monkeypatch.setattr(retry, "_silence", silence)
    calls: list[str] = []

    def call(name: str, error: Exception | None = None) -> Any:
        calls.append(name)
        if error is not None:
            raise error
        return name

    with pytest.raises(OSError, match="cut"):
        retry.with_retries(call, "first", ConnectionError("cut"))
    assert calls == ["first"] * 2
    monkeypatch.setattr(silence, "_SECONDS", 3600.0)
    with pytest.raises(OSError, match="cut"):
        retry.with_retries(call, "second")
    assert calls == ["first"] * 2
    monkeypatch.setattr(silence, "_SECONDS", 0.0)
    assert retry.with_retries(call, "third") == "third"
    monkeypatch.setattr(silence, "_SECONDS", 3600.0)
    assert retry.with_retries(call, "fourth") == "fourth"
