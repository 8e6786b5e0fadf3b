"""Carries out the requests to launchers of a database, as the worker process of a server does.

launch_process.py DATABASE_URL LEASE_SECONDS
"""

from __future__ import annotations

import os
import secrets
import sys
import time

from paceline_server.launchers.registry import launcher_classes
from paceline_server.store.database import Database
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.launch_thread import LaunchThread

thread = LaunchThread(
    Database(sys.argv[1]),
    CommitSignals(),
    f"{os.getpid()}:{secrets.token_hex(4)}",
    int(float(sys.argv[2]) * 1e9),
    {name: launcher() for name, launcher in launcher_classes().items()},
    time.time_ns,
)
thread.start()
print("started", flush=True)
while not thread.unready():
    time.sleep(1.0)
