"""Texts from files, words of commands, and sizes: what is printed can be read and copied."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.text import encodable, printable, shell_word, wrap
from hexdata.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bücher/a_b-c [red].棋", "Bücher/a_b-c [red].棋"),
        (os.fsdecode(b"h\xe4user.pkl"), r"h\udce4user.pkl"),
        ("a\nb\r\t\x00\x1b[31m\x9b\x7f", r"a\nb\r\t\x00\x1b[31m\x9b\x7f"),
        ("\u202a\u202e\u2066\u2069\u061c", r"\u202a\u202e\u2066\u2069\u061c"),  # reverse the text
        ("\u2028\u2029\u0085\xa0\u200b\ufeff\u034f", r"\u2028\u2029\x85\xa0\u200b\ufeff\u034f"),
        ("\U000e0001\U000e0100", r"\U000e0001\U000e0100"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert encodable(text) == (shown if "\udce4" in text else text)


@given(st.text(st.characters(codec=None)))
def test_any_text_can_be_encoded_and_printed(text: str) -> None:
    encodable(text).encode("utf-8")
    assert printable(text).isprintable()
    printable(text).encode("utf-8")


def test_words_of_a_shell_can_be_copied_from_the_terminal() -> None:
    """Bash parses the printed words to the original bytes."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    texts = [
        "",
        "a b",
        "a'b",
        "a\nb",
        "$HOME `id` \\",
        "\x1b[31m'\\",
        "h\udce4user",
        "\u202egnp",
        "*?[a]",
        "日本",
    ]
    words = [shell_word(text) for text in texts]
    assert [printable(word) for word in words] == words
    command = ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"]
    read = subprocess.run(command, capture_output=True, check=True).stdout
    assert read.split(b"\0")[:-1] == [os.fsencode(text) for text in texts]


def test_texts_are_wrapped_outside_of_commands() -> None:
    assert wrap("", 40) == [""]
    assert wrap("a long/path/without/any/blank b", 20) == ["a", "  long/path/without/any/blank", "  b"]
    lines = ["Run", "  `hexdata verify a-long-name`", "  and `hexdata info`."]
    assert wrap("Run `hexdata verify a-long-name` and `hexdata info`.", 24) == lines


SIZES = {
    "1GB": 10**9, "1 gb": 10**9, " 700MiB ": 700 * 2**20, "1.5kB": 1_500, "2G": 2 * 10**9, "3Mi": 3 * 2**20,
    "0b": 0, "2TiB": 2 * 2**40, "64KIB": 64 * 2**10, 5_000: 5_000,
}  # fmt: skip


def test_sizes_are_parsed() -> None:
    assert {text: parse_bytes(text) for text in SIZES} == SIZES
    for text in ["", "GB", "2", "123", "-1GB", "1 GB more", "1e9", "1,000", "1.GB", ".5GB", "1PB"]:
        with pytest.raises(ConfigError, match="not a size"):
            parse_bytes(text)


@given(st.integers(0, 999 * 10**12))
def test_formatted_sizes_have_three_digits(size: int) -> None:
    text = format_bytes(size).replace(",", "")
    assert parse_bytes(text) == pytest.approx(size, rel=0.0051)
    assert len(text.split()[0].replace(".", "")) <= 3
    assert [format_bytes(each) for each in (0, 999, 43_210, 999_600)] == ["0 B", "999 B", "43.2 kB", "1 MB"]
