"""The rank's process: does the kernel hold it in I/O?"""

from __future__ import annotations

from paceline_server.detect.causes.suspect import Suspect
from paceline_server.detect.causes.symptom import MetricObservation
from paceline_server.detect.finding import Evidence

_CAUSE = "blocked on I/O"


def check(suspect: Suspect) -> list[MetricObservation]:
    states = {
        live.rank: live.state.process_state
        for live in suspect.live
        if live.state is not None and live.state.process_state is not None
    }
    if not states:
        return []
    blocked = [rank for rank, state in states.items() if state == "D"]
    if blocked:
        text = f"the process of rank {blocked[0]} is blocked in uninterruptible I/O (state D)"
        return [MetricObservation(_CAUSE, 2.0, (Evidence(text),))]
    rank, state = next(iter(states.items()))
    # One glance; most I/O waits are shorter than the time between two.
    return [
        MetricObservation(
            _CAUSE, -0.7, (Evidence(f"the process of rank {rank} is in state {state}"),)
        )
    ]
