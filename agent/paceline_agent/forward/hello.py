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
from paceline_agent.forward.rendezvous_port import RendezvousPort
from paceline_agent.settings import AgentSettings
from paceline_wire.batch import AgentHello, CollectorEvent, GpuInfo
from paceline_wire.commands import StartRanks

INVENTORY_SECONDS = 5.0  # the longest wait for the GPUs


class HelloSender:
    """Sends the hello, and sends it again when the node's GPUs or rendezvous port change."""

    def __init__(self, settings: AgentSettings, outbox: Outbox) -> None:
        self._settings = settings
        self._outbox = outbox
        self._gpus = Gpus()
        self._was_sent = False
        self._previous_gpus: list[GpuInfo] | None = None  # as last collected
        self._inventory_ready = asyncio.Event()
        self._port = RendezvousPort()

    async def send_first(self) -> None:
        """Send the first hello, after a wait for the GPUs: placement needs to know them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INVENTORY_SECONDS):
                await self._inventory_ready.wait()
        self.send(first=True)

    def send(self, *, first: bool = False) -> None:
        """Send the hello.

        It contains the lease, after which a node without contact kills its ranks.

        Args:
            first: place it before everything that waits to be packed.
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
        self._was_sent = True

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
        self._outbox.put_events(self._gpus.update(collected, timeline_ns()))
        if self._gpus.all != previous and self._was_sent:
            self.send()
        self._inventory_ready.set()  # also if there are no GPUs

    def before_start(self, command: StartRanks) -> None:
        """Release the rendezvous port if rank 0 of this command is about to listen on it."""
        if command.master_port == self._port.number:
            self._port.hand_over()
            self.send()

    def close(self) -> None:
        """Release the rendezvous port."""
        self._port.close()
