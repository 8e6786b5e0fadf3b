"""Makes the benchmarks importable from the checkout: they are not part of the distribution."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
