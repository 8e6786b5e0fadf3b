"""The registry of checks: every module in `checks/` with a function `check` is one.

A check takes a `Suspect` and returns the `WeighedEvidence` for each cause that it measures. Its
`SYMPTOMS` list the metrics that it reads.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module

from paceline_server.detect.causes import checks
from paceline_server.detect.causes.suspect import Suspect
from paceline_server.detect.causes.symptom import Symptom, WeighedEvidence

Check = Callable[[Suspect], list[WeighedEvidence]]

_MODULES = [
    import_module(f"{checks.__name__}.{module.name}")
    for module in pkgutil.iter_modules(checks.__path__)
]
CHECKS: tuple[Check, ...] = tuple(module.check for module in _MODULES)
SYMPTOMS: tuple[Symptom, ...] = tuple(symptom for module in _MODULES for symptom in module.SYMPTOMS)
