"""How Sphinx builds these pages: ``python -m sphinx -W --keep-going -n docs FOLDER``.

The reference is made of the docstrings while it builds; nothing is written beside the sources.
"""

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import hexdata

project = "hexdata"
project_copyright = "the hexdata developers"
version = release = hexdata.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
"""Headings have the anchors that code hosts give them, so that links work in both places."""

autodoc_mock_imports = ["torch"]
"""PyTorch is large, and only its names are needed."""
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(_duckdb|collections|contextlib|io|np|npt|numpy|pathlib|pyarrow|threading|torch|typing)\..*",
    ),
    (
        r"py:class",
        r"Batch|Tensor|TensorBatch|tuple\[.*|[a-z]+|hexdata\.order\.Item|hexdata\.retry\.T|hexdata\.store\.Store",
    ),
    (r"py:.*", r"hexdata\.\w+\.[a-z]\w*\..*"),
    # Signatures with AnyPath, of which a part is known to the type checker only, stand as they are written.
    (r"py:class", r"(Any|Remote|U)?Path|BufferedReader|DuckDBPyConnection|FileFacts|Store|pa\.\w+"),
    (r"py:class", r"BoardForm|CacheFolder|FinalPolicy|Mode|OnError|Remainder"),
]
"""What need not lead anywhere: names of other projects, whose indices would need a network, and types that
stand in a signature and are not public names of a package."""

html_theme = "furo"
html_title = f"hexdata {release}"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

_GOOGLE = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)
_SEVERAL = re.compile(r"^:(ivar|param) (\w+, )+\w+:")
"""Names that share a description. With a space between them Sphinx takes the first for a type."""


def _read_google_style(
    _app: Sphinx, what: str, _name: str, _obj: object, _options: Any, lines: list[str]
) -> None:
    """Turn the sections of a docstring into what Sphinx reads.

    Those of attributes have none; napoleon as an extension takes what precedes their first colon for a type.
    """
    if what not in ("attribute", "data", "property"):
        read = GoogleDocstring(lines, _GOOGLE, what=what).lines()
        lines[:] = [_SEVERAL.sub(lambda names: names[0].replace(", ", ","), line) for line in read]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _read_google_style)
