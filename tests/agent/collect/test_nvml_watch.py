"""Jobs of the NVML collector that hang, and jobs that are only slow."""

from __future__ import annotations

import threading
import time

from paceline_agent.collect.nvml.watch import Watch


def compute_for(seconds: float) -> str:
    """Use the CPU for this long, measured by the thread's clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return "computed"


def test_a_job_that_runs_is_waited_for_and_one_that_is_stuck_is_not() -> None:
    release = threading.Event()
    watch = Watch(0.3, 1.0)
    answers = watch.run(
        {
            "busy": lambda: compute_for(0.8),
            "stuck": lambda: release.wait(60),
            "quick": lambda: "answered",
        }
    )
    assert answers == {"busy": "computed", "quick": "answered"}
    assert watch.stuck == {"stuck"}
    release.set()
    watch.wait()
    assert watch.stuck == set()
    assert watch.run({"stuck": lambda: "answered"}) == {"stuck": "answered"}
