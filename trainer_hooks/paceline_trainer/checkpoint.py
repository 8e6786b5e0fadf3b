"""Checkpoints that are whole or absent: torch.distributed.checkpoint, hashes, a commit marker.

    DIRECTORY/generation-00000003             claim: generation 3 has begun to use the directory
    DIRECTORY/step-00000040.generation-00000003/
        *.distcp, .metadata                   as torch.distributed.checkpoint writes them
        manifest.json                         what run this is, and each file's size and SHA-256
        COMMITTED                             SHA-256 of the manifest; renamed here last of all

Saving: the state is copied, training goes on, and a thread writes the shards, hashes them, and
gathers the hashes; rank 0 compares them with what is on disk and commits. All of it runs on a
process group of its own, since collectives of two threads on one group would cross.

A zombie of an older generation does no harm: once a newer one has claimed the directory it may
not commit, and were it to slip through that check, it would commit in its own directory, which
anything committed by a newer generation outranks.

Loading tries the best committed checkpoint; each rank hashes a share of its files, because a
flipped bit would otherwise load silently. If one differs, all set that checkpoint aside and fall
back to the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from paceline_trainer.errors import CheckpointError, DamagedError, TrainerSettingsError

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
DAMAGED = "damaged-"  # what a directory found damaged is renamed to, and left for people to see
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})\.generation-(\d{8,})")
_CLAIM = re.compile(r"generation-(\d{8,})")

Entry = dict[str, Any]  # of the manifest, on one file: its `bytes` and `sha256`


@dataclass(frozen=True, slots=True, order=True)
class Saved:
    """A checkpoint directory. A newer generation outranks a later step of an older one."""

    generation: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08}.generation-{self.generation:08}"


def saved_checkpoints(directory: Path, *, committed: bool = True) -> list[Saved]:
    """Those in `directory`, the best one to resume from first."""
    found = []
    for path in directory.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (not committed or (path / COMMITTED).is_file()):
            found.append(Saved(int(match[2]), int(match[1])))
    return sorted(found, reverse=True)


def claim(directory: Path, generation: int) -> None:
    """Shut out older generations, and clear away what they (or we) never committed.

    Raises CheckpointError if a newer generation was here first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"generation-{generation:08}").touch()
    _refuse_if_outdated(directory, generation)
    whole = saved_checkpoints(directory)
    for saved in saved_checkpoints(directory, committed=False):
        if saved not in whole:
            shutil.rmtree(directory / saved.name, ignore_errors=True)


def _refuse_if_outdated(directory: Path, generation: int) -> None:
    claims = (_CLAIM.fullmatch(path.name) for path in directory.glob("generation-*"))
    newest = max((int(match[1]) for match in claims if match), default=generation)
    if newest > generation:
        raise CheckpointError(
            f"generation {newest} has taken over {directory}; generation {generation} may no "
            "longer write there"
        )


class Checkpointer:
    """One rank's end. All ranks must make the same calls in the same order."""

    def __init__(
        self,
        directory: Path,
        group: dist.ProcessGroup,
        generation: int,
        *,
        run: Mapping[str, Any],
        keep: int,
    ) -> None:
        """Raises CheckpointError on every rank if a newer generation has claimed `directory`."""
        self.directory = directory
        self.generation = generation
        self.run = dict(run)
        self.keep = max(1, keep)
        self._group = group
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self._latest: tuple[int, Future[str | None]] | None = None
        failure = self._on_rank_0(lambda: claim(directory, generation))
        if failure:
            raise CheckpointError(failure)

    def save(self, step: int, state: dict[str, Tensor]) -> None:
        """Copy the state and begin to write it. Waits for an earlier save that is under way."""
        if self._latest is not None and self._latest[0] == step and self.wait():
            return
        self.wait()
        path = self.directory / Saved(self.generation, step).name
        written = async_save(state, checkpoint_id=path, process_group=self._group)
        assert isinstance(written, Future), "the default stager copies before it returns"
        self._latest = step, self._thread.submit(self._commit, step, path, written)

    def wait(self) -> bool:
        """Wait for the save under way, if any. False if it was not committed."""
        return self._latest is None or self._latest[1].result() is None

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def load(self, state: dict[str, Tensor]) -> int | None:
        """Fill `state` from the best undamaged checkpoint; its step, or None if there is none.

        Raises SettingsError if that is of another run (model, seed, batch, data or tp differ).
        """
        for saved in self._candidates():
            path = self.directory / saved.name
            damage = self._first(self._attempt(partial(self._verify, path)))
            if damage is None:
                damage = self._attempt(partial(self._read, path, state))
            if damage is None:
                self._latest = (saved.step, _done())
                return saved.step
            self._on_rank_0(partial(self._set_aside, saved, damage))
        return None

    # Saving: what the checkpoint thread of each rank does.

    def _commit(self, step: int, path: Path, written: Future[Any]) -> str | None:
        """None, or why there is no checkpoint of `step`; the same on every rank."""
        files: dict[str, Entry] = {}

        def describe() -> None:
            written.result()
            files.update((file.name, _describe(file)) for file in self._own_files(path))

        failure = self._first(self._attempt(describe))
        if failure is None:
            parts: list[Any] = [None] * self._ranks
            dist.all_gather_object(parts, files, group=self._group)
            whole = {name: entry for part in parts for name, entry in part.items()}
            failure = self._on_rank_0(lambda: self._mark(step, path, whole))
        if failure and self._rank == 0:
            _log.error("The checkpoint of step %d was not committed: %s.", step, failure)
        return failure

    def _own_files(self, path: Path) -> list[Path]:
        own = list(path.glob(f"__{self._rank}_*.distcp"))
        return [*own, path / ".metadata"] if self._rank == 0 else own

    def _mark(self, step: int, path: Path, files: dict[str, Entry]) -> None:
        """Check what all ranks wrote against the disk, and commit it."""
        for name, entry in files.items():
            if (path / name).stat().st_size != entry["bytes"]:
                raise CheckpointError(f"{name} is not on rank 0's disk as its writer left it")
        manifest = {
            "version": VERSION,
            "step": step,
            "generation": self.generation,
            "run": self.run,
            "files": files,
        }
        content = json.dumps(manifest, indent=1, sort_keys=True).encode()
        _write_durably(path / MANIFEST, content)
        _refuse_if_outdated(self.directory, self.generation)
        _write_durably(path / COMMITTED, hashlib.sha256(content).hexdigest().encode())
        self._prune()

    def _prune(self) -> None:
        """Delete what is beyond the best `keep`, and what was never committed."""
        kept = saved_checkpoints(self.directory)[: self.keep]
        for saved in saved_checkpoints(self.directory, committed=False):
            if saved in kept or saved.generation > self.generation:
                continue
            path = self.directory / saved.name
            (path / COMMITTED).unlink(missing_ok=True)  # first: a committed one is always whole
            shutil.rmtree(path, ignore_errors=True)

    # Loading

    def _candidates(self) -> list[Saved]:
        found: list[Any] = [saved_checkpoints(self.directory) if self._rank == 0 else None]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        candidates: list[Saved] = found[0]
        return candidates

    def _verify(self, path: Path) -> None:
        """This rank's share of the files. Raises DamagedError, SettingsError."""
        manifest = read_manifest(path)
        if manifest["run"] != self.run:
            raise TrainerSettingsError(
                f"the checkpoints in {self.directory} are of the run {manifest['run']}, but this "
                f"is {self.run}; give another directory or the same settings"
            )
        files: dict[str, Entry] = manifest["files"]
        for name in sorted(files)[self._rank :: self._ranks]:
            if _describe(path / name) != files[name]:
                raise DamagedError(f"{name} does not match its SHA-256")

    def _read(self, path: Path, state: dict[str, Tensor]) -> None:
        # Into copies first: if reading fails half-way, `state` is still what it was.
        copies = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        load(copies, checkpoint_id=path, process_group=self._group)
        for name, tensor in state.items():
            tensor.copy_(copies[name])

    def _set_aside(self, saved: Saved, damage: str) -> None:
        """Out of the way of the run, which will come to that step again."""
        _log.error(
            "Passed over the checkpoint of step %d, which is damaged: %s.", saved.step, damage
        )
        path = self.directory / saved.name
        shutil.rmtree(self.directory / f"{DAMAGED}{saved.name}", ignore_errors=True)
        path.rename(self.directory / f"{DAMAGED}{saved.name}")

    # How ranks agree on success

    def _attempt(self, act: Callable[[], None]) -> str | None:
        """None, or one line on why it failed here."""
        try:
            act()
        except (OSError, CheckpointError, CheckpointException) as error:
            return f"{_reason(error)} (rank {self._rank})"
        return None

    def _first(self, failure: str | None) -> str | None:
        """The first failure that any rank reports, the same on every rank."""
        failures: list[Any] = [None] * self._ranks
        dist.all_gather_object(failures, failure, group=self._group)
        return next((failure for failure in failures if failure), None)

    def _on_rank_0(self, act: Callable[[], None]) -> str | None:
        return self._first(self._attempt(act) if self._rank == 0 else None)


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises DamagedError unless the manifest is the one that was committed."""
    content = (path / MANIFEST).read_bytes()
    if hashlib.sha256(content).hexdigest().encode() != (path / COMMITTED).read_bytes():
        raise DamagedError(f"{MANIFEST} does not match its SHA-256")
    manifest: dict[str, Any] = json.loads(content)
    if manifest["version"] != VERSION:
        raise DamagedError(f"its version is {manifest['version']}, this trainer reads {VERSION}")
    return manifest


def _describe(file: Path) -> Entry:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"bytes": opened.tell(), "sha256": digest}


def _write_durably(path: Path, content: bytes) -> None:
    """The file appears complete, by rename, and is still there after a power failure."""
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


def _done() -> Future[str | None]:
    done: Future[str | None] = Future()
    done.set_result(None)
    return done


def _reason(error: BaseException) -> str:
    """One line: of torch's collected failures, the first one itself."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
