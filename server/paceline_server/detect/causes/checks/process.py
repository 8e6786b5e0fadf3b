"""State of the rank's process: is it blocked in uninterruptible I/O?"""

from __future__ import annotations

from paceline_server.detect.causes.catalog import BLOCKED_ON_IO
from paceline_server.detect.causes.suspect import Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence
from paceline_server.detect.finding import Evidence

SYMPTOMS: tuple[Symptom, ...] = ()  # read from the state page, not from telemetry


def check(suspect: Suspect) -> list[WeighedEvidence]:
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
        return [WeighedEvidence(BLOCKED_ON_IO, 2.0, (Evidence(text),))]
    rank, state = next(iter(states.items()))
    # One sample only: most I/O waits are shorter than the time between two samples.
    return [
        WeighedEvidence(
            BLOCKED_ON_IO, -0.7, (Evidence(f"the process of rank {rank} is in state {state}"),)
        )
    ]
