"""Stand-in for the generation-A compiler: the simulator's modules, with a ``baremetal`` that writes files."""

import sys
from pathlib import Path

from accelopt_ray.nki_sim import modules

sys.path.append(str(Path(__file__).parent / "nki"))
from standin_baremetal import baremetal

_shims = modules.build()
_shims["neuronxcc.nki"].baremetal = baremetal
sys.modules.update(_shims)
