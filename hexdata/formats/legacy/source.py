"""What the bytes of a pickle come from, and how they begin. Never looks further into them."""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["ByteSource", "looks_like_pickle"]

_TEXT_STARTS: Final = (b"}q", b"}(", b"}.", b"]q", b"](", b"].", b"(d", b"(l")
"""How a dict or a list begins under protocols 0 and 1, which do not name themselves."""


def looks_like_pickle(head: bytes) -> bool:
    """Say whether decompressed bytes begin like a pickle of protocol 0 to 5 that holds a dict or a list.

    Args:
        head: the first bytes of the file, gunzipped if it was gzipped; two are enough.
    """
    return (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1) or head.startswith(
        _TEXT_STARTS
    )


class ByteSource(Protocol):
    """What the pickle machine reads from."""

    def read(self, size: int) -> bytes:
        """Return at most ``size`` more bytes, none at the end."""
