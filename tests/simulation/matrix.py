"""Runs all parts of the proof by simulation, and adds up what they found.

    python tests/simulation/matrix.py                              # everything
    python tests/simulation/matrix.py --share 3/7                  # every seventh task, from the third
    python tests/simulation/matrix.py --parts small,objects --minutes 20
    python tests/simulation/matrix.py --out FOLDER                 # again: only what is missing or has failed

The parts ``small`` and ``medium`` are the cases of ``disk.py``: each operation of each command with each
fault; of medium commands, a sample of each fault. ``rot`` are changed bytes, see ``rot.py``. The others are
scripts, see ``SCRIPTS``. All are divided into tasks, which the processes share. The results of each task are
appended to ``FOLDER/results.jsonl``, with a digest of the code that was tested, so that an interrupted run
can be continued. The summary is printed and written to ``FOLDER/summary.json``. Exits with status 1 if a case
fails or a task ends with an exception, and with status 3 if the time was over before all were tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

from tests.simulation import rot  # noqa: E402
from tests.simulation.commands import COMMANDS  # noqa: E402
from tests.simulation.disk import (  # noqa: E402
    Case,
    CommandGroup,
    default_folder,
    load_libraries,
    preload,
    sample,
)
from tests.simulation.replay import digest  # noqa: E402
from tests.simulation.sharing import Group, cpu_seconds, share_tasks  # noqa: E402

DISK_PARTS: Final = ("small", "medium")
SCRIPTS: Final = {
    "objects": [f"simulation/objects.py --first {first} --count 125" for first in range(0, 1000, 125)],
    "fuzz": [f"fuzz/fuzz_parsers.py --sample 30 {seed}" for seed in range(1, 5)],
}
"""Scripts in ``tests`` that try a fixed number of cases and end with another status than 0 if one fails."""
PARTS: Final = (*SCRIPTS, "rot", "medium", "small")
"""The parts, in the order in which they are begun."""
MEDIUM_EACH: Final = 6
"""Cases of each fault and medium command."""
ROT_STEP: Final = 25
"""Of each file, every k-th byte is altered."""


def tested_code() -> str:
    """Return a digest of all that determines the result of a case."""
    files = sorted([*TESTS.parent.glob("hexdata/**/*.py"), *Path(__file__).parent.glob("*.[pc]*")])
    return digest(b"".join(path.read_bytes() for path in files if path.is_file()))[:16]


class Results:
    """The results of chunks, in a file.

    Args:
        folder: Folder of the file. It is created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.code = folder, tested_code()
        self._path = folder / "results.jsonl"
        self.lines: dict[tuple[str, str, int], dict[str, Any]] = {}
        for text in self._path.read_text().splitlines() if self._path.exists() else []:
            line = json.loads(text)
            if line["code"] == self.code:
                self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        self.lines[line["part"], line["name"], line["chunk"]] = line

    def is_done(self, part: str, name: str, chunk: int) -> bool:
        """Return whether a chunk was tried with this code, and nothing failed."""
        line = self.lines.get((part, name, chunk))
        return line is not None and not line["failures"]

    def add(self, part: str, name: str, chunk: int, **result: Any) -> None:
        """Append the result of a chunk."""
        line = {"code": self.code, "part": part, "name": name, "chunk": chunk, **result}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._keep(line)


class Script(Group):
    """A script with several argument lists, which are one task each."""

    def __init__(self, commands: list[str], deadline: float) -> None:
        super().__init__()
        self._commands, self._deadline = commands, deadline

    def prepare(self) -> tuple[dict[str, Any], int]:
        return {}, len(self._commands)

    def begin(self, job: int) -> Callable[[int], dict[str, Any]]:
        del job
        return self._run

    def _run(self, number: int) -> dict[str, Any]:
        """Run a script, and end it at the deadline."""
        script, *arguments = shlex.split(self._commands[number])
        try:
            done = subprocess.run(
                [sys.executable, str(TESTS / script), *arguments],
                cwd=TESTS.parent,
                env={**os.environ, "PYTHONPATH": str(TESTS.parent), "LD_PRELOAD": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=None if self._deadline == float("inf") else max(1.0, self._deadline - time.time()),
            )
        except subprocess.TimeoutExpired:
            return {"late": True}
        last = done.stdout.strip().splitlines()[-1:] or [""]
        failures = [{"wrong": done.stdout[-3000:]}] if done.returncode else []
        return {"counts": {}, "failures": failures, "last": last[0]}


class Matrix:
    """A run of some parts.

    Args:
        results: Results of earlier runs and of this one.
        share: The number of a share and the number of shares.
        deadline: Time at which no further task is started, in seconds since 1970.
    """

    def __init__(self, results: Results, share: tuple[int, int], deadline: float) -> None:
        self.results, self.share, self.deadline = results, share, deadline
        self.missing: Counter[str] = Counter()
        self.broken = 0
        self._groups: dict[Group, tuple[str, str]] = {}

    def add(self, part: str, name: str, group: Group) -> None:
        """Add a group, of which the tasks of the share are done that are not done already."""
        index, shares = self.share

        def is_due(number: int) -> bool:
            return number % shares == index - 1 and not self.results.is_done(part, name, number)

        group.is_due = is_due
        self._groups[group] = part, name

    def run(self, jobs: int) -> None:
        """Do the tasks of all groups, and print failures and the sums of each group."""
        for group, number, answer in share_tasks(list(self._groups), jobs, self.deadline):
            part, name = self._groups[group]
            if "broken" in answer:
                self.broken += 1
                print(f"BROKEN {part} {name} {number}\n    {_first_lines(answer['broken'])}", flush=True)
            elif "late" in answer:
                self.missing[part] += 1
            elif number is not None:
                self.results.add(part, name, number, **(group.facts or {}), **answer)
                for failure in answer["failures"]:
                    case = Case(**failure["case"]) if part in DISK_PARTS else failure.get("case", part)
                    print(f"FAILED {case}\n    {_first_lines(failure['wrong'])}", flush=True)
            else:
                self._print(group)
        for group, (part, _) in self._groups.items():
            self.missing[part] += len(group.left)
            self.missing[f"{part}, not begun"] += group.facts is None

    def _print(self, group: Group) -> None:
        part, name = self._groups[group]
        done = [line for line in self.results.lines.values() if (line["part"], line["name"]) == (part, name)]
        cases = sum(line["counts"].get("cases", 0) for line in done)
        failed = sum(len(line["failures"]) for line in done)
        cpu = sum(line["cpu"] for line in done)
        print(f"{part} {name}: {cases:,} cases, {failed} failed; {cpu:.0f} s of CPU time", flush=True)


def _first_lines(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n    ".join(lines if len(lines) <= 6 else [lines[0], "…", *lines[-4:]])


def summary_of(results: Results, parts: list[str]) -> dict[str, Any]:
    """Return the sums of all results of the code that is tested, by part and command."""
    summary: dict[str, Any] = {}
    for (part, name, _), line in sorted(results.lines.items()):
        if part not in parts:
            continue
        entry = summary.setdefault(part, {}).setdefault(
            name or part, {"counts": Counter(), "failed": 0, "cpu": 0.0, "seconds": 0.0}
        )
        entry["counts"].update(line["counts"])
        entry["failed"] += len(line["failures"])
        entry["cpu"] = round(entry["cpu"] + line["cpu"], 1)
        entry["seconds"] = round(entry["seconds"] + line["seconds"], 1)
        entry |= {key: line[key] for key in ("operations", "all cases") if key in line}
        if "last" in line:
            entry.setdefault("last", []).append(line["last"])
    return summary


def table_of(summary: dict[str, Any]) -> str:
    """Return the summary as text."""
    columns = ("operations", "cases", "of", "disks", "failed", "CPU s")
    lines = [f"{'':<28}" + "".join(f"{column:>12}" for column in columns)]
    for part, entries in summary.items():
        sums: Counter[str] = Counter()
        for name, entry in entries.items():
            counts = entry["counts"]
            values = {
                "operations": entry.get("operations", 0),
                "cases": counts["cases"],
                "of": entry.get("all cases", 0),
                "disks": counts["disks after crashes"] + counts["disks after errors"],
                "failed": entry["failed"],
                "CPU s": round(entry["cpu"]),
            }
            sums.update(values)
            lines.append(_row(f"{part} {name}" if name != part else part, values))
        if len(entries) > 1:
            lines.append(_row(f"{part}, all", sums))
    return "\n".join(lines)


def _row(name: str, values: dict[str, int]) -> str:
    return f"{name:<28}" + "".join(f"{value:>12,}" for value in values.values())


def main() -> None:
    """Run the parts that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--only", help="commands of the disk, separated by commas; default: all")
    parser.add_argument("--share", default="1/1", help="K/N: of each command, every N-th task, from the K-th")
    parser.add_argument("--medium-each", type=int, default=MEDIUM_EACH, help="default: %(default)s")
    parser.add_argument("--rot-step", type=int, default=ROT_STEP, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the samples of medium and rot")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no task after this time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=default_folder() / "matrix", help="default: %(default)s")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    begin = time.time()
    folder = default_folder()
    preload(folder)
    load_libraries()
    results = Results(options.out)
    index, shares = map(int, options.share.split("/"))
    matrix = Matrix(results, (index, shares), begin + 60 * options.minutes)
    add_groups(matrix, [part for part in PARTS if part in parts], folder, options)
    matrix.run(options.jobs)
    summary = summary_of(results, parts)
    failed = sum(entry["failed"] for entries in summary.values() for entry in entries.values())
    missing = +matrix.missing
    facts = {
        "code": results.code,
        "failed": failed,
        "broken": matrix.broken,
        "not tried": missing,
        "seconds": round(time.time() - begin),
        "CPU seconds": round(cpu_seconds()),
    }
    print("\n" + table_of(summary))
    print(
        ", ".join(f"{name}: {dict(value) if name == 'not tried' else value}" for name, value in facts.items())
    )
    (options.out / "summary.json").write_text(json.dumps({**facts, "parts": summary}, indent=1) + "\n")
    sys.exit(1 if failed or matrix.broken else 3 if missing else 0)


def add_groups(matrix: Matrix, parts: list[str], folder: Path, options: argparse.Namespace) -> None:
    """Add the groups of some parts."""

    def choose(cases: list[Case]) -> list[Case]:
        return sample(cases, lambda _: options.medium_each, options.seed)

    for part in parts:
        if part in SCRIPTS:
            matrix.add(part, "", Script(SCRIPTS[part], matrix.deadline))
        elif part == "rot":
            for name in rot.SCENARIOS:
                place = folder / f"rot-{name}-{os.getpid()}"
                matrix.add(part, name, rot.ScanGroup(name, place, options.seed, options.rot_step))
        else:
            for name in options.only.split(",") if options.only else COMMANDS:
                place = folder / f"{name}-{part}-{os.getpid()}"
                chosen = choose if part == "medium" else list
                matrix.add(part, name, CommandGroup(name, part, place, chosen))


if __name__ == "__main__":
    main()
