"""The dumps in a folder: which files are dumps, and of which ranks.

File names of PyTorch end with the rank (`nccl_trace_rank_3`); users add suffixes and folders. A
dump does not contain its rank, so the name is needed. The first bytes of a file show whether it is
a dump, its format and its compression.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zstandard

from paceline_server.flight_recorder import plain_pickle
from paceline_server.flight_recorder.dump import Dump, dump_from
from paceline_server.flight_recorder.errors import (
    FlightRecorderError,
    MalformedDumpError,
    MisnamedDumpError,
    NoDumpsError,
    NotADumpError,
)

# A full ring of 20,000 entries with 30 frames each is below this.
FILE_BYTES_LIMIT = 256 * 1024 * 1024
_IGNORED_SHOWN = 8

_RANK = re.compile(
    # After the word `rank`, unless the number counts ranks within a node, or nodes ...
    r"(?<!local)(?<!local[-_])(?<!node)(?<!node[-_])rank[-_=. ]*(\d{1,7})(?!\d)"
    # ... or at the end, before the suffixes. `1.5` and `2025.09.22` are not ranks.
    r"|(?:^|[^\d.]|(?:^|\D)\.)(\d{1,7})(?:\.[a-z]\w*)*$",
    re.IGNORECASE,
)
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
# First bytes of pickle protocols 2 and above, then of a dict in protocols 0 and 1; the last
# alternative is an import.
_PICKLE = re.compile(rb"\x80[\2-\5]|\(dp?\d*\n|\}q|c[\w.]+\n[\w.]+\n")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Folder:
    """The dumps by rank, and notes about the files."""

    dumps: dict[int, Dump]
    notes: tuple[str, ...]
    unreadable: frozenset[int]  # ranks whose file is named like a dump but is not one
    malformed: tuple[MalformedDumpError, ...]


@dataclass(frozen=True, slots=True)
class _DumpFile:
    path: Path
    name: str  # name relative to the folder that is read
    rank: int
    form: str  # the name without the rank


def read_folder(directory: Path) -> Folder:
    """Read every dump in `directory`; if it has none, those in the folders below it.

    A truncated dump, or one of another format, counts as a rank without a dump and is noted.
    Raises NoDumpsError, HostileDumpError or MalformedDumpError; the message names the file.
    """
    try:
        if not directory.is_dir():
            raise NoDumpsError(f"{directory} is not a folder of Flight Recorder dumps")
        found = _read_all(directory, directory.iterdir())
        if not found.dumps:
            below = (path for path in directory.rglob("*") if not path.is_dir())
            found = _read_all(directory, below)
    except OSError as error:
        raise NoDumpsError(f"{error.filename} cannot be read: {error.strerror}") from error
    if not found.dumps and found.malformed:
        raise found.malformed[0]
    if not found.dumps:
        raise NoDumpsError(
            f"{directory} contains no Flight Recorder dump: expected one file per rank, whose "
            "name, or that of its folder, ends in the rank, such as _dump_0, trace_rank_0.json or "
            "rank_0/dump"
        )
    return found


def _read_all(directory: Path, paths: Iterable[Path]) -> Folder:
    dumps: dict[int, Dump] = {}
    files: dict[int, _DumpFile] = {}
    failed: list[tuple[_DumpFile, FlightRecorderError]] = []
    notes: list[str] = []
    ignored: list[str] = []
    for path in sorted(paths, key=lambda path: (len(path.name), path.name, path)):
        file = _named(path, directory)
        if file is None or not path.is_file():
            ignored.append(str(path.relative_to(directory)))
            continue
        try:
            dump = _read(file)
        except (MalformedDumpError, NotADumpError) as error:
            failed.append((file, error))
            continue
        first = files.setdefault(file.rank, file)
        if first is file:
            dumps[file.rank] = dump
        elif first.path.parent == path.parent:
            notes.append(
                f"{file.name} is ignored: {first.name} is another dump of rank {file.rank}"
            )
        else:
            raise MalformedDumpError(
                f"{file.name} is another dump of rank {file.rank} than {first.name}: {directory} "
                "holds several incidents, analyze one of the folders in it"
            )
    forms = {file.form for file in files.values()}
    unreadable = {
        file.rank
        for file, error in failed
        if file.form in forms and not isinstance(error, MisnamedDumpError)
    } - dumps.keys()
    for file, why in failed:
        if file.form in forms and file.rank in unreadable:
            notes.append(f"{why}: rank {file.rank} is treated as having no dump")
        elif isinstance(why, NotADumpError):
            ignored.append(file.name)
        else:
            notes.append(f"{why}: ignored")
    if ignored:
        more = len(ignored) - _IGNORED_SHOWN
        shown = ", ".join(ignored[:_IGNORED_SHOWN]) + (f" and {more} more" if more > 0 else "")
        notes.append(f"{shown}: ignored: not a dump of a rank")
    malformed = tuple(error for _, error in failed if isinstance(error, MalformedDumpError))
    return Folder(dumps, tuple(notes), frozenset(unreadable), malformed)


def _named(path: Path, directory: Path) -> _DumpFile | None:
    """Return the file with its rank, from its name or the name of its folder."""
    relative = path.relative_to(directory)
    for part, rest in ((path.name, ""), (relative.parent.name, f"/{path.name}")):
        found = _RANK.search(part)
        if found is not None:
            first, last = found.span(found.lastindex or 0)
            form = part[:first] + part[last:] + rest
            return _DumpFile(path, str(relative), int(part[first:last]), form)
    return None


def _read(file: _DumpFile) -> Dump:
    try:
        if file.path.stat().st_size > FILE_BYTES_LIMIT:
            raise MalformedDumpError(f"is larger than {FILE_BYTES_LIMIT} bytes, no dump is")
        dump = dump_from(load(_unpacked(file.path.read_bytes())), file.rank)
        listed = [group.ranks for group in dump.groups.values() if group.ranks]
        if listed and not any(file.rank in ranks for ranks in listed):
            raise MisnamedDumpError(f"is not of rank {file.rank}: no group in it has that rank")
    except FlightRecorderError as error:
        raise type(error)(f"{file.name} {error}") from error
    except OSError as error:
        raise MalformedDumpError(f"{file.name} cannot be read: {error.strerror}") from error
    return dump


def _unpacked(data: bytes) -> bytes:
    """Return the content, decompressed if needed. Raises NotADumpError or MalformedDumpError."""
    packed = io.BytesIO(data)
    try:
        if data.startswith(_GZIP):
            with gzip.open(packed) as stream:
                data = stream.read(FILE_BYTES_LIMIT + 1)
        elif data.startswith(_ZSTD):
            with zstandard.open(packed) as stream:
                data = stream.read(FILE_BYTES_LIMIT + 1)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise MalformedDumpError("is incomplete: its compressed content ends early") from error
    if len(data) > FILE_BYTES_LIMIT:
        raise MalformedDumpError(f"is larger than {FILE_BYTES_LIMIT} bytes, no dump is")
    if not _JSON.match(data) and not _PICKLE.match(data):
        raise NotADumpError("does not begin like a dump" if data else "is empty")
    return data


def load(data: bytes) -> object:
    """Return the content of a dump. Raises HostileDumpError or MalformedDumpError."""
    if not _JSON.match(data):
        return plain_pickle.load(data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedDumpError("is incomplete JSON") from error
