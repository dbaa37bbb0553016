"""Trains a few steps with the training script of Snowflake2025, first on its own pickles, then on a store.

Usage: ``python tests/benchmarks/snowflake.py CHECKOUT PICKLES FOLDER``. CHECKOUT is a copy of the files of
Snowflake2025, PICKLES a folder of its processed pickles, and FOLDER is new. The second run uses the lines of
``docs/howto/snowflake.md``. The program also counts which positions the original loader delivers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUCKETS = 20
STEPS = ["--epochs", "1", "--max_samples", "2560", "--max_validation_samples", "512"]
MINI_EPOCHS = ["--min_mini_epochs_per_epoch", "2", "--max_mini_epochs_per_epoch", "2"]
COUNT = """
import hashlib, json, logging, sys, time
from collections import Counter
from hex_ai.data_pipeline import StreamingMixedShardDataset

def key(board, policy, value):
    return hashlib.blake2b(board.numpy().tobytes() + policy.numpy().tobytes(), digest_size=12).digest()

folder, pool, threshold, positions = sys.argv[1], *map(int, sys.argv[2:])
def delivered(count):
    dataset = StreamingMixedShardDataset([folder], ["all"], pool_size=pool, refill_threshold=threshold,
        enable_augmentation=False, max_examples_unaugmented=count, random_seed=42, verbose=0)
    return [key(*row) for row in dataset]
begin = time.perf_counter()
train = delivered(None)
seconds = time.perf_counter() - begin
val = delivered(positions // 10)
known = set(train)
print(json.dumps({"delivered": len(train), "seconds": seconds, "validation": len(val),
                  "validation in train": sum(row in known for row in val)}))
"""


def copy_checkout(checkout: Path, folder: Path) -> Path:
    """Copy the code of Snowflake and return the folder of the copy."""
    for name in ("hex_ai", "scripts"):
        shutil.copytree(checkout / name, folder / name)
    (folder / "logs").mkdir()
    return folder


def run(code: Path, *command: str) -> str:
    """Run a Python command of Snowflake in the folder of its code and return what it prints."""
    environment = os.environ | {
        "VIRTUAL_ENV": str(code / "hex_ai_env"),  # Snowflake requires an environment of this name
        "PYTHONPATH": os.pathsep.join([".", str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=code, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def train(code: Path, data: Path) -> list[str]:
    """Run the training script on a folder of data and return the lines with its losses."""
    begin = time.perf_counter()
    output = run(code, "scripts/hyperparam_sweep.py", "--data_dirs", str(data), *STEPS, *MINI_EPOCHS)
    losses = re.findall(r"(\[Epoch \d+\].*Train Losses.*)", output)
    return [*dict.fromkeys(losses), f"{time.perf_counter() - begin:.0f} s"]


def switch(code: Path) -> None:
    """Change the trainer as ``docs/howto/snowflake.md`` says."""
    batches, body = re.findall(
        r"^```python\n(.*?)^```", read(ROOT / "docs/howto/snowflake.md"), re.MULTILINE | re.DOTALL
    )
    (code / "hex_ai/hexdata_batches.py").write_text(batches)
    module = code / "hex_ai/training_orchestration.py"
    text = read(module)
    text = replace(r'(def create_datasets\(.*?\):\n    """.*?"""\n).*?(?=^def )', rf"\g<1>{body}\n\n", text)
    text = replace(
        r"    # Do a quick validation that the directories exist.*?(?=    # Get batch_size)", "", text
    )
    module.write_text(text)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def replace(pattern: str, by: str, text: str) -> str:
    """Replace the only match of a pattern."""
    text, count = re.subn(pattern, by, text, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, f"{count} matches of {pattern}"
    return text


def main() -> None:
    """Train twice and print the losses and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("checkout", "pickles", "folder"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    folder, pickles = options.folder.resolve(), options.pickles.resolve()
    folder.mkdir(parents=True)

    before = copy_checkout(options.checkout, folder / "before")
    (folder / "step1").mkdir()
    for path in pickles.glob("*_processed.pkl.gz"):
        shutil.copyfile(path, folder / "step1" / path.name)
    shuffled = folder / "shuffled"
    paths = ["--input-dir", folder / "step1", "--output-dir", shuffled, "--temp-dir", folder / "temporary"]
    run(before, "scripts/shuffle_processed_data.py", *map(str, paths), "--num-buckets", str(BUCKETS))
    print("original:", *train(before, shuffled), sep="\n", flush=True)

    after = copy_checkout(options.checkout, folder / "after")
    switch(after)
    hexdata = [sys.executable, "-m", "hexdata"]
    store = folder / "store"
    subprocess.run(
        [*hexdata, "convert", pickles, store, "--val", "0.02", "--test", "0.95"], cwd=ROOT, check=True
    )
    print("with hexdata:", *train(after, store), sep="\n", flush=True)

    positions = sum(
        json.loads((store / "manifest.json").read_text())["counts"][name] for name in ["positions"]
    )
    print(f"{positions:,} positions in {BUCKETS} shuffled pickles", flush=True)
    for pool, threshold in ((1_000_000, 750_000), (26_000, 19_500)):
        counted = run(before, "-c", COUNT, str(shuffled), str(pool), str(threshold), str(positions))
        print(f"pool of {pool:,}, refilled below {threshold:,}: {counted.splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
