"""Stands in for the ``vllm`` command: same options, a small chat endpoint, and whatever trouble it is told to make.

What it does stands in ``behaviour.json`` in the model's folder, a list with an entry for each start (the last one holds
for all further ones): ``start_s`` until it listens, ``exit_at_start`` a code, ``exit_after`` requests, ``hang_after``
requests (it accepts connections and never answers). Each start adds its process id to ``starts``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def handler(name: str, behaviour: dict[str, Any]) -> type[BaseHTTPRequestHandler]:
    requests = iter(range(10**9))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/models"):
                if self.server.hung:  # type: ignore[attr-defined]
                    time.sleep(3600)
                self._send({"object": "list", "data": [{"id": name, "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = next(requests)
            if number >= behaviour.get("exit_after", 10**9):
                os._exit(7)
            if number >= behaviour.get("hang_after", 10**9):
                self.server.hung = True  # type: ignore[attr-defined]
                time.sleep(3600)
            prompt = sum(len(message["content"]) for message in body["messages"]) // 4
            message = {"role": "assistant", "content": f"reply {number} of {os.getpid()}", "reasoning": "hm"}
            choices = [{"index": i, "finish_reason": "stop", "message": message} for i in range(body.get("n", 1))]
            usage = {"prompt_tokens": prompt, "completion_tokens": 8 * len(choices), "total_tokens": prompt + 8}
            common = {"id": "x", "object": "chat.completion", "created": 0, "model": name}
            self._send({**common, "choices": choices, "usage": usage})

        def _send(self, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("source", type=Path)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args()
    starts = options.source / "starts"
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    behaviours = json.loads((options.source / "behaviour.json").read_text())
    behaviour = behaviours[min(number, len(behaviours) - 1)]
    time.sleep(behaviour.get("start_s", 0.0))
    if "exit_at_start" in behaviour:
        print("CUDA out of memory", file=sys.stderr)
        sys.exit(behaviour["exit_at_start"])
    server = ThreadingHTTPServer((options.host, options.port), handler(options.served_model_name, behaviour))
    server.hung = False  # type: ignore[attr-defined]
    print("listening", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
