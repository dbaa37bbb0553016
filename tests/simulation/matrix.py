"""Runs all parts of the proof by simulation, and adds up what they found.

    python tests/simulation/matrix.py                              # everything
    python tests/simulation/matrix.py --share 3/7                  # every seventh chunk, from the third
    python tests/simulation/matrix.py --parts small,objects --minutes 20
    python tests/simulation/matrix.py --out FOLDER                 # again: only what is missing or has failed

The parts ``small`` and ``medium`` are the cases of ``disk.py``: each operation of each command with each
fault, and of medium commands every k-th chunk of cases. The others are scripts, see ``SCRIPTS``. The results
of each chunk are appended to ``FOLDER/results.jsonl``, with a digest of the code that was tested, so that an
interrupted run can be continued. The summary is printed and written to ``FOLDER/summary.json``. Exits with
status 1 if a case fails, and with status 3 if the time was over before all were tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

from tests.simulation.commands import COMMANDS  # noqa: E402
from tests.simulation.disk import (  # noqa: E402
    Case,
    Simulation,
    check_all,
    default_folder,
    load_libraries,
    preload,
)
from tests.simulation.replay import digest  # noqa: E402

DISK_PARTS: Final = ("small", "medium")
SCRIPTS: Final = {
    "objects": "simulation/objects.py --first 0 --count 1000",
    "rot": "simulation/rot.py store --step 60 --minutes 10",
    "fuzz": "fuzz/fuzz_parsers.py --sample 120 1",
}
"""Scripts in ``tests`` that try a fixed number of cases and end with another status than 0 if one fails."""
MEDIUM_EVERY: Final = 40
"""Of the chunks of medium commands, one of this number is tried."""


def tested_code() -> str:
    """Return a digest of all that determines the result of a case."""
    files = sorted([*TESTS.parent.glob("hexdata/**/*.py"), *Path(__file__).parent.glob("*.[pc]*")])
    return digest(b"".join(path.read_bytes() for path in files if path.is_file()))[:16]


class Results:
    """The results of chunks, in a file.

    Args:
        folder: folder of the file. It is created.
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


class Matrix:
    """A run of some parts.

    Args:
        results: results of earlier runs and of this one.
        jobs: number of processes.
        share: the number of a share and the number of shares.
        deadline: time at which no further chunk is started, in seconds since 1970.
    """

    def __init__(self, results: Results, jobs: int, share: tuple[int, int], deadline: float) -> None:
        self.results, self.jobs, self.share, self.deadline = results, jobs, share, deadline
        self.missing: Counter[str] = Counter()
        self.broken = 0

    def run_disk(self, part: str, name: str, folder: Path, every: int) -> None:
        """Try the cases of one command, or every k-th chunk of them."""
        place = folder / f"{name}-{part}-{os.getpid()}"
        index, number = self.share
        try:
            simulation = Simulation(name, part, place)
            chunks = simulation.chunks(simulation.cases())
            mine = range((index - 1) * every, len(chunks), number * every)
            due = {k: chunks[k] for k in mine if not self.results.is_done(part, name, k)}
            facts = {"operations": len(simulation.operations), "chunks": len(chunks)}
            facts["all cases"] = sum(map(len, chunks))

            def report(chunk: int, answer: dict[str, Any]) -> None:
                due.pop(chunk)
                self.results.add(part, name, chunk, **facts, **answer)
                for failure in answer["failures"]:
                    print(
                        f"FAILED {Case(**failure['case'])}\n    {_first_lines(failure['wrong'])}", flush=True
                    )

            self.broken += check_all(simulation, dict(due), min(self.jobs, len(due)), self.deadline, report)
            self.missing[part] += len(due)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        done = [line for line in self.results.lines.values() if (line["part"], line["name"]) == (part, name)]
        cases = sum(line["counts"]["cases"] for line in done)
        failed = sum(len(line["failures"]) for line in done)
        cpu = sum(line["cpu"] for line in done)
        figures = f"{cases:,} of {facts['all cases']:,} cases, {failed} failed; {cpu:.0f} s of CPU time"
        print(f"{part} {name}: {figures}", flush=True)

    def run_script(self, part: str) -> None:
        """Run the command of another part, unless it has succeeded with this code."""
        if self.results.is_done(part, "", 0):
            return
        if time.time() > self.deadline:
            self.missing[part] += 1
            return
        script, *arguments = shlex.split(SCRIPTS[part])
        before = os.times()
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(TESTS / script), *arguments],
            cwd=TESTS.parent,
            env={**os.environ, "PYTHONPATH": str(TESTS.parent), "LD_PRELOAD": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        after = os.times()
        last = done.stdout.strip().splitlines()[-1:] or [""]
        failures = [{"wrong": done.stdout[-3000:]}] if done.returncode else []
        self.results.add(
            part,
            "",
            0,
            counts={},
            failures=failures,
            seconds=round(time.perf_counter() - begin, 1),
            cpu=round(
                after.children_user + after.children_system - before.children_user - before.children_system, 1
            ),
            last=last[0],
        )
        print(f"{part}: {'FAILED ' if failures else ''}{last[0]}", flush=True)


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
        entry |= {key: line[key] for key in ("operations", "all cases", "last") if key in line}
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
    everything = [*DISK_PARTS, *SCRIPTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(everything), help="default: %(default)s")
    parser.add_argument("--only", help="commands of the disk, separated by commas; default: all")
    parser.add_argument(
        "--share", default="1/1", help="K/N: of each command, every N-th chunk, from the K-th"
    )
    parser.add_argument("--medium-every", type=int, default=MEDIUM_EVERY, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no chunk after this time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=default_folder() / "matrix", help="default: %(default)s")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(everything):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(everything)}")
    index, number = map(int, options.share.split("/"))
    begin = time.time()
    folder = default_folder()
    preload(folder)
    load_libraries()
    results = Results(options.out)
    matrix = Matrix(results, options.jobs, (index, number), begin + 60 * options.minutes)
    for part in everything:
        if part in DISK_PARTS and part in parts:
            for name in options.only.split(",") if options.only else COMMANDS:
                matrix.run_disk(part, name, folder, options.medium_every if part == "medium" else 1)
        elif part in parts:
            matrix.run_script(part)
    summary = summary_of(results, parts)
    failed = sum(entry["failed"] for entries in summary.values() for entry in entries.values())
    missing = +matrix.missing
    print("\n" + table_of(summary))
    print(f"{failed} failed; not tried: {dict(missing) or 'nothing'}; {time.time() - begin:.0f} s")
    facts = {
        "code": results.code,
        "failed": failed,
        "not tried": missing,
        "seconds": round(time.time() - begin),
    }
    (options.out / "summary.json").write_text(json.dumps({**facts, "parts": summary}, indent=1) + "\n")
    sys.exit(1 if failed or matrix.broken else 3 if missing else 0)


if __name__ == "__main__":
    main()
