"""Requests to an S3 server through s3fs, which hexdata uses, against the same requests through obstore.

The server is a minimal one on loopback that answers from memory, so the cost is that of the clients. A
position in the printed rates is one request.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("obstore")
pytest.importorskip("s3fs")

MB = 1 << 20
DATA = bytes(range(256)) * (1 << 18)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Start the server in a separate process and return its address."""
    server = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    server.kill()
    server.communicate()


def s3fs_client(endpoint: str) -> tuple[Callable[[int, int], bytes], Callable[[bytes], object]]:
    from s3fs import S3FileSystem

    region = {"region_name": "us-east-1"}
    system = S3FileSystem(key="a", secret="b", endpoint_url=endpoint, client_kwargs=region)
    return (
        lambda start, stop: system.cat_file("bucket/object", start=start, end=stop),
        lambda data: system.pipe_file("bucket/new", data),
    )


def obstore_client(endpoint: str) -> tuple[Callable[[int, int], bytes], Callable[[bytes], object]]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "bucket",
        endpoint=endpoint,
        access_key_id="a",
        secret_access_key="b",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    return (
        lambda start, stop: bytes(obstore.get_range(store, "object", start=start, end=stop)),
        lambda data: obstore.put(store, "new", data, use_multipart=False),
    )


def requests_of(client: Any, endpoint: str, kind: str) -> Callable[[], None]:
    """Return a function that makes the requests of one kind and checks their answers."""
    get, put = client(endpoint)

    def small() -> None:
        for start in range(0, 500 * 4096, 4096):
            assert len(get(start, start + 4096)) == 4096

    def large() -> None:
        for number in range(32):
            start = number % 8 * 8 * MB
            assert get(start, start + 8 * MB)[-1] == 255

    def puts() -> None:
        for _ in range(16):
            put(DATA[: 8 * MB])

    made = {"small": small, "large": large, "puts": puts}[kind]
    get(0, 1)
    return made


@pytest.mark.parametrize("kind", ["small", "large", "puts"])
def test_obstore_against_s3fs(endpoint: str, versus: Any, kind: str) -> None:
    """500 reads of 4 kB, 32 reads of 8 MB, or 16 puts of 8 MB; the rival is s3fs."""
    ours = requests_of(obstore_client, endpoint, kind)
    rival = requests_of(s3fs_client, endpoint, kind)
    assert versus(ours, rival, {"small": 500, "large": 32, "puts": 16}[kind]) > 0


# --- the server ---------------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sent = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
            if "100-continue" in head:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if sent:
                await reader.readexactly(int(sent[1]))
            writer.write(response(head))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def response(head: str) -> bytes:
    common = 'ETag: "abc"\r\nLast-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nx-amz-request-id: 1\r\n'
    if head.startswith("PUT"):
        return f"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{common}\r\n".encode()
    asked = re.search(r"range: *bytes=(\d+)-(\d*)", head, re.IGNORECASE)
    start, stop, status = 0, len(DATA), "200 OK"
    if asked:
        start, stop = int(asked[1]), int(asked[2] or len(DATA) - 1) + 1
        status = "206 Partial Content"
        common += f"Content-Range: bytes {start}-{stop - 1}/{len(DATA)}\r\n"
    lines = f"HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\n{common}\r\n"
    return lines.encode() + (b"" if head.startswith("HEAD") else DATA[start:stop])


async def serve() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with the process that started this one


if __name__ == "__main__":
    asyncio.run(serve())
