"""The dumps of a folder: which files are dumps, and of which rank.

The rank is in the name, after the word (`rank_3_dump`) or at the end (`_dump_3`,
`comm_lib_trace_3`, `trace_rank_3.json.gz`): the dump itself does not say. Whether a file is JSON or
a pickle, compressed or not, is seen from its first bytes.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline_server.flight_recorder import plain_pickle
from paceline_server.flight_recorder.dump import Dump, dump_from
from paceline_server.flight_recorder.errors import (
    FlightRecorderError,
    MalformedDumpError,
    NoDumpsError,
)

# A full ring of 20,000 entries with 30 frames each is below this.
FILE_BYTES_LIMIT = 256 * 1024 * 1024

_RANK_IN_NAME = re.compile(
    r"rank[-_=]*(\d{1,7})(?!\d)"
    r"|(?:^|[^0-9.])(\d{1,7})(?:\.(?:json|pkl|pickle|bin|dump|trace))?(?:\.gz)?$"
)
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Folder:
    """The dumps by rank, and what about the files is worth a word."""

    dumps: dict[int, Dump]
    notes: tuple[str, ...]
    unreadable: frozenset[int]  # ranks whose file is named like the dumps and is none
    malformed: tuple[MalformedDumpError, ...]


def read_folder(directory: Path) -> Folder:
    """Read every dump in `directory`; where it holds none, those in the folders below it.

    A dump that is cut off or of another format is one more rank without a dump, and noted.
    Raises NoDumpsError, HostileDumpError or MalformedDumpError; the message names the file.
    """
    if not directory.is_dir():
        raise NoDumpsError(f"{directory} is not a folder of Flight Recorder dumps")
    found = _read_all(directory, directory.iterdir())
    if not found.dumps:
        found = _read_all(directory, directory.rglob("*"))
    if not found.dumps and found.malformed:
        raise found.malformed[0]
    if not found.dumps:
        raise NoDumpsError(
            f"{directory} holds no Flight Recorder dump: expected one file per rank, whose name "
            "ends in the rank, such as _dump_0 or trace_rank_0.json"
        )
    return found


def _read_all(directory: Path, paths: Iterable[Path]) -> Folder:
    notes: list[str] = []
    dumps: dict[int, Dump] = {}
    written: dict[str, set[int]] = defaultdict(set)  # by the name without its number
    malformed: list[MalformedDumpError] = []
    for path in sorted(paths, key=lambda path: (len(path.name), path.name, path)):
        name = str(path.relative_to(directory))
        named = _RANK_IN_NAME.search(path.name)
        if named is None or not path.is_file():
            notes.append(f"{name} is not named like a dump: ignored")
            continue
        first, last = named.span(1 if named[1] else 2)
        rank = int(path.name[first:last])
        written[path.name[:first] + path.name[last:]].add(rank)
        if path.stat().st_size == 0:
            notes.append(f"{name} is empty: rank {rank} counts as without a dump")
        elif rank in dumps and path.parent != directory:
            raise MalformedDumpError(
                f"{name} is another dump of rank {rank}: {directory} holds several incidents, "
                "analyze one of the folders in it"
            )
        elif rank in dumps:
            notes.append(f"{name} is a second dump of rank {rank}: ignored")
        else:
            try:
                dumps[rank] = _read(path, name, rank)
            except MalformedDumpError as error:
                malformed.append(error)
                notes.append(f"{error}: rank {rank} counts as without a dump")
    alike = [ranks for ranks in written.values() if ranks & dumps.keys()]
    unreadable = frozenset().union(*alike) - dumps.keys()
    return Folder(dumps, tuple(notes), unreadable, tuple(malformed))


def _read(path: Path, name: str, rank: int) -> Dump:
    try:
        if path.stat().st_size > FILE_BYTES_LIMIT:
            raise MalformedDumpError(f"is larger than {FILE_BYTES_LIMIT} bytes, no dump is")
        return dump_from(load(_unpacked(path.read_bytes())), rank)
    except FlightRecorderError as error:
        raise type(error)(f"{name} {error}") from error
    except OSError as error:
        raise MalformedDumpError(f"{name} cannot be read: {error.strerror}") from error


def _unpacked(data: bytes) -> bytes:
    if not data.startswith(_GZIP):
        return data
    stream = zlib.decompressobj(wbits=31)
    try:
        unpacked = stream.decompress(data, FILE_BYTES_LIMIT + 1)
    except zlib.error as error:
        raise MalformedDumpError("is not whole gzip") from error
    if len(unpacked) > FILE_BYTES_LIMIT:
        raise MalformedDumpError(f"is larger than {FILE_BYTES_LIMIT} bytes, no dump is")
    if not stream.eof:
        raise MalformedDumpError("is not whole gzip")
    return unpacked


def load(data: bytes) -> object:
    """A dump's content. Raises HostileDumpError or MalformedDumpError."""
    if data.removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"{":
        return plain_pickle.load(data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedDumpError("is not whole JSON") from error
