"""Plan and results of the micro-benchmarks; a result is one JSON object per line of stdout."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

MARK = "paceline-probe "  # marks the lines that are results, because libraries print too


class BenchmarkPlan(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[str]
    hostnames: list[str]  # to find the node number of processes that were started without one
    ranks_of_nodes: list[int]
    address: str  # address of node 0
    port: int
    backend: Literal["gloo", "nccl"]
    rounds: int  # maximum number of rounds of pairs
    bytes_at_most: int
    seconds: float  # duration of each compute measurement
    patience_seconds: float  # timeout of one group of nodes
    deadline_seconds: float  # timeout of everything, after which each process exits

    def encode(self) -> str:
        """Return the plan for a command line, without characters that a shell interprets."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @staticmethod
    def decode(text: str) -> BenchmarkPlan:
        padded = text + "=" * (-len(text) % 4)
        return _plans.decode(base64.urlsafe_b64decode(padded))

    @property
    def world_size(self) -> int:
        return sum(self.ranks_of_nodes)

    def ranks_of(self, node: int) -> range:
        first = sum(self.ranks_of_nodes[:node])
        return range(first, first + self.ranks_of_nodes[node])


_plans = msgspec.json.Decoder(BenchmarkPlan)


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag="compute"):
    """Compute speed of one GPU, or of the CPUs of a node."""

    node: str
    device: str  # "cuda:3" or "cpu"
    matmul_flops_per_second: float
    memory_bytes_per_second: float
    host_to_device_bytes_per_second: float | None = None


class Exchange(msgspec.Struct, frozen=True, kw_only=True, tag="exchange"):
    """An all-reduce among all ranks of `nodes`: one node, a pair, or the first n nodes."""

    nodes: list[str]
    kind: Literal["node", "pair", "scale"]
    latency_seconds: float | None = None  # for 8 bytes
    bus_bytes_per_second: float | None = None  # as nccl-tests counts: 2 (n-1)/n of the size
    size_bytes: int | None = None
    error: str | None = None


class Transport(msgspec.Struct, frozen=True, kw_only=True, tag="transport"):
    node: str
    network: str  # "IB", "Socket" or a plugin's name, as NCCL logs it


class FailedNode(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    node: str
    error: str


Result = Compute | Exchange | Transport | FailedNode
_decoder = msgspec.json.Decoder(Result)


def line(result: Result) -> str:
    return MARK + msgspec.json.encode(result).decode()


def parse(text: str) -> Iterator[Result]:
    """Yield the results in a launcher's output, which may prefix lines with the node."""
    for each in text.splitlines():
        _, mark, rest = each.partition(MARK)
        if mark:
            try:
                yield _decoder.decode(rest)
            except msgspec.DecodeError:  # mixed output of two processes
                continue


def pair_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, with each pair of `count` nodes once (circle method)."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        across = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in across if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def scale_steps(count: int) -> list[int]:
    """Return 2, 3, ... and `count`: the numbers of nodes at which a blocking fabric becomes
    visible."""
    return sorted({k for k in (2, 3, count) if 2 <= k <= count}) if count > 2 else []


def of_kind(results: Iterable[Result], kind: str) -> list[Exchange]:
    return [each for each in results if isinstance(each, Exchange) and each.kind == kind]
