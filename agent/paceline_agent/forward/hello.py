"""What the agent says of its node: on every boot, and again whenever it changes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import socket

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.contract import Collected
from paceline_agent.collect.gpus import Gpus
from paceline_agent.forward.outbox import Outbox
from paceline_agent.settings import AgentSettings
from paceline_wire.batch import AgentHello, CollectorEvent, GpuInfo
from paceline_wire.commands import StartRanks

INVENTORY_SECONDS = 5.0


class RendezvousPort:
    """A port kept free for the next rank 0 on this node.

    It is bound but not listened on, both with SO_REUSEADDR: nobody is given it by chance, while
    the ranks' store, which sets that option too, could even bind it beside us.
    """

    def __init__(self) -> None:
        self._socket = _reserve()

    @property
    def number(self) -> int:
        return int(self._socket.getsockname()[1])

    def hand_over(self) -> None:
        """Let go of it, since a rank is about to use it, and keep another."""
        used, self._socket = self._socket, _reserve()
        used.close()

    def close(self) -> None:
        self._socket.close()


def _reserve() -> socket.socket:
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


class Greeter:
    """Says hello."""

    def __init__(self, settings: AgentSettings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._gpus = Gpus()
        self._greeted = False
        self._learnt: list[GpuInfo] | None = None  # of the call before
        self._inventory_known = asyncio.Event()
        self._port = RendezvousPort()

    async def greet_first(self) -> None:
        """Wait a moment for the GPUs: a node is to be given ranks only when it knows them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INVENTORY_SECONDS):
                await self._inventory_known.wait()
        self.greet(first=True)

    def greet(self, *, first: bool = False) -> None:
        """The lease goes along, so that the server knows how long a silent node may still run.

        `first`: before all that waits to be packed.
        """
        settings = self._settings
        hello = AgentHello(
            time_ns=timeline_ns(),
            hostname=socket.gethostname(),
            version=importlib.metadata.version("paceline"),
            address=settings.reachable_address,
            rendezvous_port=self._port.number,
            slots=self._gpus.slots(settings.slots),
            gpus=self._gpus.all,
            labels={"lease_seconds": f"{settings.lease_seconds:g}", **settings.labels},
        )
        self._outbox.put_hello(hello, first=first)
        self._greeted = True

    def learn(self, collected: Collected) -> None:
        """Look for news of the node's GPUs in what a collector brought."""
        if collected.gpus is None and not any(
            isinstance(event, CollectorEvent) and event.collector == "nvml"
            for event in collected.events
        ):
            return
        if collected.gpus is not None and collected.gpus is self._learnt:
            return
        self._learnt = collected.gpus
        before = self._gpus.all
        self._outbox.put_events(self._gpus.learn(collected, timeline_ns()))
        if self._gpus.all != before and self._greeted:
            self.greet()
        self._inventory_known.set()  # or known not to be had

    def before_start(self, command: StartRanks) -> None:
        """Rank 0 is about to listen on our port."""
        if command.master_port == self._port.number:
            self._port.hand_over()
            self.greet()

    def close(self) -> None:
        self._port.close()
