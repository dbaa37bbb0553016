"""Shards that a command writes to its standard output, started by the webdataset library."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import Popen
from typing import IO, TYPE_CHECKING

from hexdata.errors import ConfigError, StoreError
from hexdata.shards.sources import (
    WHOLE_FILE,
    ByteRange,
    altered_shard_error,
    check_stream_end,
    discard_bytes,
    unreadable_file_error,
)
from hexdata.system import kill_group

if TYPE_CHECKING:
    from webdataset.gopen import Pipe

__all__ = ["CommandSource"]


@dataclass(frozen=True)
class CommandSource:
    """Shards read from a command, or from a URL that webdataset's ``gopen`` opens with a command.

    ``pipe:cat /data/{name}`` runs in a shell, with the name quoted; ``sftp://host/{name}`` runs
    ``curl``, and so on. A command writes a whole shard: the bytes before a part are discarded.

    Attributes:
        url: URL or command with ``{name}`` in place of the file name.
    """

    url: str

    def address(self, name: str) -> str:
        """Return the URL or the command of a file."""
        return self.url.replace("{name}", shlex.quote(name) if self.url.startswith("pipe:") else name)

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[_CommandStream]:
        """Start the command; see :meth:`ShardSource.open`. Leaving the context early kills it."""
        address = self.address(name)
        stream = _CommandStream(_start(address), address)
        try:
            stream.skip(part.start)
            yield stream
        finally:
            stream.close()


def _start(address: str) -> Pipe:
    """Start the command of a pipe, or the one that webdataset uses for a URL.

    A pipe's shell leads a new process group, so that all processes it starts can be killed with it.
    """
    from webdataset.gopen import Pipe, gopen  # imports PyTorch, where it is installed

    try:
        if address.startswith("pipe:"):
            command = address.removeprefix("pipe:")
            return Pipe(command, mode="rb", shell=True, start_new_session=True)  # noqa: S604 - as documented
        opened = gopen(address, "rb")
    except (OSError, ValueError) as error:
        raise unreadable_file_error(address, error) from error
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

    def read(self, size: int, /) -> bytes:
        return self._output.read(size)

    def skip(self, count: int) -> None:
        """Read and discard ``count`` bytes."""
        missing = discard_bytes(self._output.read, count)
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
