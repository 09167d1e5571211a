"""The parent's end of the launcher: starting :mod:`accelopt_ray.devices.launcher` and handing requests to it."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import accelopt_ray
from accelopt_ray.devices.launcher import HEADER

_GRACE_S = 10.0
_PRELOAD = (
    "numpy",
    "ml_dtypes",
    "accelopt_ray.nki_sim.serialize",
    "accelopt_ray.nki_sim.tracer",
    "accelopt_ray.nki_sim.validate",
    "accelopt_ray.nki_sim.numerics",
    "accelopt_ray.nki_sim.cost",
    "accelopt_ray.devices.simulator_worker",
)
# Nothing else of the parent's environment reaches a child: no keys, no tokens, no proxy settings.
# The loader reads LD_LIBRARY_PATH when a process starts, so it cannot be given to a worker later.
_ENVIRONMENT_NAMES = (
    "PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH",
)  # fmt: skip


class LauncherLostError(Exception):
    """The launcher ended before it acted on a request."""


class Launcher:
    """This process's launcher, started on first use; safe to use from several threads and after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def send(self, body: bytes, descriptors: Sequence[int]) -> None:
        """Hands a request and its files over.

        Raises:
            LauncherLostError: The launcher has ended.
        """
        with self._lock:
            if self._socket is None or self._owner != os.getpid():
                self._start()
            assert self._socket is not None
            try:
                socket.send_fds(self._socket, [HEADER.pack(len(body))], descriptors)
                self._socket.sendall(body)
            except OSError as error:
                raise LauncherLostError(str(error)) from error

    def discard(self) -> None:
        """Ends the launcher; the next request starts a new one."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            if self._process is not None and self._owner == os.getpid():
                try:
                    self._process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._socket = self._process = None

    def address_space_bytes(self) -> int:
        """Virtual memory that every child starts with, which an address-space limit must leave room for."""
        if self._process is None:
            return 1 << 30
        try:
            with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as statm:
                return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 1 << 30

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(accelopt_ray.__file__).resolve().parent.parent)
        paths = list(dict.fromkeys([root, *(path for path in sys.path if path)]))
        program = (
            "import sys; sys.path[:] = sys.argv[2].split(chr(10));"
            "import socket; from accelopt_ray.devices import launcher;"
            "launcher.serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3].split(','))"
        )
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        environment = {name: os.environ[name] for name in _ENVIRONMENT_NAMES if name in os.environ}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": threads}
        environment.setdefault("OPENBLAS_NUM_THREADS", threads)
        with theirs:
            self._process = subprocess.Popen(
                # -S and -s: no site customisation runs, so that the start is quick and the same everywhere.
                [sys.executable, "-S", "-s", "-c", program, str(theirs.fileno()), "\n".join(paths), ",".join(_PRELOAD)],
                env=environment,
                cwd=tempfile.gettempdir(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket, self._owner = ours, os.getpid()


LAUNCHER = Launcher()
"""The one of this process."""

atexit.register(LAUNCHER.discard)
