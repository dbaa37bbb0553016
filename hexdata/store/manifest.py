"""The manifest ``STORE/manifest.json``: the files of a store and the lineage of its stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Literal

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import StoreError
from hexdata.order import ORDER_VERSION
from hexdata.schema import MAX_EXTRAS, SCHEMA_VERSION, TARGETS, is_target
from hexdata.storage import AnyPath, Changed, storage_of
from hexdata.store.files import FileFacts, canonical_json
from hexdata.store.location import MANIFEST_NAME, no_store_error
from hexdata.strict_json import (
    MAX_JSON_BYTES,
    PLAIN_NAME,
    AtMost,
    Count,
    HexDigest,
    Matching,
    Within,
    check_value,
    parse_json,
    shortened,
)

__all__ = ["MANIFEST_NAME", "Manifest", "StoreFile"]

_KIND: Final = "hexdata store"
"""Schema versions of stores that this release reads. It writes only the last one."""
_HINT: Final = "Restore manifest.json from a copy, or convert the sources into a new store."

_SPLITS: Final = "(?:train|val|test)"
_SOURCE_NAME: Final = PLAIN_NAME.replace("\\\\", "")
"""Part of a source's name. It may contain backslashes, which also escape bytes that are not UTF-8."""
_FILE_NAME: Final = (
    r"^(?:(?:sources|rejected|games|positions)/part-[0-9]{6,9}\.parquet"
    rf"|shuffled/{_SPLITS}/bucket-[0-9]{{6,9}}\.parquet"
    rf"|shards/(?:manifest\.json|{_SPLITS}-[0-9]{{6,9}}\.tar)"
    rf"|pickles/shuffled/{_SPLITS}/(?:shuffled_[0-9]{{4,9}}\.pkl\.gz|shuffling_progress\.json)"
    rf"|pickles/original(?:/{_SOURCE_NAME})+)$"
)
StoreFile = Annotated[str, Matching(_FILE_NAME, "the path of a file that hexdata writes")]
"""A path relative to the store."""
_Split = Literal["train", "val", "test"]
_Fraction = Annotated[float, Within(0, 1)]
_Targets = Annotated[list[str], AtMost(len(TARGETS) + MAX_EXTRAS)]


@dataclass(frozen=True)
class _TableCounts:
    games: Count = 0
    positions: Count = 0
    rejected: Count = 0
    sources: Count = 0


@dataclass(frozen=True)
class _ConvertStage:
    val: _Fraction
    test: _Fraction
    records: Count
    positions: Count
    rejected: Count
    salvage: bool = False
    truncate_repeats: bool = False


@dataclass(frozen=True)
class _ShuffleStage:
    of: HexDigest
    seed: int
    order_version: Count
    positions: Count
    rejected: Count
    splits: dict[_Split, Count]
    buckets: dict[_Split, Annotated[int, Within(1, 1_000_000)]]
    choices: dict[
        Literal[
            "where",
            "dedup",
            "per_game",
            "per_game_by",
            "balance_by",
            "stratify_by",
            "assign",
        ],
        str | int,
    ]
    left_out: dict[Literal["where", "dedup", "per_game", "balance_by"], Count]
    targets: _Targets | None = None
    """Optional columns of the buckets."""
    policies: dict[_Split, Count] | None = None
    """Number of positions with a policy. Not in manifests of earlier releases."""
    removed: dict[StoreFile, FileFacts] | None = None
    """Buckets that an export removes or has removed. They are not among the files of the manifest."""


@dataclass(frozen=True)
class _ExportStage:
    of: HexDigest
    shard_size: Count
    block_size: Count
    layout: Literal["blocks", "samples"]
    positions: Count
    rejected: Count
    splits: dict[_Split, Count]
    shards: dict[_Split, Count]
    digest: HexDigest


@dataclass(frozen=True)
class _PicklesStage:
    of: HexDigest
    order: Literal["original", "shuffled"]
    level: Annotated[int, Within(0, 9)]
    positions: Count
    rejected: Count
    files: Count


@dataclass(frozen=True)
class _Stages:
    convert: _ConvertStage | None = None
    shuffle: _ShuffleStage | None = None
    export: _ExportStage | None = None
    pickles_original: _PicklesStage | None = field(default=None, metadata={"key": "pickles-original"})
    pickles_shuffled: _PicklesStage | None = field(default=None, metadata={"key": "pickles-shuffled"})


@dataclass(frozen=True)
class _ManifestFile:
    """The schema of manifest.json."""

    kind: str
    schema_version: int
    order_version: int
    board_size: Annotated[int, Within(MIN_SIZE, MAX_SIZE)] | None
    counts: _TableCounts
    files: dict[StoreFile, FileFacts]
    stages: _Stages
    targets: _Targets
    digest: HexDigest | None = None


@dataclass
class Manifest:
    """The content of a store's manifest. It contains no times, host names or paths outside the store.

    Attributes:
        board_size: Cells along an edge; None until a position has been converted.
        counts: Number of rows by table: sources, games, positions, rejected.
        files: Size, rows and digest by path relative to the store, with forward slashes.
        stages: Lineage: the options, inputs and results of each stage.
        targets: Optional columns that the positions of the store have, sorted by name.
        tag: Version of the object from which the manifest was read; None on a disk or for a new manifest.
        before_saving: Called before the manifest is published; raises to prevent that.
    """

    board_size: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: asdict(_TableCounts()))
    files: dict[str, FileFacts] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    tag: str | None = field(default=None, compare=False)
    before_saving: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    @classmethod
    def load(cls, folder: AnyPath) -> Manifest:
        """Read and check the manifest of the store at ``folder``.

        Raises:
            StoreError: The manifest is missing, unreadable, corrupt, not hexdata's or of another version.
        """
        path = folder / MANIFEST_NAME
        try:
            data, tag = storage_of(path).read_tagged(MAX_JSON_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise no_store_error(folder) from error
        except OSError as error:
            raise StoreError(
                "the manifest cannot be read",
                path=path,
                found=error.strerror or error,
                hint="Check the disk and the permissions of the file, and run the command again.",
            ) from error
        content = parse_json(data, path, what="the manifest", hint=_HINT)
        if isinstance(content, dict) and "block_size" in content:
            raise no_store_error(folder)  # the manifest of shards
        if not isinstance(content, dict) or content.get("kind") != _KIND:
            raise StoreError("the manifest is not that of a hexdata store", path=path, hint=_HINT)
        for name, known in (("schema_version", SCHEMA_VERSION), ("order_version", ORDER_VERSION)):
            if content.get(name) != known or isinstance(content[name], bool):
                raise StoreError(
                    f"the store has another {name}",
                    path=path,
                    found=shortened(repr(content.get(name))),
                    expected=known,
                    hint="Read it with the hexdata release that wrote it, or convert the sources again.",
                )
        _check_digest(content, path)
        checked = check_value(_ManifestFile, content, path, what="the manifest", hint=_HINT)
        stages = {name: stage for name, stage in content["stages"].items() if stage is not None}
        _check_stages(checked, path)
        _check_targets(checked, path)
        return cls(
            board_size=checked.board_size,
            counts=asdict(checked.counts),
            files=dict(checked.files),
            stages=stages,
            targets=tuple(checked.targets),
            tag=tag,
        )

    def save(self, folder: AnyPath) -> None:
        """Publish the manifest. This is the last step of every stage.

        Raises:
            StoreError: In an object store, another process has published a manifest since this one was read.
            StoreLockedError: The store's lock has been lost.
        """
        content = {
            "kind": _KIND,
            "schema_version": SCHEMA_VERSION,
            "order_version": ORDER_VERSION,
            "board_size": self.board_size,
            "counts": self.counts,
            "files": {name: facts.to_json() for name, facts in self.files.items()},
            "stages": self.stages,
            "targets": list(self.targets),
        }
        content["digest"] = _digest(content)
        self.before_saving()
        path, data = folder / MANIFEST_NAME, canonical_json(content)
        try:
            self.tag = storage_of(path).put(data, self.tag)
        except Changed as error:
            raise StoreError(
                "another process has changed this store in the meantime; nothing was published",
                path=path,
                hint="Make sure that only one process writes to the store, and run the command again.",
            ) from error

    def files_in(self, folder: str) -> dict[str, FileFacts]:
        """Return the files below ``folder`` (relative, such as ``"positions"``), sorted by path."""
        return {name: self.files[name] for name in sorted(self.files) if name.startswith(f"{folder}/")}

    @property
    def removed_buckets(self) -> dict[str, FileFacts]:
        """Buckets that ``export --free-buckets`` removes or has removed, sorted by path."""
        removed = self.stages.get("shuffle", {}).get("removed") or {}
        return {name: FileFacts(**removed[name]) for name in sorted(removed)}

    def buckets(self, split: str | None = None) -> dict[str, FileFacts]:
        """Return the buckets of the shuffle, also those that were removed, sorted by path.

        Args:
            split: Split of the buckets; None for all (default).
        """
        folder = "shuffled" if split is None else f"shuffled/{split}"
        removed = self.removed_buckets.items()
        return self.files_in(folder) | {name: f for name, f in removed if name.startswith(f"{folder}/")}

    def targets_of(self, table: str) -> tuple[str, ...]:
        """Return the optional columns of "positions" or "shuffled". Buckets may be older."""
        shuffled = self.stages.get("shuffle", {}).get("targets") if table == "shuffled" else None
        return self.targets if shuffled is None else tuple(shuffled)

    @property
    def total_bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(facts.bytes for facts in self.files.values())

    def digest(self, *folders: str, first: Sequence[int] | None = None) -> str:
        """Return the SHA-256 of the paths and digests of all files in these folders, also removed buckets.

        Args:
            folders: The folders.
            first: Number of files of each folder that count, in order of their numbers (default None: all).
        """
        files = self.files | self.removed_buckets
        counts = [None] * len(folders) if first is None else first
        digests: dict[str, str] = {}
        for folder, count in zip(folders, counts, strict=True):
            names = sorted((n for n in files if n.startswith(f"{folder}/")), key=lambda n: (len(n), n))
            digests |= {name: files[name].sha256 for name in names[:count]}
        return _digest(digests)


def _digest(content: object) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _check_digest(content: dict[str, Any], path: AnyPath) -> None:
    """Check the manifest's own digest, which manifests of older releases do not have.

    Raises:
        StoreError: The manifest was altered after it was written.
    """
    if "digest" not in content:
        return
    try:
        found = _digest({name: value for name, value in content.items() if name != "digest"})
    except UnicodeEncodeError as error:  # an escape such as \ud800, which hexdata never writes
        raise StoreError(
            "the manifest contains text that UTF-8 cannot encode",
            path=path,
            found=shortened(repr(error.object[error.start : error.end])),
            hint=_HINT,
        ) from None
    if found != content["digest"]:
        raise StoreError(
            "the manifest was altered or is damaged",
            path=path,
            found=f"digest {found[:16]}…",
            expected=shortened(str(content["digest"])[:16]) + "…",
            hint=_HINT,
        )


def _check_stages(manifest: _ManifestFile, path: AnyPath) -> None:
    """Check that stages have their input stage and that positions have a board size.

    Raises:
        StoreError: One of them is missing.
    """
    stages = manifest.stages
    for name, stage in (("export", stages.export), ("pickles-shuffled", stages.pickles_shuffled)):
        if stage is not None and stages.shuffle is None:
            raise StoreError(
                f"the manifest has the stage {name} without the stage shuffle that it depends on",
                path=path,
                hint=_HINT,
            )
    removed = (stages.shuffle and stages.shuffle.removed) or {}
    if any(not name.startswith("shuffled/") for name in removed) or (
        removed and any(name.startswith("shuffled/") for name in manifest.files)
    ):
        raise StoreError(
            "the manifest lists removed buckets beside existing ones, or other files as removed",
            path=path,
            hint=_HINT,
        )
    if manifest.counts.positions and manifest.board_size is None:
        raise StoreError("the manifest has positions but no board_size", path=path, hint=_HINT)


def _check_targets(manifest: _ManifestFile, path: AnyPath) -> None:
    """Check the names of the optional columns.

    DuckDB does not distinguish upper and lower case in names of columns.

    Raises:
        StoreError: They are not sorted and distinct optional columns.
    """
    shuffle = manifest.stages.shuffle
    for listed in (manifest.targets, (shuffle and shuffle.targets) or []):
        valid = all(map(is_target, listed)) and len({name.lower() for name in listed}) == len(listed)
        if not valid or listed != sorted(listed):
            raise StoreError(
                "the manifest has invalid targets",
                path=path,
                found=shortened(repr(listed)),
                expected="a sorted list of distinct names among root_value, visits, weight and extra.NAME",
                hint=_HINT,
            )
