"""The JSON file of an evaluation, from which a later run with the same options continues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
from pydantic import TypeAdapter, ValidationError

Results = TypeVar("Results")
_INTERVAL_SECONDS = 10.0  # between two writes: a campaign may have thousands of short trials


@dataclass(slots=True)
class ResultsFile(Generic[Results]):
    """Figures and finished trials of a campaign.

    Args:
        path: of the file to write; None: nothing is written.
        campaign: what decides which trials there are: the options, and what cannot run here.
        trials: the type of the finished trials.
    """

    path: Path | None
    campaign: dict[str, Any]
    trials: TypeAdapter[Results]
    _due_seconds: float = 0.0

    def content(self, figures: dict[str, Any], trials: Results) -> dict[str, Any]:
        """Return the figures with what `read` needs."""
        finished = self.trials.dump_python(trials, mode="json")
        return {**figures, "campaign": self.campaign, "finished": finished}

    def write_part(self, content: Callable[[], dict[str, Any]]) -> None:
        """Write the file so far, at most once in _INTERVAL_SECONDS: the run may be killed."""
        now = time.monotonic()
        if self.path is not None and self._is_replaceable(self.path) and now >= self._due_seconds:
            self.write(content())
            self._due_seconds = now + _INTERVAL_SECONDS

    def write(self, content: dict[str, Any]) -> None:
        if self.path is None:
            return
        text = json.dumps(content, indent=2) + "\n"
        if not self._is_replaceable(self.path):
            self.path.write_text(text)
            return
        path = self.path.resolve()
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        new.replace(path)

    @staticmethod
    def _is_replaceable(path: Path) -> bool:
        """Return whether it is no device or pipe."""
        return path.is_file() or not path.exists()

    def read(self, path: Path) -> Results:
        """Return the finished trials in a file of the same campaign.

        Raises:
            click.BadParameter: the file has none, or those of another campaign.
        """
        try:
            content = json.loads(path.read_bytes())
            campaign = dict(content["campaign"])
        except (ValueError, TypeError, KeyError):
            raise _refused(f"expected the JSON that --output wrote; {path} has none") from None
        for name, expected in self.campaign.items():
            if (found := campaign.get(name)) != expected:
                raise _refused(
                    f"expected a run with {name.replace('_', ' ')} {_text(expected)}; "
                    f"that of {path} has {_text(found)}"
                )
        try:
            return self.trials.validate_python(content.get("finished"))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("finished", *first["loc"])))
            raise _refused(
                f"expected trials as this version writes them; in {path} {place}: {first['msg']}"
            ) from None


def _refused(reason: str) -> click.BadParameter:
    return click.BadParameter(reason, param_hint="--continue")


def _text(value: Any) -> str:
    return (", ".join(map(str, value)) or "nothing") if isinstance(value, list) else str(value)
