"""Requests with a body to stores of the S3 protocol, which fail if the store stops reading it."""

from __future__ import annotations

import concurrent.futures
import io
import time
from typing import Any, Final

from hexdata.storage import retry

__all__ = ["send_body"]

_POLL_SECONDS: Final = 1.0


class _Body(io.BytesIO):
    """Bytes to send, with the time at which the client last took some of them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.taken_at = time.monotonic()

    def read(self, size: int | None = -1, /) -> bytes:
        self.taken_at = time.monotonic()
        return super().read(size)


def send_body(system: Any, method: str, body: bytes, **arguments: Any) -> Any:
    """Send a request with a body, once.

    The HTTP client waits without a limit if a server accepts a connection and does not read from it.

    Args:
        system: File system of s3fs.
        method: Name of a method of the S3 client, such as "put_object".
        body: Content to send.
        arguments: Other arguments of the method, among them ``Bucket`` and ``Key``.

    Returns:
        The answer of the client.

    Raises:
        SendTimeoutError: The store has taken no bytes for ``READ_TIMEOUT`` seconds.
        OSError: The request failed.
    """
    import asyncio  # 7 ms that local stores do not need

    data = _Body(body)
    request = asyncio.run_coroutine_threadsafe(system._call_s3(method, Body=data, **arguments), system.loop)
    try:
        while True:
            done, _ = concurrent.futures.wait([request], timeout=min(_POLL_SECONDS, retry.READ_TIMEOUT))
            if done:
                return request.result()
            # After the last byte, the timeout of the client itself applies, which ends earlier.
            if time.monotonic() - data.taken_at > retry.READ_TIMEOUT + _POLL_SECONDS:
                url = f"{system.s3.meta.endpoint_url}/{arguments['Bucket']}/{arguments['Key']}"
                raise retry.SendTimeoutError(f'Write timeout on endpoint URL: "{url}"')
    finally:
        request.cancel()
