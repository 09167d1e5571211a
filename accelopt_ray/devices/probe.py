"""Tries, from inside a confined child, what the sandbox should prevent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable


def probe(argument: bytes) -> bytes:
    """Reports for each protection whether it held.

    Args:
        argument: JSON with ``environment`` (name of a variable that only the parent has), ``file`` (a path outside the
            allowed ones) and ``pid`` (the parent's).

    Returns:
        JSON: protection name -> whether it held.
    """
    given = json.loads(argument)
    return json.dumps(
        {
            "clean_environment": given["environment"] not in os.environ,
            "no_network": _refused(_connect),
            "no_foreign_files_read": _refused(lambda: open(given["file"], "rb").close()),
            "no_foreign_files_written": _refused(lambda: _write_beside(given["file"])),
            "no_second_process": _refused(_fork),
            "no_other_programs": _refused(lambda: subprocess.run([sys.executable, "-c", ""], check=True)),
            "no_signals_to_others": _refused(lambda: os.kill(given["pid"], 0)),
        }
    ).encode()


def _refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, subprocess.SubprocessError):
        return True
    return False


def _connect() -> None:
    # A listener in this very process: needs a network, but nobody else's help.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname(), timeout=1.0).close()


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _write_beside(file: str) -> None:
    path = f"{file}.probe-{os.getpid()}"
    with open(path, "wb"):
        pass
    os.unlink(path)
