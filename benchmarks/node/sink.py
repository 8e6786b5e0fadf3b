"""A server stub that accepts batches and only counts them.

It runs in the benchmark's process, whose CPU time is not measured.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from paceline_wire.batch import decode
from paceline_wire.commands import PING_SECONDS, Order, Ping, encode_line


class Sink(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.samples: Counter[str] = Counter()  # by metric
        self.series: set[tuple[str, ...]] = set()
        self.batches = self.spans = self.lost_spans = 0
        self.answer_seconds = 0.0  # delay of each response
        self.orders: list[Order] = []  # sent to each connected agent
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Sink:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def take(self, payload: bytes) -> int:
        batch = decode(payload)
        self.batches += 1
        self.samples.update(sample.name for sample in batch.samples)
        for sample in batch.samples:
            self.series.add((sample.name, *sample.labels.values()))
        self.spans += sum(block.count for block in batch.spans)
        self.lost_spans += sum(block.lost for block in batch.spans)
        return batch.sequence


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Sink

    def do_POST(self) -> None:
        sequence = self.server.take(self.rfile.read(int(self.headers["content-length"])))
        if self.server.closing.wait(self.server.answer_seconds):
            self.close_connection = True
            return
        answer = json.dumps({"status": "stored", "sequence": sequence}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for order in self.server.orders:
                self.wfile.write(encode_line(order))
            while not self.server.closing.wait(PING_SECONDS):
                self.wfile.write(encode_line(Ping(time.time_ns())))
        except OSError:  # the agent has disconnected
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing: a line per batch would hide all other output."""
