"""Sources of shards: a folder, a real web server on this machine, an object store, and real commands."""

from __future__ import annotations

import re
import signal
import threading
from contextlib import nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.loader import Loader
from hexdata.retry import RetryPolicy
from hexdata.shards import sources
from hexdata.shards.reader import BlockReader, load_manifest
from hexdata.shards.sources import ShardSource, make_source
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault

NAME = "some file.tar"
DATA = np.random.default_rng(3).bytes(3_000_000)


class FileServer(ThreadingHTTPServer):
    """Serves one folder, with faults on request.

    Attributes:
        ranges: Whether Range headers are supported: True, False (ignored), or the status that refuses them.
        lengths: Whether responses have a Content-Length.
        statuses: Statuses of the next responses, instead of a file.
        cuts: Number of bytes after which each of the next responses breaks off.
        requests: Name and Range header of each request.
    """

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}"
        self.ranges, self.lengths, self.statuses, self.cuts, self.requests = True, True, [], [], []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name, header = self.path.removeprefix("/").replace("%20", " "), self.headers.get("Range")
        self.server.requests.append((name, header))
        path = self.server.folder / name
        if self.server.statuses:
            return self.send_error(self.server.statuses.pop(0))
        if not path.is_file():
            return self.send_error(404)
        if header and self.server.ranges > 1:
            return self.send_error(self.server.ranges)
        data = path.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "") if self.server.ranges else None
        if part:
            start, stop = int(part[1]), int(part[2] or len(data) - 1) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            data = data[start:stop]
        else:
            self.send_response(200)
        if self.server.lengths:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data[: self.server.cuts.pop(0) if self.server.cuts else None])
        except ConnectionError:
            self.close_connection = True  # the client has closed the connection
        return None

    def log_message(self, *_):
        """Write nothing to the output of the test."""


@pytest.fixture
def serve():
    """Return ``serve(folder)``, which starts a server on a free port."""
    running = []

    def start(folder):
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
def folder(tmp_path):
    (tmp_path / NAME).write_bytes(DATA)
    return tmp_path


@pytest.fixture
def server(folder, serve):
    return serve(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Make four attempts without pauses."""
    monkeypatch.setattr(sources, "_RETRY", RetryPolicy(attempts=4, first_wait=0.0))


def read(source, start=0, stop=None, size=None):
    """Read a part as the shard reader does: at the end of the file, call ``finish``."""
    with source.open(NAME, start, stop, size=size) as stream:
        data = stream.read((stop or SIZE) - start)
        if stop in (None, SIZE):
            stream.finish()
    return data


def test_a_location_may_be_a_path_or_an_address():
    for location, source in (
        ("a:b/c", Path("a:b/c")),
        ("https://host/shards/", "https://host/shards/{name}"),
        ("http://host/{name}?key=1", "http://host/{name}?key=1"),
    ):
        assert make_source(location) == ShardSource(source)
    for location in ("http://[host/shards", "http://host:99999/shards", "https:///shards"):
        with pytest.raises(ConfigError, match="no valid host and port"):
            make_source(location)


SIZE = len(DATA)
PARTS = {
    (0, None): None,
    (0, 1): "bytes=0-0",
    (1_000_000, 2_500_000): "bytes=1000000-2499999",
    (2_999_999, SIZE): "bytes=2999999-2999999",
    (1_500_000, None): "bytes=1500000-",
}
"""Parts of the file, and the header that requests each."""


@pytest.mark.parametrize("kind", ["folder", "http", "no ranges", "http 400", "http 501", "pipe", "s3"])
def test_every_source_returns_the_requested_bytes(folder, server, kind, request):
    server.ranges = {"http 400": 400, "http 501": 501}.get(kind, kind == "http")
    locations = {"folder": folder, "pipe": f"pipe:cat {folder}/{{name}}"}
    if kind == "s3":
        bucket, store = (request.getfixturevalue(name) for name in ("bucket", "object_store"))
        (bucket / NAME).write_bytes(DATA)
        store.fail(Fault("GET", "tar", cut=1_000_000, count=2), Fault("GET", "tar", status=503))
        locations["s3"] = str(bucket)
    source = make_source(locations.get(kind, server.url))
    for part in [*PARTS][:: 3 if kind == "s3" else 1]:
        assert read(source, *part, SIZE) == DATA[slice(*part)], part
    if kind == "http":
        assert [header for _, header in server.requests] == list(PARTS.values())


@pytest.mark.parametrize("kind", ["folder", "http", "s3"])
def test_missing_and_other_files_raise_an_error_with_the_address(folder, server, kind, request):
    location = folder if kind == "folder" else server.url
    if kind == "s3":
        folder = request.getfixturevalue("bucket")
        (folder / NAME).write_bytes(DATA)
        location = str(folder)
    source = make_source(location)
    address = re.escape(source.address(NAME))
    if kind != "http":
        with pytest.raises(StoreError, match=rf"{address}: .* altered; found 3000000 bytes; exp.* 9"):
            read(source, 5, 8, 9)
    if kind == "s3":
        store = request.getfixturevalue("object_store")
        store.fail(Fault(status=403, count=9))
        with pytest.raises(StoreError, match=rf"{address}: a file cannot be read; found") as caught:
            read(source)
        store.requests()
        with pytest.raises(StoreError, match="the object store failed"):
            Loader(location)
        assert len(store.requests()) == 1
        store.fail()
        assert not any(secret in f"{caught.value!r} {caught.value}" for secret in (ACCESS_KEY, SECRET_KEY))
        with pytest.raises(StoreError, match="no manifest"):
            Loader(location)
    (folder / NAME).unlink()
    with pytest.raises(StoreError, match=rf"{address}: the shard is missing"):
        read(source)
    assert len(server.requests) == (kind == "http")  # not retried


# --- a web server -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_resumed_at_the_same_byte(server, ranges):
    server.ranges, server.cuts = ranges, [1_000_000, 1_200_000, 0, 0]
    assert read(make_source(server.url)) == DATA
    if ranges:
        assert [header for _, header in server.requests] == [None, "bytes=1000000-", *["bytes=2200000-"] * 3]


def test_requests_are_repeated_if_the_server_is_busy_but_not_if_it_refuses(server):
    server.statuses = [503, 429, 500]
    assert read(make_source(server.url)) == DATA
    for statuses, requests in (([403], 1), ([503] * 9, 4), ([500] * 9, 4)):
        server.statuses, server.requests = list(statuses), []
        with pytest.raises(StoreError, match=f"cannot be read; found HTTP Error {statuses[0]}"):
            read(make_source(server.url))
        assert len(server.requests) == requests


@pytest.mark.parametrize("lengths", [True, False])
def test_other_bytes_than_the_manifest_lists_are_refused_without_a_cache(make_shards, serve, lengths):
    """A page of another program, or a shard to which bytes were appended."""
    folder = make_shards(train=20)
    server, path = serve(folder.path), folder.path / "train-000000.tar"
    server.lengths, data = lengths, path.read_bytes()
    manifest = load_manifest(make_source(folder.path))
    for other in (data + bytes(10_240), b"<html>Sign in</html>", data):
        path.write_bytes(other)
        reader = BlockReader(make_source(server.url), manifest, "train", ["move"])
        for blocks in ((0, None), (1, 2), (0, 1)):  # a part is read again with a Range header
            with nullcontext() if other is data else pytest.raises(HexdataError, match=re.escape(path.name)):
                list(reader.read(0, *blocks))
    path.write_bytes(data + bytes(10_240))
    with pytest.raises(StoreError, match=re.escape(path.name)):
        list(reader.read(0, 0, 1))


# --- commands -----------------------------------------------------------------------------------------


def test_a_command_that_fails_or_writes_other_bytes_raises_an_error(folder):
    file = f"'{folder}/{NAME}'"
    for command, found in (
        ("exit 3", "found exit status 3; expected 0"),
        (f"head -c 1000 {file}; exit 7", "found exit status 7; expected 0"),
        ("kill -9 $$", "found exit status -9; expected 0"),
        (f"cat {file} {file}", "found more bytes"),
    ):
        source = ShardSource(f"pipe:{command} # {{name}}")
        # Of a later part, the command may end before it begins.
        for start in (0, 2_000):
            with pytest.raises(StoreError, match=found):
                read(source, start)
    assert read(ShardSource(f"pipe:head -c 1000 {file} # {{name}}"), 2_000) == b""


def test_closing_a_stream_kills_the_children_of_the_command():
    source = ShardSource("pipe:(sleep 61 & echo y; wait; echo n) | cat; echo n # {name}")
    before = set(psutil.Process().children(recursive=True))
    with source.open(NAME) as stream:
        assert stream.read(2) == b"y\n"
        processes = set(psutil.Process().children(recursive=True)) - before
        assert len(processes) >= 4  # two shells, sleep and cat
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


def test_ctrl_c_ends_a_loader_that_waits_for_a_command(make_shards, tmp_path, monkeypatch):
    shards, ended = make_shards(train=20).path, tmp_path / "ended"
    stall = f"head -c 99 {shards}/{{name}}; sleep 40; touch {ended}"
    command = f"case {{name}} in *.tar) {stall};; *) cat {shards}/{{name}};; esac"
    loader, wait = Loader(f"pipe:{command}", mode="stream", batch_size=4), sources.wait
    monkeypatch.setattr(sources, "wait", lambda *given: (signal.raise_signal(signal.SIGINT), wait(*given)))
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    assert not ended.exists()


# --- manifests ---------------------------------------------------------------------------------------


def test_a_missing_or_altered_manifest_raises_an_error_with_the_address(make_shards, serve):
    path = make_shards(train=20).path / "manifest.json"
    server, pipe = serve(path.parent), f"pipe:cat {path.parent}/{{name}} 2>&-"
    path.write_bytes(path.read_bytes().replace(b'"seed":7', b'"seed":8'))
    with pytest.raises(StoreError, match=r"manifest\.json: the shard manifest was altered"):
        load_manifest(make_source(server.url))
    path.unlink()
    for location, message in ((server.url, r"manifest\.json: no shard"), (pipe, "exit status 1")):
        with pytest.raises(StoreError, match=message):
            load_manifest(make_source(location))
