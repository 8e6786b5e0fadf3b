"""Lets the tests here import `synthetic_trace`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
