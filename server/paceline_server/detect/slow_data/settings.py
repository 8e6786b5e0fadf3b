"""Thresholds of the slow data detector."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.detect.shared_settings import BASELINE_STEPS


@dataclass(frozen=True, slots=True)
class SlowDataSettings:
    """Thresholds: how long and how often a rank must wait for its data, and compared with what."""

    # Number of past steps needed to judge a rank by its own past alone.
    baseline_steps: int = BASELINE_STEPS
    # A step is slow when the wait exceeds the normal one by this share of the step: a stall that
    # makes steps a tenth longer is 9% of them, and the jitter of the wait is far smaller ...
    share: float = 0.06
    # ... and is this many times the wait of the peers and the rank's own earlier wait.
    ratio: float = 3.0
    # A reported wait lasts while it is this many times the normal one. On a busy host the waits of
    # the peers grow too.
    lasting_ratio: float = 1.5
    # This many of the last steps must be slow; the end of an epoch or a cold cache is shorter.
    window_steps: int = 5
    hits: int = 4
    # An intermittent wait (every n-th file is on a slow disk, a loader refills) must occur this
    # often in one of these numbers of steps, and cost this share of their time, because all storage
    # has occasional long reads.
    recurring_windows: tuple[int, ...] = (32, 128, 320)
    recurring_hits: int = 4
    # In a longer one, waits of all ranks do not count: each epoch begins with one.
    epoch_steps: int = 128
    recurring_share: float = 0.03
    # It must come and go for this long: in short steps the scheduler of a busy host delays single
    # reads for some seconds.
    recurring_seconds: float = 10.0


DEFAULTS = SlowDataSettings()
