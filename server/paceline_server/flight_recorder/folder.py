"""The dumps of a folder: which files are dumps, and of which rank.

The rank is the number at the end of the name (`_dump_3`, `nccl_trace_rank_3`, `comm_lib_trace_3`,
`trace_rank_3.json`): the dump itself does not say. Whether a file is JSON or a pickle is seen from
its first byte.
"""

from __future__ import annotations

import json
import re
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

_RANK_IN_NAME = re.compile(r"(?:^|[^0-9.])(\d{1,7})(?:\.(?:json|pkl|pickle|bin|dump|trace))?$")


@dataclass(frozen=True, slots=True)
class Folder:
    """The dumps by rank, and what about the files is worth a word."""

    dumps: dict[int, Dump]
    notes: tuple[str, ...]


def read_folder(directory: Path) -> Folder:
    """Read every dump in `directory`, not below it.

    Raises NoDumpsError, HostileDumpError or MalformedDumpError; the message names the file.
    """
    if not directory.is_dir():
        raise NoDumpsError(f"{directory} is not a folder of Flight Recorder dumps")
    notes: list[str] = []
    dumps: dict[int, Dump] = {}
    for path in sorted(directory.iterdir(), key=lambda path: (len(path.name), path.name)):
        named = _RANK_IN_NAME.search(path.name)
        if named is None or not path.is_file():
            notes.append(f"{path.name} is not named like a dump: ignored")
        elif path.stat().st_size == 0:
            notes.append(f"{path.name} is empty: rank {int(named[1])} counts as without a dump")
        elif int(named[1]) in dumps:
            notes.append(f"{path.name} is a second dump of rank {int(named[1])}: ignored")
        else:
            dumps[int(named[1])] = _read(path, int(named[1]))
    if not dumps:
        raise NoDumpsError(
            f"{directory} holds no Flight Recorder dump: expected one file per rank, whose name "
            "ends in the rank, such as _dump_0 or trace_rank_0.json"
        )
    return Folder(dumps, tuple(notes))


def _read(path: Path, rank: int) -> Dump:
    try:
        if path.stat().st_size > FILE_BYTES_LIMIT:
            raise MalformedDumpError(f"is larger than {FILE_BYTES_LIMIT} bytes, no dump is")
        data = path.read_bytes()
        return dump_from(load(data), rank)
    except FlightRecorderError as error:
        raise type(error)(f"{path.name} {error}") from error
    except OSError as error:
        raise MalformedDumpError(f"{path.name} cannot be read: {error.strerror}") from error


def load(data: bytes) -> object:
    """A dump's content. Raises HostileDumpError or MalformedDumpError."""
    if data.lstrip()[:1] != b"{":
        return plain_pickle.load(data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedDumpError("is not whole JSON") from error
