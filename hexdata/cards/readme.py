"""Dataset cards: README files whose YAML header lists the parts that ``datasets.load_dataset`` loads."""

from __future__ import annotations

from importlib import resources
from string import Template
from typing import Final

from hexdata.schema import SPLITS, board_bytes
from hexdata.store.manifest import Manifest

_ALL_SPLITS: Final = "all_splits"
"""Name of the only split of a table whose files contain positions or games of all splits."""
_ROWS: Final = {
    "shuffled": "a position, in shuffled order, by split",
    "positions": "a position, in the order of the input",
    "games": "a game, with its split",
    "sources": "an input file",
    "rejected": "a rejected record, with the reason",
}
_SIZES: Final = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "n>1B")
"""Size categories of the Hub, each ten times the one before."""


def _boards_of(manifest: Manifest) -> str:
    """Return the end of a sentence about the boards of a store."""
    size = manifest.board_size
    return "" if size is None else f" on boards of {size} x {size} cells"


def store_readme(manifest: Manifest) -> str:
    """Return the dataset card of a store, with one config for each table."""
    configs, rows = dict[str, dict[str, str]](), list[str]()
    for name, row in _ROWS.items():
        files = {_ALL_SPLITS: f"{name}/*.parquet"}
        if name == "shuffled":
            files = {s: f"shuffled/{s}/*.parquet" for s in SPLITS if manifest.files_in(f"shuffled/{s}")}
        if listed := manifest.files_in(name):
            configs[name] = files
            count = sum(facts.rows for facts in listed.values())
            rows.append(f"| `{name}` | {count:,} | {row} | {', '.join(f'`{split}`' for split in files)} |")
    default = "shuffled" if "shuffled" in configs else "positions"
    return _fill(
        "store",
        header=_header(configs, default, manifest.counts["positions"]),
        **{name: f"{manifest.counts[name]:,}" for name in ("positions", "games", "sources")},
        boards=_boards_of(manifest),
        rows="\n".join(rows),
        default=default,
        example=next(iter(configs.get(default, ())), _ALL_SPLITS),
    ) + _boards(manifest, 'np.frombuffer(b"".join(positions[:256]["board"]), np.uint8)')


def shards_readme(manifest: Manifest) -> str:
    """Return the dataset card of the folder of the shards, in the format of webdataset."""
    export = manifest.stages["export"]
    shards = {split: export["shards"][split] for split in SPLITS if export["shards"].get(split)}
    files = {split: f"{split}-*.tar" for split in shards}
    rows = (f"| `{split}` | {export['splits'][split]:,} | {count:,} |" for split, count in shards.items())
    text = _fill(
        "shards",
        header=_header({"shards": files}, "shards", export["positions"]),
        boards=_boards_of(manifest),
        sample=f"a block of up to {export['block_size']:,} positions",
        rows="\n".join(rows),
        example=next(iter(shards), "train"),
    )
    return text + _boards(manifest, 'np.array(sample["board.npy"], np.uint8)')


def _fill(name: str, **texts: str) -> str:
    """Return ``templates/NAME.md`` with its placeholders replaced."""
    path = resources.files("hexdata.cards") / "templates" / f"{name}.md"
    return Template(path.read_text(encoding="utf-8")).substitute(texts)


def _header(configs: dict[str, dict[str, str]], default: str, positions: int) -> str:
    """Return the YAML header, which lists the files of each config by split, and the comment."""
    lines = []
    for name, files in configs.items():
        lines += [f"- config_name: {name}", "  default: true" if name == default else "", "  data_files:"]
        lines += [f"  - split: {split}\n    path: {path}" for split, path in files.items()]
    # Numbers below 1,000 have up to three digits, and each further digit is the next category.
    size = _SIZES[min(max(len(str(positions)) - 3, 0), len(_SIZES) - 1)]
    return _fill("header", size=size, configs="\n".join(filter(None, lines)))


def _boards(manifest: Manifest, packed: str) -> str:
    """Return the section on packed boards."""
    size = manifest.board_size
    if size is None:
        return ""
    return _fill("boards", size=str(size), packed=packed, bytes=str(board_bytes(size)), bits=str(2 * size**2))
