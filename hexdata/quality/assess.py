"""Comparison of the measures of a shuffle with those expected of a uniform random order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from hexdata.quality.figures import BucketFigures, Figure, Quality, judge
from hexdata.quality.measure import (
    AUTOCORRELATION_LAGS,
    BATCHES,
    LAGS,
    SPLIT,
    BucketFacts,
    Dispersion,
    RowRange,
    SplitMeasures,
)
from hexdata.quality.theory import (
    Kernel,
    Moments,
    Slots,
    batch_slots,
    expected_games,
    lag_slots,
    moments,
    possible_share,
    product_kernel,
    same_game_kernel,
    tail_bound,
    total,
)

__all__ = ["MAX_GAME_SHARE", "assess_split"]

MAX_GAME_SHARE: Final = 0.02
"""Accepted share of one game in a bucket, unless the sizes of games and buckets require more."""

_SlotsOf = Callable[[Iterable[RowRange]], Slots]


def assess_split(measured: SplitMeasures, choices: dict[str, Any]) -> Quality:
    """Compare the measures of a split with those expected of a uniform random order.

    Args:
        measured: Measures of the training split.
        choices: Selection options of the shuffle, from its lineage.
    """
    return _Assessment(measured, whole_games=choices.get("assign") == "game").quality()


class _Assessment:
    def __init__(self, measured: SplitMeasures, whole_games: bool) -> None:
        self.measures = measured
        self.whole = measured.whole
        self.whole_games = whole_games
        self.rows = {number: facts for number, facts in enumerate(measured.buckets) if facts.rows}
        segments = self.rows if measured.by_bucket else {0: measured.whole}
        after = measured.after.segments()
        self.runs = {number: after.get(number, []) for number in segments}
        self.runs_before = [run for _, run in measured.before.runs]
        self.games = {number: _games(facts) for number, facts in segments.items()}
        self.values = {number: _values(facts) for number, facts in segments.items()}
        self.segments = segments

    def quality(self) -> Quality:
        measures = self.measures
        figures = [*map(self._largest_share, measures.dispersions), self._games_in_bucket()]
        figures += [self._batch(size) for size in BATCHES]
        lags = [self._lag(lag) for lag in range(1, LAGS + 1)]
        figures += [lags[0], _worst("neighbours-worst", f"the worst of lags 1 to {LAGS}", lags)]
        products = [] if measures.constant else [self._product(lag) for lag in AUTOCORRELATION_LAGS]
        if products:
            listed = ", ".join(map(str, AUTOCORRELATION_LAGS[:-1])) + f" and {AUTOCORRELATION_LAGS[-1]}"
            figures += [products[0], _worst("value-worst", f"the worst of lags {listed}", products)]
        figures.append(self._rank())
        if not measures.constant:
            figures.append(self._bucket_mean())
        return Quality(
            split=SPLIT,
            positions=self.whole.rows,
            sampled=measures.after.rows,
            sampled_before=measures.before.rows,
            buckets=len(measures.buckets),
            reference="each bucket in uniform order" if measures.by_bucket else "the split in uniform order",
            figures=figures,
            lags=lags + products,
            by_bucket=[self._bucket(number, facts) for number, facts in self.rows.items()],
        )

    # --- buckets

    def _bucket(self, number: int, facts: BucketFacts) -> BucketFigures:
        valued, band = not self.measures.constant, self._band(facts.rows)
        return BucketFigures(
            bucket=number,
            rows=facts.rows,
            games=facts.games,
            largest_share=facts.largest / facts.rows,
            value_mean=facts.mean if valued else None,
            value_deviation=band if valued and band else None,
            z=self._deviations(facts.mean, facts.rows) if valued and band else None,
        )

    def _largest_share(self, spread: Dispersion) -> Figure:
        share, games = max((largest / rows, games) for rows, games, largest in spread.buckets)
        if len(spread.buckets) == 1:
            possible = max(MAX_GAME_SHARE, share)
        else:
            sizes = [rows for rows, *_ in spread.buckets]
            possible = possible_share(spread.sizes, sum(sizes), min(sizes), len(sizes), MAX_GAME_SHARE)
        if self.whole_games:
            note = "not judged: each game is in one bucket"
        elif possible > MAX_GAME_SHARE:
            note = f"limit {possible:.3%}: games and buckets of this size cannot keep to {MAX_GAME_SHARE:.0%}"
        else:
            note = f"limit {MAX_GAME_SHARE:.0%}"
        figure = Figure(
            name="largest-share",
            title=f"largest share of one game in a bucket ({games:,} games)",
            unit="share",
            after=share,
            judged=not self.whole_games,
            ok=self.whole_games or share <= possible,
            note=note,
        )
        if spread.split != SPLIT:
            title = f"largest share of one game in a bucket of {spread.split} ({games:,} games)"
            return replace(figure, name=f"largest-share-{spread.split}", title=title)
        return replace(figure, before=max(largest / rows for rows, _, largest, _ in self.measures.pieces))

    def _games_in_bucket(self) -> Figure:
        games = [facts.games for facts in self.rows.values()]
        before = [games for _, games, _, _ in self.measures.pieces]
        return Figure(
            name="games-in-bucket",
            title="games in a bucket, mean",
            unit="count",
            before=sum(before) / len(before),
            after=sum(games) / len(games),
            expected=expected_games(
                self.measures.dispersions[0].sizes,
                self.whole.rows,
                (facts.rows for facts in self.rows.values()),
            ),
            note=f"from {min(games):,} to {max(games):,}",
        )

    def _bucket_mean(self) -> Figure:
        pieces = [(mean, rows) for rows, _, _, mean in self.measures.pieces]
        before = max(pieces, key=lambda piece: abs(self._deviations(*piece)))[0]
        buckets = [self._mean_of(facts.mean, facts.rows) for facts in self.rows.values()]
        return replace(max(buckets, key=_distance), before=before)

    def _mean_of(self, mean: float, rows: int) -> Figure:
        """Return the figure for the mean value of a bucket of ``rows`` rows."""
        whole = self.whole
        skewness = abs(whole.third / whole.rows) / (whole.second / whole.rows) ** 1.5 / math.sqrt(rows)
        band, z, bound = self._band(rows), self._deviations(mean, rows), tail_bound(skewness)
        note = ""
        if not band:
            note = "does not depend on the order"
        elif self.whole_games:
            note, bound = f"whole games per bucket: {abs(z):.3g} s.d. of independent positions", None
        elif bound is None:
            note = "too few pairs or rows to judge"
        return Figure(
            name="bucket-mean",
            title="value mean of a bucket, the furthest out",
            unit="value",
            after=mean,
            expected=whole.mean,
            deviation=band,
            z=z if band else None,
            bound=bound if band else None,
            judged=bool(band) and bound is not None,
            ok=bound is None or abs(z) <= bound,
            note=note,
        )

    def _band(self, rows: int) -> float:
        """Return the standard deviation of the mean of ``rows`` values drawn without replacement."""
        n = self.whole.rows
        return math.sqrt(self.whole.second / (n - 1) / rows * (1 - rows / n)) if rows < n else 0.0

    def _deviations(self, mean: float, rows: int) -> float:
        band = self._band(rows)
        return (mean - self.whole.mean) / band if band else 0.0

    # --- pairs of row indices

    def _chance(self, slots_of: _SlotsOf, kernels: dict[int, Kernel]) -> Moments:
        return total(moments(slots_of(self.runs[number]), kernel) for number, kernel in kernels.items())

    def _pairs(self, slots_of: _SlotsOf) -> int:
        return sum(slots_of(runs).pairs for runs in self.runs.values())

    def _same_game(self, figure: Figure, found: int, slots_of: _SlotsOf, scale: float) -> Figure:
        """Judge a count of same-game pairs. The figure is ``scale`` times their share of all pairs."""
        pairs = self._pairs(slots_of)
        if not pairs:
            return figure
        chance = self._chance(slots_of, self.games)
        uniform = self.whole.pairs / (self.whole.rows * (self.whole.rows - 1))
        note = ""
        if self.whole_games and uniform:
            ratio = found / pairs / uniform
            note = f"whole games per bucket: {ratio:.3g} times the pairs of a uniform order"
        elif not chance.mean:
            note = "no game has two positions"
        return judge(replace(figure, note=note), found, chance, scale / pairs)

    def _batch(self, size: int) -> Figure:
        def slots(runs: Iterable[RowRange]) -> Slots:
            return batch_slots(runs, size)

        whole = min(size, self.whole.rows)
        scale = whole * (whole - 1) / 2
        before, pairs = self.measures.before, slots(self.runs_before).pairs
        figure = Figure(
            name=f"batch-{size}",
            title=f"same-game pairs in a batch of {size}",
            unit="count",
            before=before.batch_pairs[size] / pairs * scale if pairs else None,
        )
        return self._same_game(figure, self.measures.after.batch_pairs[size], slots, scale)

    def _lag(self, lag: int) -> Figure:
        def slots(runs: Iterable[RowRange]) -> Slots:
            return lag_slots(runs, lag)

        before, pairs = self.measures.before, slots(self.runs_before).pairs
        figure = Figure(
            name=f"neighbours-{lag}",
            title=f"neighbours of the same game, lag {lag}",
            unit="share",
            before=before.lag_pairs[lag - 1] / pairs if pairs else None,
        )
        return self._same_game(figure, self.measures.after.lag_pairs[lag - 1], slots, 1.0)

    def _product(self, lag: int) -> Figure:
        def slots(runs: Iterable[RowRange]) -> Slots:
            return lag_slots(runs, lag)

        before = self.measures.before
        squares = slots(self.runs_before).pairs * self.whole.second / self.whole.rows
        figure = Figure(
            name=f"value-{lag}",
            title=f"autocorrelation of the value, lag {lag}",
            unit="value",
            before=before.products[lag] / squares if squares else None,
        )
        squares = sum(
            slots(self.runs[number]).pairs * facts.second / facts.rows
            for number, facts in self.segments.items()
        )
        if not squares:
            return figure
        return judge(figure, self.measures.after.products[lag], self._chance(slots, self.values), 1 / squares)

    def _rank(self) -> Figure:
        figure = Figure("rank", "rank correlation with the input order", "value", before=1.0)
        covariance = sum(rows * cov for _, rows, cov, _, _ in self.measures.ranks)
        index_variance = sum(rows * var for _, rows, _, var, _ in self.measures.ranks)
        rank_variance = sum(rows * var for _, rows, _, _, var in self.measures.ranks)
        if not index_variance * rank_variance:
            return figure
        variance = sum(
            rows * one * rows * other / (rows - 1)
            for _, rows, _, one, other in self.measures.ranks
            if rows > 1
        )
        chance = Moments(0.0, variance, 0.0)
        return judge(figure, covariance, chance, 1 / math.sqrt(index_variance * rank_variance))


def _games(facts: BucketFacts) -> Kernel:
    return same_game_kernel(facts.rows, facts.pairs, facts.triples)


def _values(facts: BucketFacts) -> Kernel:
    return product_kernel(facts.rows, facts.second, facts.third, facts.fourth)


def _worst(name: str, among: str, figures: list[Figure]) -> Figure:
    """Return the figure with the largest deviation, failed ones first, under the name ``name``."""
    worst = max(figures, key=_distance)
    return replace(worst, name=name, note=f"{among}: {worst.note}" if worst.note else among)


def _distance(figure: Figure) -> tuple[bool, float]:
    return not figure.ok, abs(figure.z or 0.0)
