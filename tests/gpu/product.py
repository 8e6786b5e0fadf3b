"""A server, and an agent with a script under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.waiting import wait_for


@contextmanager
def running_server(directory: Path) -> Iterator[str]:
    """Start a server. Yield its address."""
    url = f"http://127.0.0.1:{free_port()}"
    database = f"sqlite:///{directory}/paceline.db"
    port = url.rpartition(":")[2]
    server = _start("server", "--database-url", database, "--port", port, directory=directory)
    try:
        wait_for(lambda: _responds(url) or server.poll() is not None, "the server")
        assert server.poll() is None, (directory / "server.log").read_text()
        yield url
    finally:
        server.terminate()
        server.wait(60)


def watch(
    url: str, ranks: int, script: Sequence[str], directory: Path, **settings: str
) -> subprocess.Popen[bytes]:
    """Start a script under `paceline watch` and torchrun; its output is in `watch.log`."""
    return _start(
        *("watch", "--server", url, "--", sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={ranks}", f"--master-port={free_port()}", *script),
        directory=directory,
        **settings,
    )


def _start(*arguments: str, directory: Path, **settings: str) -> subprocess.Popen[bytes]:
    own = {
        "PACELINE_STATE_DIRECTORY": str(directory / "state"),
        "PACELINE_AGENT_NODE_DIRECTORY": str(directory / "node"),
    }
    with (directory / f"{arguments[0]}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline_cli", *arguments],
            env=os.environ | own | settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=60).is_success
    except httpx.HTTPError:
        return False
