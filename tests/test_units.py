"""Sizes in bytes as text: parsing and formatting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        ("1 gb", 10**9),
        (" 700MiB ", 700 * 2**20),
        ("1.5kB", 1_500),
        ("2G", 2 * 10**9),
        ("3Mi", 3 * 2**20),
        ("0b", 0),
        ("2TiB", 2 * 2**40),
        ("64KIB", 64 * 2**10),
        (5_000, 5_000),
    ],
)
def test_sizes_are_parsed(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "2", "123", "-1GB", "1 GB more", "1e9", "1,000", "1.GB", ".5GB", "1PB"]
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


def test_too_large_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="size too large"):
        parse_bytes("1000001TB")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (43_210, "43.2 kB"), (999_600, "1 MB"), (10**12, "1 TB")],
)
def test_sizes_are_formatted_with_three_digits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 10**15))
def test_formatted_sizes_are_within_half_a_percent(size: int) -> None:
    assert parse_bytes(format_bytes(size).replace(",", "")) == pytest.approx(size, rel=0.0051)
