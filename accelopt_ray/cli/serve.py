"""``accelopt-ray serve-rewriter``: the offline rewriter as a model endpoint of its own."""

from __future__ import annotations

from typing import Annotated

import typer


def serve_rewriter(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8631,
) -> None:
    """Serve the rule-based rewriter as an OpenAI-compatible chat endpoint until interrupted."""
    from accelopt_ray.rewrite.server import serve

    print(f"offline rewriter at http://{host}:{port}/v1 (Ctrl-C ends it)", flush=True)
    serve(host, port)
