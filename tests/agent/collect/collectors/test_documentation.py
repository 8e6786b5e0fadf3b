"""docs/adding-a-collector.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline_agent.collect.collectors import discover
from paceline_agent.collect.contract import Collector

PAGE = (Path(__file__).parents[4] / "docs" / "adding-a-collector.md").read_text()


def test_every_collector_has_its_row():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) s \|", PAGE, re.MULTILINE))
    assert {name: float(seconds) for name, seconds in rows.items()} == {
        collector.name: collector.interval_seconds for collector in discover()
    }


def test_the_example_works(context, procfs, series):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "adding-a-collector.md", "exec"), namespace)
    collector_type = namespace["SwapCollector"]
    assert issubclass(collector_type, Collector)
    (procfs / "swaps").write_text(
        "Filename Type Size Used Priority\n/dev/sda2 partition 100 25 -2\n"
    )
    found = series(collector_type(context).collect(1))
    assert found == {"node_swap_used_bytes{device=/dev/sda2}": 25 * 1024}
