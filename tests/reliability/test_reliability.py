"""The reliability campaign; it takes about an hour and a half and writes `docs/reliability.md`."""

from __future__ import annotations

import pytest

from tests.reliability import report
from tests.reliability.run import campaign
from tests.reliability.trial import is_good


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_every_fault_is_recovered_or_rightly_left_alone() -> None:
    results = campaign()
    report.write(results)
    assert len(results) >= 125
    assert [result for result in results if not is_good(result)] == []
