"""Runs every code block of the documents.

A document runs from top to bottom in a temporary folder that contains a copy of ``configs/``. The lines of
``console`` blocks that start with ``$`` run one by one, ``python`` blocks run in one namespace, and ``toml``
blocks are parsed. A comment above the fence changes this: ``<!-- not run: why -->`` skips a block,
``<!-- file: name -->`` also writes it to the folder, ``<!-- store: path -->`` runs a ``sql`` block on that
store. The output of commands is not compared with the document. To save time:

- The demo with which most documents begin has ``DEMO_GAMES`` games, with few exceptions. It is run
  once and copied.
- Commands in this process use one core: small stores are finished before workers have started.
- A plain ``hexdata`` command runs in this process, also if its output goes to a file. Others run in a shell.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
import warnings
from contextlib import chdir
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hexdata.batch import FIELDS
from hexdata.cli import app
from hexdata.errors import HexdataError

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "CHANGELOG.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PLAIN = {"json", "mermaid", "sql", "text", "{eval-rst}", "{include}", "{toctree}"}
"""Languages of blocks that are not run, except ``sql`` with a store; Sphinx runs its own blocks."""
OPTIONAL = {name: name for name in ("datasets", "jax", "pandas", "polars", "torch")} | {
    "hexdata.webdataset": "torch"
}
"""Parts of names in imports, and the libraries without which the blocks that import them are skipped."""
LONGEST_COMMAND = 300.0
"""Seconds after which a command is considered to hang."""

FENCE = re.compile(r"^ *```(?P<language>\w*|\{[\w-]+\})( [./\w]+)?\s*$")
DEMO = re.compile(r"hexdata demo( hexdata-demo)?( --games \d+)?")
"""A demo that may be copied: it writes the folder ``hexdata-demo`` with the same bytes every time."""
DEMO_GAMES = 64
TO_FILE = re.compile(r"hexdata (?P<arguments>[^|&;<>*$`]+) > (?P<file>[\w.-]+)")
"""A command that needs a shell only to write its output to a file."""
OWN_GAMES = {"quality.md"}
"""Documents whose statements need as many games as they name."""
MARK = re.compile(r"^ *<!-- (?P<mark>not run|file|store): (?P<text>.*\S) -->\s*$")


class BlockError(AssertionError):
    """A block that fails; the message starts with file and line."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its first line, language, text and the mark above it."""

    where: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def error(self, message: str, line: int | None = None) -> BlockError:
        return BlockError(f"{self.where}:{line or self.line}: {message}")


def blocks_of(document: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    blocks, opened, marks = [], None, {}
    lines = document.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            above = MARK.match(lines[number - 2]) if number > 1 else None
            opened, marks = (number, fence["language"]), {above["mark"]: above["text"]} if above else {}
        elif opened is not None and fence and not fence["language"]:
            start, language = opened
            text = "\n".join(lines[start : number - 1]) + "\n"
            blocks.append(Block(document.name, start + 1, language, text, marks))
            opened = None
    if opened is not None:
        raise BlockError(f"{document.name}:{opened[0]}: the block is never closed")
    return blocks


def words_of(command: str) -> list[str]:
    """Return the words of a command, or none if it needs a shell."""
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    return [] if re.search(r"[$`]", command) or re.search(r"[|&;<>*]", unquoted) else shlex.split(command)


def run_here(block: Block, line: int, arguments: list[str], scratch: Path) -> Result:
    """Run ``hexdata`` in this process."""
    with chdir(scratch), warnings.catch_warnings():
        warnings.simplefilter("default")
        done = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "FORCE_COLOR": None})
    if done.exit_code:
        report = (
            done.exception.report() if isinstance(done.exception, HexdataError) else [repr(done.exception)]
        )
        said = "\n".join([done.output, *report])
        raise block.error(f"exit status {done.exit_code} from: hexdata {shlex.join(arguments)}\n{said}", line)
    return done


def run_command(block: Block, line: int, command: str | list[str], scratch: Path) -> str:
    """Run one command, text for bash or a list; return its output. Raise an error if it fails."""
    if isinstance(command, str) and (written := TO_FILE.fullmatch(command)):
        done = run_here(block, line, shlex.split(written["arguments"]), scratch)
        (scratch / written["file"]).write_text(done.stdout, encoding="utf-8")
        return ""
    words = words_of(command) if isinstance(command, str) else command
    if words[:1] == ["hexdata"]:
        return run_here(block, line, words[1:], scratch).output
    scripts = sysconfig.get_path("scripts")  # where the tested installation has its hexdata
    plain = {"NO_COLOR": "1", "FORCE_COLOR": ""}  # the second would draw progress bars too
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"} | plain
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command] if isinstance(command, str) else command,
        cwd=scratch,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_COMMAND,
        check=False,
    )
    if done.returncode:
        raise block.error(f"exit status {done.returncode} from: {command}\n{done.stdout}", line)
    return done.stdout


def run_demo(block: Block, line: int, command: str, scratch: Path, shelf: Path) -> str:
    """Copy the files of a demo, which is run at the first call, and return what it printed."""
    if block.where not in OWN_GAMES:
        command = f"hexdata demo --games {DEMO_GAMES}"
    kept, printed = shelf / command, shelf / f"{command}.txt"
    if not kept.exists():
        begun = Path(tempfile.mkdtemp(dir=shelf))
        printed.write_text(run_command(block, line, command, begun), encoding="utf-8")
        begun.rename(kept)
    if not (scratch / "hexdata-demo").exists():  # else the command changes nothing
        shutil.copytree(kept, scratch, dirs_exist_ok=True)
    return printed.read_text(encoding="utf-8")


def run_console(block: Block, scratch: Path, shelf: Path) -> None:
    """Run the lines after ``$``; a line that ends in a backslash continues on the next one."""
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    commands = 0
    for number, line in lines:
        if line.startswith("$ "):
            command = line.removeprefix("$ ")
            while command.endswith("\\"):
                command = command.removesuffix("\\") + next(lines)[1]
            if DEMO.fullmatch(command):
                run_demo(block, number, command, scratch, shelf)
            else:
                run_command(block, number, command, scratch)
            commands += 1
    if not commands:
        raise block.error("no line of the block starts with $: it is text")


def lacks_library(block: ast.Module) -> bool:
    """Return whether a block imports a name of ``OPTIONAL``, and its library is not installed."""
    nodes = list(ast.walk(block))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    parts = {*names, *(part for name in names for part in name.split("."))}
    return any(find_spec(OPTIONAL[part]) is None for part in OPTIONAL.keys() & parts)


def names_in(block: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a block defines, and those that it uses and does not define."""
    defined, used = set(), set()
    for node in ast.walk(block):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.alias):
            defined.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
    return defined, used - defined


def run_python(block: Block, namespace: dict[str, Any], skipped: set[str]) -> None:
    """Run a block in this process; a traceback contains the line of the document.

    Without a library that it imports, a block is skipped, and so are those that use a name of a skipped one.
    The names that skipped blocks define are added to ``skipped``.
    """
    try:
        parsed = ast.parse(block.text)
        defined, used = names_in(parsed)
        if lacks_library(parsed) or used & skipped - namespace.keys():
            skipped |= defined
            return
        exec(compile("\n" * (block.line - 1) + block.text, block.where, "exec"), namespace)
    except Exception as error:
        raise block.error(f"{type(error).__name__}: {error}") from error


def run_block(block: Block, scratch: Path, shelf: Path, namespace: dict[str, Any], skipped: set[str]) -> None:
    if "file" in block.marks:
        (scratch / block.marks["file"]).write_text(block.text, encoding="utf-8")
    if "not run" in block.marks:
        return
    if block.language == "console":
        run_console(block, scratch, shelf)
    elif block.language == "python":
        run_python(block, namespace, skipped)
    elif block.language == "toml":
        try:
            tomllib.loads(block.text)
        except tomllib.TOMLDecodeError as error:
            raise block.error(str(error)) from error
    elif block.language == "sql" and "store" in block.marks:
        run_command(block, block.line, ["hexdata", "sql", block.marks["store"], block.text], scratch)
    elif block.language not in PLAIN:
        raise block.error(
            f"no way to run a block of language {block.language!r}: use console, python or toml, "
            f"or one of {', '.join(sorted(PLAIN))} for what is only read"
        )


def run_document(document: Path, scratch: Path, shelf: Path) -> set[str]:
    """Run the blocks of a document, and return the names that skipped blocks define."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    skipped: set[str] = set()
    for block in blocks_of(document):
        run_block(block, scratch, shelf, namespace, skipped)
    return skipped


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demos")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    if (ROOT / "configs").is_dir():
        shutil.copytree(ROOT / "configs", folder / "configs")
        demo = folder / "configs" / "demo.toml"
        demo.write_text(
            re.sub(r"^games = \d+", f"games = {DEMO_GAMES}", demo.read_text(), flags=re.MULTILINE)
        )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


# webdataset leaves the shards that it read to the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_block_runs(document, scratch, shelf):
    if skipped := run_document(document, scratch, shelf):
        pytest.skip(f"no library for blocks, which define {', '.join(sorted(skipped))}; the others ran")


def test_every_field_is_documented():
    text = (ROOT / "docs/batches.md").read_text(encoding="utf-8")
    assert [name for name in FIELDS if f"`{name}`" not in text] == [], "add them to docs/batches.md"


# The harness itself.


def write(folder: Path, text: str) -> Path:
    path = folder / "sample.md"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not run: -->\n```console\n$ true\n$ exit 3\n```", "sample.md:4: exit status 3"),
        ("```console\n$ false | true\n```", "sample.md:2: exit status 1"),
        ("```console\nhexdata demo\n```", "sample.md:2: no line"),
        ("```python\nok = 1\n```\n\n```python\nassert ok == 2\n```", "sample.md:6: AssertionError"),
        ("```python\nx = (\n```", "sample.md:2: SyntaxError"),
        ("```toml\nseed = \n```", "sample.md:2: Invalid value"),
        ("```\ntrue\n```", "sample.md:2: no way to run"),
        ("text\n```python\nx = 1\n", "sample.md:2: the block is never closed"),
        ("<!-- not run: afar -->\n\n```console\n$ exit 3\n```", "sample.md:4: exit status 3"),
    ],
)
def test_a_failing_block_is_named(text, message, tmp_path, scratch, shelf):
    with pytest.raises(BlockError, match=f"^{re.escape(message)}"):
        run_document(write(tmp_path, text), scratch, shelf)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_placeholder_is_left(document):
    assert not re.search(r"@@|TODO|FIXME|XXX", document.read_text())
