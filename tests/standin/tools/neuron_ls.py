"""Stand-in for ``neuron-ls --json-output``; ``nc_count`` is the field that Ray's detection of NeuronCores reads."""

import json
import sys
from pathlib import Path

script = json.loads((Path(__file__).parent / "behaviour.json").read_text())
if sys.argv[1:] != ["--json-output"]:
    sys.exit(2)
if script["neuron_ls"] == "no_driver":
    print("neuron-ls: no neuron device found", file=sys.stderr)
    sys.exit(1)
print(json.dumps([{"neuron_device": 0, "nc_count": 2, "memory_size": 34359738368, "neuron_processes": []}]))
