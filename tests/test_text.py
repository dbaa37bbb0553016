"""Escaping of texts from files."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.text import encodable, printable, shell_word, wrap


@pytest.mark.parametrize("text", ["", "games/a b.trmph", "häuser.pkl", "\u7530.trmph"])
def test_ordinary_names_are_unchanged(text):
    assert encodable(text) == printable(text) == text


def test_unprintable_characters_are_escaped():
    name = os.fsdecode(b"h\xe4user.pkl")
    assert encodable(name) == printable(name) == "h\\udce4user.pkl"
    assert printable("a\x1b[31m\tb\nc") == "a\\x1b[31m\\tb\\nc"
    assert printable("\u202egnp.exe") == "\\u202egnp.exe"  # the override would reverse the text
    assert encodable("a\nb") == "a\nb"


@given(st.text(st.characters(codec=None)))
def test_any_text_can_be_encoded_and_printed(text):
    encodable(text).encode("utf-8")
    assert printable(text).isprintable()
    printable(text).encode("utf-8")


WORDS = [
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


@pytest.mark.parametrize("text", WORDS)
def test_a_shell_word_can_be_copied_from_the_terminal(text):
    """Bash parses the printed word to the original bytes."""
    word = shell_word(text)
    assert printable(word) == word
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    read = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert read.stdout == os.fsencode(text)


def test_texts_are_wrapped_outside_of_commands():
    assert wrap("", 40) == [""]
    assert wrap("a long/path/without/any/blank b", 20) == ["a", "  long/path/without/any/blank", "  b"]
    assert wrap("Run `hexdata verify a-long-name` and `hexdata info`.", 24) == [
        "Run",
        "  `hexdata verify a-long-name`",
        "  and `hexdata info`.",
    ]
