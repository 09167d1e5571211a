"""One ``vllm serve`` process: started in a session of its own, logged to a file, ended with all it has started."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
from pathlib import Path

from accelopt_ray.outcome import UserError
from accelopt_ray.serving.command import serve_command, serve_environment
from accelopt_ray.serving.model import HostedModel

_PR_SET_PDEATHSIG = 1
_TERMINATION_S = 20.0
_LOG_TAIL_BYTES = 4000


def free_port(host: str) -> int:
    """Returns a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A model's server as a child of this process."""

    def __init__(self, model: HostedModel, log: Path, host: str = "127.0.0.1") -> None:
        """Prepares; nothing is started.

        Args:
            model: What to serve.
            log: File that its output is added to.
            host: Address that it listens on.
        """
        self._model = model
        self._log = log
        self._host = host
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def base_url(self) -> str:
        """Where it answers, the same from its first start on."""
        return f"http://{self._host}:{self._port}/v1"

    async def start(self) -> None:
        """Starts the command; it is not ready yet.

        The child is asked to end should this process die without a word. The kernel ties that to the thread that
        starts it, so call this from a thread that lives as long as the process.

        Raises:
            UserError: The command does not exist or may not be run.
        """
        self._port = self._port or free_port(self._host)
        command = serve_command(self._model, self._port, self._host)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=serve_environment(self._model, os.environ),
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            except OSError as error:
                raise UserError(
                    f"cannot start {self._model.executable} for the model {self._model.name} ({error.strerror}): "
                    "install vllm on the node, or name the command as executable"
                ) from None

    async def loading(self) -> str | None:
        """Nothing: the server listens once its model is loaded."""
        return None

    def failure(self) -> str | None:
        """Why it has ended, in one sentence, or None while it runs."""
        if self._process is None:
            return f"the server of {self._model.name} has not been started"
        code = self._process.returncode
        if code is None:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the server of {self._model.name} {how}: {self._last_line()} (see {self._log})"

    async def stop(self) -> None:
        """Ends it and everything in its session, by force if it does not follow."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _TERMINATION_S)
        # Engine processes may outlive the server that started them.
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def _last_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def _end_with_parent() -> None:
    if os.name == "posix" and os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
