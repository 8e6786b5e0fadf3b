"""The hello: a description of the node, sent at every boot and again whenever it changes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import socket

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.contract import Collected
from paceline_agent.collect.gpus import Gpus
from paceline_agent.forward.outbox import Outbox
from paceline_agent.settings import RENDEZVOUS_PORT, AgentSettings
from paceline_wire.batch import AgentHello, CollectorEvent, GpuInfo
from paceline_wire.commands import StartRanks

INVENTORY_SECONDS = 5.0  # the longest wait for the GPUs


class RendezvousPort:
    """A TCP port reserved for the next rank 0 on this node, whose store will listen on it.

    It is bound with SO_REUSEADDR and not listened on: the kernel gives it to no other process by
    chance, while the ranks' store, which sets that option too, can bind it at any time.
    """

    def __init__(self) -> None:
        self._socket = _reserve()

    @property
    def number(self) -> int:
        """The port's number, chosen by the kernel."""
        return int(self._socket.getsockname()[1])

    def hand_over(self) -> None:
        """Release the port, which a rank is about to use, and reserve another."""
        used, self._socket = self._socket, _reserve()
        used.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def _reserve() -> socket.socket:
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", RENDEZVOUS_PORT))
    return reserved


class Greeter:
    """Sends the hello, and sends it again when the node's GPUs or rendezvous port change."""

    def __init__(self, settings: AgentSettings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._gpus = Gpus()
        self._greeted = False
        self._previous_gpus: list[GpuInfo] | None = None  # as last collected
        self._inventory_ready = asyncio.Event()
        self._port = RendezvousPort()

    async def greet_first(self) -> None:
        """Send the first hello, after a wait for the GPUs: placement needs to know them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INVENTORY_SECONDS):
                await self._inventory_ready.wait()
        self.greet(first=True)

    def greet(self, *, first: bool = False) -> None:
        """Send the hello. It has the lease, after which a node without contact kills its ranks.

        Args:
            first: put it before everything that waits to be packed.
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

    def update(self, collected: Collected) -> None:
        """Take the node's GPUs from a collector's result, and send the hello if they changed."""
        if collected.gpus is None and not any(
            isinstance(event, CollectorEvent) and event.collector == "nvml"
            for event in collected.events
        ):
            return
        if collected.gpus is not None and collected.gpus is self._previous_gpus:
            return
        self._previous_gpus = collected.gpus
        previous = self._gpus.all
        self._outbox.put_events(self._gpus.learn(collected, timeline_ns()))
        if self._gpus.all != previous and self._greeted:
            self.greet()
        self._inventory_ready.set()  # also if there are no GPUs

    def before_start(self, command: StartRanks) -> None:
        """Release the rendezvous port if rank 0 of this command is about to listen on it."""
        if command.master_port == self._port.number:
            self._port.hand_over()
            self.greet()

    def close(self) -> None:
        """Release the rendezvous port."""
        self._port.close()
