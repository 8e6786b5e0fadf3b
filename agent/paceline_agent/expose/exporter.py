"""The agent's `/metrics`: the last result of each collector, and metrics of the agent itself."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.blocks import SeriesBlock, each
from paceline_agent.collect.contract import Collected
from paceline_agent.expose.exposition import Families
from paceline_agent.expose.scrape import completed
from paceline_agent.settings import HOSTNAME_LABEL
from paceline_wire.batch import Sample

log = logging.getLogger(__name__)

CONNECTIONS_AT_MOST = 32


@dataclass(frozen=True, slots=True)
class OwnMetric:
    """A metric that the agent reports about itself."""

    name: str
    read: Callable[[], float | None]  # None: unknown, left out


class Exporter:
    """Values for /metrics; written by the event loop, read by the HTTP thread.

    A value that the last call of a collector did not return is not shown, because a frozen value
    looks current. OpenMetrics is served on request (`Accept`), as in prometheus-client.
    """

    def __init__(
        self,
        own: Sequence[OwnMetric],
        *,
        procfs_root: Path = Path("/proc"),
        hostname_label: str = HOSTNAME_LABEL,
    ) -> None:
        self._own = own
        self._procfs_root = procfs_root
        self._latest: dict[str, Sequence[Sample | SeriesBlock]] = {}
        self._lasting: dict[str, Sequence[Sample | SeriesBlock]] = {}
        self._families = Families(self._samples, hostname_label=hostname_label)
        self._server: ThreadingWSGIServer | None = None

    def put(self, collected: Collected) -> None:
        self._latest[collected.collector] = collected.samples
        if collected.lasting is not None:
            self._lasting[collected.collector] = collected.lasting

    def start(self, host: str, port: int) -> int | None:
        """Serve and return the port; None if that is impossible, which is logged once."""
        registry = CollectorRegistry()
        registry.register(self._families)
        try:
            server = _listening(host, port, registry)
        except OSError as error:
            log.error("no /metrics on %s:%d: %s", host, port, error.strerror)
            return None
        self._server = server
        # By default it would wake up twice a second to check whether it should end.
        Thread(target=server.serve_forever, args=[None], name="metrics", daemon=True).start()
        log.info("/metrics on %s:%d", host, server.server_port)
        return int(server.server_port)

    def close(self) -> None:
        if self._server is not None:
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._server.shutdown()
            self._server.server_close()

    def _samples(self) -> Iterator[Sample]:
        now_ns = timeline_ns()
        for own in self._own:
            value = own.read()
            if value is not None:
                yield Sample(own.name, {}, float(value), now_ns)
        brought = [*self._lasting.values(), *self._latest.values()]
        yield from completed(each(itertools.chain(*brought)), self._procfs_root)


class _LimitedServer(ThreadingWSGIServer):
    """A server with few connections, each of which has a thread: the oldest makes room for another.

    Any user of the node can connect, and then be silent. The threads count against the limit of
    the service, which its ranks share.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connections: dict[socket.socket, None] = {}
        self._lock = Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            if len(self._connections) > CONNECTIONS_AT_MOST:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):  # the client has ended it
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing per scrape."""


def _listening(host: str, port: int, registry: CollectorRegistry) -> ThreadingWSGIServer:
    """Return prometheus-client's server without its thread. Raises OSError."""
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]

    class MetricsServer(_LimitedServer):
        address_family = family

    return make_server(str(address[0]), port, make_wsgi_app(registry), MetricsServer, _Silent)
