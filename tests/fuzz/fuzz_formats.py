"""Coverage-guided fuzzing of every reader, with the invariants of `tests/formats/test_legacy_fuzz.py`.

Needs atheris (the extra `bench`, for Python versions and platforms with wheels). The arguments are those of
libFuzzer: `fuzz_formats.py CORPUS -max_total_time=600` writes the seeds to the folder CORPUS and starts from
all files in it; `fuzz_formats.py FILE` tests one file.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import zlib
from collections import Counter
from pathlib import Path

import atheris

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "formats"), str(TESTS.parent)]

with atheris.instrument_imports(include=["hexdata.formats", "hexdata.board"]):
    import hexdata.formats.legacy
    import hexdata.formats.trmph  # noqa: F401 - instrumented here, used below

from test_legacy_fuzz import MALICIOUS, SEEDS, check_converting, check_reading, import_lazy_modules  # noqa: E402

CONVERT_EVERY = 400
"""Every k-th file is also converted, which takes a hundred times as long as reading."""
OPTIONS = ["-timeout=0", "-rss_limit_mb=1500", "-max_len=20000", "-len_control=0"]
"""The time limit is that of the invariants."""


class Harness:
    """Checks the invariants for each input of the fuzzer, and counts the results."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        scratch.mkdir()
        self.endings: Counter[str] = Counter()
        self.runs = self.converted = 0

    def __call__(self, content: bytes) -> None:
        self.runs += 1
        path = self.scratch / "file"
        path.write_bytes(content)
        self.endings[check_reading(path)] += 1
        if self.runs % CONVERT_EVERY == 0:
            self.convert(path)
        if self.runs % 1_000 == 0:
            self.report()

    def convert(self, path: Path) -> None:
        check_converting(path)
        shutil.rmtree(self.scratch / "store", ignore_errors=True)
        self.converted += 1

    def report(self) -> None:
        print(
            f"{self.runs:,} files, {self.converted:,} converted:",
            dict(self.endings.most_common()),
            flush=True,
        )


def mutate(content: bytes, max_size: int, seed: int) -> bytes:
    """Mutate with libFuzzer: for gzip streams, half of the time the decompressed content."""
    if seed % 2 and content.startswith(b"\x1f\x8b"):
        try:
            inner = gzip.decompress(content)
        except (EOFError, OSError, zlib.error):
            return atheris.Mutate(content, max_size)
        return gzip.compress(atheris.Mutate(inner[:max_size], max_size), 1, mtime=0)[:max_size]
    return atheris.Mutate(content, max_size)


def write_dictionary(path: Path) -> None:
    """Write byte strings that random mutations would hardly produce, in the format of libFuzzer."""
    words = [
        *MALICIOUS,
        b"numpy.core.multiarray\n_reconstruct\n",
        b"hex_ai.enums",
        b"examples",
        b"\x87R",
        b"u.",
    ]
    path.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in words))


def write_seeds(corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for name, content in SEEDS.items():
        (corpus / f"seed-{name}").write_bytes(content)


def main(arguments: list[str]) -> None:
    inputs = [Path(argument).resolve() for argument in arguments if not argument.startswith("-")]
    if not inputs:
        raise SystemExit(__doc__)
    if not inputs[0].is_file():
        write_seeds(inputs[0])
    scratch = inputs[0].with_name(f"{inputs[0].name}-scratch")  # libFuzzer leaves no chance to clean up
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    import_lazy_modules(scratch)
    write_dictionary(scratch / "words")
    harness = Harness(scratch / "here")
    options = [sys.argv[0], *OPTIONS, f"-dict={scratch / 'words'}", *arguments]
    atheris.Setup(options, harness, custom_mutator=mutate)
    atheris.Fuzz()  # never returns


if __name__ == "__main__":
    main(sys.argv[1:])
