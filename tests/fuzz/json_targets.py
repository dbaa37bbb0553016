"""Fuzz targets for JSON and TOML files: manifests, ledgers, journals, states of loaders, configs."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import tomllib
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

from binary_targets import small_store
from fuzz_target import BOTH, NEITHER, STRICTER, Target, edited, files_in_memory, require

import hexdata.store.files as files_module
import hexdata.store.journal as journal_module
import hexdata.store.ledger as ledger_module
import hexdata.store.manifest as manifest_module
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.live.options import STAGES, parse_live_config
from hexdata.loader.checkpoint import DataIdentity, LoaderPosition, check_state, make_state
from hexdata.loader.options import LoaderOptions
from hexdata.pipeline import load_config
from hexdata.shards.manifest import ShardManifest
from hexdata.store.files import canonical_json
from hexdata.store.journal import read_journal
from hexdata.store.ledger import Ledger
from hexdata.store.manifest import Manifest
from hexdata.strict_json import parse_json

__all__ = [
    "ConfigTarget",
    "JournalTarget",
    "JsonTarget",
    "LedgerTarget",
    "LiveConfigTarget",
    "ManifestTarget",
    "ShardManifestTarget",
    "StateTarget",
]

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 1.5, 1e308, 2**31, 2**62, 2**63, "", "x", "../x", "/etc/passwd", [], {}),
    *([[]], "|O", "a" * 64, "shards/train-000009.tar", "pipe:cat {name}", "auto", "\ud800", {"x": 1}),
)
KEYS = ("x", "../../x", "positions/part-000009.parquet", "shuffle", "digest", "targets", "extra.komi")
CONFIGS = Path(__file__).parents[2] / "configs"


def altered(content: Any, rng: random.Random) -> Any:
    """Change one or two values or keys of a JSON value, in place, and return it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        node = content
        while isinstance(node, dict | list) and node:
            key = rng.choice([*node] if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], dict | list) and rng.random() < 0.8:
                node = node[key]
                continue
            kind = rng.randrange(6)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, dict):
                node[rng.choice(KEYS)] = node.pop(key)
            elif kind == 2 and isinstance(node, list):
                node.insert(key, node[key])
            elif kind <= 3 and type(node[key]) is int:
                node[key] += rng.choice((-1, 1))
            elif kind == 4 and isinstance(node, dict):
                node[rng.choice(KEYS)] = deepcopy(rng.choice(VALUES))
            else:
                node[key] = deepcopy(rng.choice(VALUES))
            break
    return content


@functools.lru_cache(maxsize=512)
def _parsed(raw: bytes) -> str | None:
    """Return valid JSON as text, since a value could be changed; None for other bytes."""
    try:
        return json.dumps(json.loads(raw))
    except (ValueError, RecursionError):
        return None


class JsonTarget(Target):
    """JSON: accepted texts have the value that Python's json reads, and no duplicate keys."""

    name = "json"
    max_len: ClassVar[int] = 200
    words = (
        b'{"a":1,"a":2}',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"[" * 70,
        b"]" * 70,
        b'"\\ud800"',
        b'{"',
        b'":',
        b",",
    )

    def seeds(self) -> list[bytes]:
        return [
            b'{"a": [1, 2.5, "x\\n\\u00e9", null, true], "b": {}}',
            b"[[[]]]",
            b'"text"',
            b"-12e3",
            b" {} ",
        ]

    def check(self, raw: bytes) -> str:
        try:
            found = parse_json(raw, "file")
        except StoreError:
            return NEITHER
        pairs: list[bool] = []
        expected = json.loads(
            raw.decode(),
            object_pairs_hook=lambda items: pairs.append(len(dict(items)) == len(items)) or dict(items),
        )
        require(repr(found) == repr(expected) and all(pairs), f"{found}, not {expected}")
        require("inf" not in repr(found).replace("'", "") or b"inf" in raw, "an infinite number")
        return BOTH


class _DigestTarget(Target):
    """A JSON file that contains its own digest."""

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.store = small_store()
        self.valid = self.path_of(self.store).read_bytes()

    @staticmethod
    def path_of(store: Path) -> Path:
        """Return the file in a store."""
        raise NotImplementedError

    @staticmethod
    def with_digest(content: Any) -> bytes:
        """Return the bytes of the file with its digest."""
        raise NotImplementedError

    def seeds(self) -> list[bytes]:
        content = json.loads(self.valid)
        found = [self.valid]
        for key in ("files", "stages", "splits", "fields"):
            if isinstance(content.get(key), dict):
                found += [self.with_digest(content | {key: {k: v}}) for k, v in content[key].items()][:6]
        return found

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        text = _parsed(raw)
        if text is None or rng.random() < 0.1:
            return edited(raw, rng, self.words)
        content = altered(json.loads(text), rng)
        if rng.random() < 0.9 and isinstance(content, dict) and "digest" in content:
            try:
                return self.with_digest(content)
            except ValueError:  # a surrogate or an infinite number, which have no digest
                content["digest"] = "0" * 64
        return json.dumps(content).encode()


class ManifestTarget(_DigestTarget):
    """The manifest of a store: an accepted one can be written again, and names files in the store only."""

    name = "manifest"
    max_len: ClassVar[int] = 1 << 14

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(manifest_module))

    @staticmethod
    def path_of(store: Path) -> Path:
        return store / "manifest.json"

    @staticmethod
    def with_digest(content: Any) -> bytes:
        content.pop("digest", None)
        return canonical_json(content | {"digest": hashlib.sha256(canonical_json(content)).hexdigest()})

    def check(self, raw: bytes) -> str:
        self.file.content = raw
        try:
            manifest = Manifest.load(self.scratch)
        except StoreError:
            return NEITHER
        content = json.loads(raw)
        require(set(content["files"]) == set(manifest.files), "other files")
        for name in (*manifest.files, *manifest.removed_buckets):
            inside = not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name
            require(inside, f"a file outside of the store: {name}")
        require(content["counts"].items() <= manifest.counts.items(), "other counts")
        require(
            all(facts.bytes >= 0 and facts.rows >= 0 for facts in manifest.files.values()), "a size below 0"
        )
        digest = content.pop("digest", None)
        own = hashlib.sha256(canonical_json(content)).hexdigest()
        require(digest in (None, own), "another digest")
        return BOTH


class ShardManifestTarget(_DigestTarget):
    """The manifest of shards: an accepted one is the same after it is written and read again."""

    name = "shard-manifest"
    max_len: ClassVar[int] = 1 << 14

    @staticmethod
    def path_of(store: Path) -> Path:
        return store / "shards" / "manifest.json"

    @staticmethod
    def with_digest(content: Any) -> bytes:
        content.pop("digest", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return json.dumps(content | {"digest": hashlib.sha256(text.encode()).hexdigest()}).encode()

    def check(self, raw: bytes) -> str:
        try:
            manifest = ShardManifest.loads(raw, "manifest.json")
        except StoreError:
            return NEITHER
        again = ShardManifest.loads(manifest.dumps(), "manifest.json")
        content = json.loads(raw)
        require(
            again == manifest and content["digest"] == manifest.digest, "another manifest when written again"
        )
        for split, part in content["splits"].items():
            require(
                sum(shard["positions"] for shard in part["shards"]) == manifest.positions(split), "other sums"
            )
            for shard in part["shards"]:
                require(Path(shard["name"]).name == shard["name"], f"a shard outside: {shard['name']}")
        return BOTH


PLAN = {"seed": 1}


class LedgerTarget(Target):
    """The ledger of a stage: the units of all lines before the first that is cut, each with its digest."""

    name = "ledger"
    max_len: ClassVar[int] = 1200

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(ledger_module, files_module))

    @staticmethod
    def _written(values: list[Any]) -> bytes:
        hashed, data = hashlib.sha256(), b""
        for value in values:
            text = value if isinstance(value, bytes) else json.dumps(value).encode()
            whole = hashed.copy()
            whole.update(text)
            line = whole.hexdigest().encode() + b" " + text + b"\n"
            hashed.update(line)
            data += line
        return data

    def seeds(self) -> list[bytes]:
        plan = hashlib.sha256(canonical_json(PLAN)).hexdigest()
        header = {"stage": "shuffle", "plan": plan}
        units = [{"unit": f"bucket-{number}", "facts": {"rows": number}} for number in range(4)]
        done = {"a": {"rows": 1}}
        old = {
            "stage": "shuffle",
            "plan": plan,
            "done": done,
            "sha256": hashlib.sha256(json.dumps(done).encode()).hexdigest(),
        }
        lines = self._written([header, *units])
        return [lines, lines[:-9], lines + bytes(30), self._written([header]), json.dumps(old).encode()]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change the values of lines, and compute the digests again."""
        texts = [line.partition(b" ")[2] for line in raw.split(b"\n") if line]
        if not texts or rng.random() < 0.2:
            return edited(raw, rng)
        place = rng.randrange(len(texts))
        kind = rng.randrange(4)
        if kind == 0:
            texts[place:place] = [rng.choice(texts)]
        elif kind == 1:
            del texts[place]
        elif (text := _parsed(texts[place])) is not None and kind == 2:
            texts[place] = json.dumps(altered(json.loads(text), rng)).encode()
        else:
            texts[place] = edited(texts[place], rng).replace(b"\n", b"")
        data = self._written(texts)
        return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data

    def check(self, raw: bytes) -> str:
        self.file.content = raw
        try:
            ledger = Ledger(Path("/store/progress.json"), "shuffle", PLAN, read_only=True)
        except StoreError:
            return NEITHER
        done = self._units(raw)
        require(len(ledger) == len(done), f"{len(ledger)} units, not {len(done)}")
        for unit, facts in done.items():
            require(unit in ledger and ledger[unit] == facts, f"another unit {unit}")
        return BOTH if done else NEITHER

    @staticmethod
    def _units(raw: bytes) -> dict[str, Any]:
        if raw.lstrip()[:1] == b"{":
            old = json.loads(raw)
            plan = hashlib.sha256(canonical_json(PLAN)).hexdigest()
            return old["done"] if old["plan"] == plan else {}
        done: dict[str, Any] = {}
        for number, line in enumerate(raw.split(b"\n")[:-1]):
            if b"\0" in line and number:
                break
            content = json.loads(line[65:])
            if number == 0:
                if content["plan"] != hashlib.sha256(canonical_json(PLAN)).hexdigest():
                    return {}
            else:
                done[content["unit"]] = content["facts"]
        return done


class JournalTarget(Target):
    """The journal: exactly the lines that are valid entries are read, and damage raises nothing."""

    name = "journal"
    max_len: ClassVar[int] = 600
    words = (b"\n", b"true", b"null", b"-1", b"1e9", b'"x":1,', b"NaN")

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.file = stack.enter_context(files_in_memory(journal_module))

    def seeds(self) -> list[bytes]:
        entry = {"stage": "convert", "finished": "2026-01-31T12:00:00Z", "seconds": 1.5, "positions": 7}
        entry |= {"bytes": 9, "peak_bytes": 0, "resumed": False, "version": "1"}
        line = json.dumps(entry).encode()
        return [line + b"\n", line + b"\n{}\n" + line + b"\n" + line[:40]]

    def check(self, raw: bytes) -> str:
        self.file.content = raw
        entries = read_journal(Path("/store"))
        expected = []
        for line in raw.splitlines():
            try:
                content = json.loads(line.decode())
            except (ValueError, RecursionError):
                continue
            if isinstance(content, dict) and self._is_entry(content) and line.count(b'":') >= 8:
                expected.append(content)
        found = [vars(entry) for entry in entries]
        require(all(entry in expected for entry in found), f"{found}, not {expected}")
        return BOTH if found else NEITHER

    @staticmethod
    def _is_entry(content: dict[str, Any]) -> bool:
        counts = ("positions", "bytes", "peak_bytes")
        return (
            all(isinstance(content.get(key), str) for key in ("stage", "finished", "version"))
            and all(type(content.get(key)) is int and content[key] >= 0 for key in counts)
            and isinstance(content.get("seconds"), int | float)
            and isinstance(content.get("resumed"), bool)
            and len(content) == 8
        )


class StateTarget(Target):
    """The state of a loader: an accepted one differs from a valid one only in its position and its rank."""

    name = "state"
    max_len: ClassVar[int] = 1500

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self.options = LoaderOptions(batch_size=4, split="train")
        self.valid = make_state(self.options, DataIdentity("d" * 64), LoaderPosition(2, 3, 5))

    def seeds(self) -> list[bytes]:
        return [json.dumps(self.valid).encode(), json.dumps({**self.valid, "batch": 0}).encode()]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        text = _parsed(raw)
        if text is None or rng.random() < 0.1:
            return edited(raw, rng)
        return json.dumps(altered(json.loads(text), rng)).encode()

    def check(self, raw: bytes) -> str:
        try:
            state = json.loads(raw)
        except (ValueError, RecursionError):
            return NEITHER
        try:
            position = check_state(state, self.options, DataIdentity("d" * 64), lambda epoch: 10, str)
        except HexdataError:
            return NEITHER
        require(0 <= position.batch <= 10 and position.epoch >= 0, f"the position {position}")
        free = ("epoch", "batch", "epoch_digest", "rank", "world_size")
        other = [key for key in self.valid if key not in free and state.get(key) != self.valid[key]]
        require(not other, f"a state with other values of {other}")
        return BOTH


class ConfigTarget(Target):
    """A config of `hexdata run`: an accepted one contains no command and no address of a cluster."""

    name = "config"
    max_len: ClassVar[int] = 700
    words = (
        *(
            b'"pipe:cat x"',
            b'"https://x/{name}"',
            b'"{name}"',
            b"[engine]\naddress = ",
            b'"auto"',
            b"true",
            b"'''",
        ),
        *(
            b"memory = ",
            b'"1GB"',
            b"nan",
            b"[[",
            b"]]",
            b"2024-01-01",
            b"0x7f",
            b"[export]\n",
            b"workers = 1\n",
        ),
    )

    def seeds(self) -> list[bytes]:
        texts = [path.read_text() for path in sorted(CONFIGS.glob("*.toml")) if path.name != "live.toml"]
        lines = [[line.partition(" #")[0] for line in text.splitlines() if line[:1] != "#"] for text in texts]
        found = ["\n".join(line for line in each if line).encode() for each in lines]
        sections = [b'store = "s"\n' + section for text in found for section in _sections(text)]
        return sorted({text[: self.max_len] for text in [*found, *sections]}, key=len)

    def check(self, raw: bytes) -> str:
        path = self.scratch / "config.toml"
        path.write_bytes(raw)
        try:
            config = load_config(path)
        except HexdataError:
            return self._refused(raw)
        content = tomllib.loads(raw.decode("utf-8-sig"))
        require(config.store == content["store"], "another store")
        for text in _texts(content):
            is_command = text.strip().lower().startswith("pipe:")
            is_command |= "{name}" in text and not text.lower().startswith(("http://", "https://"))
            require(not is_command, f"a command is accepted: {text}")
        require(content.get("engine", {}).get("address", "auto") in (None, "auto"), "an address of a cluster")
        return BOTH

    @staticmethod
    def _refused(raw: bytes) -> str:
        try:
            tomllib.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return NEITHER
        return STRICTER


def _sections(text: bytes) -> list[bytes]:
    return [b"[" + part for part in text.split(b"\n[")[1:]]


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


class LiveConfigTarget(ConfigTarget):
    """A config of `hexdata live`: an accepted one names no code, only stages of hexdata."""

    name = "live-config"
    words = (
        *(
            b'stages = ["os:system"]\n',
            b'"os:system"',
            b"[system]\n",
            b"[ChunkRelabeller]\n",
            b'"a.b:C"',
            b"= 0\n",
        ),
        *(
            b"transform = ",
            b"relabel = ",
            b"capacity = ",
            b'"drop-new"',
            b"true",
            b"nan",
            b"[batch]\n",
            b"1e9",
        ),
    )

    def seeds(self) -> list[bytes]:
        text = (CONFIGS / "live.toml").read_text()
        lines = [line.partition(" #")[0] for line in text.splitlines() if line[:1] != "#"]
        whole = "\n".join(line for line in lines if line).encode()
        return [
            *_sections(whole),
            b"seed = 3\nbatch_size = 8\nstages = []\n",
            b'stages = ["os:system"]\n[system]\n',
        ]

    def check(self, raw: bytes) -> str:
        try:
            content = tomllib.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return NEITHER
        try:
            options = parse_live_config(content)
        except ConfigError:
            return STRICTER
        require(all(stage.kind in STAGES for stage in options.stages), "a stage of another package")
        require("relabel" not in content.get("ChunkRelabeller", {}), "code is named")
        return BOTH
