"""A node to measure the agent on: emulated GPUs, the InfiniBand tree of a real node, a sink.

with FakeNode() as node, Sink() as sink:
    with node.agent(sink.url) as agent:
        ...
"""

from benchmarks.node.fake import FakeNode, free_port
from benchmarks.node.processes import Family, RunningProcess
from benchmarks.node.sink import Sink

__all__ = ["FakeNode", "Family", "RunningProcess", "Sink", "free_port"]
