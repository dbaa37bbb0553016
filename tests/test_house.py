"""The law of the house: who may import whom, and which library lives in which room.

Reads the source text, so a breach is found without running it. The tables below are the law; a new room
or a new library is one line there.
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

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "hexdata"

FLOORS = {
    "errors": 0,
    "progress": 0,
    "text": 0,
    "board": 1,
    "checks": 1,
    "config": 1,
    "order": 1,
    "pool": 1,
    "remote": 1,
    "units": 1,
    "draw": 2,
    "engine": 2,
    "schema": 2,
    "formats": 3,
    "store": 3,
    "batch": 4,
    "games": 4,
    "selection": 4,
    "quality": 5,
    "sql": 5,
    "convert": 6,
    "demo": 6,
    "export": 6,
    "live": 6,
    "loader": 6,
    "report": 6,
    "show": 6,
    "shuffle": 6,
    "verify": 6,
    "pipeline": 7,
    "torch": 7,
    "": 8,  # hexdata/__init__.py, the face of the house: its names load when they are asked for
    "cli": 9,
    "__main__": 10,
}
"""A room (a module or a folder) imports from lower floors and from itself, and from nowhere else."""


def between(lowest: int, highest: int) -> tuple[str, ...]:
    return tuple(room for room, floor in FLOORS.items() if lowest <= floor <= highest)


LIBRARIES = {
    "numpy": between(1, 7),
    "pyarrow": between(2, 7),
    "duckdb": ("store/session.py",),
    "loky": ("engine/local.py",),
    "psutil": ("pool",),
    "zlib_ng": ("formats",),
    "fsspec": ("remote",),
    "upath": ("remote",),
    "tenacity": ("remote", "shuffle"),
    "webdataset": ("loader", "formats"),
    "torch": ("torch",),
    "ray": ("engine/ray.py",),
    "pydantic": ("pipeline",),
    "matplotlib": ("report",),
    "jinja2": ("report",),
    "typer": ("cli",),
    "watchfiles": ("live",),
    "click": ("cli",),
    "rich": ("cli",),
    "prometheus_client": ("live/prometheus.py",),
}
"""Where each library that is not Python's own may be imported: rooms, or files within one."""

RESTRICTED = {
    "pickle": (),  # reading untrusted pickles runs no code from them
    "marshal": (),
    "shelve": (),
    "random": (),  # every random choice comes from hexdata.order
    "secrets": (),
}
"""The same for modules of Python itself."""

PURE = ("order", "board", "schema")
IMPURE = {"datetime", "io", "os", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid"}
"""What the pure rooms do not import: clocks, files, processes."""

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
    "tenacity",
    "torch",
    "upath",
    "webdataset",
}
"""What neither ``import hexdata`` nor ``hexdata --help`` loads."""

LONGEST_FILE = 500


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, its tree, and what it imports, in order of appearance."""

    path: Path
    place: str
    name: str
    tree: ast.Module
    imports: list[str] = field(default_factory=list)

    @property
    def room(self) -> str:
        return room_of(self.name)

    def stands_in(self, places: tuple[str, ...]) -> bool:
        return any(self.room == place or self.place == place for place in places)


def room_of(name: str) -> str:
    """Return the first part of a name below ``hexdata``; empty for ``hexdata/__init__.py``."""
    return name.partition(".")[2].partition(".")[0]


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Yield what is imported anywhere in a module, functions included, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_house(house: Path) -> dict[str, Module]:
    """Read every source file under ``house``, by dotted name."""
    modules = {}
    for path in sorted(house.rglob("*.py")):
        place = path.relative_to(house)
        parts = place.parts[:-1] if path.name == "__init__.py" else (*place.parts[:-1], path.stem)
        name = ".".join(("hexdata", *parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules[name] = Module(path, place.as_posix(), name, tree, list(imported_names(tree)))
    return modules


def home(imported: str, modules: dict[str, Module]) -> str:
    """Return the module that an imported name of the house comes from."""
    return imported if imported in modules else imported.rpartition(".")[0]


def unknown_rooms(modules: dict[str, Module]) -> list[str]:
    rooms = {module.room for module in modules.values()} - FLOORS.keys()
    return [f"hexdata/{room} has no floor: give it one in FLOORS of tests/test_house.py" for room in rooms]


def floor_breaches(modules: dict[str, Module]) -> list[str]:
    breaches = []
    for module in modules.values():
        for imported in module.imports:
            if imported.split(".")[0] != "hexdata" or imported == "hexdata.__version__":
                continue
            room, floor = room_of(imported), FLOORS.get(module.room, max(FLOORS.values()))
            if room not in FLOORS:
                breaches.append(f"{module.place} imports {imported}: import it from its own module")
            elif room != module.room and FLOORS[room] >= floor:
                breaches.append(f"{module.place}, floor {floor}, imports {imported}, floor {FLOORS[room]}")
    return breaches


def library_breaches(modules: dict[str, Module]) -> list[str]:
    breaches = []
    for module in modules.values():
        for library in {imported.split(".")[0] for imported in module.imports} - {"hexdata"}:
            places = LIBRARIES.get(library, RESTRICTED.get(library))
            if places is not None:
                if not module.stands_in(places):
                    breaches.append(f"{module.place} imports {library}, whose place is {places or 'nowhere'}")
            elif library not in sys.stdlib_module_names:
                breaches.append(
                    f"{module.place} imports {library}: give it a room in LIBRARIES of tests/test_house.py"
                )
    return breaches


def impurities(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.place} imports {imported}"
        for module in modules.values()
        if module.room in PURE
        for imported in module.imports
        if imported.split(".")[0] in IMPURE
    ]


def forbidden_calls(modules: dict[str, Module]) -> list[str]:
    """Find what no import shows: NumPy's generators, pickles inside arrays, files opened by pure rooms."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.keyword, ast.Name)) else ""
            pure_opens = module.room in PURE and text in ("open", "print", "input")
            dynamic = text in ("__import__", "importlib.import_module") and module.room
            if text in ("np.random", "numpy.random", "allow_pickle=True") or pure_opens or dynamic:
                found.append(f"{module.place}:{getattr(node, 'lineno', 0)} has {text}")
    return found


def cycle(modules: dict[str, Module]) -> list[str]:
    """Return one circle of imports, or nothing. A package that re-exports its own files is no circle."""
    graph = {
        name: {home(imported, modules) for imported in module.imports if imported.startswith("hexdata.")}
        - {name, "hexdata"}
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" imports ".join(reversed(error.args[1]))]
    return []


RULES = [unknown_rooms, floor_breaches, library_breaches, impurities, forbidden_calls, cycle]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_house(HOUSE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_law(rule, modules):
    assert len(modules) > 5
    assert rule(modules) == []


BROKEN = {
    "attic.py": ("unknown_rooms", "hexdata/attic has no floor"),
    "errors.py": ("floor_breaches", "floor 0, imports hexdata.schema"),
    "store/files.py": ("floor_breaches", "floor 3, imports hexdata.formats"),
    "export.py": ("floor_breaches", "floor 6, imports hexdata.shuffle"),
    "convert/a.py": ("floor_breaches", "import it from its own module"),
    "convert/sql.py": ("library_breaches", "imports duckdb"),
    "loader/legacy.py": ("library_breaches", "imports pickle"),
    "report/draw.py": ("library_breaches", "imports seaborn: give it a room"),
    "order.py": ("impurities", "imports time"),
    "board.py": ("forbidden_calls", "board.py:1 has np.random"),
    "formats/shards.py": ("forbidden_calls", "has allow_pickle=True"),
    "schema.py": ("forbidden_calls", "has open"),
    "shuffle/plan.py": ("cycle", "hexdata.shuffle.plan"),
}
BROKEN_TEXT = {
    "attic.py": "",
    "errors.py": "def later():\n    from hexdata.schema import SPLITS",
    "store/files.py": "import hexdata.formats.trmph",
    "export.py": "from hexdata import shuffle",
    "convert/a.py": "from hexdata import Store",
    "convert/sql.py": "import duckdb",
    "loader/legacy.py": "from pickle import loads",
    "report/draw.py": "import seaborn.objects",
    "order.py": "import time",
    "board.py": "np.random.rand()",
    "formats/shards.py": "np.load(file, allow_pickle=True)",
    "schema.py": "open('x')",
    "shuffle/plan.py": "from hexdata.shuffle import local",
    "shuffle/local.py": "from hexdata.shuffle.plan import make_plan",
}


def test_the_law_finds_every_breach(tmp_path):
    for place, text in BROKEN_TEXT.items():
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = {rule.__name__: rule(read_house(tmp_path)) for rule in RULES}
    for place, (rule, message) in BROKEN.items():
        assert any(message in complaint for complaint in found[rule]), place
    assert sum(map(len, found.values())) == len(BROKEN)


def test_every_module_says_what_it_is_for(modules):
    assert [module.place for module in modules.values() if not ast.get_docstring(module.tree)] == []


def test_no_file_is_too_long():
    files = [*HOUSE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    lengths = {path.relative_to(ROOT).as_posix(): path.read_bytes().count(b"\n") for path in files}
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after ``code``."""
    report = "import sys; sys.stderr.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    return set(child.stderr.split())


def test_importing_hexdata_loads_nothing_heavy():
    loaded = loaded_by("import hexdata")
    assert "hexdata" in loaded
    assert loaded & (LAZY | {"typer", "rich"}) == set()


def test_help_loads_nothing_heavy():
    loaded = loaded_by(
        "import sys; sys.argv = ['hexdata', '--help']\n"
        "from hexdata.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert "typer" in loaded
    assert loaded & LAZY == set()


def test_hexdata_names_about_ten_things():
    assert 5 <= len(hexdata.__all__) <= 20  # a stage and its options each, the loader, what people look at
    assert all(getattr(hexdata, name) is not None for name in hexdata.__all__)
