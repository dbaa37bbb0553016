"""Layering rules: which package may import which, and which package may import each library.

The tests read the source text and run none of it. The tables below are the rules: a new package, module
or library needs one line there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hexdata
from tests.conftest import SLOW_FILES

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
    "pool": 1,
    "retry": 1,
    "temporary": 1,
    "strict_json": 1,
    "units": 1,
    "config": 2,
    "draw": 2,
    "progress_bar": 2,
    "schema": 2,
    "storage": 2,
    "engine": 3,
    "fill": 3,
    "policy": 3,
    "formats": 4,
    "store": 4,
    "games": 5,
    "selection": 5,
    "shards": 5,
    "batch": 6,
    "cards": 6,
    "quality": 6,
    "sql": 6,
    "convert": 7,
    "demo": 7,
    "export": 7,
    "info": 7,
    "live": 7,
    "loader": 7,
    "report": 7,
    "show": 7,
    "shuffle": 7,
    "verify": 7,
    "browse": 8,
    "pipeline": 8,
    "torch": 8,
    "webdataset": 9,
    "": 9,  # hexdata/__init__.py: the public names, each imported on first use
    "cli": 10,
    "__main__": 11,
}
"""Layer of each unit (a package or a top-level module). A unit imports only itself and lower layers."""


def between(lowest: int, highest: int) -> tuple[str, ...]:
    return tuple(unit for unit, layer in LAYERS.items() if lowest <= layer <= highest)


LIBRARIES = {
    "numpy": between(1, 8),
    "pyarrow": between(2, 8),
    "duckdb": ("store/session.py",),
    "loky": ("engine/local.py",),
    "psutil": ("pool", "system"),
    "zlib_ng": ("formats",),
    "fsspec": ("storage",),
    "upath": ("storage",),
    "webdataset": ("shards", "webdataset"),
    "torch": ("torch",),
    "ray": ("engine/ray.py",),
    "pydantic": ("pipeline", "live/options.py"),
    "matplotlib": ("report",),
    "jinja2": ("report",),
    "typer": ("cli",),
    "watchfiles": ("live",),
    "click": ("cli",),
    "rich": ("cli", "progress_bar"),
    "prometheus_client": ("live/prometheus.py",),
    "resvg_py": ("show/find.py",),
    "starlette": ("browse/app.py",),
    "uvicorn": ("browse/server.py",),
}
"""The units, or files within a unit, that may import each third-party library."""

RESTRICTED = {
    "pickle": (),  # untrusted pickles must not run code
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
    "duckdb",
    "fsspec",
    "jinja2",
    "loky",
    "matplotlib",
    "numpy",
    "pyarrow",
    "pydantic",
    "ray",
    "torch",
    "upath",
    "webdataset",
}
"""Libraries that neither ``import hexdata`` nor ``hexdata --help`` may load."""


@dataclass(frozen=True)
class Module:
    """One source file, its syntax tree and the dotted names it imports."""

    path: Path
    relative_path: str
    name: str
    tree: ast.Module
    nodes: list[ast.AST]
    imports: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return unit_of(self.name)

    def is_among(self, allowed: tuple[str, ...]) -> bool:
        return self.unit in allowed or self.relative_path in allowed


def unit_of(name: str) -> str:
    """Return the first part of a dotted name below ``hexdata``; empty for ``hexdata/__init__.py``."""
    return name.partition(".")[2].partition(".")[0]


def imported_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the dotted name of every import in a module, including those inside functions."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_package(root: Path) -> dict[str, Module]:
    """Read every source file under ``root``, keyed by dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.parts[:-1] if path.name == "__init__.py" else (*relative.parts[:-1], path.stem)
        name = ".".join(("hexdata", *parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        imports = list(imported_names(nodes))
        modules[name] = Module(path, relative.as_posix(), name, tree, nodes, imports)
    return modules


def dotted(node: ast.AST) -> str:
    """Return the source of a name such as ``np.random`` or of the keyword ``name=True``; else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        return f"{node.arg}={node.value.value!r}"
    return ""


def defining_module(imported: str, modules: dict[str, Module]) -> str:
    """Return the module of hexdata that an imported dotted name belongs to."""
    return imported if imported in modules else imported.rpartition(".")[0]


def find_unlisted_units(modules: dict[str, Module]) -> list[str]:
    units = {module.unit for module in modules.values()} - LAYERS.keys()
    return [f"hexdata/{unit} has no layer: add it to LAYERS in tests/test_layers.py" for unit in units]


def find_layer_violations(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        for imported in module.imports:
            if imported.split(".")[0] != "hexdata" or imported == "hexdata.__version__":
                continue
            unit, layer = unit_of(imported), LAYERS.get(module.unit, max(LAYERS.values()))
            if unit not in LAYERS:
                found.append(
                    f"{module.relative_path} imports {imported}: import it from the module that defines it"
                )
            elif unit != module.unit and LAYERS[unit] >= layer:
                found.append(
                    f"{module.relative_path}, layer {layer}, imports {imported}, layer {LAYERS[unit]}"
                )
    return found


def find_library_violations(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        for library in {imported.split(".")[0] for imported in module.imports} - {"hexdata"}:
            allowed = LIBRARIES.get(library, RESTRICTED.get(library))
            if allowed is not None:
                if not module.is_among(allowed):
                    found.append(
                        f"{module.relative_path} imports {library}, allowed only in {allowed or 'no module'}"
                    )
            elif library not in sys.stdlib_module_names:
                found.append(
                    f"{module.relative_path} imports {library}: add it to LIBRARIES in tests/test_layers.py"
                )
    return found


def find_impure_imports(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.relative_path} imports {imported}"
        for module in modules.values()
        if module.unit in PURE
        for imported in module.imports
        if imported.split(".")[0] in IMPURE
    ]


def find_forbidden_calls(modules: dict[str, Module]) -> list[str]:
    """Find NumPy's generators, pickles inside arrays, dynamic imports, and files opened by pure units."""
    found = []
    for module in modules.values():
        for node in module.nodes:
            text = dotted(node)
            pure_opens = module.unit in PURE and text in ("open", "print", "input")
            dynamic = text in ("__import__", "importlib.import_module") and module.unit
            if text in ("np.random", "numpy.random", "allow_pickle=True") or pure_opens or dynamic:
                found.append(f"{module.relative_path}:{getattr(node, 'lineno', 0)} has {text}")
    return found


def find_import_cycle(modules: dict[str, Module]) -> list[str]:
    """Return the first import cycle found, or nothing.

    A package that re-exports its own modules is not a cycle.
    """
    graph = {
        name: {
            defining_module(imported, modules)
            for imported in module.imports
            if imported.startswith("hexdata.")
        }
        - {name, "hexdata"}
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


RULES = [
    find_unlisted_units,
    find_layer_violations,
    find_library_violations,
    find_impure_imports,
    find_forbidden_calls,
    find_import_cycle,
]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_package(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_hexdata_follows_the_rule(rule, modules):
    assert len(modules) > 5
    assert rule(modules) == []


VIOLATIONS = {
    "attic.py": ("find_unlisted_units", "hexdata/attic has no layer"),
    "errors.py": ("find_layer_violations", "layer 0, imports hexdata.schema"),
    "store/files.py": ("find_layer_violations", "layer 4, imports hexdata.formats"),
    "export.py": ("find_layer_violations", "layer 7, imports hexdata.shuffle"),
    "convert/a.py": ("find_layer_violations", "import it from the module that defines it"),
    "convert/sql.py": ("find_library_violations", "imports duckdb"),
    "loader/legacy.py": ("find_library_violations", "imports pickle"),
    "storage/lock.py": ("find_library_violations", "imports fcntl"),
    "report/draw.py": ("find_library_violations", "imports seaborn: add it to LIBRARIES"),
    "order.py": ("find_impure_imports", "imports time"),
    "board.py": ("find_forbidden_calls", "board.py:1 has np.random"),
    "shards/format.py": ("find_forbidden_calls", "has allow_pickle=True"),
    "schema.py": ("find_forbidden_calls", "has open"),
    "shuffle/layout.py": ("find_import_cycle", "hexdata.shuffle.layout"),
}
VIOLATING_SOURCES = {
    "attic.py": "",
    "errors.py": "def later():\n    from hexdata.schema import SPLITS",
    "store/files.py": "import hexdata.formats.trmph",
    "export.py": "from hexdata import shuffle",
    "convert/a.py": "from hexdata import Store",
    "convert/sql.py": "import duckdb",
    "loader/legacy.py": "from pickle import loads",
    "storage/lock.py": "import fcntl",
    "report/draw.py": "import seaborn.objects",
    "order.py": "import time",
    "board.py": "np.random.rand()",
    "shards/format.py": "np.load(file, allow_pickle=True)",
    "schema.py": "open('x')",
    "shuffle/layout.py": "from hexdata.shuffle import tasks",
    "shuffle/tasks.py": "from hexdata.shuffle.layout import make_plan",
}


def test_the_rules_find_every_violation(tmp_path):
    for name, text in VIOLATING_SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = {rule.__name__: rule(read_package(tmp_path)) for rule in RULES}
    for name, (rule, message) in VIOLATIONS.items():
        assert any(message in violation for violation in found[rule]), name
    assert sum(map(len, found.values())) == len(VIOLATIONS)


def test_every_module_has_a_docstring(modules):
    assert [module.relative_path for module in modules.values() if not ast.get_docstring(module.tree)] == []


def test_few_modules_ask_whether_a_path_is_local(modules: dict[str, Module]):
    """Code that differs between disks and object stores belongs in ``hexdata/storage``."""
    checks = [
        f"{module.relative_path}:{node.lineno}"
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.Call)
        and dotted(node.func) == "isinstance"
        and "Path" in {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    ]
    assert 0 < len(checks) < 15, checks


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


def test_every_slow_file_exists():
    tests = ROOT / "tests"
    assert [name for name in SLOW_FILES if not (tests / name).is_file()] == []
