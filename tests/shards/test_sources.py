"""Sources of shards: a folder, a real web server on this machine, and real commands."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.stream import StreamEpoch
from hexdata.retry import RetryPolicy
from hexdata.shards.command import CommandSource
from hexdata.shards.http import HttpSource
from hexdata.shards.locate import load_manifest, make_source
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.sources import WHOLE_FILE, ByteRange, FolderSource, ShardSource

NAME = "some file.tar"
DATA = np.random.default_rng(3).bytes(3_000_000)


class FileServer(ThreadingHTTPServer):
    """Serves one folder, with faults on request.

    Attributes:
        ranges: Whether Range headers are supported.
        shift: Number of bytes by which the start of a range is wrong.
        statuses: Statuses of the next responses, instead of a file.
        cuts: Number of bytes after which each of the next responses breaks off.
        requests: Name and Range header of each request.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.ranges = True
        self.shift = 0
        self.statuses: list[int] = []
        self.cuts: list[int] = []
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        name = self.path.removeprefix("/").replace("%20", " ")
        header = self.headers.get("Range")
        self.server.requests.append((name, header))
        path = self.server.folder / name
        if self.server.statuses:
            return self.send_error(self.server.statuses.pop(0))
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "") if self.server.ranges else None
        if part:
            start, stop = int(part[1]) + self.server.shift, int(part[2] or len(data) - 1) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            data = data[start:stop]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data[: self.server.cuts.pop(0) if self.server.cuts else None])
        except ConnectionError:
            self.close_connection = True  # the client has closed the connection
        return None

    def log_message(self, *args: Any) -> None:
        """Write nothing to the output of the test."""


Serve = Callable[[Path], FileServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return ``serve(folder)``, which starts a server on a free port."""
    running: list[tuple[FileServer, threading.Thread]] = []

    def start(folder: Path) -> FileServer:
        server = FileServer(folder)
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / NAME).write_bytes(DATA)
    return tmp_path


@pytest.fixture
def server(folder: Path, serve: Serve) -> FileServer:
    return serve(folder)


def quick(server: FileServer, attempts: int = 4, **chosen: Any) -> HttpSource:
    """Return a source without pauses between attempts."""
    retry = RetryPolicy(attempts=attempts, first_wait=0.0)
    return HttpSource(f"{server.url}/{{name}}", retry=retry, **chosen)


def read(source: ShardSource, part: ByteRange = WHOLE_FILE, chunk: int = 10_240) -> bytes:
    """Read a part as the shard reader does: at the end of the file, call ``finish``."""
    stop = len(DATA) if part.stop is None else part.stop
    data = b""
    with source.open(NAME, part) as stream:
        while len(data) < stop - part.start:
            more = stream.read(min(chunk, stop - part.start - len(data)))
            if not more:
                break
            data += more
        if stop == len(DATA):
            stream.finish()
    return data


@pytest.mark.parametrize(
    ("location", "source"),
    [
        (Path("a/b"), FolderSource(Path("a/b"))),
        ("a/b", FolderSource(Path("a/b"))),
        ("a:b/c", FolderSource(Path("a:b/c"))),
        ("file:///a/b%20c", FolderSource(Path("/a/b c"))),
        ("https://host/shards/", HttpSource("https://host/shards/{name}")),
        ("http://host/{name}?key=1", HttpSource("http://host/{name}?key=1")),
        ("pipe:cat /a/{name}", CommandSource("pipe:cat /a/{name}")),
        ("ais://bucket/shards", CommandSource("ais://bucket/shards/{name}")),
    ],
)
def test_make_source_chooses_the_source_by_the_location(location: str | Path, source: ShardSource) -> None:
    assert make_source(location) == source
    assert pickle.loads(pickle.dumps(source)) == source


def test_a_file_address_of_another_machine_is_rejected() -> None:
    """It would be read as a path of this machine."""
    with pytest.raises(ConfigError, match="cannot name another machine"):
        make_source("file://host/shards")


def test_a_pipe_without_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"found pipe:cat …\. Write {name}"):
        make_source("pipe:cat /a")


PARTS = [
    ByteRange(),
    ByteRange(file_size=len(DATA)),
    ByteRange(0, 1, len(DATA)),
    ByteRange(1_000_000, 2_500_000, len(DATA)),
    ByteRange(2_999_999, len(DATA), len(DATA)),
    ByteRange(1_500_000, None, len(DATA)),
]


@pytest.mark.parametrize("kind", ["folder", "http", "http without ranges", "pipe"])
def test_every_source_returns_the_requested_bytes(folder: Path, server: FileServer, kind: str) -> None:
    server.ranges = kind == "http"
    locations = {"folder": folder, "pipe": f"pipe:cat {folder}/{{name}}"}
    source = make_source(locations.get(kind, server.url))
    for part in PARTS:
        assert read(source, part) == DATA[part.start : part.stop], part
    if kind == "http":
        expected = [None, None, "0-0", "1000000-2499999", "2999999-2999999", "1500000-"]
        assert [header for _, header in server.requests] == [e and f"bytes={e}" for e in expected]


@pytest.mark.parametrize("kind", ["folder", "http"])
def test_missing_files_and_wrong_sizes_raise_an_error_with_the_address(
    folder: Path, server: FileServer, kind: str
) -> None:
    source = make_source(folder if kind == "folder" else server.url)
    address = re.escape(source.address(NAME))
    with pytest.raises(
        StoreError, match=rf"{address}: the shard is truncated or altered; found 3000000 bytes; exp.* 9"
    ):
        read(source, ByteRange(5, 8, 9))
    (folder / NAME).unlink()
    with pytest.raises(StoreError, match=rf"{address}: the shard is missing"):
        read(source)
    assert len(server.requests) == (kind == "http") * 2  # neither is retried


def test_a_folder_is_checked_without_reading(folder: Path) -> None:
    source = FolderSource(folder)
    assert source.find_fault(NAME, len(DATA)) is None
    assert "found 3000000 bytes" in str(source.find_fault(NAME, 7))
    assert "missing" in str(source.find_fault("other.tar", 7))
    (folder / "loop.tar").symlink_to("loop.tar")
    assert "loop.tar: a file cannot be read" in str(source.find_fault("loop.tar", 7))


def test_a_shard_on_a_failing_disk_has_a_hint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("hexdata.shards.sources.open_file", fail)
    with pytest.raises(StoreError, match="a file cannot be read; found Input/output error") as caught:
        read(FolderSource(folder))
    assert caught.value.hint is not None
    assert "Check the disk" in caught.value.hint


# --- a web server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_resumed_at_the_same_byte(server: FileServer, ranges: bool) -> None:
    server.ranges = ranges
    server.cuts = [1_000_000, 1_200_000, 0, 0]
    assert hashlib.sha256(read(quick(server))).digest() == hashlib.sha256(DATA).digest()
    if ranges:
        assert [header for _, header in server.requests] == [None, "bytes=1000000-", *["bytes=2200000-"] * 3]


def test_a_connection_without_data_fails_after_four_attempts(server: FileServer) -> None:
    server.cuts = [1_000_000, 0, 0, 0]
    with pytest.raises(StoreError, match=r"some%20file.*cannot be read; found .*byte 1000000 of 3000000"):
        read(quick(server, attempts=4))
    assert len(server.requests) == 4


def test_requests_are_repeated_if_the_server_is_busy_but_not_if_it_refuses(server: FileServer) -> None:
    server.statuses = [503, 429, 500]
    assert read(quick(server)) == DATA
    server.statuses, server.requests = [403], []
    with pytest.raises(StoreError, match="cannot be read; found HTTP Error 403"):
        read(quick(server))
    server.statuses, attempts = [503] * 9, len(server.requests)
    with pytest.raises(StoreError, match="HTTP Error 503"):
        read(quick(server, attempts=3))
    assert len(server.requests) - attempts == 3


def test_a_response_with_another_range_raises_an_error(server: FileServer) -> None:
    server.shift = 5
    with pytest.raises(StoreError, match="byte 100 was requested, the response starts at 105"):
        read(quick(server), ByteRange(100))


def test_an_invalid_response_raises_an_error_without_a_retry(serve: Serve, folder: Path) -> None:
    answers = ["200 OK\r\nContent-Length: many", "302 Found\r\nLocation: http://[::1/x"]
    for answer, found in zip(answers, ["invalid literal", "Invalid IPv6 URL"], strict=True):

        class Senseless(Handler):
            line = f"HTTP/1.1 {answer}\r\n\r\n".encode("ascii")

            def do_GET(self) -> None:
                self.wfile.write(self.line)

        server = serve(folder)
        server.RequestHandlerClass = Senseless
        with pytest.raises(StoreError, match=f"cannot be read; found {found}"):
            read(quick(server))
    for url in ("http://[::1/{name}", "http://127.0.0.1:port/{name}"):
        with pytest.raises(StoreError, match="cannot be read"):
            read(HttpSource(url, retry=RetryPolicy(first_wait=1e9, longest_wait=1e9)))  # no second attempt


def test_a_url_may_contain_any_characters(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    server = serve(tmp_path)
    source = make_source(f"{server.url}/{{name}}?key=a%20b&dön =[1]")
    with pytest.raises(StoreError, match="the shard is missing"):
        read(source)
    assert server.requests == [("some file.tar?key=a b&d%C3%B6n =[1]", None)]


def test_a_silent_or_stopped_server_raises_an_error(serve: Serve, folder: Path) -> None:
    class Silent(Handler):
        def do_GET(self) -> None:
            self.server.release.wait(30)  # type: ignore[attr-defined]

    server = serve(folder)
    server.RequestHandlerClass = Silent
    server.release = threading.Event()  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="timed out"):
        read(quick(server, attempts=1, timeout=0.05))
    server.release.set()  # type: ignore[attr-defined]
    source = quick(server, attempts=2)
    server.shutdown()
    server.server_close()
    with pytest.raises(StoreError, match="Connection refused"):
        read(source)


# --- commands -----------------------------------------------------------------------------------------


def test_a_failing_command_raises_an_error_with_its_status(folder: Path) -> None:
    for command, found in (
        ("exit 3", "exit status 3"),
        (f"head -c 1000 '{folder}/some file.tar'; exit 7", "exit status 7"),
        ("kill -9 $$", "exit status -9"),
    ):
        source = CommandSource(f"pipe:{command} # {{name}}")
        with pytest.raises(StoreError, match=f"pipe:.*command .* failed; found {found}; expected 0"):
            read(source)
        with pytest.raises(StoreError, match=found):
            read(source, ByteRange(2_000, None, len(DATA)))  # it ended before the part began


def test_a_command_that_writes_too_few_or_too_many_bytes_raises_an_error(folder: Path) -> None:
    short = CommandSource(f"pipe:head -c 1000 '{folder}/some file.tar' # {{name}}")
    with pytest.raises(StoreError, match="the shard is truncated or altered; found 1000 bytes"):
        read(short, ByteRange(2_000, None, len(DATA)))
    longer = CommandSource(f"pipe:cat {folder}/{{name}} {folder}/{{name}}")
    with pytest.raises(StoreError, match="found more bytes"):
        read(longer)


def test_closing_a_stream_kills_the_command() -> None:
    silent = 60.0  # seconds without output, in which it would not notice a closed pipe
    source = CommandSource(f"pipe:echo y; exec sleep {silent} # {{name}}")
    begin = time.monotonic()
    before = set(psutil.Process().children(recursive=True))
    with source.open(NAME) as stream:
        assert stream.read(2) == b"y\n"
        (process,) = set(psutil.Process().children(recursive=True)) - before
    assert not process.is_running()
    assert time.monotonic() - begin < silent / 2


def test_closing_a_stream_kills_the_children_of_the_command() -> None:
    source = CommandSource("pipe:(sleep 61 & echo y; wait; echo n) | cat; echo n # {name}")
    before = set(psutil.Process().children(recursive=True))
    with source.open(NAME) as stream:
        assert stream.read(2) == b"y\n"
        processes = set(psutil.Process().children(recursive=True)) - before
        assert len(processes) >= 4  # two shells, sleep and cat
    gone, alive = psutil.wait_procs(processes, timeout=60)
    assert (gone, alive) == (list(gone), [])


def test_names_are_quoted_for_the_shell(tmp_path: Path) -> None:
    name = "a $(touch broken) 'b'; touch broken.tar"
    (tmp_path / name).write_bytes(b"inside")
    with CommandSource(f"pipe:cd {tmp_path} && cat {{name}}").open(name) as stream:
        assert stream.read(100) == b"inside"
        stream.finish()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_unknown_schemes_raise_an_error() -> None:
    with pytest.raises(StoreError, match=r"nowhere://x/a.*no gopen handler"):
        read(make_source("nowhere://x/a"))


# --- manifests and epochs -----------------------------------------------------------------------------


def test_a_manifest_is_the_same_from_every_source(shards: Any, serve: Serve) -> None:
    server = serve(shards.path)
    expected = ShardManifest.load(shards.path)
    for location in (shards.path, server.url, f"pipe:cat {shards.path}/{{name}}"):
        manifest = load_manifest(make_source(location))
        assert (manifest.digest, manifest) == (expected.digest, expected)


def test_a_missing_or_altered_manifest_raises_an_error_with_the_address(
    make_shards: Any, serve: Serve
) -> None:
    folder = make_shards(train=20)
    server = serve(folder.path)
    path = folder.path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":7', b'"seed":8'))
    for location in (folder.path, server.url):
        with pytest.raises(StoreError, match=r"manifest\.json: the shard manifest was altered"):
            load_manifest(make_source(location))
    path.unlink()
    with pytest.raises(StoreError, match="a folder with no manifest"):
        load_manifest(make_source(folder.path))
    with pytest.raises(StoreError, match=r"manifest\.json: no shard manifest"):
        load_manifest(make_source(server.url))
    with pytest.raises(StoreError, match="exit status 1"):
        load_manifest(make_source(f"pipe:cat {folder.path}/{{name}} 2>&-"))


def ids_of(source: ShardSource, batches: range | None = None) -> list[list[int]]:
    options = LoaderOptions(mode="stream", batch_size=12, streams=(2, 2), window=24)
    epoch = StreamEpoch(source, load_manifest(source), options, 1, ("position_id",))
    return [b["position_id"].tolist() for b, _ in epoch.blocks(batches or range(epoch.steps))]


@pytest.mark.parametrize("ranges", [True, False])
def test_an_epoch_is_the_same_from_every_source(shards: Any, serve: Serve, ranges: bool) -> None:
    server = serve(shards.path)
    server.ranges = ranges
    expected = ids_of(FolderSource(shards.path))
    assert sorted(itertools.chain(*expected)) == list(range(134))
    for location in (server.url, f"pipe:cat {shards.path}/{{name}}"):
        assert ids_of(make_source(location)) == expected
        assert ids_of(make_source(location), range(7, 12)) == expected[7:]


def test_an_epoch_survives_broken_connections(shards: Any, serve: Serve) -> None:
    server = serve(shards.path)
    server.cuts = [1 << 20, 700, 5_000, 11_000, 0, 0, 3_000]  # the manifest is not cut
    assert ids_of(quick(server)) == ids_of(FolderSource(shards.path))


def test_resuming_over_http_requests_only_the_remaining_shards(make_shards: Any, serve: Serve) -> None:
    folder = make_shards(train=64)  # four shards of two blocks of 8
    server = serve(folder.path)
    options = LoaderOptions(mode="stream", batch_size=8, shuffle=False, window=8)
    manifest = ShardManifest.load(folder.path)
    epoch = StreamEpoch(make_source(server.url), manifest, options, 0, ("position_id",))
    assert len(list(epoch.blocks(range(3, 5)))) == 2
    entries = manifest.splits["train"]
    assert server.requests == [(entries[1].name, None), (entries[2].name, None)]  # to compare the digests
    server.requests.clear()
    assert len(list(epoch.blocks(range(3, 5)))) == 2
    second = entries[1].offsets["board"][1] - 640  # a tar header and an npy header
    first_end = entries[2].offsets["board"][1] - 640
    assert server.requests == [
        (entries[1].name, f"bytes={second}-{entries[1].bytes - 1}"),
        (entries[2].name, f"bytes=0-{first_end - 1}"),
    ]
