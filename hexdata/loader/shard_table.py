"""Reading of rows of shards into a :class:`GameTable` without games: a whole split, or a window of a stream.

Shards are read from front to back, and compared with the manifest while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, HexdataError, StoreError
from hexdata.loader.game_table import PACKED_PREFIX, GameTable, policy_arrays
from hexdata.loader.options import OnError
from hexdata.loader.shared_arrays import allocate, require_memory
from hexdata.policy import SparsePolicies
from hexdata.progress import SILENT, Progress
from hexdata.shards.blocks import SPARSE_FIELDS, members_to_policies, slice_rows
from hexdata.shards.cache import AnySource
from hexdata.shards.manifest import REPAIR_HINT, ShardManifest
from hexdata.shards.reader import BlockReader

_DOWNLOADS: Final = 4
"""Number of shards that are read at once if they are not on a local disk.

Of local shards, each is read alone: threads that wait for each other's lock between many short operations
took 4.2 s of CPU time for 650 MB in place of 2.3 s, and longer on two cores.
"""

SkippedShard = tuple[str, int, HexdataError]
"""Name of a shard that cannot be used, its number of positions, and its error."""


class ShardRows:
    """A number of rows, which are read from slices of shards and then become a table.

    Args:
        reader: Reader of the shards.
        board_size: Board size n.
        rows: Number of rows.
        used: A table whose memory is used again if it is large enough (default None).
    """

    def __init__(
        self, reader: BlockReader, board_size: int, rows: int, used: GameTable | None = None
    ) -> None:
        self._reader, self._board_size, self._count = reader, board_size, rows
        self._arrays = {
            name: used.packed[name][:rows]
            if used and used.positions >= rows
            else allocate((rows, *spec.shape), spec.dtype)
            for name, spec in reader.specs.items()
            # Policies have different lengths, so they are kept in parts until their total size is known.
            if name not in SPARSE_FIELDS
        }
        self._policies: list[tuple[npt.NDArray[np.int64], SparsePolicies | None]] = []
        """Rows with policies, and the policies unless only the rows are needed, of each call of ``read``."""

    def read(self, shard: int, start: int, stop: int, row: int) -> None:
        """Read rows [start, stop) of a shard into the rows from ``row`` on.

        Raises:
            StoreError, FormatError: The shard differs from the manifest. The rows are then not valid.
        """
        size = self._reader.manifest.block_size
        found: list[tuple[npt.NDArray[np.int64], SparsePolicies | None]] = []
        # Blocks are read whole; rows before `start` and after `stop` are cut off.
        block_start = start // size * size
        with closing(self._reader.read(shard, start // size, -(-stop // size))) as blocks:
            for block in blocks:
                first, last = max(start - block_start, 0), min(stop - block_start, size)
                # Only the first and the last block of a range are cut; cutting takes time for their policies.
                if last - first < len(block["position_id"]):
                    block = slice_rows(block, first, last)
                for name, array in self._arrays.items():
                    array[row : row + last - first] = block[name]
                if len(block.get("policy_row", ())):
                    policies = members_to_policies(block) if "policy_cell" in block else None
                    found.append((block["policy_row"].astype(np.int64) + row, policies))
                row += last - first
                block_start += size
        # Last, since the blocks are only valid now. Copied, since views would keep all bytes of the shard;
        # together, since malloc keeps the memory of many small copies.
        if found:
            parts = [policies for _, policies in found if policies is not None]
            policies = SparsePolicies.join(parts) if parts else None
            self._policies.append((np.concatenate([rows for rows, _ in found]), policies))

    def table(self) -> GameTable:
        """Return the rows, and free the memory that they took besides."""
        table: dict[str, Any] = {PACKED_PREFIX + name: array for name, array in self._arrays.items()}
        table |= policy_arrays(self._policies, self._count, self._board_size**2)
        return GameTable(self._board_size, table | {"starts": np.zeros(1, np.int64)})


def read_shard_table(
    source: AnySource,
    manifest: ShardManifest,
    split: str,
    policies: bool,
    on_error: OnError = "raise",
    progress: Progress = SILENT,
    left_out: Mapping[str, HexdataError] = MappingProxyType({}),
) -> tuple[GameTable, list[SkippedShard]]:
    """Read the positions of a split, in stored order.

    Args:
        source: Source of the shards.
        manifest: The shard manifest.
        split: Name of the split.
        policies: Whether to read the policies that are not one-hot. Otherwise the table only contains which
            positions have one.
        on_error: "raise", or "skip" to leave out the shards that cannot be used (default "raise").
        progress: Advanced by the bytes of the shards (default: no reports).
        left_out: Shards to leave out, by name, with their errors (default: none).

    Returns:
        The table, and the shards that were left out.

    Raises:
        StoreError, FormatError: A shard differs from the manifest, or cannot be read; or none can be used.
        BudgetError: The shards do not fit into the available memory.
    """
    shards = manifest.splits[split]
    # An empty table would deliver nothing, which a user of "skip" does not expect.
    if shards and len(left_out) == len(shards):
        reason, found = f"no shard of {split} can be used", left_out[shards[0].name].detail()
        raise StoreError(reason, path=source.address(""), found=found, hint=REPAIR_HINT)
    # Before anything is read, since the sizes are in the manifest.
    size = sum(shard.bytes for shard in shards)  # a table takes a little less
    hint = "Use mode='stream', which reads the shards sequentially."
    require_memory(size, f"the shards of {split} do not fit into the available memory", hint)
    progress.begin("read shards", size, "bytes")
    members = [name for name in manifest.fields if name not in SPARSE_FIELDS]
    if "policy_row" in manifest.fields:
        members += SPARSE_FIELDS if policies else SPARSE_FIELDS[:2]
    reader = BlockReader(source, manifest, split, members)
    numbers = [number for number, shard in enumerate(shards) if shard.name not in left_out]
    starts = np.cumsum([0, *(shards[number].positions for number in numbers)]).tolist()
    rows = ShardRows(reader, manifest.board_size, starts[-1])
    faults: dict[str, HexdataError] = {}
    threads = ThreadPoolExecutor(1 if source.is_local else _DOWNLOADS, "hexdata-shards")
    try:
        # Each shard has rows of its own, so that the threads need no lock.
        futures = [
            threads.submit(rows.read, number, 0, shards[number].positions, start)
            for number, start in zip(numbers, starts, strict=False)
        ]
        # In the order of the shards, so that the error that is raised does not depend on the threads.
        for number, future in zip(numbers, futures, strict=True):
            try:
                future.result()
            except (StoreError, FormatError) as error:
                if on_error == "raise":
                    raise
                faults[shards[number].name] = error
            progress.advance(shards[number].bytes)
    finally:
        threads.shutdown(cancel_futures=True)
    if faults:  # they leave gaps in the rows: the other shards are read again
        left_out = {**left_out, **faults}
        return read_shard_table(source, manifest, split, policies, on_error, progress, left_out)
    table = rows.table()
    table.read_again = partial(_read_again, source, manifest, split, policies, "raise", SILENT, {**left_out})
    return table, [
        (shard.name, shard.positions, left_out[shard.name]) for shard in shards if shard.name in left_out
    ]


def _read_again(*given: Any) -> GameTable:
    """Read a table whose temporary file is gone. The same shards must be readable."""
    return read_shard_table(*given)[0]
