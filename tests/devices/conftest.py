"""Makes the stand-in toolchain importable for the tests of devices."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "standin"))
