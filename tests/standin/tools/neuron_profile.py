"""Stand-in for ``neuron-profile``: prints the summary of a stand-in trace.

Follows ``tools/neuron-sys-tools/neuron-profile-user-guide.rst`` of aws-neuron-sdk v2.26.1: ``view -n NEFF -s NTFF
--output-format summary-json``. Every call multiplies the time by the next of the scripted factors.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

folder = Path(__file__).parent
script = json.loads((folder / "behaviour.json").read_text())
behaviour = script["profiler"]

if sys.argv[1:] == ["--version"]:
    print("neuron-profile (stand-in) 2.0")
    sys.exit(0)

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["view"])
parser.add_argument("--output-format", required=True, choices=["summary-json"])
parser.add_argument("-n", required=True)
parser.add_argument("-s", required=True)
arguments = parser.parse_args()
summary = json.loads(Path(arguments.s).read_text())
Path(arguments.n).read_bytes()

calls = folder / "profiler_calls"
count = len(calls.read_text()) if calls.exists() else 0
with calls.open("a") as stream:
    stream.write("x")
factors = script["factors"]
summary["total_time"] *= factors[count % len(factors)]

if behaviour == "crash":
    print("panic: runtime error: index out of range", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)
if behaviour == "hang":
    time.sleep(600)
if behaviour == "missing_field":
    del summary["total_time"]
if behaviour == "garbage":
    print("{not json")
    sys.exit(0)
print(json.dumps({"n0_nc0": summary}))
