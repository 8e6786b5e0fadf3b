"""A rank that cannot read the checkpoints exits and leaves them in place: they may be intact."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

import paceline.checkpoints.layout
from paceline.checkpoints.errors import CheckpointError, DamagedError, UnreadableError
from paceline.checkpoints.layout import saved_checkpoints
from paceline.checkpoints.metadata import load_metadata
from paceline.checkpoints.storage import Checkpointer
from paceline_trainer.settings import RankPlacement, TrainerSettings
from paceline_trainer.train import train
from paceline_wire.topology import Topology

TWO_RANKS = Topology(2, 1, 1)


@pytest.fixture
def settings(tiny_settings: TrainerSettings, tmp_path: Path) -> TrainerSettings:
    return replace(
        tiny_settings,
        steps=4,
        evaluate_every=0,
        checkpoint_every=2,
        checkpoint_directory=tmp_path / "shared",
    )


def content(directory: Path) -> dict[str, bytes]:
    """Return the files of all checkpoints."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.glob("step-*/*"))
    }


@pytest.mark.parametrize("unable", [0, 1])
def test_a_rank_without_the_shared_mount_ends_and_changes_no_checkpoint(
    ranks_pool: Any, settings: TrainerSettings, tmp_path: Path, unable: int
) -> None:
    ranks_pool.run(settings, TWO_RANKS)
    shared = tmp_path / "shared"
    before = content(shared)
    unmounted = replace(settings, checkpoint_directory=tmp_path / "empty")
    run = ranks_pool.start(
        [unmounted if rank == unable else settings for rank in (0, 1)], TWO_RANKS, generation=1
    )
    failures = run.failures()
    assert "is the shared directory mounted there?" in failures[unable]
    assert f"ranks [{unable}]" in failures[1 - unable], "the other rank waits, and names it"
    assert content(shared) == before
    again = ranks_pool.run(replace(settings, steps=6), TWO_RANKS, generation=2)
    assert again.first_step == 4


def test_all_ranks_without_the_shared_mount_do_not_begin_at_step_0(
    settings: TrainerSettings, tmp_path: Path
) -> None:
    moved = replace(settings, checkpoint_directory=tmp_path / "empty")
    place = RankPlacement(generation=1, saved_step=4)
    with pytest.raises(UnreadableError, match=r"saved step 4, but .* no checkpoint"):
        train(moved, place, HashStore())
    dist.destroy_process_group()


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Return a function that opens a checkpointer of one rank, and a directory with one
    checkpoint."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], backend="gloo")
    made: list[Checkpointer] = []

    def open_one(generation: int, saved_step: int | None = None) -> Checkpointer:
        made.append(
            Checkpointer(tmp_path, group, generation, run={}, keep=3, saved_step=saved_step)  # type: ignore[arg-type]
        )
        return made[-1]

    first = open_one(0)
    first.save(4, {"weight": torch.ones(4)})
    assert first.wait()
    yield open_one
    for checkpointer in made:
        checkpointer.close()
    dist.destroy_process_group()


def load(checkpointer: Checkpointer) -> int | None:
    return checkpointer.load({"weight": torch.zeros(4)})


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json"])
def test_an_input_output_error_is_not_damage(opened: Any, tmp_path: Path, name: str) -> None:
    """A directory replaces a file, so that reading it fails with an OSError, even for root."""
    (saved,) = saved_checkpoints(tmp_path)
    path = tmp_path / saved.name / name
    checkpointer = opened(1)
    path.rename(tmp_path / "kept")
    path.mkdir()
    with pytest.raises(UnreadableError):
        load(checkpointer)
    path.rmdir()
    (tmp_path / "kept").rename(path)
    assert load(opened(2)) == 4


def test_a_manifest_of_a_newer_version_is_not_damage(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paceline.checkpoints.layout, "VERSION", 0)
    with pytest.raises(UnreadableError, match="version 1, this Paceline reads 0"):
        load(opened(1))
    monkeypatch.undo()
    assert load(opened(2)) == 4


def test_that_all_checkpoints_are_damaged_is_no_missing_mount(opened: Any, tmp_path: Path) -> None:
    (saved,) = saved_checkpoints(tmp_path)
    (tmp_path / saved.name / "__0_0.distcp").write_bytes(b"rubbish")
    for generation in (1, 2):
        with pytest.raises(CheckpointError, match="are damaged"):
            load(opened(generation, 4))


class _Evil:
    def __reduce__(self) -> Any:
        return (print, ("owned",))


@pytest.mark.parametrize("value", [_Evil(), print, "text", [1]])
def test_metadata_that_is_not_of_a_checkpoint_is_refused(
    value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(value))
    with path.open("rb") as file, pytest.raises(DamagedError):
        load_metadata(file)
    assert capsys.readouterr().out == ""


def test_a_manipulated_checkpoint_runs_no_code(
    opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved,) = saved_checkpoints(tmp_path)
    path = tmp_path / saved.name
    content = io.BytesIO()
    torch.save(_Evil(), content)
    (path / "__0_0.distcp").write_bytes(content.getvalue())
    written = _StorageInfo("__0_0.distcp", 0, len(content.getvalue()))
    metadata = Metadata(
        state_dict_metadata={"weight": BytesStorageMetadata()},
        storage_data={MetadataIndex("weight"): written},
        storage_meta=StorageMeta(),
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in manifest["files"]:
        changed = (path / name).read_bytes()
        digest = hashlib.sha256(changed).hexdigest()
        manifest["files"][name] = {"bytes": len(changed), "sha256": digest}
    encoded = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(encoded)
    (path / "COMMITTED").write_text(hashlib.sha256(encoded).hexdigest())
    with pytest.raises(DamagedError, match="BytesStorageMetadata"):
        load(opened(1))
    assert "owned" not in capsys.readouterr().out
