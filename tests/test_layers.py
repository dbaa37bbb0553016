"""Layering rules: which package may import which, and which package may import each library.

The tests read the source text and run none of it. The tables below are the rules: a new package, module
or library needs one line there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hexdata

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hexdata"

LAYERS = {
    "errors": 0,
    "progress": 0,
    "system": 0,
    "text": 0,
    "board": 1,
    "checks": 1,
    "extras": 1,
    "order": 1,
    "retry": 1,
    "temporary": 1,
    "json_models": 1,
    "units": 1,
    "arrays": 2,
    "config": 2,
    "draw": 2,
    "pool": 2,
    "progress_bar": 2,
    "schema": 2,
    "storage": 2,
    "engine": 3,
    "fill": 3,
    "options": 3,
    "policy": 3,
    "formats": 4,
    "store": 5,
    "games": 6,
    "selection": 6,
    "shards": 6,
    "batch": 7,
    "cards": 7,
    "quality": 7,
    "sql": 7,
    "convert": 8,
    "demo": 8,
    "export": 8,
    "info": 8,
    "live": 8,
    "loader": 8,
    "show": 8,
    "shuffle": 8,
    "browse": 9,
    "report": 9,
    "torch": 9,
    "verify": 9,
    "pipeline": 10,
    "webdataset": 10,
    "": 10,  # hexdata/__init__.py: the public names, each imported on first use
    "cli": 11,
    "__main__": 12,
}
"""Layer of each unit (a package or a top-level module). A unit imports only itself and lower layers."""


def between(lowest: int, highest: int) -> tuple[str, ...]:
    return tuple(unit for unit, layer in LAYERS.items() if lowest <= layer <= highest)


LIBRARIES = {
    "aiohttp": ("storage",),  # an error that s3fs passes on
    "numpy": between(1, 9),
    "pyarrow": between(2, 9),
    "duckdb": ("store/session.py",),
    "loky": ("engine/local.py",),
    "msgspec": (*between(1, 8), "cli/render.py"),
    "psutil": ("system",),
    "zlib_ng": ("formats",),
    "fsspec": ("storage",),
    "upath": ("storage",),
    "webdataset": ("webdataset",),
    "torch": ("torch",),
    "ray": ("engine/ray.py",),
    "jinja2": ("report",),
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli", "progress_bar"),
    "prometheus_client": ("live/prometheus.py",),
    "resvg_py": ("show/find.py",),
    "starlette": ("browse/app.py",),
    "uvicorn": ("browse/server.py",),
}
"""The units, or files within a unit, that may import each third-party library."""

RESTRICTED = {
    "pickle": ("formats/legacy/unpickler.py",),  # untrusted pickles must not run code
    "marshal": (),
    "shelve": (),
    "random": ("retry",),  # every random choice comes from hexdata.order; only waits may differ
    "secrets": (),
    **dict.fromkeys(
        ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"), ("system",)
    ),
    **dict.fromkeys(("msvcrt", "winreg", "_winapi"), ("system",)),
}
"""The same for modules of the standard library. Those in the last two lines exist on one system only."""

PURE = ("order", "board", "schema", "fill", "policy")
IMPURE = {"datetime", "io", "os", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid"}
"""Modules that pure units must not import: clocks, files, processes."""

LAZY = {
    "aiohttp",
    "duckdb",
    "fsspec",
    "jinja2",
    "loky",
    "msgspec",
    "numpy",
    "pyarrow",
    "ray",
    "torch",
    "upath",
    "webdataset",
}
"""Libraries that neither ``import hexdata`` nor ``hexdata --help`` may load."""


@dataclass(frozen=True)
class Module:
    """One source file, its syntax tree and the dotted names it imports, also inside functions."""

    path: str
    name: str
    tree: ast.Module
    imports: list[str]

    @property
    def unit(self) -> str:
        return unit_of(self.name)


def unit_of(name: str) -> str:
    """Return the first part of a dotted name below ``hexdata``; empty for ``hexdata/__init__.py``."""
    return name.partition(".")[2].partition(".")[0]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """Every source file by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE.parent)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imports += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are absolute"
                imports += [f"{node.module}.{alias.name}" for alias in node.names]
        found[name] = Module(path.relative_to(PACKAGE).as_posix(), name, tree, imports)
    assert len(found) > 100
    return found


def test_each_unit_has_a_layer_and_imports_only_lower_ones(modules):
    assert {module.unit for module in modules.values()} - LAYERS.keys() == set()
    for module in modules.values():
        for imported in module.imports:
            if imported.split(".")[0] == "hexdata" and imported != "hexdata.__version__":
                unit = unit_of(imported)
                # An unlisted unit is a name of hexdata/__init__.py: import it from where it is defined.
                assert unit in LAYERS, f"{module.path} imports {imported}"
                is_lower = LAYERS[unit] < LAYERS[module.unit]
                assert unit == module.unit or is_lower, f"{module.path} imports {imported}"


def test_each_library_is_imported_where_it_is_allowed(modules):
    for module in modules.values():
        for name in {imported.split(".")[0] for imported in module.imports} - {"hexdata"}:
            allowed = LIBRARIES.get(name, RESTRICTED.get(name))
            if allowed is None:
                assert name in sys.stdlib_module_names, f"{module.path}: add {name} to LIBRARIES"
            else:
                assert {module.unit, module.path} & {*allowed}, f"{module.path} imports {name}"
            assert module.unit not in PURE or name not in IMPURE, f"{module.path} imports {name}"


def test_no_module_has_hidden_inputs(modules):
    """NumPy's generators, pickles inside arrays, dynamic imports, and files opened by pure units."""
    for module in modules.values():
        forbidden = {"np.random", "numpy.random", "allow_pickle=True"}
        forbidden |= {"open", "print", "input"} if module.unit in PURE else set()
        forbidden |= {"__import__", "importlib.import_module"} if module.unit else set()
        kinds = (ast.Name, ast.Attribute, ast.keyword)
        found = {ast.unparse(node) for node in ast.walk(module.tree) if isinstance(node, kinds)}
        assert found & forbidden == set(), module.path


def test_no_imports_form_a_cycle(modules):
    """A package that re-exports its own modules is no cycle."""
    graph = {
        name: {each if each in modules else each.rpartition(".")[0] for each in module.imports}
        & modules.keys() - {name, "hexdata"}
        for name, module in modules.items()
    }
    TopologicalSorter(graph).prepare()


def test_the_architecture_page_describes_every_unit():
    """Each package or module is in bold where the page describes it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [unit for unit in LAYERS if unit not in ("", "__main__") and f"**`{unit}`**" not in text]
    assert missing == []


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules loaded in a new interpreter after it ran ``code``."""
    report = "import sys; sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    return set(child.stderr.split())


def test_importing_hexdata_loads_no_heavy_library():
    loaded = loaded_by("import hexdata")
    assert "hexdata" in loaded
    assert loaded & (LAZY | {"typer", "rich"}) == set()


def test_help_loads_no_heavy_library():
    loaded = loaded_by(
        "import sys; sys.argv = ['hexdata', '--help']\n"
        "from hexdata.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert "typer" in loaded
    assert loaded & LAZY == set()


def test_hexdata_exports_a_small_public_api():
    assert 5 <= len(hexdata.__all__) <= 20
    assert all(getattr(hexdata, name) is not None for name in hexdata.__all__)
