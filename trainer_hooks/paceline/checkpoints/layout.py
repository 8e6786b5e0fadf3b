"""The checkpoint directory: names, claims, and the manifest that commits a checkpoint.

    DIRECTORY/run                             random number, for copies in memory
    DIRECTORY/generation-00000003             claim: generation 3 uses the directory
    DIRECTORY/step-00000040.generation-00000003/
        *.distcp, .metadata                   as torch.distributed.checkpoint writes them
        manifest.json                         the run, and size and SHA-256 of each file
        COMMITTED                             SHA-256 of the manifest; created last, by rename

A process left over from an older generation does no harm: it cannot commit after a newer generation
has claimed the directory. If it passes that check in a race, it commits to a directory of its own
generation, and every checkpoint of a newer generation takes precedence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.errors import CheckpointError, DamagedError, UnreadableError

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
RUN = "run"
DAMAGED = "damaged-"  # prefix of damaged directories, which are kept for inspection
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})\.generation-(\d{8,})")
_CLAIM = re.compile(r"generation-(\d{8,})")

Entry = dict[str, Any]  # a file in the manifest: its `bytes` and `sha256`


@dataclass(frozen=True, slots=True, order=True)
class Saved:
    """A checkpoint directory. A newer generation takes precedence over a later step."""

    generation: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08}.generation-{self.generation:08}"


def saved_checkpoints(directory: Path, *, committed: bool = True) -> list[Saved]:
    """Return the checkpoints in `directory`, the best one to resume from first."""
    found = []
    for path in directory.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (not committed or (path / COMMITTED).is_file()):
            found.append(Saved(int(match[2]), int(match[1])))
    return sorted(found, reverse=True)


def newest_generation(directory: Path) -> int | None:
    """Return the newest generation that has used the directory; None: none has.

    Checkpoints count, too: copied to another directory, they have no claims.
    """
    claims = (_CLAIM.fullmatch(path.name) for path in directory.glob("generation-*"))
    claimed = [int(match[1]) for match in claims if match]
    saved = [each.generation for each in saved_checkpoints(directory, committed=False)]
    return max(claimed + saved, default=None)


def claim(directory: Path, generation: int) -> None:
    """Claim the directory for `generation` and delete uncommitted checkpoints.

    Raises CheckpointError if a newer generation has claimed it.
    """
    _make(directory)
    (directory / f"generation-{generation:08}").touch()
    refuse_if_outdated(directory, generation)
    whole = saved_checkpoints(directory)
    for saved in saved_checkpoints(directory, committed=False):
        if saved not in whole:
            shutil.rmtree(directory / saved.name, ignore_errors=True)


def claim_next(directory: Path) -> int:
    """Claim the directory for a new generation and return it."""
    _make(directory)
    while True:
        generation = (newest_generation(directory) or 0) + 1
        try:
            (directory / f"generation-{generation:08}").touch(exist_ok=False)
        except FileExistsError:  # another run started at the same time
            continue
        claim(directory, generation)
        return generation


def withdraw(directory: Path, generation: int) -> None:
    """Withdraw the claim of a generation that has saved nothing."""
    (directory / f"generation-{generation:08}").unlink()


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(
            f"the directory of checkpoints, {directory}, is a file, lies below one, or is a broken "
            "link: name a directory that all ranks share"
        ) from error


def run_of(directory: Path) -> str:
    """Return the identity of the directory, of which its file `run` is a part.

    A directory that was deleted and created again has another one, and so has a copy of it.
    """
    path = directory / RUN
    if not path.exists():
        _write_durably(path, secrets.token_hex(16).encode())
    content = path.read_bytes().strip() if path.is_file() else b""
    if not re.fullmatch(rb"[0-9a-f]{32}", content):
        raise CheckpointError(
            f"{path} is damaged, or not Paceline's: move it away while no job uses the directory, "
            "or name another directory"
        )
    return hashlib.sha256(content + os.fsencode(directory.resolve())).hexdigest()[:32]


def refuse_if_outdated(directory: Path, generation: int) -> None:
    """Raise CheckpointError if a newer generation has claimed the directory."""
    newest = newest_generation(directory)
    if newest is not None and newest > generation:
        raise CheckpointError(
            f"generation {newest} has taken over {directory}; generation {generation} may no "
            "longer write to it. If another job was started with this directory, give each one "
            "its own"
        )


def commit(path: Path, manifest: dict[str, Any], generation: int) -> None:
    """Write the manifest and, last, the marker. Raises CheckpointError for an old generation."""
    content = json.dumps(manifest | {"version": VERSION}, indent=1, sort_keys=True).encode()
    _write_durably(path / MANIFEST, content)
    refuse_if_outdated(path.parent, generation)
    _write_durably(path / COMMITTED, hashlib.sha256(content).hexdigest().encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest.

    Raises:
        DamagedError: it is not the committed manifest.
        UnreadableError: a newer version of Paceline wrote it.
        OSError: it cannot be read.
    """
    content = (path / MANIFEST).read_bytes()
    if hashlib.sha256(content).hexdigest().encode() != (path / COMMITTED).read_bytes():
        raise DamagedError(f"{MANIFEST} does not match its SHA-256")
    manifest: dict[str, Any] = json.loads(content)
    if manifest["version"] != VERSION:
        raise UnreadableError(
            f"{path} has version {manifest['version']}, this Paceline reads {VERSION}: use the "
            "release that wrote it"
        )
    return manifest


def prune(directory: Path, keep: int, generation: int) -> None:
    """Delete all but the best `keep` checkpoints, and uncommitted ones."""
    kept = saved_checkpoints(directory)[:keep]
    for saved in saved_checkpoints(directory, committed=False):
        if saved in kept or saved.generation > generation:
            continue
        path = directory / saved.name
        # COMMITTED first, so that a committed checkpoint is always complete
        try:
            (path / COMMITTED).unlink(missing_ok=True)
        except OSError as error:  # it stays; the new checkpoint is committed all the same
            _log.warning("An old checkpoint cannot be deleted: %s", error)
        else:
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Delete what a save that failed has left, which may fill the disk. No rank writes any more."""
    if not (path / COMMITTED).exists():
        shutil.rmtree(path, ignore_errors=True)


def set_aside(directory: Path, saved: Saved) -> None:
    """Rename a damaged checkpoint, because the run will save that step again."""
    shutil.rmtree(directory / f"{DAMAGED}{saved.name}", ignore_errors=True)
    (directory / saved.name).rename(directory / f"{DAMAGED}{saved.name}")


def refuse_if_all_damaged(directory: Path) -> None:
    """Raise CheckpointError if there were checkpoints, of which each was set aside as damaged.

    Called if none can be loaded.
    """
    names = sorted(path.name for path in directory.glob(f"{DAMAGED}*"))
    if names:
        raise CheckpointError(
            f"all checkpoints in {directory} are damaged, the newest is {names[-1]}. Training does "
            f"not restart from step 0: to do so, move {DAMAGED}* away, or name another directory"
        )


def refuse_if_lost(path: Path, names: list[str]) -> None:
    """Raise DamagedError if the checkpoint can be listed but lacks one of the files."""
    try:
        present = {file.name for file in path.iterdir()}
    except OSError:  # then it is unknown whether files are lost
        return
    lost = [name for name in names if name not in present]
    if lost:
        raise DamagedError(f"{lost[0]} does not exist")


def describe(file: Path) -> Entry:
    """Return the size and SHA-256 of a file."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"bytes": opened.tell(), "sha256": digest}


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it appears complete, by rename, and survives a power failure."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    temporary.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
