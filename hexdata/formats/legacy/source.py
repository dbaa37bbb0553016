"""Source of the bytes of a pickle, and detection of a pickle from its first bytes."""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["ByteSource", "looks_like_pickle"]

_TEXT_STARTS: Final = (b"}q", b"}(", b"}.", b"]q", b"](", b"].", b"(d", b"(l")
"""First bytes of a dict or a list in protocols 0 and 1, which have no protocol header."""


def looks_like_pickle(head: bytes) -> bool:
    """Return whether bytes begin like a pickle of protocol 2 to 5, or like a dict or list of protocol 0 or 1.

    Args:
        head: The first bytes of the file, decompressed; two are enough.
    """
    return (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1) or head.startswith(
        _TEXT_STARTS
    )


class ByteSource(Protocol):
    """Source of bytes for the unpickler."""

    def read(self, size: int) -> bytes:
        """Return at most ``size`` more bytes, none at the end."""
