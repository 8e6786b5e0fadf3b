"""Events of a real agent while GPUs disappear and return."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline_wire.batch import AgentHello, CommandResult, DeviceEvent
from paceline_wire.commands import RankSpec, StartRanks
from paceline_wire.topology import Topology

SHOW = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)"


@pytest.fixture
def until_slots(server, wait_for):
    """Return a function that waits for a hello with this many slots and returns its GPUs."""

    def wait(slots: int) -> list[str | None]:
        def newest() -> AgentHello | None:
            hellos = server.events(AgentHello)
            return hellos[-1] if hellos and hellos[-1].slots == slots else None

        return [gpu.trouble for gpu in wait_for(newest, 60, f"{slots} slots").gpus]

    return wait


def gpu_events(server) -> list[tuple[str, str]]:
    """Return the events of GPUs; other tests create network interfaces on this machine."""
    events = server.events(DeviceEvent)
    return [(event.kind, event.device) for event in events if event.kind.startswith("gpu_")]


def test_a_lost_gpu_is_no_slot_and_one_that_is_back_is(
    gpus, server, start_agent, until_slots, wait_for
):
    agent = start_agent()
    assert until_slots(2) == [None, None]
    gpus.set(0, lost=1)
    assert until_slots(1) == ["lost", None]
    assert gpu_events(server) == [("gpu_lost", "gpu0")]
    # LOCAL_RANK counts visible GPUs: without the lost one, which has a lower index.
    server.commands.append(
        StartRanks(
            command_id=1,
            job="job-a",
            generation=0,
            topology=Topology(dp=1),
            ranks=[RankSpec(0, 0, gpu=1)],
            argv=[sys.executable, "-c", SHOW],
            master_address="127.0.0.1",
            master_port=29500,
        )
    )
    wait_for(lambda: server.events(CommandResult))
    log = Path(agent.directory) / "logs" / "job-a.g0.r0.log"
    assert wait_for(log.read_text).strip() == server.events(AgentHello)[-1].gpus[1].uuid
    gpus.set(0, lost=0)
    assert until_slots(2) == [None, None]
    assert gpu_events(server) == [("gpu_lost", "gpu0"), ("gpu_back", "gpu0")]


@pytest.mark.campaign
def test_a_driver_that_is_unloaded_and_loaded_again(gpus, server, start_agent, until_slots):
    start_agent()
    until_slots(2)
    gpus.set_driver(loaded=False)
    assert until_slots(0) == ["lost", "lost"]
    gpus.set_driver(loaded=True)
    assert until_slots(2) == [None, None]
    assert sorted(gpu_events(server)) == sorted(
        (kind, device) for kind in ("gpu_back", "gpu_lost") for device in ("gpu0", "gpu1")
    )


@pytest.mark.campaign
def test_a_library_that_comes_later_brings_slots(
    gpus, nvml_library, start_agent, until_slots, tmp_path, monkeypatch
):
    later = tmp_path / "later"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(later))
    start_agent()
    assert until_slots(1) == [], "as many as a node without GPUs has"
    later.symlink_to(nvml_library)
    assert until_slots(2) == [None, None]
