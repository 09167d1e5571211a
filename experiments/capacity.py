"""Measures where the machinery of sweeps saturates: ``python -m experiments.capacity``.

Models answer at once and evaluations do nothing, so what is left is drivers, recorders and the pool. Prints evaluations
and calls a second for one run and for several in one process; at the published sizes, one run on real cores asks for
144 evaluations an iteration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.sweep.file import load_sweep
from accelopt_ray.sweep.folder import SweepFolder
from actors.cluster import connected
from actors.sweep import SweepSession

SIZES = {"iterations": 2, "beam_width": 6, "plans_per_candidate": 12, "attempts_per_plan": 2, "use_memory": False}


class NoWork:
    """Evaluates nothing; every kernel is correct and takes its number of nanoseconds."""

    def __call__(self, job: EvaluationJob) -> EvaluationResult:
        return EvaluationResult(
            job.evaluation_id,
            EvaluationOutcome.CORRECT,
            device=job.device,
            simulated=True,
            check=job.check,
            latency_ms=1.0,
        )


@contextmanager
def instant_model() -> Iterator[str]:
    """Serves a model that writes a new kernel at once."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            text = f"Plan.\n\n```python\nX = {next(numbers)}\n\ndef kernel(x):\n    return x\n```\n"
            message = {"role": "assistant", "content": text}
            data = json.dumps(
                {
                    "id": "x", "object": "chat.completion", "created": 0, "model": "m",
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
                }
            ).encode()  # fmt: skip
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


def main() -> int:
    """Prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=2, help="profilers that do nothing")
    arguments = parser.parse_args()
    with instant_model() as base_url, connected(arguments.slots) as cluster, tempfile.TemporaryDirectory() as name:
        models = {"default": {"base_url": base_url, "model": "m"}}
        base = {"task": "silu", "shape": {"M": 256, "N": 2048}, "search": SIZES, "models": models}
        for concurrent in (1, 4):
            path = Path(name) / "sweep.yaml"
            content = {"name": f"capacity-{concurrent}", "base": base, "grid": {"seed": list(range(concurrent))}}
            path.write_text(yaml.safe_dump({**content, "concurrent_runs": concurrent}), encoding="utf-8")
            sweep = load_sweep(path)
            folder = SweepFolder(Path(name) / sweep.name)
            folder.claim(sweep)
            session = SweepSession(sweep, sweep.runs, folder, cluster, lambda _: None, make_evaluator=NoWork)
            started = time.monotonic()
            session.run()
            elapsed_s = time.monotonic() - started
            outcomes = [each for state in session.states.values() if state for each in state.outcomes]
            evaluations, calls = sum(each.evaluations for each in outcomes), sum(each.calls for each in outcomes)
            print(
                f"{concurrent} runs in one process, {arguments.slots} profilers: {evaluations} evaluations "
                f"and {calls} calls in {elapsed_s:.1f} s (start included): {evaluations / elapsed_s:.1f} and "
                f"{calls / elapsed_s:.1f} a second",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
