"""Sphinx configuration of these pages, built with ``python -m sphinx -W --keep-going -n docs FOLDER``.

The library reference is generated from the docstrings during the build, which writes no file beside the
sources.
"""

import re
from typing import Any

import typer
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import hexdata
from hexdata.cli import app as cli
from hexdata.formats.registry import BUILT_IN_FORMATS

project = "hexdata"
project_copyright = "the hexdata developers"
version = release = hexdata.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
"""Headings get the same anchors as on code hosts, so that links work in both."""

autodoc_mock_imports = ["torch", "webdataset"]
"""PyTorch is large, and the build needs only its names. webdataset imports it."""
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(_duckdb|collections|contextlib|fractions|io|msgspec|np|npt|numpy|pathlib|pyarrow|rich|threading|torch|types|typing)\..*",
    ),
    (
        r"py:class",
        r"Batch|Tensor|TensorBatch|tuple\[.*|[a-z]+|"
        r"hexdata\.arrays\.Arrays|hexdata\.order\.Item|hexdata\.retry\.T|hexdata\.store\.Store",
    ),
    (r"py:.*", r"hexdata\.\w+\.[a-z]\w*\..*"),
    # Sphinx cannot resolve signatures with AnyPath, part of which exists only for the type checker.
    (
        r"py:class",
        r"(Any|Remote|U)?Path|AbstractContextManager|BufferedReader|DuckDBPyConnection|FileFacts|Store|pa\.\w+",
    ),
    (
        r"py:class",
        r"BoardForm|Dedup|FinalPolicy|Mode|OnError|Remainder|Row|Spread|TransformFunction|Weights",
    ),
]
"""References that may be unresolved: names of other projects, whose indices would need a network, and types
in signatures that are not public names of a package."""

html_theme = "furo"
html_title = f"hexdata {release}"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

_GOOGLE = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)
_SEVERAL = re.compile(r"^:(ivar|param) (\w+, )+\w+:")
"""Names that share a description. If spaces separate them, Sphinx reads the first as a type."""


def _read_google_style(
    _app: Sphinx, what: str, _name: str, _obj: object, _options: Any, lines: list[str]
) -> None:
    """Convert the sections of a docstring to reStructuredText fields.

    Docstrings of attributes have no sections. They are left out, because napoleon, used as an extension,
    would read the text before their first colon as a type.
    """
    if what not in ("attribute", "data", "property"):
        read = GoogleDocstring(lines, _GOOGLE, what=what).lines()
        lines[:] = [_SEVERAL.sub(lambda names: names[0].replace(", ", ","), line) for line in read]


def _list_formats(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Put the table of the built-in formats of sources in place of the comment ``<!-- formats -->``."""
    rows = [
        f"| `{each.name}` | {' '.join(f'`{name}`' for name in each.patterns)} | {each.contents} |"
        for each in BUILT_IN_FORMATS
    ]
    table = "\n".join(["| `--format` | files | contents |", "|---|---|---|", *rows])
    source[0] = source[0].replace("<!-- formats -->", table)


def _list_options(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Put the table of a command's options in place of a comment, such as ``<!-- options of shuffle -->``."""

    def table(command: re.Match[str]) -> str:
        rows = ["| option | default | meaning |", "|---|---|---|"]
        for option in commands[command[1]].params:
            if option.opts[0].startswith("--") and not option.hidden:
                default = "" if option.default in (None, False) else option.default
                name = " ".join(filter(None, [option.opts[0], option.metavar])).replace("|", r"\|")
                rows.append(f"| `{name}` | {default} | {option.help} |")
        return "\n".join(rows)

    commands: Any = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    source[0] = re.sub(r"<!-- options of (\w+) -->", table, source[0])


def setup(app: Sphinx) -> None:
    """Connect the functions above; called by Sphinx."""
    app.connect("autodoc-process-docstring", _read_google_style)
    app.connect("source-read", _list_formats)
    app.connect("source-read", _list_options)
