"""Commit, reject and fall back: the checkpoints of one rank, with a real gloo group of one."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.checkpoints import storage
from paceline.checkpoints.errors import CheckpointError, OtherRunError
from paceline.checkpoints.layout import (
    COMMITTED,
    MANIFEST,
    Saved,
    claim,
    read_manifest,
    saved_checkpoints,
)
from paceline.checkpoints.storage import Checkpointer

State = dict[str, Tensor]
Open = Callable[..., Checkpointer]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.new_group([0], backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    yield group
    dist.destroy_process_group()


@pytest.fixture
def opened(group: dist.ProcessGroup, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a checkpointer; all are closed at the end."""
    made: list[Checkpointer] = []

    def open_one(generation: int = 0, *, keep: int = 3, seed: int = 0) -> Checkpointer:
        made.append(Checkpointer(tmp_path, group, generation, run={"seed": seed}, keep=keep))
        return made[-1]

    yield open_one
    for checkpointer in made:
        checkpointer.close()


def state(value: float) -> State:
    flat = torch.full((6,), value)  # views of one storage, like the optimizer's
    return {"a/value": flat[:4].view(2, 2), "b@tp0/value": flat[4:]}


def loaded(checkpointer: Checkpointer) -> tuple[int | None, set[float]]:
    into = state(-1.0)
    step = checkpointer.load(into)
    return step, {element for tensor in into.values() for element in tensor.flatten().tolist()}


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state(float(step)))
    assert checkpointer.wait()


def test_the_next_generation_loads_the_saved_state(opened: Open) -> None:
    save(opened(0), 4, 8)
    assert loaded(opened(1)) == (8, {8.0})


def test_the_state_is_copied_before_save_returns(opened: Open) -> None:
    checkpointer, values = opened(), state(1.0)
    checkpointer.save(1, values)
    for tensor in values.values():
        tensor.fill_(99.0)
    assert checkpointer.wait()
    assert loaded(opened(1)) == (1, {1.0})


def test_without_a_checkpoint_nothing_is_loaded(opened: Open) -> None:
    assert loaded(opened()) == (None, {-1.0})


def flip_a_bit(path: Path, bit: int = 0x10) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= bit
    path.write_bytes(content)


def flip_the_highest_bit(path: Path) -> None:
    """Make the text file invalid UTF-8."""
    flip_a_bit(path, 0x80)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_a_bit, flip_the_highest_bit, cut_short, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", MANIFEST, COMMITTED])
def test_a_damaged_checkpoint_is_detected_and_the_previous_one_loaded(
    opened: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    name: str,
) -> None:
    save(opened(), 4, 8)
    damage(tmp_path / Saved(0, 8).name / name)
    assert loaded(opened(1)) == (4, {4.0})
    # otherwise the checkpoint counts as never committed
    if (name, damage) != (COMMITTED, Path.unlink):
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        assert record.getMessage().startswith("Skipped the checkpoint of step 8, which is")


def test_training_begins_again_after_damage_to_all_checkpoints_only_once_they_were_moved(
    opened: Open, tmp_path: Path
) -> None:
    save(opened(), 4, 8)
    for step in (4, 8):
        flip_a_bit(tmp_path / Saved(0, step).name / "__0_0.distcp")
    for generation in (1, 2):
        with pytest.raises(CheckpointError, match=r"all checkpoints in .* damaged-step-00000008"):
            opened(generation).load(state(-1.0))
    (tmp_path / "away").mkdir()
    for path in tmp_path.glob("damaged-*"):
        path.rename(tmp_path / "away" / path.name)
    assert loaded(opened(3)) == (None, {-1.0})


def test_a_checkpoint_without_its_marker_is_ignored(opened: Open, tmp_path: Path) -> None:
    save(opened(), 4, 8)
    (tmp_path / Saved(0, 8).name / COMMITTED).unlink()
    assert loaded(opened(1)) == (4, {4.0})
    assert not (tmp_path / Saved(0, 8).name).exists(), "cleared away by the next generation"


def test_a_process_of_an_older_generation_cannot_commit(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zombie = opened(0)
    save(zombie, 4)
    claim(tmp_path, 1)
    zombie.save(8, state(8.0))
    assert not zombie.wait()
    assert "generation 1 has taken over" in caplog.text
    assert not (tmp_path / Saved(0, 8).name).exists(), "nothing is written that is not committed"
    assert loaded(opened(1)) == (4, {4.0})


def test_a_newer_generation_takes_precedence_over_a_later_step(
    opened: Open, tmp_path: Path
) -> None:
    zombie = opened(0)
    save(zombie, 4, 8)
    shutil.move(tmp_path / Saved(0, 8).name, tmp_path / "hidden")
    newer = opened(1)
    assert loaded(newer)[0] == 4
    save(newer, 6)
    shutil.move(tmp_path / "hidden", tmp_path / Saved(0, 8).name)  # passed the check
    assert loaded(opened(2)) == (6, {6.0})


def test_an_older_generation_cannot_open(opened: Open) -> None:
    opened(5)
    with pytest.raises(CheckpointError, match="generation 5 has taken over"):
        opened(4)


def test_only_the_last_few_are_kept(opened: Open, tmp_path: Path) -> None:
    save(opened(keep=2), 1, 2, 3, 4)
    assert saved_checkpoints(tmp_path) == [Saved(0, 4), Saved(0, 3)]
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_step_already_committed_is_not_written_again(opened: Open, tmp_path: Path) -> None:
    save(opened(), 4)
    before = (tmp_path / Saved(0, 4).name / MANIFEST).stat().st_mtime_ns
    again = opened()
    assert loaded(again)[0] == 4
    save(again, 4)
    assert (tmp_path / Saved(0, 4).name / MANIFEST).stat().st_mtime_ns == before


def test_the_checkpoint_of_another_run_is_refused(opened: Open) -> None:
    save(opened(seed=0), 4)
    with pytest.raises(OtherRunError, match="use another directory"):
        loaded(opened(seed=1))


def test_a_write_error_gives_no_checkpoint_and_no_crash(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened()
    save(checkpointer, 4)
    # blocks the file to be written
    (tmp_path / Saved(0, 8).name / "__0_0.distcp").mkdir(parents=True)
    checkpointer.save(8, state(8.0))
    assert not checkpointer.wait()
    assert "The checkpoint of step 8 was not committed" in caplog.text
    assert not (tmp_path / Saved(0, 8).name).exists(), "a full disk would stay full"
    save(checkpointer, 12)
    assert loaded(opened(1)) == (12, {12.0})


def test_a_full_disk_is_named_as_the_reason(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch reports it as an unexpected position in its zip file."""
    monkeypatch.setattr("paceline.saves.FULL_BYTES", 1 << 80)
    checkpointer = opened()
    (tmp_path / Saved(0, 8).name / "__0_0.distcp").mkdir(parents=True)
    checkpointer.save(8, state(8.0))
    assert not checkpointer.wait()
    assert "of step 8 was not committed: No space left on device: " in caplog.text


def test_an_error_of_the_file_system_is_named_as_the_reason(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer, limits = opened(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        checkpointer.save(8, {"large": torch.zeros(1 << 20)})
        assert not checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "of step 8 was not committed: [Errno 27] File too large" in caplog.text


def fill_disk(
    monkeypatch: pytest.MonkeyPatch, directory: Path, room: int, code: int = errno.ENOSPC
) -> None:
    """Have the disk take no more than `room` checkpoints."""
    whole = storage.save

    def save_if_room(*args: object, **options: object) -> object:
        if len(saved_checkpoints(directory)) >= room:
            raise OSError(code, os.strerror(code))
        return whole(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(storage, "save", save_if_room)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_no_more_than_are_kept_takes_each_new_one(
    opened: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    fill_disk(monkeypatch, tmp_path, room=2, code=code)
    save(opened(keep=2), 1, 2, 3, 4)
    assert saved_checkpoints(tmp_path) == [Saved(0, 4), Saved(0, 3)]
    save(opened(1, keep=2), 5)  # a restart from a copy in memory
    assert saved_checkpoints(tmp_path) == [Saved(1, 5), Saved(0, 4)]
    assert caplog.text.count("deleted before a new one is written") == 2, "once per start"


@pytest.mark.parametrize(("room", "keep"), [(1, 1), (1, 2), (2, 3)])
def test_a_full_disk_takes_no_checkpoint_that_is_to_be_kept(
    opened: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
    keep: int,
) -> None:
    fill_disk(monkeypatch, tmp_path, room)
    checkpointer = opened(keep=keep)
    save(checkpointer, *range(1, room + 1))
    checkpointer.save(9, state(9.0))
    assert not checkpointer.wait()
    assert len(saved_checkpoints(tmp_path)) == room
    assert "no older checkpoint can be deleted for it" in caplog.text


def test_a_full_disk_takes_no_checkpoint_if_the_newest_is_damaged(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, tmp_path, room=2)
    save(opened(keep=2), 1, 2)
    (file,) = (tmp_path / Saved(0, 2).name).glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    checkpointer = opened(1, keep=2)
    checkpointer.save(3, state(3.0))
    assert not checkpointer.wait()
    assert loaded(opened(2)) == (1, {1.0})


def test_a_peer_that_dies_during_a_save_is_one_sentence(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")

    checkpointer = opened()
    monkeypatch.setattr(checkpointer.peers, "first", fail)
    checkpointer.save(4, state(4.0))
    assert not checkpointer.wait()
    [record] = caplog.records
    assert "of step 4 was not committed: Connection closed by" in record.getMessage()
    assert not record.exc_info


def test_an_error_after_the_commit_deletes_no_checkpoint(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("stale file handle")

    checkpointer = opened()
    monkeypatch.setattr(storage, "prune", fail)
    checkpointer.save(4, state(4.0))
    assert not checkpointer.wait()
    assert loaded(opened(1)) == (4, {4.0})


def test_an_error_creating_the_directory_gives_no_checkpoint_and_no_crash(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened()
    save(checkpointer, 4)
    (tmp_path / Saved(0, 8).name).touch()  # blocks the directory to be created
    checkpointer.save(8, state(8.0))
    assert not checkpointer.wait()
    assert "The checkpoint of step 8 was not committed" in caplog.text
    (tmp_path / Saved(0, 8).name).unlink()
    save(checkpointer, 12)
    assert loaded(opened(1)) == (12, {12.0})


def test_the_manifest_lists_every_file_with_its_hash(opened: Open, tmp_path: Path) -> None:
    save(opened(2), 4)
    path = tmp_path / Saved(2, 4).name
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["generation"], manifest["run"]) == (4, 2, {"seed": 0})
    data = {file.name for file in path.iterdir()} - {MANIFEST, COMMITTED}
    assert set(manifest["files"]) == data
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())
    assert json.loads((path / MANIFEST).read_text()) == manifest
