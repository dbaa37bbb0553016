"""Order of the input of a store: game after game, a shuffle of windows, or as good as random.

In a uniform random order of N positions, two of them are at most L apart with probability
(2 L N - L (L + 1)) / (N (N - 1)). If the positions of one game are that close r times as often, they are as
dense as after a shuffle of windows of N / r positions. A shuffle buffer of B positions is as dense as windows
of 2 B: the delay in it is distributed exponentially with mean B, whose mean density is 1 / (2 B).

Of a large store, complete games from the whole order are measured. If most games are unknown, or known in
fragments, the boards tell: two positions are related if one has all stones of the other. Pairs that are close
in the order are compared with pairs of the same positions at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.order import Permutation, derive_key
from hexdata.storage import translate_errors
from hexdata.store import Store
from hexdata.store.commands import command_line
from hexdata.store.parquet import read_parquet
from hexdata.store.session import duckdb_session, read_parquet_sql
from hexdata.system import default_workers
from hexdata.text import count_of, printable

_Array = npt.NDArray[Any]
_Kind = Literal["random", "windows", "games", "mixed", "unknown"]

_LAGS: Final = (15, 255)
"""Distances within which pairs are counted: a batch, and less for windows that are narrower than a batch."""
_SAMPLED: Final = 250_000
"""About the number of positions of the games that are measured."""
_STRETCH: Final = 8_192
_STRETCHES: Final = 8
"""Consecutive positions whose values and boards are compared, and the number of such stretches."""
_FEWEST: Final = 512
"""In fewer positions, a batch is most of the order."""
_GAMES: Final = 0.5
"""Share of positions followed by one of the same game from which on an order is called game after game."""
_FRAGMENT: Final = 4
"""With fewer positions per game, games tell little of the order."""
_STONES: Final = 10
"""Boards with fewer stones occur in many games."""
_ADVICE: Final = (
    "Train with the loader, which draws a random order of all positions in every epoch, or shuffle the store."
)
_OF_SHUFFLED: Final = "The shuffled files have another order, which verify compares with a random one."
_TEXTS: Final = {
    "random": "as good as random",
    "games": "game after game",
    "unknown": "unknown: there are too few positions of one game",
}
_MEANINGS: Final = {
    "random": "Training may read the files in this order. The loader draws another one in every epoch, so no "
    "shuffle is needed.",
    "unknown": f"The order of the input does not matter to the loader. {_ADVICE}",
}


@dataclass(frozen=True)
class InputOrder:
    """Order in which the positions of a store were read.

    Attributes:
        kind: "random", "windows", "games" (game after game), "mixed" (different by folder), or "unknown".
        text: The result, as the end of the sentence "The order of the input is …".
        meaning: What it means for training, and what to do.
        width: Number of positions among which those of a game are spread, for "windows"; otherwise None.
        ratio: Pairs of one game within 255 positions, relative to a random order; None if it is unknown.
        neighbours: Share of positions followed by one of the same game; None if it is unknown.
        files: Mean number of files with positions of a game; None if the games are unknown.
        files_expected: The same in a random order of all positions.
        value_correlation: Correlation of the values of neighbours; None if it is undefined.
        by_boards: Whether boards were compared, because games are unknown.
        positions: Number of positions that were compared.
    """

    kind: _Kind
    text: str
    meaning: str
    width: int | None = None
    ratio: float | None = None
    neighbours: float | None = None
    files: float | None = None
    files_expected: float | None = None
    value_correlation: float | None = None
    by_boards: bool = False
    positions: int = 0


def measure_input_order(store: Store, *, memory: int = 256 << 20, threads: int | None = None) -> InputOrder:
    """Measure the order in which the positions of a store were read. The store is only read.

    Args:
        store: The store, whose files are intact.
        memory: Memory limit of DuckDB in bytes (default: 256 MiB).
        threads: Number of DuckDB threads. Default None: one per core, at most four.

    Raises:
        StoreError: A file cannot be read.
        BudgetError: The memory is too small.
    """
    found = _measure(store, memory, threads or min(4, default_workers()))
    return replace(found, meaning=_OF_SHUFFLED) if "shuffle" in store.manifest.stages else found


def _measure(store: Store, memory: int, threads: int) -> InputOrder:
    total = store.manifest.counts["positions"]
    if total < _FEWEST:
        return _result("unknown", text=f"unknown: {count_of(total, 'position')} are too few")
    # Positions of a game are fragments of their own where a shuffled file is not marked as one.
    by_boards = 2 * store.count_without_game() > total or total < _FRAGMENT * store.manifest.counts["games"]
    files = read_parquet_sql(store.files("positions"))
    # Stretches from the whole order, because parts of an input may have been shuffled differently.
    starts, length = [0], total
    if total > _STRETCH * _STRETCHES:
        starts, length = np.linspace(0, total - _STRETCH, _STRETCHES).astype(int).tolist(), _STRETCH
    parts = " OR ".join(f"position_id BETWEEN {start} AND {start + length - 1}" for start in starts)
    board = ", board" if by_boards else ""
    # Every step-th game, and not every step-th position: pairs within a game are counted.
    step = total // _SAMPLED + 1
    with (
        translate_errors(store.path),
        duckdb_session(memory=memory, threads=threads, store=store.path) as con,
    ):
        rows = con.sql(
            f"SELECT value::DOUBLE AS value{board} FROM {files} WHERE {parts} ORDER BY position_id"
        ).to_arrow_table()
        sample = con.sql(
            f"SELECT game_id, position_id FROM {files} WHERE game_id % {step} = 0 ORDER BY ALL"
        ).to_arrow_table()
    sources = pa.concat_tables(read_parquet(path, ["name", "positions"]) for path in store.files("sources"))
    sizes = sources["positions"].to_numpy()
    folders = np.array([str(PurePosixPath(name).parent) for name in sources["name"].to_pylist()])
    index = sample["position_id"].to_numpy()
    # The ids are used as indices below, and the store may be damaged.
    is_inside = ((index >= 0) & (index < total)).all() and (sizes >= 0).all() and sizes.sum() == total
    if rows.num_rows != len(starts) * length or not is_inside:
        hint = f"Run `{command_line('verify', store.path)}` to list the faults."
        raise StoreError("the positions are not numbered as those of the sources", path=store.path, hint=hint)
    # The correlation of neighbours in value is known for every store, also without games.
    centred = rows["value"].to_numpy().reshape(len(starts), length)
    centred = centred - centred.mean()
    variance = float((centred * centred).mean())
    facts: dict[str, Any] = {}
    # Equal values have no correlation.
    if math.isfinite(variance) and variance > 0:
        facts["value_correlation"] = float((centred[:, 1:] * centred[:, :-1]).mean() / variance)
    if by_boards:
        packed = np.frombuffer(b"".join(rows["board"].to_pylist()), np.uint8)
        places = np.array(starts)[:, None] + np.arange(length)
        source = np.searchsorted(np.cumsum(sizes), places.ravel(), side="right")
        # Numbers, since NumPy gives each text the space of the longest one.
        folder = np.unique(folders, return_inverse=True)[1][source]
        return _by_boards(packed.reshape(len(starts), length, -1), folder, facts)
    return _by_games(sample["game_id"].to_numpy(), index, sizes, folders, facts)


def _by_games(
    game: _Array, index: _Array, sizes: _Array, folders: _Array, facts: dict[str, Any]
) -> InputOrder:
    """Judge an order by some complete games.

    Args:
        game: Game of each of their positions, ascending.
        index: Their indices in the order, ascending within a game.
        sizes: Number of positions of each file.
        folders: Folder of each file. Files of different folders may have been shuffled separately.
        facts: What is known of the order.
    """
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    source = np.searchsorted(ends, index, side="right")
    followed = np.append((game[1:] == game[:-1]) & (index[1:] == index[:-1] + 1), False)
    # Of many small files, some contain no game of the sample.
    seen = np.bincount(source, minlength=len(sizes)) > 0
    # A shuffle of all files spreads a game over about `files_expected` of them; other orders reach fewer.
    _, number, counts = np.unique(game, return_inverse=True, return_counts=True)
    pairs = len(np.unique(number * len(sizes) + source))
    lengths, games = np.unique(counts, return_counts=True)
    # A game of n positions misses a file with the share s of all positions with probability (1 - s)^n.
    reached = (1 - (1 - sizes[None, :] / total) ** lengths[:, None]).sum(axis=1)
    facts |= {
        "neighbours": float(followed.mean()),
        "files": pairs / len(counts),
        "files_expected": float((reached * games).sum() / games.sum()),
        "positions": len(game),
    }
    judged, close, chance = list[tuple[int, str, _Kind, int | None]](), 0, 0.0
    for folder in np.unique(folders[seen]):
        own = np.where(folders == folder, sizes, 0)
        kept = np.where(seen, own, 0)
        size, rest = int(kept.sum()), (kept > 0)[source]
        # Indices in the order of the folder alone.
        moved = (index - (ends - np.cumsum(kept))[source])[rest]
        counted = _close_pairs(game[rest], moved, size) if size > 1 else [(0, 0.0)]
        close, chance = close + counted[-1][0], chance + counted[-1][1]
        is_ordered = float(followed[rest].mean()) > _GAMES
        found = ("games", None) if is_ordered else _judge(counted, size)
        judged.append((int(own.sum()), str(folder), *found))
    facts["ratio"] = close / chance if chance else None
    # The largest folder is the result, unless others with many positions differ.
    judged.sort(key=lambda each: (-each[0], each[1]))
    _, _, kind, width = judged[0]
    others = [each for each in judged[1:] if each[0] > 0.05 * total and each[2] not in (kind, "unknown")]
    text = _text(kind, width)
    if others:
        named = [f"{printable(name)}: {_text(of, wide)}" for _, name, of, wide in [judged[0], *others[:2]]]
        kind, width, text = "mixed", None, "; ".join(["different by folder", *named])
    return _result(kind, text=text, width=width, **facts)


def _close_pairs(game: _Array, index: _Array, total: int) -> list[tuple[int, float]]:
    """Return the pairs of one game within each of ``_LAGS``, and the number expected of a random order.

    The games ascend, and the indices within each.
    """
    _, number, counts = np.unique(game, return_inverse=True, return_counts=True)
    # Ascending numbers, in which different games are further apart than any lag.
    place = number * (total + _LAGS[-1]) + index
    pairs = int((counts * (counts - 1)).sum()) / 2
    found = []
    for lag in _LAGS:
        close = int((np.searchsorted(place, place + lag, side="right") - np.arange(1, len(place) + 1)).sum())
        # The formula in the docstring of the module is that of a lag below the number of positions.
        near = min(lag, total - 1)
        chance = pairs * (2 * near * total - near * (near + 1)) / (total * (total - 1))
        found.append((close, chance))
    return found


def _judge(counted: Sequence[tuple[int, float]], total: int) -> tuple[_Kind, int | None]:
    """Return the kind of an order and the width of its windows from (pairs, pairs expected) per lag."""
    # Up to a tenth more pairs is no disadvantage; five standard deviations of a count are chance.
    excess = [pairs > 1.1 * chance + 5 * math.sqrt(chance) + 5 for pairs, chance in counted]
    if any(excess):
        # Windows narrower than the larger lag have their full density within the smaller lag only. Of fewer
        # than 50 pairs, the ratio has an error of more than 14 %.
        ratios = [pairs / chance for pairs, chance in counted if pairs >= 50]
        return "windows", round(total / max(ratios, default=1.0))
    return ("random" if counted[-1][1] >= 1 else "unknown"), None


def _by_boards(boards: _Array, folder: _Array, facts: dict[str, Any]) -> InputOrder:
    """Judge an order by the boards of its stretches (K, L, bytes) and the folder of each position (K L,)."""
    many = np.bitwise_count(boards).sum(axis=2) >= _STONES
    # Boards are padded to whole words of 64 bits, to compare eight bytes at a time.
    padded = np.zeros((*boards.shape[:2], -(-boards.shape[2] // 8) * 8), np.uint8)
    padded[:, :, : boards.shape[2]] = boards
    words = padded.view(np.uint64)

    def related(step: int, words: _Array, many: _Array) -> int:
        one, other = words[:, step:], words[:, :-step]
        both = one & other
        nested = (both == one).all(axis=2) | (both == other).all(axis=2)
        return int((nested & many[:, step:] & many[:, :-step]).sum())

    count = many.size
    comparable = int((many[:, 1:] & many[:, :-1]).sum())
    if 2 * comparable < count:
        text = "unknown, as are the games, and the boards have too few stones"
        return _result("unknown", text=text, **facts)
    # The same positions at random, those of each folder among themselves: how often boards are related by
    # chance cancels.
    random = Permutation(count, derive_key(0, "quality", "input"))[np.arange(count)]
    drawn = np.empty(count, np.int64)
    drawn[np.argsort(folder, kind="stable")] = np.lexsort((random, folder))
    mixed = words.reshape(count, -1)[drawn].reshape(words.shape), many.ravel()[drawn].reshape(many.shape)
    steps = range(1, min(_LAGS[-1], words.shape[1] - 1) + 1)
    found = np.array([related(step, words, many) for step in steps])
    chance = np.array([related(step, *mixed) for step in steps])
    counted = [(int(found[:lag].sum()), max(int(chance[:lag].sum()), 1)) for lag in _LAGS]
    facts |= {
        "ratio": counted[-1][0] / counted[-1][1],
        "neighbours": int(found[0]) / max(comparable, 1),
        "by_boards": True,
        "positions": count,
    }
    if facts["neighbours"] > _GAMES:
        return _result("games", **facts)
    kind, width = _judge(counted, count)
    return _result(kind, width=width, **facts)


def _text(kind: _Kind, width: int | None) -> str:
    if width is None:
        return _TEXTS[kind]
    # Two digits, since the width is estimated from a sample.
    about = round(width, 2 - len(str(width)))
    return f"a shuffle of windows of about {about:,} positions, as of a buffer of {about // 2:,}"


def _result(kind: _Kind, *, text: str = "", width: int | None = None, **facts: Any) -> InputOrder:
    times = facts.get("ratio") or 1.0
    meaning = _MEANINGS.get(
        kind,
        f"A batch of 256 that is read in this order has {times:,.1f} times as many pairs of one game as in a "
        f"random order. {_ADVICE}",
    )
    return InputOrder(kind, text or _text(kind, width), meaning, width=width, **facts)
