"""Adds the addresses of a repository to the metadata of a release: ``add_addresses.py URL REF [FOLDER]``.

The checkout names no address. This program adds the table ``[project.urls]`` to ``pyproject.toml``, unless it
exists, and makes the relative links of ``README.md`` absolute: a package index shows this file without the
others.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(?P<before>!?\[(?:[^][]|\[[^]]*\])*\]\()(?P<path>(?![a-z]+:|#)[^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def urls(url: str, ref: str) -> str:
    """Return the table of addresses."""
    addresses = {
        "Repository": url,
        "Documentation": f"{url}/blob/{ref}/docs/index.md",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in addresses.items())


def absolute_links(text: str, url: str, ref: str) -> str:
    """Return Markdown in which links to files are addresses; images get those of the files themselves."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["before"].startswith("!") else "blob"
        return f"{link['before']}{url}/{kind}/{ref}/{link['path']})"

    parts = CODE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in parts)


def main(url: str, ref: str, folder: str = ".") -> None:
    """Change the files of a checkout."""
    project, readme = Path(folder, "pyproject.toml"), Path(folder, "README.md")
    text = project.read_text(encoding="utf-8")
    if "[project.urls]" not in text:
        project.write_text(text + urls(url, ref), encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    readme.write_text(absolute_links(text, url, ref), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
