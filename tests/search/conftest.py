from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine is no failure: examples have no deadline.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
