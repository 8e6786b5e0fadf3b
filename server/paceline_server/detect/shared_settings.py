"""Values that several detectors' settings share."""

from __future__ import annotations

from typing import Final

# Number of past steps in a baseline; with 10, the error of its median is a third of one step's.
BASELINE_STEPS: Final = 10
# A problem that is over sooner is not reported: other processes occasionally take the
# CPUs of a host for a second, which is 25 steps of 40 ms. Four steps of 0.5 s take this long.
LEAST_SECONDS: Final = 2.0
# False alarms expected per step of healthy, normal noise over all ranks. It is a hundredth of the
# allowed rate (one in 10,000 steps), because real tails are heavier than normal and the scatter
# itself is only estimated.
FALSE_ALARMS_PER_STEP: Final = 1e-6
