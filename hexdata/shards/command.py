"""Shards that a command writes to its standard output, started by the webdataset library."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from subprocess import Popen
from typing import IO, TYPE_CHECKING, Final

from hexdata.errors import ConfigError, StoreError, without_secrets
from hexdata.shards.sources import (
    WHOLE_FILE,
    ByteRange,
    Pace,
    altered_shard_error,
    check_stream_end,
    discard_bytes,
    unreadable_file_error,
)
from hexdata.system import kill_group, wait_readable

if TYPE_CHECKING:
    from webdataset.gopen import Pipe

__all__ = ["CommandSource"]

_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class CommandSource:
    """Shards read from a command, or from a URL that webdataset's ``gopen`` opens with a command.

    ``pipe:cat /data/{name}`` runs in a shell, with the name quoted; ``sftp://host/{name}`` runs
    ``curl``, and so on. A command writes a whole shard: the bytes before a part are discarded.

    Attributes:
        url: URL or command with ``{name}`` in place of the file name.
    """

    url: str = field(repr=False)

    def address(self, name: str) -> str:
        """Return the URL of a file for messages, or the program of the command and the name of the file."""
        if self.url.startswith("pipe:"):
            return f"{without_secrets(self.url)} {name}"
        return without_secrets(self.command(name))

    def command(self, name: str) -> str:
        """Return the URL or the command of a file."""
        return self.url.replace("{name}", shlex.quote(name) if self.url.startswith("pipe:") else name)

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[_CommandStream]:
        """Start the command; see :meth:`ShardSource.open`. Leaving the context early kills it."""
        address = self.address(name)
        stream = _CommandStream(_start(self.command(name), address), address)
        try:
            stream.skip(part.start)
            yield stream
        finally:
            stream.close()


def _start(url: str, address: str) -> Pipe:
    """Start the command of a pipe, or the one that webdataset uses for a URL.

    A pipe's shell leads a new process group, so that all processes it starts can be killed with it.
    """
    from webdataset.gopen import Pipe, gopen  # imports PyTorch, where it is installed

    try:
        if url.startswith("pipe:"):
            command = url.removeprefix("pipe:")
            return Pipe(command, mode="rb", shell=True, start_new_session=True)  # noqa: S604 - as documented
        opened = gopen(url, "rb")
        failed = None
    except (OSError, ValueError) as error:
        failed = unreadable_file_error(address, error)
    if failed is not None:
        raise failed  # not within the handler: the text of the cause may contain the URL
    if not isinstance(opened, Pipe):
        raise ConfigError(
            "webdataset does not open this URL with a command", found=address, expected="pipe:COMMAND"
        )
    return opened


class _CommandStream:
    """The standard output of a command.

    webdataset's ``Pipe`` may miss the exit status, and reports a command that was stopped on purpose as
    failed; so the process is waited for here.
    """

    def __init__(self, opened: Pipe, address: str) -> None:
        self._opened = opened  # its stream is closed when it is garbage-collected
        self._process: Popen[bytes] = opened.proc
        self._output: IO[bytes] = opened.stream
        self._address = address
        self._pace = Pace()

    def read(self, size: int, /) -> bytes:
        begun, output = time.monotonic(), self._output.fileno()
        is_ready = wait_readable(output, self._pace.left)
        data = os.read(output, min(size, _CHUNK)) if is_ready else b""
        try:
            self._pace.add(begun, len(data))
        except OSError as error:
            raise unreadable_file_error(self._address, error) from error
        return data

    def skip(self, count: int) -> None:
        """Read and discard ``count`` bytes."""
        missing = discard_bytes(self.read, count)
        if missing:
            self.finish()
            raise altered_shard_error(self._address, f"{count - missing} bytes")

    def finish(self) -> None:
        check_stream_end(self, self._address)
        status = self._process.wait()
        if status:
            raise StoreError(
                "the command that writes the shard failed",
                path=self._address,
                found=f"exit status {status}",
                expected=0,
                hint="Run it in a shell to see the reason.",
            )

    def close(self) -> None:
        if self._process.poll() is None:
            kill_group(self._process)
        self._output.close()
        self._process.wait()
