"""The adapter of torchrun writes how each rank ended; the processes are of torch's own context."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, api

from paceline.environment import read_rank_environment
from paceline.integrations import torchelastic
from paceline_wire.ending import Ending, read_ending
from paceline_wire.ring import RingReader


def run(
    scripts: list[str],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    record: bool = True,
    signaled: bool = False,
) -> list[Ending | None]:
    """Run one shell per local rank as torchrun does. Return how each ended.

    `record`: the ranks have rings. `signaled`: torchrun gets SIGTERM once each script has written
    the file `RANK.ready`.
    """
    for name in ("close", "wait"):
        monkeypatch.setattr(api.PContext, name, getattr(api.PContext, name))
    torchelastic.attach(api)
    environments = {
        rank: {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(scripts)),
            "PACELINE_JOB": "local",
            "PACELINE_RING_DIRECTORY": str(directory),
        }
        for rank in range(len(scripts))
    }
    rings = []
    for environment in environments.values():
        rank = read_rank_environment(environment)
        assert rank is not None
        if record:
            rank.ring_path.touch()
        rings.append(rank.ring_path)
    context = api.SubprocessContext(
        name="train",
        entrypoint="sh",
        args={rank: ("-c", script) for rank, script in enumerate(scripts)},
        envs=environments,
        logs_specs=DefaultLogsSpecs(log_dir=str(directory / "logs")),
    )
    context.start()
    if signaled:
        while not all((directory / f"{rank}.ready").exists() for rank in environments):
            time.sleep(0.05)
        try:
            raise api.SignalException("Process got signal: 15", signal.SIGTERM)
        except api.SignalException:
            context.close(signal.SIGTERM)
    while not signaled and context.wait(0) is None:
        pass
    return [read_ending(ring, os.getuid()) for ring in rings]


def test_the_exit_codes_of_a_failed_rank_and_of_one_that_finished_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # A process exists until torchrun has read how it ended.
    fails = f"read pid < {fifo}; while kill -0 $pid; do sleep 0.05; done; exit 3"
    scripts = [f"echo $$ > {fifo}; exit 0", fails, "sleep 600"]
    endings = run(scripts, tmp_path, monkeypatch)
    assert endings == [Ending(0), Ending(3), None]


def test_a_rank_that_was_killed_while_torchrun_ended_the_others_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all ranks are killed at once, and torchrun finds one of them first."""
    ready = f"touch {tmp_path}/$RANK.ready; while :; do sleep 0.05; done"
    fails = f"while [ ! -e {tmp_path}/1.ready -o ! -e {tmp_path}/2.ready ]; do sleep 0.05; done"
    scripts = [f"{fails}; kill -9 $$", f"trap 'kill -9 $$' TERM; {ready}", ready]
    endings = run(scripts, tmp_path, monkeypatch)
    killed = Ending(None, signal.SIGKILL)
    assert endings == [killed, killed, None], "torchrun itself sends SIGTERM"


def test_how_ranks_ended_that_a_signal_to_torchrun_ended_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = f"touch {tmp_path}/$RANK.ready; while :; do sleep 0.05; done"
    # The agent may read the file as soon as a rank has ended.
    copies = f"trap 'cp {tmp_path}/*.r1.end {tmp_path}/copy; exit 0' TERM; {ready}"
    scripts = [ready, copies, f"trap 'exit 9' TERM; {ready}"]
    endings = run(scripts, tmp_path, monkeypatch, signaled=True)
    assert endings == [
        Ending(None, signal.SIGTERM, launcher_signal=signal.SIGTERM),
        Ending(0, launcher_signal=signal.SIGTERM),
        Ending(9, launcher_signal=signal.SIGTERM),
    ]
    assert Ending(launcher_signal=signal.SIGTERM) == msgspec.json.decode(
        (tmp_path / "copy").read_bytes(), type=Ending
    )


def test_a_rank_that_finishes_first_is_written_while_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = f"while [ ! -e {tmp_path}/*.r0.end ]; do sleep 0.05; done"
    assert run(["exit 0", wait], tmp_path, monkeypatch) == [Ending(0), Ending(0)]


def test_the_ring_of_a_rank_that_loads_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchelastic, "RESERVED_AFTER_SECONDS", 0.0)
    other = tmp_path / "local.g0.r1.ring"
    other.write_text("the rank's own")
    wait = f"while [ ! -e {tmp_path}/local.g0.r0.ring ]; do sleep 0.05; done; exit 3"
    endings = run([wait, "sleep 600"], tmp_path, monkeypatch, record=False)
    reader = RingReader(tmp_path / "local.g0.r0.ring")
    identity = reader.identity
    assert (identity.rank, identity.world_size, identity.is_reserved) == (0, 2, True)
    assert reader.view().status == "failed"
    assert identity.pid != os.getpid()
    assert identity.native_thread_id is None, "no thread of the rank is known"
    assert endings[0] == Ending(3), "a failure while it loads is reported as that of any rank"
    assert other.read_text() == "the rank's own"
