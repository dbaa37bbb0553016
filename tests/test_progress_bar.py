"""The progress bar of terminals and notebooks: labels, widths and what remains."""

from __future__ import annotations

import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from hexdata.progress_bar import ProgressBar


def shown_on_a_terminal(width: int) -> str:
    """Return what a terminal shows of a stage that is half done, and of a finished one."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    with ProgressBar(console) as bar:
        bar.begin("read", 1_000_000, "bytes")
        bar.advance(1_000_000)
        bar.begin("scatter", 97_000_000, "positions")
        for _ in range(4):
            time.sleep(0.01)
            bar.advance(12_000_000)
        bar._bar.refresh()
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_rate_time_left_and_memory_have_labels_and_fit(width):
    shown = shown_on_a_terminal(width)
    lines = [line.rstrip() for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]", shown) if line.strip()]
    assert max(map(len, lines)) <= width
    last = next(line for line in reversed(lines) if line.startswith("scatter"))
    assert re.search(r" 49%", last)
    assert re.search(r"[\d,]+ positions/s" if width >= 80 else r"[\d,]+/s", last)
    assert re.search(r"\d+:\d\d left", last)
    assert re.search(r"memory [\d.]+ [MG]B$", last)
    assert ("━" in last) == (width >= 80)
    finished = next(line for line in reversed(lines) if line.startswith("read"))
    assert "100%" in finished
    assert "left" not in finished
    assert "memory" not in finished


class Handle:
    def __init__(self, data):
        self.updates = [data]

    def update(self, data, *, raw):
        assert raw
        self.updates.append(data)


@pytest.fixture
def notebook(monkeypatch):
    """The displays of a kernel without widgets."""
    handles = []

    def display(data, *, raw, display_id):
        assert raw
        assert display_id
        handles.append(Handle(data))
        return handles[-1]

    shell = SimpleNamespace(kernel=object())
    fake = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setattr("hexdata.progress_bar._NOTEBOOK_SECONDS", 0.0)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # rich would display outputs of its own
    return handles


def test_a_notebook_shows_one_output_that_is_updated_and_remains(notebook, capsys):
    with ProgressBar() as bar:
        bar.note("a note")
        bar.begin("sort", 1_000, "positions")
        time.sleep(0.01)
        bar.advance(250)
        time.sleep(0.01)
        bar.advance(250)
        bar.begin("write", None, "files")
        bar.advance(3)
    (handle,) = notebook
    texts = [data["text/plain"] for data in handle.updates]
    half = next(text for text in texts if " 50%" in text)
    assert re.search(r"sort .* 50% [\d,]+ positions/s +\d+:\d\d left +memory [\d.]+ [MG]B", half)
    assert texts[-1].splitlines()[1].startswith("write")
    assert "100%" in texts[-1].splitlines()[1], "a stage of unknown length is complete at the end"
    assert "\x1b" not in "".join(texts)
    assert capsys.readouterr().err == "note: a note\n"
