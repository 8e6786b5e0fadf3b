"""Carries out the requests to launchers of a database, as the worker process of a server does.

launch_process.py DATABASE_URL LEASE_SECONDS

PACELINE_SERVER_KUBERNETES_URL and _CREDENTIALS are those of the server.
"""

from __future__ import annotations

import os
import secrets
import sys
import time

from paceline_server.launchers.contract import Surroundings
from paceline_server.launchers.registry import create_launchers
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.launch_thread import LaunchThread

database = Database(sys.argv[1])
thread = LaunchThread(
    database,
    CommitSignals(),
    f"{os.getpid()}:{secrets.token_hex(4)}",
    int(float(sys.argv[2]) * 1e9),
    create_launchers(Surroundings(Settings(), database)),
    time.time_ns,
)
thread.start()
print("started", flush=True)
while not thread.unready():
    time.sleep(1.0)
