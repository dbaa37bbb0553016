"""Each JSON file that hexdata reads back, with each kind of damage: refused in one line, or not used.

Digests are those of the damaged content, as an attacker would write them. The table ``FILES`` says how each
kind of file is read by what a user calls; ``DAMAGE`` lists texts in place of a number of the file.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hexdata import ConvertOptions, Loader, ShuffleOptions
from hexdata.convert import convert_sources
from hexdata.errors import HexdataError
from hexdata.loader import Mixture
from hexdata.progress import Silent
from hexdata.shuffle import shuffle_store
from hexdata.store import Store
from hexdata.store.journal import read_journal
from tests.kit.loaders import make_store

MARK = "@here@"
DIGEST = "@digest@"
MOST_MEMORY = 300 << 20
LARGE = ("many values", "100 MB")
"""Damages whose memory is measured."""


@dataclass(frozen=True)
class JsonFile:
    """A kind of JSON file, or a state.

    Attributes:
        path: Glob of the file in the folder; empty for a state.
        use: Reads the file, given the folder; returns False if it was not used.
        number: Path to a count of at least 0 in the content.
        required: Keys that must exist at the top.
        names: Path to a dict whose keys are names of files, or to a name; None if there is none.
        inner: Path to an object with fixed keys below the top.
        sealed: Whether the text follows its SHA-256 and a space.
        accepted: Names of damages that are valid in this file.
        unrecognised: Names of damages after which the error names the folder, since the file is no manifest.
    """

    path: str
    use: Callable[[Path], object]
    number: tuple[Any, ...]
    required: tuple[str, ...]
    names: tuple[Any, ...] | None = None
    inner: tuple[Any, ...] = ()
    sealed: bool = False
    accepted: tuple[str, ...] = ()
    unrecognised: tuple[str, ...] = ()


SHUFFLE = ShuffleOptions(seed=8, threads=1, buckets=3)
CONVERT = ConvertOptions(workers=1, val=0.3, test=0)
BUCKET = "shuffled/train/bucket-000000.parquet"
FACTS = ("positions", "records", "votes", "header", "reading")


class Stop(Silent):
    """Stops a stage like Ctrl-C, when the first unit of a step is finished."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.reached = False

    def begin(self, step: str, total: int | None, unit: str) -> None:
        self.reached = step == self.step

    def advance(self, amount: int) -> None:
        if amount and self.reached:
            raise KeyboardInterrupt


def journal_used(store: Path) -> bool:
    return len(read_journal(store)) == 1


FILES = {
    "manifest": JsonFile(
        "store/manifest.json",
        lambda folder: Store.open(folder / "store"),
        ("counts", "games"),
        ("kind", "schema_version", "order_version", "board_size", "counts", "files", "stages", "targets"),
        ("files",),
        ("stages", "convert"),
        unrecognised=("without kind", "only a list", "only null", "only an object"),
    ),
    "shard manifest": JsonFile(
        "store/shards/manifest.json",
        lambda folder: Loader(folder / "store" / "shards", mode="exact", batch_size=4),
        ("splits", "train", 0, "bytes"),
        ("version", "schema_version", "board_size", "block_size", "fields", "splits", "digest"),
        ("splits", "train", 0, "name"),
        ("splits", "train", 0),
        unrecognised=("without block_size", "only a list", "only null", "only an object"),
    ),
    "ledger": JsonFile(
        "shuffled/**/progress.json",
        lambda folder: shuffle_store(folder / "shuffled", SHUFFLE),
        ("units", BUCKET, "rows"),
        ("plan", "units"),
        None,
        ("units", BUCKET),
        sealed=True,
    ),
    "facts of a source": JsonFile(
        "converted/**/facts.json",
        lambda folder: convert_sources([folder / "in"], folder / "converted", CONVERT),
        ("sources", 0, "positions"),
        (),
        None,  # names are only compared with the folder: with another one, the sources are read again
        ("sources", 0, "votes"),
        sealed=True,
        accepted=("only an object",),  # of another release: the source is read again
    ),
    "journal": JsonFile(
        "journal/logs/stages.jsonl",
        lambda folder: journal_used(folder / "journal"),
        ("positions",),
        ("stage", "seconds", "positions", "version"),
    ),
    "record of a run": JsonFile(
        "recorded/**/shuffle.run",
        lambda folder: Store.open(folder / "recorded").unfinished("shuffle") is not None,
        ("options", "seed"),
        ("options",),
        accepted=("true", "float", "text", "control", "below 0", "2^63", "10^400"),
    ),
    "state": JsonFile(
        "", lambda folder: None, ("epoch",), ("digest", "seed", "where", "rank", "epoch", "batch")
    ),
    "state of a mixture": JsonFile("", lambda folder: None, ("pace",), ("sources", "seed", "epoch", "batch")),
}
"""The table: kinds of files by name."""

WRONG = {
    "true": "true",
    "null": "null",
    "float": "1.5",
    "text": '"7"',
    "list": "[]",
    "an object": "{}",
    "lone surrogate": '"\\ud800"',
    "control": '"\\u001b[31m\\n"',
    "below 0": "-1",
    "2^63": str(2**63),
    "10^400": "1" + "0" * 400,
    "many digits": "1" * 5000,
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "1e999": "1e999",
    "deep list": "[" * 200 + "]" * 200,
    "deeper list": "[" * 100_000 + "]" * 100_000,
    "deep object": '{"a":' * 200 + "1" + "}" * 200,
    "many values": "[0" + ",0" * 4_000_000 + "]",
}
"""JSON text in place of a number."""
ALSO_STATES = [name for name in WRONG if name not in ("many values", "deeper list", "many digits")]
NAMES = ("../x", "/etc/passwd", "a\0b", "..", ".", "", "x\n", "a/../../b", "\ud800")
"""Names in place of the name of a file."""
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[:-3],
    "more": lambda text: text + b" x",
    "twice": lambda text: text + text,
    "mark": lambda text: b"\xef\xbb\xbf" + text,
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "not UTF-8": lambda text: text[:1] + b'"\xff":1,' + text[1:],
    "pickle": lambda text: b"\x80\x04N.",
    "open lists": lambda text: b"[" * 200_000,
    "open objects": lambda text: b'{"a":' * 200_000,
    "quotes": lambda text: b'["' + b'\\"' * 100_000 + b"[" * 100,
    "100 MB": lambda text: text + b" " * (100 << 20),
    "only a list": lambda text: b"[]",
    "only null": lambda text: b"null",
    "only an object": lambda text: b"{}",
}
"""Changes of the whole text."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a store with an interrupted shuffle, and an interrupted conversion."""
    folder = tmp_path_factory.mktemp("json")
    store = make_store(folder)
    shutil.copytree(store, folder / "shuffled")
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(folder / "shuffled", SHUFFLE, Stop("sort"))
    shutil.copytree(folder / "shuffled", folder / "recorded")
    with pytest.raises(KeyboardInterrupt):
        convert_sources([folder / "in"], folder / "converted", CONVERT, Stop("write"))
    (folder / "journal/logs").mkdir(parents=True)
    line = (store / "logs/stages.jsonl").read_bytes().splitlines()[0]
    (folder / "journal/logs/stages.jsonl").write_bytes(line)
    return folder


def loader(folder: Path, kind: JsonFile) -> Any:
    made = Loader(folder / "store", mode="exact", batch_size=4, seed=1)
    return made if "digest" in kind.required else Mixture([made], [1.0], batch_size=4)


def content_of(folder: Path, kind: JsonFile) -> Any:
    """Return the content of the sound file or state."""
    if not kind.path:
        return loader(folder, kind).state_dict()
    (path,) = folder.glob(kind.path)
    return json.loads(path.read_bytes()[65 if kind.sealed else 0 :])


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def signed(text: bytes, kind: JsonFile) -> bytes:
    """Return the text with the digest that it should have."""
    if kind.sealed:
        return hashlib.sha256(text).hexdigest().encode() + b" " + text
    if (
        "manifest" not in kind.path or len(text) > 1 << 20
    ):  # these are refused before their digest is compared
        return text
    try:
        facts = json.loads(text)
        del facts["digest"]
        if "shards" in kind.path:
            canonical = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
        else:
            canonical = json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
    return text.replace(DIGEST.encode(), hashlib.sha256(canonical).hexdigest().encode())


def texts(content: Any, kind: JsonFile) -> Iterator[tuple[str, bytes, bool]]:
    """Yield the name of each damage, the damaged text, and whether a state can have it."""
    if isinstance(content, dict) and "digest" in content and kind.path:
        content = {**content, "digest": DIGEST}

    def changed(path: tuple[Any, ...], change: Callable[[Any], object]) -> bytes:
        other = copy.deepcopy(content)
        change(at(other, path))
        return json.dumps(other).encode()

    *parent, last = kind.number
    marked = changed(tuple(parent), lambda node: node.update({last: MARK})).decode()
    for name, raw in WRONG.items():
        yield name, marked.replace(f'"{MARK}"', raw).encode(), name in ALSO_STATES
    number = at(content, kind.number)
    twice = f'{number}, "{last}": {number}'
    yield "duplicate key", marked.replace(f'"{MARK}"', twice).encode(), False
    for where in {(), kind.inner}:
        for key in ("more", "__class__", "\x1b[31m", "\ud800", ""):
            yield (
                f"unknown key {where} {key!r}",
                changed(where, lambda node, k=key: node.update({k: 1})),
                True,
            )
    for key in kind.required:
        yield f"without {key}", changed((), lambda node, k=key: node.pop(k)), True
    for name in NAMES if kind.names else ():
        node = at(content, kind.names or ())
        if isinstance(node, dict):
            value = next(iter(node.values()), "0" * 64)
            yield (
                f"name {name!r}",
                changed(kind.names or (), lambda n, k=name, v=value: n.update({k: v})),
                True,
            )
        else:
            *above, key = kind.names or ()
            yield f"name {name!r}", changed(tuple(above), lambda n, k=key, v=name: n.update({k: v})), True
    text = json.dumps(content).encode()
    for name, change in BYTES.items():
        yield name, change(text), False


def refusal(use: Callable[[], object]) -> HexdataError | None:
    """Return the error of a call, which must be one clear line; None if the file was not used."""
    error = None
    try:
        used = use()
    except HexdataError as raised:
        error = raised
    if error is None:
        assert used is False, "the damage was accepted"
    else:
        assert str(error).isprintable()
        assert len(str(error)) < 1_000
    return error


@contextmanager
def damaged(folder: Path, kind: JsonFile, text: bytes) -> Iterator[Path]:
    """Replace the content of a file for a while; yields its path."""
    (path,) = folder.glob(kind.path)
    before = path.read_bytes()
    path.write_bytes(signed(text, kind))
    try:
        yield path
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_damaged_json_is_refused_in_one_line(sound: Path, name: str) -> None:
    kind, files = FILES[name], sorted(sound.rglob("*"))
    content = content_of(sound, kind)
    for damage, text, of_states in texts(content, kind):
        if damage in kind.accepted or damage in LARGE:
            continue
        if not kind.path:
            if of_states:
                state = json.loads(text)
                assert refusal(lambda s=state: loader(sound, kind).load_state_dict(s)), damage
            continue
        with damaged(sound, kind, text) as path:
            try:
                error = refusal(lambda: kind.use(sound))
            except AssertionError as wrong:
                raise AssertionError(f"{damage}: {wrong}") from wrong
        named = path.parent if damage in kind.unrecognised else path
        assert error is None or error.path == str(named), f"{damage}: {error}"
        assert sorted(sound.rglob("*")) == files, damage


@pytest.mark.parametrize("name", [name for name, kind in FILES.items() if kind.path])
def test_memory_is_bounded(sound: Path, name: str) -> None:
    kind = FILES[name]
    for damage, text, _ in texts(content_of(sound, kind), kind):
        if damage in LARGE:
            with damaged(sound, kind, text) as path:
                tracemalloc.start()
                try:
                    error = refusal(lambda: kind.use(sound))
                    assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
                finally:
                    tracemalloc.stop()
            assert error is None or error.path == str(path), f"{damage}: {error}"


def test_a_sound_file_is_used(sound: Path) -> None:
    """The texts of the table fail because of their damage."""
    for name, kind in FILES.items():
        content = content_of(sound, kind)
        if not kind.path:
            loader(sound, kind).load_state_dict(json.loads(json.dumps(content)))
            continue
        (path,) = sound.glob(kind.path)
        if isinstance(content, dict) and "digest" in content:
            content = {**content, "digest": DIGEST}
        path.write_bytes(signed(json.dumps(content).encode(), kind))
        assert kind.use(sound) is not False, name
