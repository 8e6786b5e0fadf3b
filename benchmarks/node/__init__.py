"""A node to measure the agent on: emulated GPUs, a real node's InfiniBand tree, a server's end.

with FakeNode() as node, Sink() as sink:
    with node.agent(sink.url) as agent:
        ...
"""

from benchmarks.node.fake import FakeNode, free_port
from benchmarks.node.processes import Family, RunningProcess
from benchmarks.node.sink import Sink

__all__ = ["FakeNode", "Family", "RunningProcess", "Sink", "free_port"]
