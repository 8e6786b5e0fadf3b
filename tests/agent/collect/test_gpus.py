from __future__ import annotations

from typing import Literal

import pytest

from paceline_agent.collect.contract import Collected
from paceline_agent.collect.gpus import Gpus
from paceline_wire.batch import CollectorEvent, GpuInfo


def gpu(index: int, uuid: str = "", trouble: Literal["lost", "hung"] | None = None) -> GpuInfo:
    return GpuInfo(index, uuid or f"GPU-{index}", "NVIDIA H200", f"00:{index}", trouble)


def listing(*gpus: GpuInfo) -> Collected:
    return Collected(gpus=list(gpus), collector="nvml")


QUARANTINED = Collected(events=[CollectorEvent(time_ns=1, collector="nvml", kind="quarantined")])


def event_list(events) -> list[tuple[str, str]]:
    return [(event.kind, event.device) for event in events]


def test_events_of_the_collector_are_not_repeated():
    gpus = Gpus()
    assert gpus.update(listing(gpu(0), gpu(1)), 1) == []
    assert gpus.update(listing(gpu(0), gpu(1, trouble="lost")), 2) == []
    assert gpus.slots(None) == 1
    assert gpus.update(listing(gpu(0), gpu(1)), 3) == []
    assert gpus.slots(None) == 2


def test_a_gpu_that_is_listed_no_more_is_lost_until_it_is_listed_again():
    gpus = Gpus()
    gpus.update(listing(gpu(0), gpu(1), gpu(2)), 1)
    moved_up = listing(gpu(0), gpu(1, "GPU-2"))
    assert event_list(gpus.update(moved_up, 2)) == [("gpu_lost", "gpu1")]
    assert gpus.update(moved_up, 3) == []
    assert [(one.uuid, one.trouble) for one in gpus.all if one.trouble] == [("GPU-1", "lost")]
    assert gpus.slots(None) == 2
    assert event_list(gpus.update(listing(gpu(0), gpu(1), gpu(2)), 4)) == [("gpu_back", "gpu1")]
    assert gpus.slots(None) == 3


def test_an_unloaded_driver_leaves_no_slot_and_a_loaded_one_brings_them_back():
    gpus = Gpus()
    gpus.update(listing(gpu(0), gpu(1)), 1)
    assert event_list(gpus.update(listing(), 2)) == [("gpu_lost", "gpu0"), ("gpu_lost", "gpu1")]
    assert gpus.slots(None) == 0
    assert event_list(gpus.update(listing(gpu(0), gpu(1)), 3)) == [
        ("gpu_back", "gpu0"),
        ("gpu_back", "gpu1"),
    ]


def test_while_nvml_hangs_no_gpu_takes_ranks():
    gpus = Gpus()
    assert gpus.update(QUARANTINED, 1) == []
    gpus.update(listing(gpu(0)), 2)
    assert event_list(gpus.update(QUARANTINED, 3)) == [("gpu_hung", "gpu0")]
    assert gpus.slots(None) == 0
    assert event_list(gpus.update(listing(gpu(0, trouble="lost")), 4)) == [], (
        "the collector says so"
    )
    assert gpus.update(listing(gpu(0)), 5) == [], "and that it is back"


def test_one_that_never_answered_is_no_slot():
    gpus = Gpus()
    gpus.update(Collected(gpus=[GpuInfo(0, "", "", "", "lost"), gpu(1)]), 1)
    assert gpus.slots(None) == 1
    gpus.update(listing(gpu(0), gpu(1)), 2)
    assert [one.trouble for one in gpus.all] == [None, None]


@pytest.mark.parametrize(
    ("total", "lost", "asked", "slots"),
    [(8, 1, 8, 7), (8, 1, 4, 4), (8, 6, 4, 2), (0, 0, 3, 3), (2, 2, 4, 2), (2, 2, 0, 0)],
)
def test_slots_that_were_asked_for_shrink_with_the_gpus(total, lost, asked, slots):
    gpus = Gpus()
    troubles = ["lost"] * lost + [None] * (total - lost)
    gpus.update(listing(*(gpu(index, trouble=one) for index, one in enumerate(troubles))), 1)
    assert gpus.slots(asked) == slots
