"""Put this folder on the import path, for `synthetic_trace` and `played_run`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
