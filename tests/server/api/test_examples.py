"""The OpenAPI document has a valid example for every resource."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from paceline_server.api import schemas
from paceline_server.api.examples import EXAMPLES
from paceline_server.api.router import build


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_valid_and_complete(name: str) -> None:
    model: type[BaseModel] = getattr(schemas, name)
    shown = model.model_validate(EXAMPLES[name])
    required = {field for field, of in model.model_fields.items() if of.is_required()}
    assert required <= set(EXAMPLES[name])
    assert shown.model_dump(exclude_unset=True)


def test_every_request_and_response_has_an_example() -> None:
    described: dict[str, Any] = build(None).openapi()
    used = _references(described["paths"])
    schemas_ = described["components"]["schemas"]
    assert used
    assert [name for name in sorted(used) if "examples" not in schemas_[name]] == []


def _references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].rsplit("/", 1)[-1]} if "$ref" in node else set()
        return own.union(*(_references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(value) for value in node))
    return set()
