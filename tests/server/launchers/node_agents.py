"""Agents of several nodes on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class Agents:
    """One agent per node, with rings of its own."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self._url = url
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        """Start the agent of a node, also again after its end."""
        with (self.directory / f"{node}.log").open("ab") as log:
            self._running[node] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "paceline_cli", "agent", "--server", self._url),
                    *("--agent-id", node, "--node-directory", str(self.directory / node)),
                    *("--spool-directory", str(self.directory / f"{node}-spool")),
                    *("--metrics-port", "0", "--address", "127.0.0.1", "--run-as", "root"),
                    *("--exit-with-parent", str(os.getpid())),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, node: str) -> None:
        """Kill the agent of a node: the node is silent from now on."""
        self._running[node].kill()
        self._running[node].wait()

    def are_up(self) -> bool:
        """Return whether each agent takes rings."""
        return all((self.directory / node / "rings").is_dir() for node in self._running)

    def stop(self) -> None:
        """End all agents."""
        for agent in self._running.values():
            agent.terminate()
        for agent in self._running.values():
            agent.wait(30)
