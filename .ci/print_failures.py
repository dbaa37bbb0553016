"""Print the tests that failed according to JUnit reports, on a page: ends of tracebacks, then all names."""

import sys
from pathlib import Path
from xml.etree import ElementTree

LINES, MOST_LINES = 20, 60
"""Number of lines of one traceback, and of all together."""

shown: list[str] = []
names = []
for report in map(Path, sys.argv[1:]):
    for test in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - our own report
        for fault in (*test.iter("failure"), *test.iter("error")):
            name = f"{test.get('classname')}::{test.get('name')}"
            lines = (fault.text or "").splitlines()[-LINES:]
            shown += [name, *(f"    {line[:200]}" for line in lines)]
            message = " ".join((fault.get("message") or "").split())
            names.append(f"{report.stem}: {name}: {message[:200]}")
print(*shown[:MOST_LINES], *names, sep="\n")
