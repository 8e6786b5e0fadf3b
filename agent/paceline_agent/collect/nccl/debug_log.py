"""A rank's log with NCCL_DEBUG set: version, network, transports, algorithms, warnings.

Formats: NCCL's src/init.cc, src/transport.cc, src/transport/{p2p,shm,net}.cc and src/enqueue.cc of
2.18 to 2.29.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_DEVICES = re.compile(r"NCCL INFO NET/(\w+) : Using (\[\d+\].*?)(?: ;|$)")
_DEVICE = re.compile(r"\[\d+\](?!=) ?([^ :]+)")  # a card with two ports: `[0]={[0] a:1, [1] b:1}`
_CHANNEL = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? : .* via ([^\n]+)")
_CONNECTED = re.compile(r"NCCL INFO Connected (?:all )?(ring|tree|NVLS|CollNet|PAT)")
_ALGORITHM = re.compile(r"\b(\w{1,40}): \d+ Bytes -> Algo (\w{1,40}) proto (\w{1,40})")
# Since 2.27, for buffers that are registered equally on all ranks; src/scheduler/symmetric_sched.cc
_SYMMETRIC = re.compile(r"\b(\w{1,40}) \[Symmetric\]: \d+ Bytes -> Kernel [A-Za-z]+_(\w{1,40})")
_WARNING = re.compile(r"NCCL WARN (.*)")
_ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")
_KINDS_AT_MOST = 32
_TEXT_CHARACTERS = 200
# NCCL's lines have 1024 at most. A script can write any line, and `re` blocks all threads.
_LINE_CHARACTERS = 2048

K = TypeVar("K")


@dataclass(slots=True)
class DebugLog:
    """The parsed part of a log. `connections`: channels by transport; `algorithms`: launches.

    `warnings` counts all warnings; `news` holds those since it was last emptied.
    """

    version: str | None = None
    network: str | None = None
    devices: tuple[str, ...] = ()
    graphs: set[str] = field(default_factory=set)  # ring, tree, ...
    connections: Counter[str] = field(default_factory=Counter)
    algorithms: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    warnings: int = 0
    news: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        line = line[:_LINE_CHARACTERS]
        if "NCCL" not in line:
            return
        if match := _CHANNEL.search(line):
            _count(self.connections, transport_of(match[1]))
        elif match := _ALGORITHM.search(line):
            chosen = _named(match[2], _ALGORITHMS), _named(match[3], _PROTOCOLS)
            _count(self.algorithms, (match[1], *chosen))
        elif match := _SYMMETRIC.search(line):
            _count(self.algorithms, (match[1], "symmetric", match[2].lower()))
        elif match := _WARNING.search(line):
            self.warnings += 1
            self.news = [*self.news[-8:], match[1][:_TEXT_CHARACTERS]]
        elif match := _CONNECTED.search(line):
            self.graphs.add(match[1].lower())
        elif match := _NETWORK.search(line):
            self.network = match[1].strip()[:40]
        elif match := _DEVICES.search(line):
            self.devices = tuple(_DEVICE.findall(match[2]))
        elif match := _VERSION.search(line):
            self.version = match[1]


def transport_of(via: str) -> str:
    """Return NET/IB/GDRDMA for `NET/IB/3/GDRDMA`, P2P/CUMEM for `P2P/CUMEM/read`."""
    parts = [part for part in via.strip().split("/") if not re.match(r"\d", part)]
    kept = parts[:1] if parts[:1] == ["SHM"] else parts[:2]
    if kept[:1] == ["NET"]:
        kept += [part for part in parts[2:] if part.startswith("GDR")][:1]
    return "/".join(part.split("(")[0].strip() for part in kept)[:40]


def _named(word: str, names: tuple[str, ...]) -> str:
    """Return the name of a choice, which older versions write as a number."""
    if word.isdecimal():
        return names[int(word)] if int(word) < len(names) else word
    return word.lower()


def _count(counter: Counter[K], key: K) -> None:
    if key in counter or len(counter) < _KINDS_AT_MOST:
        counter[key] += 1
