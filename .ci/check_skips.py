"""Print the reasons for which tests of a JUnit report were skipped and may not be; exit 1 if there is one."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

ALLOWED = re.compile((Path(__file__).with_name("allowed_skips.txt")).read_text().strip().replace("\n", "|"))
"""One regular expression a line; each is found somewhere in the reason."""

refused: dict[str, int] = {}
for skipped in ElementTree.parse(sys.argv[1]).iter("skipped"):  # noqa: S314 - our own report
    reason = f"{skipped.get('message')} {skipped.text or ''}"
    if not ALLOWED.search(reason):
        refused[reason] = refused.get(reason, 0) + 1
for reason, tests in sorted(refused.items()):
    print(f"{tests} tests were skipped that ought to run here: {reason}", file=sys.stderr)
sys.exit(bool(refused))
