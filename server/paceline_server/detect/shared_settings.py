"""Values that several detectors' settings share."""

from __future__ import annotations

from typing import Final

# Allocators, caches, JIT and page faults make the first steps of a generation slow, unevenly.
WARMUP_STEPS: Final = 3
# Steps of the past that make a baseline; with 10 the error of its median is a third of a step's.
BASELINE_STEPS: Final = 10
# False alarms expected per step of healthy, normal noise over all ranks. A hundredth of what is
# allowed (one in 10,000 steps): real tails are heavier than normal, and the scatter itself is only
# estimated.
FALSE_ALARMS_PER_STEP: Final = 1e-6
