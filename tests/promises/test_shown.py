"""What objects of the library show of themselves."""

from __future__ import annotations

from pathlib import Path

from hexdata import Loader, PositionDataset
from hexdata.loader import Mixture


def test_loaders_show_their_data(trmph_store: Path) -> None:
    loader = Loader(trmph_store, split="val", seed=7)
    shown = repr(loader)
    facts = [str(trmph_store), "'val'", f"{loader.positions:,}", "'games'", "seed=7"]
    assert all(fact in shown for fact in facts)
    assert shown in repr(Mixture([loader, loader], [1, 1]))
    assert str(trmph_store) in repr(PositionDataset(trmph_store))
