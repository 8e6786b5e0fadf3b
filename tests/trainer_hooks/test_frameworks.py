"""An adapter is attached once its framework has been imported, whatever goes wrong."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_autostart import frameworks

FRAMEWORK = """
events = [__spec__.loader is __loader__]
"""
ADAPTER = """
def attach(module):
    module.events.append("attached")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules; `some_framework` and its adapter `some_adapter` are in it."""
    (tmp_path / "some_framework.py").write_text(FRAMEWORK)
    (tmp_path / "some_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(frameworks, "ADAPTERS", {"some_framework": "some_adapter"})
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("some_framework", "some_adapter"):
        sys.modules.pop(name, None)


def test_attached_after_its_framework_has_run(folder: Path) -> None:
    frameworks.watch()
    assert "some_adapter" not in sys.modules
    framework = importlib.import_module("some_framework")
    assert framework.events == [True, "attached"]
    assert framework.__spec__.loader is framework.__loader__
    assert type(framework.__loader__).__name__ == "SourceFileLoader"


def test_attached_to_a_framework_that_is_loaded_already(folder: Path) -> None:
    framework = importlib.import_module("some_framework")
    frameworks.watch()
    assert framework.events == [True, "attached"]


@pytest.mark.parametrize("source", ["import missing_module", "def attach(module): 1 / 0", "x ="])
def test_an_adapter_that_fails_leaves_the_framework_alone(
    folder: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "some_adapter.py").write_text(source)
    frameworks.watch()
    with caplog.at_level(logging.WARNING):
        assert importlib.import_module("some_framework").events == [True]
    assert len(caplog.records) == 1


def test_a_framework_that_is_not_installed_or_fails_does_so_as_before(folder: Path) -> None:
    (folder / "some_framework.py").unlink()
    frameworks.watch()
    with pytest.raises(ModuleNotFoundError, match="some_framework"):
        importlib.import_module("some_framework")
    (folder / "some_framework.py").write_text("1 / 0")
    importlib.invalidate_caches()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("some_framework")


@pytest.mark.parametrize("factory", [frameworks.lightning_callbacks, frameworks.fabric_callbacks])
def test_a_factory_that_fails_returns_no_callback(
    factory: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "paceline.integrations.lightning", None)
    monkeypatch.setitem(sys.modules, "paceline.integrations.fabric", None)
    assert callable(factory)
    assert factory() == []
    assert len(caplog.records) == 1
