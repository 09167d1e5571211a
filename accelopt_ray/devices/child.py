"""Child processes that end: run a function in a process of its own, within limits, and be sure it is gone afterwards.

:func:`run_child` calls ``module:function(argument: bytes) -> bytes`` in a fresh worker process (see
:mod:`accelopt_ray.devices.launcher` for how it is started) and returns a typed :class:`ChildResult`. Whatever the
worker does, it is dead, with all its descendants, when the call returns, and its private folder is removed.

What holds where:

* everywhere: a session of its own, a cleaned environment, a private temporary folder, resource limits, a wall-clock
  deadline, bounded output;
* Linux: descendants are found and killed even if they left the session; a watch on the memory of all of them together;
* Linux with unprivileged user namespaces: no network, no view of other processes, temporary files in a memory file
  system of bounded size, and the kernel itself kills everything when the first process ends;
* Linux with seccomp (x86-64, arm64): no second process and no other program can be started;
* Linux with Landlock: nothing readable but Python and the given paths, nothing writable but the private folder;
* macOS has none of these; a confined child is then isolated by session, limits and environment only.

:func:`accelopt_ray.devices.protections.protections` measures which of these are active.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accelopt_ray.devices import confinement
from accelopt_ray.devices.launcher import FRAME_ANSWER, FRAME_EXCEPTION, FRAME_MEMORY, descendants
from accelopt_ray.devices.launching import LAUNCHER, LauncherLostError
from accelopt_ray.devices.processes import proportional_bytes, resident_bytes, session_of
from accelopt_ray.devices.protocol import Limits
from accelopt_ray.outcome import StrEnum

_POLL_S = 0.02
_GRACE_S = 10.0
_CONFINED_FOLDER_BYTES = 256 << 20
_CONFINED_PROCESSES = 64
_CONFINED_FILES = 256
_TOOLCHAIN_PROCESSES = 512
_TOOLCHAIN_FILE_BYTES = 16 << 30


class ChildEnd(StrEnum):
    """How a child ended."""

    ANSWERED = "answered"
    RAISED = "raised"
    TIMEOUT = "timeout"
    MEMORY_LIMIT = "memory_limit"
    CRASHED = "crashed"


class ChildError(RuntimeError):
    """The harness itself could not start or supervise a child; a retry, possibly elsewhere, may succeed."""


@dataclass(frozen=True)
class ChildTask:
    """What to run and how far it may reach.

    Attributes:
        target: ``module:function``; the function takes and returns bytes.
        argument: Its argument.
        confined: Whether the code that runs is untrusted: no network, no files, no other processes, as far as the
            operating system allows.
        import_paths: Folders to add to the worker's ``sys.path``; with a toolchain, the whole of it.
        readable: Paths a confined worker may read besides Python itself.
        max_answer_bytes: Longest answer that is accepted.
        mapped_bytes: Files that the target will map, which do not count as its memory.
        toolchain: Whether a confined worker needs a compiler and a driver: it may start programs, map any range of
            addresses and use ``writable``; the network, foreign files and lingering processes stay out of reach.
        writable: Paths that a worker with a toolchain may write besides its private folder.
        environment: Variables to set in the worker.
    """

    target: str
    argument: bytes = b""
    confined: bool = False
    import_paths: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    max_answer_bytes: int = 256 << 20
    mapped_bytes: int = 0
    toolchain: bool = False
    writable: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChildResult:
    """How a child ended and what it left.

    Attributes:
        end: How it ended.
        answer: What the target returned, when ``end`` is ``answered``.
        detail: For every other end, what happened, in words (a traceback when it raised).
        output: What it printed, at most ``Limits.output_bytes``.
        output_truncated: Whether it printed more.
        wall_s: From dispatch to the end of the last process.
        peak_memory_bytes: Largest resident memory seen, of the worker or of all processes together.
        stragglers: Processes that were still alive when the worker ended.
        protections: Which confinement was in force.
    """

    end: ChildEnd
    answer: bytes = b""
    detail: str = ""
    output: str = ""
    output_truncated: bool = False
    wall_s: float = 0.0
    peak_memory_bytes: int = 0
    stragglers: int = 0
    protections: Mapping[str, bool] = field(default_factory=dict)


def run_child(task: ChildTask, limits: Limits) -> ChildResult:
    """Runs a task in a process of its own and returns when it and all its descendants are gone.

    Args:
        task: What to run.
        limits: Wall time from now, memory of all processes together, output to keep.

    Raises:
        ChildError: If no child could be started at all.
    """
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="accelopt-ray-"))
    try:
        for attempt in range(2):
            try:
                return _Supervision(task, limits, folder, started).run()
            except LauncherLostError as lost:
                LAUNCHER.discard()
                if attempt == 1:
                    raise ChildError(f"no child process could be started: {lost}") from lost
        raise AssertionError("unreachable")
    finally:
        _remove_folder(folder)


class _Supervision:
    """The parent's side of one child: sends the request, watches, collects."""

    def __init__(self, task: ChildTask, limits: Limits, folder: Path, started: float) -> None:
        self._task = task
        self._limits = limits
        self._folder = folder
        self._started = started
        self._output = bytearray()
        self._output_truncated = False
        self._messages = bytearray()
        self._status: dict[str, int | bool] = {}
        self._peak_bytes = 0
        self._known: set[int] = set()
        self._too_many_processes = False
        self._verdict: ChildEnd | None = None

    def run(self) -> ChildResult:
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        with ours, theirs, tempfile.TemporaryFile() as argument, tempfile.TemporaryFile() as result:
            try:
                argument.write(self._task.argument)
                argument.flush()
                try:
                    LAUNCHER.send(self._request(), [theirs.fileno(), argument.fileno(), result.fileno(), output_write])
                finally:
                    os.close(output_write)
                    theirs.close()
                self._watch(ours, output_read)
                return self._conclude(result.fileno())
            finally:
                os.close(output_read)

    def _request(self) -> bytes:
        confined, toolchain = self._task.confined, self._task.toolchain
        single_threaded = confined and not toolchain
        cpu_s = int(self._limits.timeout_s * (1 if single_threaded else os.cpu_count() or 1)) + 5
        resources: list[tuple[str, int]] = [("RLIMIT_CPU", cpu_s), ("RLIMIT_CORE", 0)]
        if toolchain:
            # A driver maps ranges far beyond what is used; the memory watch counts what is.
            resources.append(("RLIMIT_FSIZE", _TOOLCHAIN_FILE_BYTES))
        else:
            address_space = self._limits.memory_bytes + self._task.mapped_bytes + LAUNCHER.address_space_bytes()
            resources.append(("RLIMIT_AS", address_space))
        if single_threaded:
            largest_file = max(_CONFINED_FOLDER_BYTES, self._task.max_answer_bytes)
            resources += [("RLIMIT_FSIZE", largest_file), ("RLIMIT_NOFILE", _CONFINED_FILES)]
            if confinement.available()["namespaces"]:
                # Counted within the namespace; elsewhere the limit would count all of the user's processes.
                resources.append(("RLIMIT_NPROC", _CONFINED_PROCESSES))
        return json.dumps(
            {
                "target": self._task.target,
                "confined": confined,
                "namespaces": single_threaded and confinement.available()["namespaces"],
                "network": confined and toolchain and confinement.available()["namespaces"],
                "landlock": confined and confinement.available()["landlock"],
                "seccomp": single_threaded and confinement.available()["seccomp"],
                "toolchain": toolchain,
                "writable": list(self._task.writable),
                "environment": dict(self._task.environment),
                "folder": str(self._folder),
                "folder_bytes": _CONFINED_FOLDER_BYTES,
                "import_paths": list(self._task.import_paths),
                "readable": [*confinement.python_paths(), *self._task.readable],
                "resources": resources,
            }
        ).encode()

    def _watch(self, control: socket.socket, output: int) -> None:
        control.setblocking(False)
        os.set_blocking(output, False)
        deadline = self._started + self._limits.timeout_s
        give_up = float("inf")
        next_look = 0.0
        # Not select(): a busy service has more descriptors than that can name.
        selector = selectors.DefaultSelector()
        selector.register(control, selectors.EVENT_READ)
        selector.register(output, selectors.EVENT_READ)
        listening = True
        while listening:
            now = time.monotonic()
            if self._verdict is None:
                if now >= deadline:
                    self._verdict = ChildEnd.TIMEOUT
                elif now >= next_look:
                    next_look = now + _POLL_S
                    self._verdict = self._look()
                if self._verdict is not None:
                    control.shutdown(socket.SHUT_WR)
                    give_up = now + _GRACE_S
            if now >= give_up:
                break
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is control:
                    listening = self._hear(control)
                elif not self._drain(output):
                    selector.unregister(output)
        selector.close()
        self._drain(output)
        self._kill_known()

    def _hear(self, control: socket.socket) -> bool:
        try:
            part = control.recv(65536)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self._messages += part
        while b"\n" in self._messages:
            line, _, rest = bytes(self._messages).partition(b"\n")
            self._messages = bytearray(rest)
            self._status.update(json.loads(line))
        return bool(part)

    def _drain(self, output: int) -> bool:
        # A flood is read and dropped, so that the writer is never blocked for ever, but in bounded portions, so that
        # the deadline is looked at in between.
        for _ in range(16):
            try:
                part = os.read(output, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            room = self._limits.output_bytes - len(self._output)
            self._output += part[:room]
            self._output_truncated = self._output_truncated or len(part) > room
        return True

    def _look(self) -> ChildEnd | None:
        """Looks at the living processes and says which of their bounds is passed, if any."""
        supervisor = int(self._status.get("pid", 0))
        if not supervisor:
            return None
        living = descendants(supervisor)
        self._known |= living
        if self._task.confined and len(living) > self._most_processes:
            self._too_many_processes = True
            return ChildEnd.CRASHED
        total = sum(map(resident_bytes, living))
        if total > self._limits.memory_bytes:
            # Pages that forked processes share were counted once for each; the exact figure takes longer to get.
            total = sum(map(proportional_bytes, living))
        self._peak_bytes = max(self._peak_bytes, total)
        return ChildEnd.MEMORY_LIMIT if total > self._limits.memory_bytes else None

    @property
    def _most_processes(self) -> int:
        return _TOOLCHAIN_PROCESSES if self._task.toolchain else _CONFINED_PROCESSES

    def _kill_known(self) -> None:
        """Ends what survived its supervisor, which only happens if that was killed from inside an unconfined child."""
        supervisor = int(self._status.get("pid", 0))
        if not supervisor or "exit_code" in self._status:
            return
        for pid in (supervisor, *descendants(supervisor), *self._known):
            if session_of(pid) == supervisor or pid == supervisor or pid in descendants(supervisor):
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    def _conclude(self, result: int) -> ChildResult:
        status = self._status
        if "pid" not in status and self._verdict is None:
            raise LauncherLostError("the launcher ended")
        end, answer, detail = self._read_end(result)
        return ChildResult(
            end=end,
            answer=answer,
            detail=detail,
            output=self._output.decode(errors="replace"),
            output_truncated=self._output_truncated,
            wall_s=time.monotonic() - self._started,
            peak_memory_bytes=max(self._peak_bytes, int(status.get("max_rss_bytes", 0))),
            stragglers=int(status.get("stragglers", 0)),
            protections={
                "namespaces": bool(status.get("namespaces", False)),
                "landlock": self._task.confined and confinement.available()["landlock"],
                "seccomp": self._task.confined and not self._task.toolchain and confinement.available()["seccomp"],
            },
        )

    def _read_end(self, result: int) -> tuple[ChildEnd, bytes, str]:
        if self._verdict is ChildEnd.TIMEOUT:
            return ChildEnd.TIMEOUT, b"", f"stopped after {self._limits.timeout_s:g} s"
        memory_text = f"used more than {self._limits.memory_bytes / 2**20:.0f} MiB of memory"
        if self._verdict is ChildEnd.MEMORY_LIMIT:
            return ChildEnd.MEMORY_LIMIT, b"", memory_text
        if self._too_many_processes:
            return ChildEnd.CRASHED, b"", f"started more than {self._most_processes} processes"
        if "exit_code" not in self._status:
            return ChildEnd.CRASHED, b"", "ended together with its supervising process"
        code = int(self._status["exit_code"])
        if code < 0:
            name = _signal_name(-code)
            if name == "SIGXCPU":
                return ChildEnd.TIMEOUT, b"", f"stopped after more than {self._limits.timeout_s:g} s of processor time"
            return ChildEnd.CRASHED, b"", f"ended by signal {name}"
        size = os.fstat(result).st_size
        if size == 0 or code != 0:
            return ChildEnd.CRASHED, b"", f"ended with exit code {code} and without a result"
        if size > self._task.max_answer_bytes:
            text = f"wrote a result of {size} bytes, more than the {self._task.max_answer_bytes} allowed"
            return ChildEnd.CRASHED, b"", text
        frame = os.pread(result, size, 0)
        kind, body = frame[:1], frame[1:]
        if kind == FRAME_ANSWER:
            return ChildEnd.ANSWERED, body, ""
        if kind == FRAME_MEMORY:
            return ChildEnd.MEMORY_LIMIT, b"", memory_text
        if kind == FRAME_EXCEPTION:
            return ChildEnd.RAISED, b"", body.decode(errors="replace")
        return ChildEnd.CRASHED, b"", "wrote a result that cannot be read"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # something in there was made unreadable
        for root, names, _ in os.walk(folder):
            for name in names:
                os.chmod(os.path.join(root, name), stat.S_IRWXU)
        shutil.rmtree(folder, ignore_errors=True)
