"""Makes the benchmarks' fake node importable from the checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
