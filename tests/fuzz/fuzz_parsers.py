"""Fuzzing of the parsers that read bytes from strangers, compared with other readers of the same bytes.

A parser may only raise an error of hexdata, and what it accepts must equal what another reader finds. The
targets are listed in ``TARGETS``; the docstring of each names what it compares.

    fuzz_parsers.py TARGET CORPUS [-runs=1000000 …]  guided by coverage; needs atheris, options of libFuzzer
    fuzz_parsers.py TARGET FILE                      one input, such as a failing one
    fuzz_parsers.py --add TARGET FILE                adds an input to the committed ones
    fuzz_parsers.py --sample SECONDS SEED [TARGET …] the committed inputs and random changes of them, without
                                                     atheris; SECONDS of processor time for all changes

Without coverage, a failing input is written to ``failing-TARGET-SEED-NUMBER`` in the current folder;
libFuzzer writes ``crash-…``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

__all__ = ["CORPUS", "TARGETS", "committed", "main", "make", "sample"]

_LEGACY = "hexdata.formats.legacy"
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pickle": ("pickles.PickleTarget", tuple(f"{_LEGACY}.{n}" for n in ("unpickler", "allowlist", "stream"))),
    "pickle-rows": ("pickles.PickleRowsTarget", (_LEGACY,)),
    "text": ("texts.TextTarget", tuple(f"hexdata.formats.{n}" for n in ("games", "lines", "trmph", "sgf"))),
    "shard": ("shards.ShardTarget", ("hexdata.shards.format", "hexdata.shards.block_check")),
    "source": ("sources.SourceTarget", ("hexdata.formats",)),
}
"""The class of each target, and the modules and packages whose coverage guides the fuzzer."""

CORPUS = HERE / "corpus"
STRUCTURED = 0.8
"""Share of inputs of a guided run that the target mutates, and libFuzzer the others."""


def make(name: str, scratch: Path) -> Any:
    """Return a target, which may write to an empty folder."""
    module, _, kind = TARGETS[name][0].rpartition(".")
    return getattr(importlib.import_module(f"tests.fuzz.{module}"), kind)(scratch)


def committed(name: str) -> list[bytes]:
    """Return the committed inputs of a target: each line of its file is one, compressed."""
    lines = (CORPUS / f"{name}.txt").read_text().splitlines()
    return [zlib.decompress(base64.b85decode(line)) for line in lines]


def sample(name: str, seconds: float, seed: int, most: int = 1 << 62) -> Counter[bool]:
    """Check the committed inputs of a target, then random changes of them and of the seeds.

    Args:
        name: Target.
        seconds: Processor time of the changes.
        seed: Seed of the changes.
        most: Maximum number of changed inputs.

    Returns:
        The number of accepted and of refused inputs.

    Raises:
        Exception: That of the first failing input, which is written to the current folder.
    """
    rng, counts = random.Random(f"{seed} {name}"), Counter[bool]()
    with tempfile.TemporaryDirectory(prefix="hexdata-fuzz-") as scratch:
        target = make(name, Path(scratch))
        inputs = [*committed(name), *target.seeds()]
        deadline = time.process_time() + seconds
        for number in range(len(inputs) + most):
            is_changed = number >= len(inputs)
            if is_changed and time.process_time() > deadline:
                break
            raw = target.mutate(rng.choice(inputs), rng) if is_changed else inputs[number]
            try:
                counts[target.check(raw)] += 1
            except BaseException:
                Path(f"failing-{name}-{seed}-{number}").write_bytes(raw)
                raise
    return counts


def run_guided(name: str, arguments: list[str]) -> None:
    """Run libFuzzer; it ends the process."""
    import atheris

    # Coverage of all of hexdata would guide the fuzzer away from the parser.
    wanted = tuple(f"{prefix}." for prefix in TARGETS[name][1])
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "hexdata").rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in files]
    others = [module for module in modules if not f"{module}.".startswith(wanted)]
    with atheris.instrument_imports(include=["hexdata"], exclude=others):
        for prefix in TARGETS[name][1]:
            importlib.import_module(prefix)
    scratch = Path(tempfile.mkdtemp(prefix="hexdata-fuzz-"))
    target = make(name, scratch)
    folder = Path(next(argument for argument in arguments if not argument.startswith("-")))
    folder.mkdir(parents=True, exist_ok=True)
    for raw in [*target.seeds(), *committed(name)]:
        (folder / hashlib.sha1(raw).hexdigest()).write_bytes(raw)

    def mutate(raw: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        found = target.mutate(raw, rng) if rng.random() < STRUCTURED else b""
        return found if 0 < len(found) <= max_size else atheris.Mutate(raw, max_size)

    words = scratch / "words"
    lines = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words if word]
    words.write_text("".join(f'"{line}"\n' for line in lines))
    options = ["-rss_limit_mb=3000", "-len_control=0", f"-max_len={target.max_len}", f"-dict={words}"]
    atheris.Setup(
        [sys.argv[0], *options, *arguments], lambda raw: target.check(raw) and None, custom_mutator=mutate
    )
    atheris.Fuzz()


def main(arguments: Sequence[str]) -> None:
    """Run what the arguments ask for."""
    kind, *others = arguments or [""]
    if kind == "--sample":
        seconds, seed, *names = others
        for name in names or TARGETS:
            counts = sample(name, float(seconds) / len(names or TARGETS), int(seed))
            print(f"{name}: {counts[True]:,} inputs accepted, {counts[False]:,} refused")
    elif kind == "--add":
        lines = {*(CORPUS / f"{others[0]}.txt").read_text().split()}
        lines.add(base64.b85encode(zlib.compress(Path(others[1]).read_bytes(), 9)).decode())
        (CORPUS / f"{others[0]}.txt").write_text("\n".join(sorted(sorted(lines), key=len)) + "\n")
    elif kind in TARGETS and others and Path(others[0]).is_file():
        with tempfile.TemporaryDirectory(prefix="hexdata-fuzz-") as scratch:
            print("accepted" if make(kind, Path(scratch)).check(Path(others[0]).read_bytes()) else "refused")
    elif kind in TARGETS and others:
        run_guided(kind, others)
    else:
        raise SystemExit(f"{__doc__}\nTargets: {', '.join(TARGETS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
