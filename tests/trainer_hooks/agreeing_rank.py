"""A rank that trains in a process of its own and can be killed or stopped.

    python agreeing_rank.py PORT RANK SIZE

It prints a line once it trains, and its steps do not depend on those of other ranks.
"""

from __future__ import annotations

import sys
import time

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paceline.agreement import Agreement

port, rank, size = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
agreement = Agreement(
    PrefixStore("test", store), rank, size, lambda: None, lambda *answer: None, dead_seconds=60.0
)
step = 0
while True:
    step += 1
    request = agreement.at(step)
    if request is not None and agreement.finish(request, done=True):
        break
    if step == 3:
        print("trains", flush=True)
    time.sleep(0.001)
agreement.close()
print(f"stopped at {step}", flush=True)
