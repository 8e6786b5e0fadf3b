"""Atomic checkpoints: torch.distributed.checkpoint with hashes and a commit marker.

    DIRECTORY/generation-00000003             claim: generation 3 uses the directory
    DIRECTORY/step-00000040.generation-00000003/
        *.distcp, .metadata                   as torch.distributed.checkpoint writes them
        manifest.json                         the run, and size and SHA-256 of each file
        COMMITTED                             SHA-256 of the manifest; created last, by rename

Saving: the state is copied and training continues. A thread writes the shards, hashes them and
gathers the hashes; rank 0 compares them with the files on disk and commits. The thread uses its own
process group, because collectives of two threads on one group would interleave.

A process left over from an older generation does no harm: it cannot commit after a newer generation
has claimed the directory. If it passes that check in a race, it commits to a directory of its own
generation, and every checkpoint of a newer generation takes precedence.

Loading tries the best committed checkpoint. Each rank hashes a share of the files, because a
flipped bit would otherwise load silently. If a hash differs, all ranks set the checkpoint aside and
try the previous one.

Only content that was read and is wrong counts as damage. If a rank cannot read a checkpoint
(missing mount, no permission, I/O error), the checkpoint may still be intact: that rank ends with
UnreadableError, so that the start fails on its node, and no file is changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from paceline_trainer.checkpoint_metadata import SafeReader
from paceline_trainer.errors import (
    CheckpointError,
    DamagedError,
    TrainerSettingsError,
    UnreadableError,
)

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
DAMAGED = "damaged-"  # prefix of damaged directories, which are kept for inspection
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})\.generation-(\d{8,})")
_CLAIM = re.compile(r"generation-(\d{8,})")
# Ranks that could read wait this long for the exit of those that could not, because the first rank
# to exit determines the node at fault.
_YIELD_SECONDS = 5.0

Entry = dict[str, Any]  # a file in the manifest: its `bytes` and `sha256`


@dataclass(frozen=True, slots=True, order=True)
class Saved:
    """A checkpoint directory. A newer generation takes precedence over a later step."""

    generation: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08}.generation-{self.generation:08}"


class _DirectoryView(NamedTuple):
    """The checkpoint directory as one rank sees it."""

    host: str
    has_claim: bool  # whether it contains the claim that rank 0 has just written
    names: frozenset[str]  # names of the committed checkpoints
    error: str | None  # why the directory cannot be listed


class _Checked(NamedTuple):
    """The result of one rank's share of the verification.

    All fields are None if there is no fault.
    """

    damage: str | None = None  # content that was read and is wrong
    missing: str | None = None  # name of a file that does not exist for this rank
    unreadable: str | None = None  # why this rank could not read


def saved_checkpoints(directory: Path, *, committed: bool = True) -> list[Saved]:
    """Return the checkpoints in `directory`, the best one to resume from first."""
    found = []
    for path in directory.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (not committed or (path / COMMITTED).is_file()):
            found.append(Saved(int(match[2]), int(match[1])))
    return sorted(found, reverse=True)


def claim(directory: Path, generation: int) -> None:
    """Claim the directory for `generation` and delete uncommitted checkpoints.

    Raises CheckpointError if a newer generation has claimed it.
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
            "longer write to it"
        )


class Checkpointer:
    """Saves and loads one rank's share. All ranks must make the same calls in the same order."""

    def __init__(
        self,
        directory: Path,
        group: dist.ProcessGroup,
        generation: int,
        *,
        run: Mapping[str, Any],
        keep: int,
        saved_step: int | None = None,
        on_result: Callable[[int, str | None], None] = lambda step, failure: None,
    ) -> None:
        """Claim the directory.

        Args:
            directory: shared by all ranks.
            group: a gloo group of all ranks, used only by this object.
            generation: the job's generation.
            run: settings that a checkpoint must have in common with the run that loads it.
            keep: number of checkpoints to keep.
            saved_step: newest step that the job is known to have saved; None: unknown.
            on_result: called with the step, and None or the reason of the failure, when a save
                ends; called in a separate thread.

        Raises:
            CheckpointError: a newer generation has claimed `directory` (on every rank).
            UnreadableError: this rank's node sees another content of `directory` than the others.
        """
        self.directory = directory
        self.generation = generation
        self.run = dict(run)
        self.keep = max(1, keep)
        self._group = group
        self._rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self._latest: tuple[int, Future[str | None]] | None = None
        self._on_result = on_result
        failure = self._on_rank_0(lambda: claim(directory, generation))
        if failure:
            raise CheckpointError(failure)
        self._compare_views(saved_step)

    def save(self, step: int, state: dict[str, Tensor]) -> None:
        """Copy the state and start to write it; wait for an earlier save in progress first."""
        if self._latest is not None and self._latest[0] == step and self.wait():
            return
        self.wait()
        path = self.directory / Saved(self.generation, step).name
        written = async_save(state, checkpoint_id=path, process_group=self._group)
        assert isinstance(written, Future), "the default stager copies before it returns"
        self._latest = step, self._thread.submit(self._commit, step, path, written)

    def wait(self) -> bool:
        """Wait for the save in progress, if any. Return whether it was committed."""
        return self._latest is None or self._latest[1].result() is None

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()

    def load(self, state: dict[str, Tensor]) -> int | None:
        """Fill `state` from the best undamaged checkpoint. Return its step; None without one.

        Raises TrainerSettingsError if it is from another run (model, seed, batch, data or tp
        differ).
        """
        for saved in self._candidates():
            path = self.directory / saved.name
            damage = self._verify(path)
            if damage is None:
                self._read(path, state)
                self._latest = (saved.step, _done())
                return saved.step
            failure = self._on_rank_0(partial(self._set_aside, saved, damage))
            if failure:
                raise CheckpointError(failure)
        return None

    # Saving: the work of each rank's checkpoint thread.

    def _commit(self, step: int, path: Path, written: Future[Any]) -> str | None:
        """Commit the checkpoint of `step`. Return the error, if any, the same on all ranks."""
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
        self._on_result(step, failure)
        return failure

    def _own_files(self, path: Path) -> list[Path]:
        own = list(path.glob(f"__{self._rank}_*.distcp"))
        return [*own, path / ".metadata"] if self._rank == 0 else own

    def _mark(self, step: int, path: Path, files: dict[str, Entry]) -> None:
        """Compare the files on disk with what the ranks wrote, and commit."""
        for name, entry in files.items():
            if (path / name).stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"{name} on rank 0's disk differs in size from what its rank wrote"
                )
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
        """Delete all but the best `keep` checkpoints, and uncommitted ones."""
        kept = saved_checkpoints(self.directory)[: self.keep]
        for saved in saved_checkpoints(self.directory, committed=False):
            if saved in kept or saved.generation > self.generation:
                continue
            path = self.directory / saved.name
            (path / COMMITTED).unlink(
                missing_ok=True
            )  # COMMITTED first, so that a committed checkpoint is always complete
            shutil.rmtree(path, ignore_errors=True)

    # Loading

    def _candidates(self) -> list[Saved]:
        found: list[Any] = [saved_checkpoints(self.directory) if self._rank == 0 else None]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        candidates: list[Saved] = found[0]
        return candidates

    def _compare_views(self, saved_step: int | None) -> None:
        """Raise UnreadableError on ranks whose node does not see the shared directory."""
        views: list[_DirectoryView] = [None] * self._ranks  # type: ignore[list-item]
        dist.all_gather_object(views, self._directory_view(), group=self._group)
        names = frozenset().union(*(view.names for view in views))
        unable = [
            view.error is not None or view.names != names or not (view.has_claim or names)
            for view in views
        ]
        own = views[self._rank]
        if any(unable):
            reason = own.error or (
                f"{own.host} does not see what other nodes see in {self.directory}: "
                "is the shared directory mounted there?"
            )
            self._fail_unreadable(reason if unable[self._rank] else None, views, unable)
        if not all(view.has_claim for view in views):
            # Rank 0 wrote its claim to another directory, although all nodes see the same
            # checkpoints.
            self._fail_unreadable(
                f"{self.directory} of rank 0 is another directory than that of its peers"
                if self._rank == 0
                else None,
                views,
                [rank == 0 for rank in range(self._ranks)],
            )
        if saved_step and not names and not any(self.directory.glob(f"{DAMAGED}*")):
            raise UnreadableError(
                f"the job saved step {saved_step}, but {self.directory} on {own.host} contains no "
                "checkpoint: is the shared directory mounted there? Training does not restart "
                "from step 0. To train from step 0, submit a new job."
            )

    def _directory_view(self) -> _DirectoryView:
        host, claim_name = socket.gethostname(), f"generation-{self.generation:08}"
        try:
            names = frozenset(saved.name for saved in saved_checkpoints(self.directory))
            return _DirectoryView(host, (self.directory / claim_name).exists(), names, None)
        except OSError as error:
            return _DirectoryView(host, False, frozenset(), f"{self.directory} on {host}: {error}")

    def _verify(self, path: Path) -> str | None:
        """Check the hashes of all files, a share per rank.

        Return the damage, the same on all ranks.

        Raises:
            TrainerSettingsError: the checkpoint is of another run.
            UnreadableError: a rank could not read its share.
        """
        checked: list[_Checked] = [_Checked()] * self._ranks
        dist.all_gather_object(checked, self._check_share(path), group=self._group)
        found = next((result.damage for result in checked if result.damage), None)
        if found:
            return found
        # A file is lost if it does not exist for rank 0 either, which lists the directory.
        missing = {result.missing for result in checked if result.missing}
        lost = self._on_rank_0(partial(_refuse_if_lost, path, sorted(missing)))
        if lost:
            return lost
        reasons = [
            result.unreadable or (result.missing and f"{path / result.missing} does not exist")
            for result in checked
        ]
        if any(reasons):
            self._fail_unreadable(reasons[self._rank], None, [bool(reason) for reason in reasons])
        return None

    def _check_share(self, path: Path) -> _Checked:
        try:
            manifest = read_manifest(path)
            if manifest["run"] != self.run:
                raise TrainerSettingsError(
                    f"the checkpoints in {self.directory} are of the run {manifest['run']}, but "
                    f"this is {self.run}; use another directory or the same settings"
                )
            files: dict[str, Entry] = manifest["files"]
            for name in sorted(files)[self._rank :: self._ranks]:
                if _describe(path / name) != files[name]:
                    raise DamagedError(f"{name} does not match its SHA-256")
        except DamagedError as error:
            return _Checked(damage=f"{error} (rank {self._rank})")
        except FileNotFoundError as error:
            return _Checked(missing=Path(error.filename).name)
        except (OSError, UnreadableError) as error:
            return _Checked(unreadable=_reason(error))
        return _Checked()

    def _fail_unreadable(
        self, reason: str | None, views: list[_DirectoryView] | None, unable: list[bool]
    ) -> NoReturn:
        """End the ranks that could not read; the others wait for them and then end too."""
        if reason is not None:
            raise UnreadableError(reason)
        ranks = [rank for rank, is_unable in enumerate(unable) if is_unable]
        hosts = "" if views is None else f" ({', '.join({views[rank].host for rank in ranks})})"
        threading.Event().wait(_YIELD_SECONDS)
        raise UnreadableError(f"ranks {ranks}{hosts} cannot read {self.directory}")

    def _read(self, path: Path, state: dict[str, Tensor]) -> None:
        # Read into copies first, so that `state` is unchanged if reading fails halfway.
        copies = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
        try:
            load(copies, storage_reader=SafeReader(path), process_group=self._group)
        except (OSError, CheckpointException) as error:
            raise UnreadableError(
                f"the hashes of {path} are right, but it cannot be read: {_reason(error)}"
            ) from error
        for name, tensor in state.items():
            tensor.copy_(copies[name])

    def _set_aside(self, saved: Saved, damage: str) -> None:
        """Rename the damaged checkpoint, because the run will save that step again."""
        _log.error("Skipped the checkpoint of step %d, which is damaged: %s.", saved.step, damage)
        path = self.directory / saved.name
        shutil.rmtree(self.directory / f"{DAMAGED}{saved.name}", ignore_errors=True)
        path.rename(self.directory / f"{DAMAGED}{saved.name}")

    # How ranks agree on success

    def _attempt(self, act: Callable[[], None]) -> str | None:
        """Call `act`. Return None, or the reason in one line if it failed on this rank."""
        try:
            act()
        except (OSError, CheckpointError, CheckpointException) as error:
            return f"{_reason(error)} (rank {self._rank})"
        return None

    def _first(self, failure: str | None) -> str | None:
        """Return the first failure of any rank, the same on all ranks."""
        failures: list[Any] = [None] * self._ranks
        dist.all_gather_object(failures, failure, group=self._group)
        return next((failure for failure in failures if failure), None)

    def _on_rank_0(self, act: Callable[[], None]) -> str | None:
        return self._first(self._attempt(act) if self._rank == 0 else None)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest.

    Raises:
        DamagedError: it is not the committed manifest.
        UnreadableError: a newer trainer wrote it.
        OSError: it cannot be read.
    """
    content = (path / MANIFEST).read_bytes()
    if hashlib.sha256(content).hexdigest().encode() != (path / COMMITTED).read_bytes():
        raise DamagedError(f"{MANIFEST} does not match its SHA-256")
    manifest: dict[str, Any] = json.loads(content)
    if manifest["version"] != VERSION:
        raise UnreadableError(
            f"{path} has version {manifest['version']}, this trainer reads {VERSION}"
        )
    return manifest


def _refuse_if_lost(path: Path, names: list[str]) -> None:
    """Raise DamagedError if the checkpoint can be listed but lacks one of the files."""
    try:
        present = {file.name for file in path.iterdir()}
    except OSError:  # then it is unknown whether files are lost
        return
    lost = [name for name in names if name not in present]
    if lost:
        raise DamagedError(f"{lost[0]} does not exist")


def _describe(file: Path) -> Entry:
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


def _done() -> Future[str | None]:
    done: Future[str | None] = Future()
    done.set_result(None)
    return done


def _reason(error: BaseException) -> str:
    """Return one line; for torch's collected failures, that of the first one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
