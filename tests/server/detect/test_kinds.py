"""The kinds of findings are defined once, and every side knows the same ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from paceline_server.api.verdict import JobVerdict
from paceline_server.detect import kinds
from paceline_server.detect.causes.catalog import CAUSES
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Finding, FindingDetails
from paceline_server.detect.kinds import KINDS, Kind
from paceline_server.detect.registry import detector_classes

ROOT = Path(__file__).parents[3]


def test_every_kind_has_one_row():
    rows = [value for value in vars(kinds).values() if isinstance(value, Kind)]
    assert len({kind.name for kind in rows}) == len(rows)
    assert {kind.name: kind for kind in rows} == KINDS


def test_kinds_are_those_that_detectors_emit():
    emitted = {kind for detector in detector_classes() for kind in detector.kinds}
    assert emitted == set(KINDS.values())


@pytest.mark.parametrize("detector", detector_classes(), ids=lambda each: each.__name__)
def test_a_detector_names_its_kinds_in_its_docstring(detector: type[Detector]):
    assert all(f"`{kind.name}`" in (detector.__doc__ or "") for kind in detector.kinds)


def test_no_detector_makes_findings_but_by_its_own_method():
    """Otherwise a kind without a row could be emitted."""
    for path in (ROOT / "server/paceline_server/detect").glob("*/**/*.py"):
        names = [
            node.func.id
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        assert "Finding" not in names, path


def test_what_a_kind_explains_is_a_kind():
    assert {name for kind in KINDS.values() for name in kind.explains} <= set(KINDS)


def test_priors_of_causes_are_of_kinds():
    assert {kind for info in CAUSES.values() for kind in info.priors} <= set(KINDS)


def test_the_web_page_knows_no_verdict_that_the_server_never_sends():
    source = (ROOT / "web/src/tone.ts").read_text(encoding="utf-8")
    (switch,) = re.findall(r"switch \(verdict\.kind\) \{(.*?)\n  \}", source, re.DOTALL)
    cases = set(re.findall(r'case "(\w+)"', switch))
    assert cases
    assert cases <= {*get_args(JobVerdict), *KINDS}


def test_details_are_the_optional_fields_of_a_finding():
    required = {"kind", "cause", "fingerprint", "summary", "detected_ns", "generation"}
    later = {"cleared", "dumps_reported"}  # never set in a new finding
    assert set(Finding.__struct_fields__) - required - later == set(FindingDetails.__annotations__)


def test_stored_findings_keep_the_name_of_a_renamed_field():
    encoded = {field.encode_name for field in msgspec.structs.fields(Finding)}
    assert "dumps_told" in encoded
    assert encoded - {"dumps_told"} == set(Finding.__struct_fields__) - {"dumps_reported"}
