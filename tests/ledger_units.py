"""Reads and alters the ledger of an interrupted stage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def read_units(path: Path) -> dict[str, Any]:
    """Return the facts of the finished units by name; none if there is no ledger."""
    lines = path.read_bytes().splitlines(keepends=True)[1:] if path.exists() else []
    entries = [json.loads(line.partition(b" ")[2]) for line in lines if line.endswith(b"\n")]
    return {entry["unit"]: entry["facts"] for entry in entries}


def replace_units(path: Path, units: dict[str, Any]) -> None:
    """Replace the units, with valid digests."""
    header = json.loads(path.read_bytes().splitlines()[0].partition(b" ")[2])
    written = b""
    for value in [header, *({"unit": name, "facts": facts} for name, facts in units.items())]:
        text = json.dumps(value).encode()
        written += hashlib.sha256(written + text).hexdigest().encode() + b" " + text + b"\n"
    path.write_bytes(written)
