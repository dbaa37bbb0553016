"""Files under a running loader: every game exactly once, whatever writers do and when the loader restarts."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hexdata import formats
from hexdata.board import game_hash
from hexdata.demo.games import make_game
from hexdata.errors import InputError
from hexdata.live import chunk_source_loader, file_path_provider
from hexdata.live.chunk import SCANNED, ChunkSource
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.file_path_provider import FilePathProvider
from tests.live.made import TIMEOUT, N, examples, piped, text_of, write_pickle
from tests.pairs import FULL

SETTLE = 0.01

pytestmark = pytest.mark.usefixtures("no_thread_survives")


@pytest.fixture(autouse=True, scope="module")
def short_waits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_path_provider, "_LEAST_WAIT", SETTLE / 4)
        yield


def hashes(*numbers: int) -> Counter[bytes]:
    return Counter(game_hash(make_game(number, 1, N).moves, N) for number in numbers)


def pickled(*numbers: int) -> list[Any]:
    return [each for n in numbers for each in examples(make_game(n, 1, N), (0, n + 1))]


class Reading:
    """The first two stages over a directory, and the games that they delivered."""

    def __init__(self, directory: Path, state: Any = None, **options: Any) -> None:
        self.provider = FilePathProvider(directory=directory, **{"settle": SETTLE, **options})
        self.loader = ChunkSourceLoader(directory=directory)
        self.pipeline = piped(self.provider, self.loader)
        if state is not None:
            self.pipeline.load_state(state)
        self.sources: list[ChunkSource | str] = []
        self.pipeline.start()

    @property
    def games(self) -> Counter[bytes]:
        sources = [source for source in self.sources if isinstance(source, ChunkSource)]
        return Counter(chunk.game_hash for source in sources for chunk in source.chunks)

    @property
    def names(self) -> list[str]:
        """Names of the sources in order, and ``SCANNED``."""
        return [getattr(source, "name", SCANNED) for source in self.sources]

    def take(self, seconds: float = 0.0) -> None:
        """Take what arrives, for some seconds or until the input ends."""
        end = time.monotonic() + seconds
        try:
            while (source := self.pipeline.take(max(0.0, end - time.monotonic()))) is not None:
                self.sources.append(source)
        except StopIteration:
            pass

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT
        while not condition():
            self.take(0.002)
            assert time.monotonic() < end, (self.names, self.pipeline.metrics(), self.pipeline.notes())

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipeline.close()


class Writers(RuleBasedStateMachine):
    """Writers append, add, replace, rename and remove files; the loader stops, crashes and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.directory = self.folder / "games"
        self.directory.mkdir()
        self.next = 0
        self.expected: Counter[bytes] = Counter()
        self.contents: dict[Path, list[int]] = {}
        """Games of the files that may still change."""
        self.reading = Reading(self.directory)
        self.saved: tuple[Any, list[ChunkSource]] | None = None

    def numbers(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def drain(self) -> None:
        """Wait until every expected game has arrived."""
        self.reading.until(lambda: not self.expected - self.reading.games)

    def pick(self, index: int) -> Path | None:
        return list(self.contents)[index % len(self.contents)] if self.contents else None

    @rule(count=st.integers(1, 4), packed=st.booleans(), folder=st.sampled_from(["", "a/", "a/b/"]))
    def add_a_text(self, count: int, packed: bool, folder: str) -> None:
        numbers = self.numbers(count)
        path = self.directory / f"{folder}{numbers[0]:04d}.trmph{'.gz' * packed}"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text_of(*numbers).encode()
        path.write_bytes(gzip.compress(content) if packed else content)
        self.expected += hashes(*numbers)
        if not packed:
            self.contents[path] = numbers

    @rule(index=st.integers(0, 99), count=st.integers(1, 3), cut=st.booleans())
    def append_to_a_text(self, index: int, count: int, cut: bool) -> None:
        path = self.pick(index)
        if path is None or len(self.contents[path]) > 10:
            return
        numbers = self.numbers(count)
        with path.open("a") as file:
            content = text_of(*numbers)
            if cut:  # the last line is not complete when it is read
                start = content.rstrip().rfind("#")
                file.write(content[: start + 2])
                file.flush()
                self.reading.take(3 * SETTLE)
                content = content[start + 2 :]
            file.write(content)
        self.contents[path] += numbers
        self.expected += hashes(*numbers)

    @rule(count=st.integers(1, 3), way=st.sampled_from(["renamed", "at once", "in two parts"]))
    def add_a_pickle(self, count: int, way: str) -> None:
        numbers = self.numbers(count)
        path = self.directory / f"{numbers[0]:04d}.pkl.gz"
        hidden = path.with_name(f".{path.name}.tmp")
        write_pickle(hidden, pickled(*numbers))
        if way == "renamed":
            hidden.rename(path)
        else:
            content = hidden.read_bytes()
            hidden.unlink()
            with path.open("wb") as file:
                file.write(content[: len(content) // 2])
                if way == "in two parts":  # it is bad when it is read first
                    file.flush()
                    self.reading.take(3 * SETTLE)
                file.write(content[len(content) // 2 :])
        self.expected += hashes(*numbers)

    @rule(index=st.integers(0, 99), way=st.sampled_from(["replaced", "renamed", "removed"]))
    def change_a_text(self, index: int, way: str) -> None:
        """Other games under a name that was read are not used; another name is another file."""
        path = self.pick(index)
        if path is None:
            return
        self.drain()
        numbers = self.contents.pop(path)
        if way == "replaced":
            path.write_text(text_of(*self.numbers(12)))
        elif way == "removed":
            path.unlink()
        else:
            path.rename(path.with_name(f"moved-{self.numbers(1)[0]:04d}.trmph"))
            self.expected += hashes(*numbers)

    @rule()
    def lose_the_directory(self) -> None:
        self.directory.rename(self.folder / "away")
        self.reading.take(3 * SETTLE)
        (self.folder / "away").rename(self.directory)
        self.drain()

    @rule()
    def save(self) -> None:
        self.reading.take()
        self.saved = pickle.loads(pickle.dumps(self.reading.pipeline.state())), list(self.reading.sources)

    @rule(lost=st.booleans())
    def restart(self, lost: bool) -> None:
        """Continue from a new state; or, as after a crash, from the last one, without what came after it."""
        if not lost:
            self.save()
        texts = {name for name in self.reading.names if name.endswith(".trmph")}
        current = {path.relative_to(self.directory).as_posix() for path in self.contents}
        if self.saved is None or (lost and texts - current):
            return  # a text that was delivered has been replaced, renamed or removed since
        self.reading.pipeline.close()
        self.reading = Reading(self.directory, self.saved[0])
        self.reading.sources = list(self.saved[1])

    def teardown(self) -> None:
        try:
            self.drain()
            self.reading.until(lambda: SCANNED in self.reading.names)
            self.reading.take(5 * SETTLE)
            assert self.reading.games == self.expected
            assert self.reading.names.count(SCANNED) == 1
        finally:
            self.reading.pipeline.close()
            shutil.rmtree(self.folder)


TestWriters = pytest.mark.filterwarnings("ignore:.*can no longer be read")(Writers.TestCase)
TestWriters.settings = settings(max_examples=40 if FULL else 6, stateful_step_count=12, deadline=None)


def test_existing_files_are_delivered_in_order_of_names_before_new_ones(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for number, name in enumerate(["b/2.trmph", "a.trmph", "b/1.trmph", "c.trmph"]):
        (tmp_path / name).write_text(text_of(number))
    with Reading(tmp_path) as reading:
        reading.until(lambda: SCANNED in reading.names)
        (tmp_path / "0.trmph").write_text(text_of(9))
        reading.until(lambda: len(reading.names) == 6)
    assert reading.names == ["a.trmph", "b/1.trmph", "b/2.trmph", "c.trmph", SCANNED, "0.trmph"]
    with Reading(tmp_path, watch=False) as reading:
        reading.take(TIMEOUT)
    assert reading.names == ["0.trmph", "a.trmph", "b/1.trmph", "b/2.trmph", "c.trmph"]
    assert reading.provider.counts == {"files": 5}
    with pytest.raises(InputError, match="no such directory"):
        FilePathProvider(directory=tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no links or pipes")
def test_only_complete_regular_files_of_the_patterns_are_read(tmp_path: Path) -> None:
    directory, outside = tmp_path / "games", tmp_path / "outside"
    for folder in (directory, directory / ".hidden", outside, directory / "folder.trmph"):
        folder.mkdir()
    for name in (".a.trmph", "b.trmph.tmp", "c.trmph.part", "d.csv", ".hidden/e.trmph"):
        (directory / name).write_text(text_of(1))
    (directory / "empty.trmph").touch()
    with suppress(OSError):  # a name that is not UTF-8, which some systems refuse
        (directory / os.fsdecode(b"\xff.trmph")).write_text(text_of(4))
    os.mkfifo(directory / "pipe.trmph")
    (outside / "f.trmph").write_text(text_of(2))
    for name, target in {"link": outside, "other": outside, "loop": directory}.items():
        (directory / name).symlink_to(target)
    with Reading(directory) as reading:
        reading.until(lambda: SCANNED in reading.names)
        assert reading.names in (["link/f.trmph", SCANNED], ["other/f.trmph", SCANNED])
        (directory / "empty.trmph").write_text(text_of(3))
        reading.until(lambda: reading.games == hashes(2, 3))
        assert {name for name, _ in reading.loader.notes().get("bad", [])} <= {r"\udcff.trmph"}
    (directory / os.fsdecode(b"\xff.trmph")).unlink(missing_ok=True)
    with Reading(directory, settle=1000) as reading:  # no file is ever complete
        reading.until(lambda: len(reading.pipeline.coordinator.files) == 2)
        (directory / "empty.trmph").unlink()
        reading.until(lambda: reading.provider.counts.get("vanished") == 1)


def test_a_missing_directory_is_warned_of_once_and_waited_for(tmp_path: Path) -> None:
    directory = tmp_path / "games"
    directory.mkdir()
    (directory / "a.trmph").write_text(text_of(1))
    with Reading(directory, pool_size=1) as reading:
        reading.until(lambda: SCANNED in reading.names)
        directory.rename(tmp_path / "away")
        with pytest.warns(UserWarning, match="can no longer be read") as caught:
            reading.until(lambda: bool(caught.list))
        assert str(directory) in reading.pipeline.notes()["FilePathProvider"]["unavailable"]
        directory.mkdir()  # as an unmounted drive leaves it: no file counts as deleted
        reading.until(lambda: not reading.provider.notes())
        directory.rmdir()
        (tmp_path / "away").rename(directory)
        (directory / "b.trmph").write_text(text_of(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reading.until(lambda: reading.games == hashes(1, 2))
        reading.take(5 * SETTLE)
        assert reading.games == hashes(1, 2)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, OSError])
def test_a_file_that_could_not_be_opened_for_a_moment_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    (tmp_path / "a.trmph").write_text(text_of(1))
    opened: list[Path] = []

    def open_source(path: Path) -> Any:
        opened.append(path)
        if len(opened) == 1:  # as from a drive that is missing between the listing and the reading
            raise error(5, "not now", str(path))
        return formats.open_source(path)

    monkeypatch.setattr(chunk_source_loader, "open_source", open_source)
    with Reading(tmp_path) as reading:
        reading.until(lambda: reading.games == hashes(1))
        reading.take(5 * SETTLE)
        assert reading.games == hashes(1)
        assert reading.loader.counts["bad_files"] == 1


def test_removed_files_are_forgotten_after_pool_size_others(tmp_path: Path) -> None:
    with Reading(tmp_path, pool_size=3) as reading:
        for number in range(8):
            (tmp_path / f"{number}.trmph").write_text(text_of(number))
            reading.until(lambda number=number: reading.games == hashes(*range(number + 1)))  # type: ignore[misc]
            if number < 6:
                (tmp_path / f"{number}.trmph").unlink()
        reading.until(lambda: len(reading.pipeline.coordinator.files) == 3)
        (tmp_path / "0.trmph").write_text(text_of(20))
        reading.until(lambda: reading.games == hashes(*range(8), 20))
