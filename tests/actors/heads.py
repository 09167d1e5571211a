"""Ray heads as `ray start` makes them, on ports of their own, and the command line as a user has it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
OBJECT_STORE_BYTES = 80 << 20
_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Head:
    """A head that runs.

    Attributes:
        gcs_address: For ``RAY_ADDRESS``.
        dashboard: For ``--address``.
        process: Its `ray start --block`.
    """

    gcs_address: str
    dashboard: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Ends it with all its processes at once, as the loss of its machine does."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started_head(
    folder: Path, *, cpus: int, port: int | None = None, environment: Mapping[str, str] | None = None, **options: object
) -> Iterator[Head]:
    """Starts a head and waits for its dashboard; ends it by force: `ray stop` would end every Ray here.

    Args:
        folder: Where its log goes.
        cpus: CPUs that it offers.
        port: Where it listens; any free port by default.
        environment: Variables of all its processes, besides this one's.
        options: Further options of `ray start`.
    """
    port = port or free_port()
    dashboard_port = free_port()
    stated = {
        "port": port, "dashboard-port": dashboard_port, "dashboard-agent-listen-port": free_port(),
        "metrics-export-port": free_port(), "ray-client-server-port": free_port(), "num-cpus": cpus,
        "object-store-memory": OBJECT_STORE_BYTES, "node-ip-address": "127.0.0.1", **options,
    }  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in stated.items()]
    variables = {**os.environ, "RAY_memory_monitor_refresh_ms": "0", **(environment or {})}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    variables.pop("RAY_ADDRESS", None)
    log = folder / f"head-{port}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=variables, start_new_session=True)
    head = Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", process)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _answers(f"{head.dashboard}/api/version"):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.5)
        yield head
    finally:
        if process.poll() is None:
            head.kill()


def copied_checkout(folder: Path) -> Path:
    """Makes a folder with what travels with a job, and nothing else."""
    for package in ("accelopt_ray", "actors", "nkibench"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def accelopt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``accelopt-ray sweep`` from the checkout, to its end."""
    command = [sys.executable, "-m", "accelopt_ray", "sweep", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def job_id(submitted: str) -> str:
    """The job's id from what `sweep submit` printed."""
    return submitted.split()[1]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True
