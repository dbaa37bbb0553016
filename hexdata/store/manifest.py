"""The manifest ``STORE/manifest.json``: the files of a store and the lineage of its stages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import StoreError
from hexdata.json_models import Count, HexDigest, Model, as_model, read_json
from hexdata.order import ORDER_VERSION
from hexdata.schema import MAX_EXTRAS, SCHEMA_VERSION, TARGETS, is_target
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.errors import ONE_WRITER, Changed
from hexdata.store.commands import MANIFEST_NAME as MANIFEST_NAME
from hexdata.store.commands import STORE_KIND, no_store_error
from hexdata.store.files import FileFacts, canonical_json, check_identity, read_bounded

_VERSIONS: Final = {"schema_version": SCHEMA_VERSION, "order_version": ORDER_VERSION}
_HINT: Final = "Restore manifest.json from a copy, or convert the sources into a new store."
_SPLITS: Final = "(?:train|val|test)"
_SOURCE_PART: Final = r"(?!(?:[^/]*\\)?\.{1,2}(?:[/\\]|\Z))[^/\x00]+"
"""Part of a source's name. It may contain backslashes, which also escape bytes that are not UTF-8, except
around ``..``, since they separate parts in Windows."""
_BUCKET_NAME: Final = rf"shuffled/{_SPLITS}/bucket-[0-9]{{6,9}}\.parquet"
# The end is ``\Z``, since ``$`` would also accept a name with a final newline.
_FILE_NAME: Final = (
    r"^(?:(?:sources|rejected|games|positions)/part-[0-9]{6,9}\.parquet"
    r"|positions/part-[0-9]{6,9}-[0-9]{1,3}\.parquet"
    rf"|{_BUCKET_NAME}"
    rf"|shards/(?:manifest\.json|{_SPLITS}-[0-9]{{6,9}}\.tar)"
    rf"|pickles/shuffled/{_SPLITS}/(?:shuffled_[0-9]{{4,9}}\.pkl\.gz|shuffling_progress\.json)"
    rf"|pickles/original(?:/{_SOURCE_PART})+)\Z"
)
# 4,096 bytes are the longest path of Linux.
StoreFile = Annotated[str, Meta(pattern=_FILE_NAME, max_length=4096)]
"""A path relative to the store of a file that hexdata writes."""
_Split = Annotated[str, Meta(pattern=rf"^{_SPLITS}\Z")]
_Option = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
"""Name of an option of ``SelectionOptions``, which checks that it exists."""
_Fraction = Annotated[float, Meta(ge=0, le=1)]
_COUNTED: Final = ("games", "positions", "rejected", "sources")
"""The tables whose rows are counted."""
_Targets = Annotated[list[str], Meta(max_length=len(TARGETS) + MAX_EXTRAS)]


class _ConvertStage(Model, frozen=True):
    val: _Fraction
    test: _Fraction
    records: Count
    positions: Count
    rejected: Count
    salvage: bool = False
    truncate_repeats: bool = False
    variations: Literal["main"] | None = None
    format: str | None = None
    alphazero_convention: str | None = None


class _ShuffleStage(Model, frozen=True):
    of: HexDigest
    seed: int
    order_version: Count
    positions: Count
    rejected: Count
    splits: dict[_Split, Count]
    buckets: dict[_Split, Annotated[int, Meta(ge=1, le=1_000_000)]]
    choices: dict[_Option, str | int]
    left_out: dict[_Option, Count]
    policies: dict[_Split, Count]
    """Number of positions with a policy."""
    targets: _Targets | None = None
    """Optional columns of the buckets."""
    removed: dict[Annotated[str, Meta(pattern=rf"^{_BUCKET_NAME}\Z")], FileFacts] | None = None
    """Buckets that an export removes or has removed. They are not among the files of the manifest."""


class _ExportStage(Model, frozen=True):
    of: HexDigest
    shard_size: Count
    block_size: Count
    positions: Count
    rejected: Count
    splits: dict[_Split, Count]
    shards: dict[_Split, Count]
    digest: HexDigest
    version: Count = 1
    """Of the shard manifest. An export with another version than this release writes is made again."""
    layout: Literal["blocks", "samples"] | None = None
    """Only of version 1."""


class _PicklesStage(Model, frozen=True):
    of: HexDigest
    order: Literal["original", "shuffled"]
    level: Annotated[int, Meta(ge=0, le=9)]
    positions: Count
    rejected: Count
    files: Count


class _Stages(Model, frozen=True):
    convert: _ConvertStage | None = None
    shuffle: _ShuffleStage | None = None
    export: _ExportStage | None = None
    pickles_original: _PicklesStage | None = msgspec.field(default=None, name="pickles-original")
    pickles_shuffled: _PicklesStage | None = msgspec.field(default=None, name="pickles-shuffled")

    def __post_init__(self) -> None:
        if (self.export or self.pickles_shuffled) and not self.shuffle:
            raise ValueError("an export without the stage shuffle that it depends on")


class _ManifestFile(Model, frozen=True):
    """The content of manifest.json."""

    kind: str
    schema_version: int
    order_version: int
    board_size: Annotated[int, Meta(ge=MIN_SIZE, le=MAX_SIZE)] | None
    counts: dict[Annotated[str, Meta(pattern=rf"^(?:{'|'.join(_COUNTED)})\Z")], Count]
    files: dict[StoreFile, FileFacts]
    stages: _Stages
    targets: _Targets

    def __post_init__(self) -> None:
        shuffle = self.stages.shuffle
        if shuffle and shuffle.removed and any(name.startswith("shuffled/") for name in self.files):
            raise ValueError("removed buckets beside existing ones")
        if self.counts.get("positions") and self.board_size is None:
            raise ValueError("positions but no board_size")
        for targets in (self.targets, (shuffle and shuffle.targets) or []):
            # DuckDB does not distinguish upper and lower case in names of columns.
            distinct = len({name.lower() for name in targets}) == len(targets)
            if not distinct or targets != sorted(targets) or not all(map(is_target, targets)):
                raise ValueError(f"targets that are no sorted, distinct optional columns: {targets}")


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
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
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
            data, tag = read_bounded(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise no_store_error(folder) from error
        content = read_json(data, path, what="the manifest", hint=_HINT)
        # The kind first: the manifest of another program, or of shards, is no damaged store.
        if not isinstance(content, dict) or content.get("kind") != STORE_KIND:
            raise no_store_error(folder)
        # The versions before the fields, since other versions may have other fields.
        check_identity(content, path, _digest, _VERSIONS, what="the manifest", hint=_HINT)
        read = as_model(_ManifestFile, content, path, what="the manifest", hint=_HINT)
        counts = dict.fromkeys(_COUNTED, 0) | read.counts
        stages = {name: stage for name, stage in content["stages"].items() if stage is not None}
        return cls(read.board_size, counts, read.files, stages, tuple(read.targets), tag)

    def save(self, folder: AnyPath) -> None:
        """Publish the manifest. This is the last step of every stage.

        Raises:
            StoreError: In an object store, another process has published a manifest since this one was read;
                or a stage has recorded what :meth:`load` would refuse.
            StoreLockedError: The store's lock has been lost.
        """
        facts = {name: getattr(self, name) for name in ("board_size", "counts", "stages", "targets", "files")}
        content = msgspec.to_builtins({"kind": STORE_KIND, **_VERSIONS, **facts})
        path = folder / MANIFEST_NAME
        # A stage that records what no reader accepts would make the whole store unreadable.
        as_model(_ManifestFile, content, path, what="the new manifest")
        content["digest"] = _digest(content)
        data = canonical_json(content)
        # As late as possible: a process that is suspended can lose its lease at any moment.
        self.before_saving()
        try:
            self.tag = storage_of(path).put(data, self.tag)
        except Changed as error:
            reason = "another process has changed this store in the meantime; nothing was published"
            raise StoreError(reason, path=path, hint=ONE_WRITER) from error

    def files_in(self, folder: str) -> dict[str, FileFacts]:
        """Return the files below ``folder`` (relative, such as "positions"), ordered by their numbers."""
        names = (name for name in self.files if name.startswith(f"{folder}/"))
        return {name: self.files[name] for name in sorted(names, key=_numbers)}

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
        # With removed buckets, so that shards stay current when ``export --free-buckets`` removes what they
        # are made from.
        files = self.files | self.removed_buckets
        digests: dict[str, str] = {}
        for folder, count in zip_longest(folders, first or ()):
            # By number, so that the first files of a folder are the same when later runs have added others.
            names = sorted((n for n in files if n.startswith(f"{folder}/")), key=_numbers)
            digests |= {name: files[name].sha256 for name in names[:count]}
        return _digest(digests)


def _numbers(name: str) -> list[str | int]:
    """Return the numbers in a name and the texts between them: part-1000000 comes after part-999999."""
    pieces = re.split("([0-9]+)", name)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)]


def _digest(content: object) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()
