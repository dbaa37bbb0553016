"""Fuzz targets for archives and compressed streams, compared with tarfile, zipfile, gzip and NumPy."""

from __future__ import annotations

import atexit
import functools
import gzip
import io
import random
import re
import shutil
import struct
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from fuzz_target import BOTH, NEITHER, STRICTER, Target, edited, files_in_memory, read_all, require

import hexdata.formats.npz as npz_module
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import FormatError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.gunzip import GunzipFile, GunzipLimits
from hexdata.formats.katago import DEFAULT_LIMITS, KataHexReader
from hexdata.formats.npz import NpzFile
from hexdata.formats.trmph import write_trmph
from hexdata.shards.block_check import check_block
from hexdata.shards.tar_members import HEADER_BYTES, MemberReader, archive_end, member_headers, parse_headers
from hexdata.shuffle import ShuffleOptions, shuffle_store

__all__ = ["GzipTarget", "MemberTarget", "NpzTarget", "ShardTarget"]

BLOCK = tarfile.BLOCKSIZE
FIELDS = {
    "board": ("|u1", (3,)),
    "move": ("<u2", ()),
    "value": ("<f4", ()),
    "position_id": ("<i8", ()),
    "extra.komi": ("<f8", ()),
    "policy": ("<f2", (3, 3)),
}


def _member(key: int, field: str, rows: int) -> bytes:
    dtype, shape = FIELDS[field]
    numbers = np.arange(rows * max(1, int(np.prod(shape))), dtype="i8").astype(dtype).tobytes()
    headers = member_headers(f"{key:06d}", field, dtype, (rows, *shape))
    return headers + numbers + bytes(-(len(headers) + len(numbers)) % BLOCK)


def _with_checksums(raw: bytes) -> bytes:
    """Return an archive whose tar headers have valid checksums."""
    found, offset = bytearray(raw), 0
    while len(found) - offset >= BLOCK and any(found[offset : offset + BLOCK]):
        header = found[offset : offset + BLOCK]
        header[148:156] = b" " * 8
        found[offset + 148 : offset + 156] = b"%06o\0 " % sum(header)
        try:
            size = int(bytes(header[124:135]), 8)
        except ValueError:
            break
        offset += BLOCK + size + -size % BLOCK
    return bytes(found)


@functools.cache
def small_store() -> Path:
    """Return a store of games on boards of size 3, with all stages, in shards of two positions. Read only."""
    folder = Path(tempfile.mkdtemp(prefix="hexdata-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "games").mkdir()
    write_trmph(folder / "games" / "a.trmph", list(make_games(3, 1, 3)), 3)
    store = folder / "store"
    convert_sources(folder / "games", store, ConvertOptions(workers=1))
    shuffle_store(store, ShuffleOptions(seed=7, threads=1))
    export_shards(store, ExportOptions(workers=1, shard_size=2, block_size=1))
    return store


class MemberTarget(Target):
    """The two headers of a member of a shard: name, size, type and shape as tarfile and NumPy read them."""

    name = "member"
    max_len: ClassVar[int] = HEADER_BYTES
    words = (
        *(b"'descr': '<f4'", b"'|u1'", b"'>f4'", b"'|O'", b"'shape': (2, 3), }", b"(2,)", b"()", b"True"),
        *(b"00000001000\0", b"ustar\x0000", b"ustar  \0", b"000001.extra.a.npy", b"../000000.a.npy"),
    )

    def seeds(self) -> list[bytes]:
        return [_member(7, field, 3)[:HEADER_BYTES] for field in FIELDS]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        found = edited(raw, rng, self.words)[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
        return _with_checksums(found) if rng.random() < 0.8 else found

    def check(self, raw: bytes) -> str:
        try:
            header = parse_headers(raw, 0, 1 << 40, "shard")
        except FormatError:
            return STRICTER if self._is_read(raw) else NEITHER
        info = tarfile.TarInfo.frombuf(raw[:BLOCK], "ascii", "strict")
        require(info.isreg() and info.name == header.name, f"tarfile reads {info.name!r}")
        stream = io.BytesIO(raw[BLOCK:])
        require(np.lib.format.read_magic(stream) == (1, 0), "another version of npy")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        require((dtype.str, shape, fortran) == (header.dtype, header.shape, False), f"NumPy reads {shape}")
        require(header.bytes == dtype.itemsize * int(np.prod(shape, dtype=object)), "another size")
        require(info.size == 128 + header.bytes and stream.tell() == 128, "another size of the member")
        return BOTH

    @staticmethod
    def _is_read(raw: bytes) -> bool:
        try:
            tarfile.TarInfo.frombuf(raw[:BLOCK], "ascii", "strict")
            stream = io.BytesIO(raw[BLOCK:])
            np.lib.format.read_magic(stream)
            with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
                np.lib.format.read_array_header_1_0(stream)
        except Exception:  # noqa: BLE001  # of tarfile, or of NumPy's evaluation of the header
            return False
        return True


class ShardTarget(Target):
    """A whole shard: the arrays that tarfile and NumPy read from its members."""

    name = "shard"
    max_len: ClassVar[int] = 1 << 15
    words = MemberTarget.words

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self._seeds = [path.read_bytes() for path in sorted((small_store() / "shards").glob("*.tar"))]

    def seeds(self) -> list[bytes]:
        return self._seeds

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change, repeat, remove or exchange members, and complete the archive."""
        pieces = [raw[start : start + BLOCK] for start in range(0, len(raw), BLOCK)]
        while pieces and not any(pieces[-1]):
            pieces.pop()
        for _ in range(rng.choice((0, 0, 1, 2))):
            start, length = rng.randrange(len(pieces) + 1), rng.choice((1, 2, 2, 4))
            if rng.random() < 0.5:
                pieces[start:start] = pieces[start : start + length]
            else:
                del pieces[start : start + length]
        if pieces and rng.random() < 0.8:
            place = rng.randrange(len(pieces))
            pieces[place] = edited(pieces[place], rng, self.words)[:BLOCK].ljust(BLOCK, b"\0")
        found = b"".join(pieces)
        if rng.random() < 0.9:
            found = _with_checksums(found)
            found += archive_end(len(found))
        return found if rng.random() < 0.9 else edited(found, rng)

    def check(self, raw: bytes) -> str:
        arrays = {}
        members = MemberReader(io.BytesIO(raw).read, 0, len(raw), len(raw), "shard")
        try:
            while header := members.next_header():
                arrays[header.name] = members.read_array()
        except FormatError:
            return NEITHER
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            found = set()
            for member in archive:
                data = archive.extractfile(member)
                assert data is not None
                expected = np.load(io.BytesIO(data.read()), allow_pickle=False)
                array = arrays[member.name]
                require(array.dtype == expected.dtype and array.shape == expected.shape, "another shape")
                found.add(member.name)
                later = sum(each.name == member.name for each in archive.getmembers()) > 1
                require(later or array.tobytes() == expected.tobytes(), "other numbers")
        require(found == arrays.keys(), f"tarfile finds {found}")
        blocks: dict[str, dict[str, Any]] = {}
        for name, array in arrays.items():
            key, _, field = name.removesuffix(".npy").partition(".")
            blocks.setdefault(key, {})[field] = array
        try:
            for key, block in blocks.items():
                check_block(block, "shard", key)
        except FormatError:
            return NEITHER
        return BOTH


class NpzTarget(Target):
    """Training data of KataHex: the arrays that NumPy reads, and as many records as rows."""

    name = "npz"
    max_len: ClassVar[int] = 1 << 15
    words = (
        *(b"'descr': '<f4'", b"'|O'", b"'fortran_order': True", b"(1, 64)", b"(0,", b"9999999999", b"PK\3\4"),
        *(b"\x00\x00\x80\x3f", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff", b"globalInputNC.npy"),
    )

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        super().__init__(scratch, stack)
        self._seeds = _npz_seeds(scratch)
        self.file = stack.enter_context(files_in_memory(npz_module))

    def seeds(self) -> list[bytes]:
        return self._seeds

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        """Change members and zip them again, or change the archive itself."""
        members = _zip_members(raw)
        if not members or rng.random() < 0.2:
            return edited(raw, rng, self.words)
        changed = dict(members)
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice([*changed])
            data = changed[name]
            kind = rng.randrange(12)
            if kind == 0:
                changed[rng.choice((name + "x", "valueTargetsNCHW.npy", name))] = changed.pop(name)
            elif kind == 1:
                changed[name] = edited(data[:128], rng, self.words) + data[128:]
            elif kind == 2:
                changed[name] = edited(data, rng, self.words)
            else:  # numbers only, so that the sizes remain
                start = 128 + 2 * rng.randrange(max(1, (len(data) - 128) // 2))
                word = rng.choice((b"\x01", b"\0\0", b"\xff\xff", b"\x00\x00\x80\x3f", rng.randbytes(2)))
                changed[name] = data[:start] + word + data[start + len(word) :]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, data in changed.items():
                archive.writestr(zipfile.ZipInfo(name), data)
        return buffer.getvalue()

    def check(self, raw: bytes) -> str:
        self.file.content = raw
        try:
            with NpzFile("/file", npz_names(), npz_names()[:4], DEFAULT_LIMITS) as file:
                blocks = list(file.blocks(1 + len(raw) % 3))
        except FormatError:
            return NEITHER
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            for name in npz_names()[:4]:
                expected = archive[name]
                found = [block[name] for block in blocks] or [expected[:0]]
                require(file.arrays[name].dtype == expected.dtype, f"another type of {name}")
                require(np.concatenate(found).tobytes() == expected.tobytes(), f"other numbers of {name}")
            rows = len(archive[npz_names()[0]])
        found_rows, rejected, code = read_all(lambda: KataHexReader("/file"))
        if code:
            return NEITHER
        require(len(found_rows) + len(rejected) == rows, f"{rows} rows")
        for row in found_rows:
            require(0 <= row["value"] <= 1, "a value out of range")
            total = sum(entry["probability"] for entry in row["policy"] or ())
            require(total < 1 + 1e-4, "a policy above 1")
            size = int((4 * len(row["board"])) ** 0.5)
            bits = np.unpackbits(np.frombuffer(row["board"], np.uint8), count=2 * size * size).reshape(2, -1)
            require(not bits.all(axis=0).any(), "two stones on a cell")
        return BOTH if found_rows else NEITHER


def npz_names() -> tuple[str, ...]:
    """Return the names of arrays, those that are read first."""
    return (
        *("binaryInputNCHWPacked", "globalInputNC", "policyTargetsNCMove", "globalTargetsNC"),
        *("scoreDistrN", "valueTargetsNCHW", "qValueTargetsNCMove", "metadataInputNC"),
    )


def _npz_seeds(scratch: Path) -> list[bytes]:
    from tests.formats.test_npz import WHITE, Row, write_kata

    rows = [
        Row(3, {(0, 0): 1}, WHITE, {(1, 1): 3, (2, 0): 1}),
        Row(3, {}, visits=None, side=True),
        Row(4, {(1, 1): 1, (2, 2): 2}, max_moves=0.5),
    ]
    return [
        write_kata(scratch / "a.npz", rows[k:stop], 4).read_bytes() for k, stop in ((0, 1), (0, 3), (2, 3))
    ]


@functools.lru_cache(maxsize=512)
def _zip_members(raw: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            infos = archive.infolist()
            if sum(info.file_size for info in infos) > 1 << 20:
                return {}
            return {info.filename: archive.read(info) for info in infos}
    except Exception:  # noqa: BLE001  # of a damaged archive
        return {}


class GzipTarget(Target):
    """A gzip stream: the bytes that Python's gzip reads; salvaging adds nothing else."""

    name = "gzip"
    max_len: ClassVar[int] = 600
    words = (
        b"\x1f\x8b\x08",
        b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\x03\x02\x00xx",
        b"\0" * 9,
        b"\x03\0" + b"\0" * 8,
    )

    def seeds(self) -> list[bytes]:
        texts = [b"", b"#3,a1b2 b\n" * 9, bytes(range(200))]
        found = [gzip.compress(text, level, mtime=0) for text in texts for level in (0, 6)]
        return [*found, found[2] + found[4], found[3] + bytes(30) + found[3], b"plain text"]

    def mutate(self, raw: bytes, rng: random.Random) -> bytes:
        found = edited(raw, rng, self.words)
        try:  # most changes are only found by the checksum, so that it is corrected sometimes
            member = zlib.decompressobj(wbits=31)
            data = member.decompress(found[:-8] if rng.random() < 0.5 else b"")
            return found[:-8] + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
        except zlib.error:
            return found

    def check(self, raw: bytes) -> str:
        flags = re.findall(rb"\x1f\x8b.(.)", raw, re.DOTALL)
        if raw[:2] != b"\x1f\x8b" or any(flag[0] & 0xE2 for flag in flags):
            return NEITHER  # zlib refuses reserved flags and wrong checksums of headers, which gzip ignores
        try:
            expected: bytes | None = gzip.decompress(raw)
        except Exception:  # noqa: BLE001  # EOFError, BadGzipFile, zlib.error, OverflowError
            expected = None
        found = _gunzip(raw, 1 << 16, salvage=False)
        salvaged = [_gunzip(raw, step, salvage=True) for step in (1 << 16, 1 + len(raw) % 5)]
        require(salvaged[0] == salvaged[1], "salvaging depends on the size of the pieces")
        if found[1]:
            require(salvaged[0][1], "salvaging finds no damage")
            require(salvaged[0][0].startswith(found[0]), "salvaging returns other bytes")
            return NEITHER if expected is None else STRICTER
        require(found == salvaged[0], "salvaging changes an undamaged stream")
        require(found[0] == expected, "other bytes than of Python's gzip")
        return BOTH


def _gunzip(raw: bytes, step: int, *, salvage: bool) -> tuple[bytes, str]:
    """Return the bytes of a stream, and the code of the error, "" for none."""
    found = bytearray()
    limits = GunzipLimits(decompressed_bytes=1 << 20, ratio=1000, ratio_floor=1 << 16)
    try:
        with GunzipFile(io.BufferedReader(io.BytesIO(raw)), limits, salvage=salvage) as file:  # type: ignore[arg-type]
            while piece := file.read(step):
                found += piece
    except FormatError as error:
        return bytes(found), error.code
    return bytes(found), ""
