"""The cost of a thread of Paceline: the processor time that others of the host lack because of it.

The training does not wait for the thread. But on a host of few processors, something else may wait
for the one that it uses (PSI), and a processor is slower while the other hyperthread of its core is
busy. Both are counted while the thread works, not before: a training that waits for an accelerator
or for a network then loses nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import NamedTuple

_SIBLING_LOSS = 0.2  # share that a busy hyperthread loses while the other one of its core is busy


class HostUse(NamedTuple):
    """Clocks of the host, all in seconds from some time on; None: not known."""

    now: float
    idle: float | None  # sum over the processors
    waited: float | None  # in which something waited for a processor

    @classmethod
    def read(cls, proc: Path = Path("/proc")) -> HostUse:
        return cls(monotonic(), _idle(proc / "uptime"), _waited(proc / "pressure/cpu"))


def lost_seconds(before: HostUse, after: HostUse, own: float) -> float:
    """Return the processor time that others have lost, for each rank of this node.

    All ranks of a node make their copies at the same time, each with one such thread. The kernel
    uses idle cores first: as long as half of the processors are idle, no core is shared.

    Args:
        before: when the thread began.
        after: when it was done.
        own: its processor time in seconds.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = (os.cpu_count() or 1) * (after.now - before.now)
    if available <= 0.0:
        return 0.0
    idle = 0.0 if before.idle is None or after.idle is None else after.idle - before.idle
    busy = min(available, max(0.0, available - idle))
    of_training = max(0.0, busy - ranks * own) / ranks
    most = min(own, of_training)
    shared = max(0.0, 2 * busy / available - 1) * most
    if before.waited is None or after.waited is None:
        return shared  # all of it is counted, because waits are not
    # These threads wait for each other, too. A thread of the training that shares a processor with
    # one waits about as long as it works.
    return max(min(most, after.waited - before.waited), _SIBLING_LOSS * shared)


def _idle(uptime: Path) -> float | None:
    try:
        return float(uptime.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _waited(pressure: Path) -> float | None:
    """Return `total` of the first line, "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"."""
    try:
        return int(pressure.read_text().split()[4].removeprefix("total=")) / 1e6
    except (OSError, ValueError, IndexError):
        return None
