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

import atexit
import json
import os
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import accelopt_ray
from accelopt_ray.devices import confinement
from accelopt_ray.devices.launcher import FRAME_ANSWER, FRAME_EXCEPTION, FRAME_MEMORY, HEADER, descendants
from accelopt_ray.devices.protocol import Limits
from accelopt_ray.outcome import StrEnum

_POLL_S = 0.02
_GRACE_S = 10.0
_CONFINED_FOLDER_BYTES = 256 << 20
_CONFINED_PROCESSES = 64
_CONFINED_FILES = 256
_TOOLCHAIN_PROCESSES = 512
_TOOLCHAIN_FILE_BYTES = 16 << 30
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
            except _LauncherLost as lost:
                _launcher.discard()
                if attempt == 1:
                    raise ChildError(f"no child process could be started: {lost}") from lost
        raise AssertionError("unreachable")
    finally:
        _remove_folder(folder)


class _LauncherLost(Exception):
    """The launcher ended before it acted on a request."""


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
                    _launcher.send(self._request(), [theirs.fileno(), argument.fileno(), result.fileno(), output_write])
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
            address_space = self._limits.memory_bytes + self._task.mapped_bytes + _launcher.address_space_bytes()
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
        total = sum(map(_resident_bytes, living))
        if total > self._limits.memory_bytes:
            # Pages that forked processes share were counted once for each; the exact figure takes longer to get.
            total = sum(map(_proportional_bytes, living))
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
            if _session_of(pid) == supervisor or pid == supervisor or pid in descendants(supervisor):
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    def _conclude(self, result: int) -> ChildResult:
        status = self._status
        if "pid" not in status and self._verdict is None:
            raise _LauncherLost("the launcher ended")
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


class _Launcher:
    """This process's launcher, started on first use; safe to use from several threads and after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def send(self, body: bytes, descriptors: Sequence[int]) -> None:
        with self._lock:
            if self._socket is None or self._owner != os.getpid():
                self._start()
            assert self._socket is not None
            try:
                socket.send_fds(self._socket, [HEADER.pack(len(body))], descriptors)
                self._socket.sendall(body)
            except OSError as error:
                raise _LauncherLost(str(error)) from error

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


_launcher = _Launcher()
atexit.register(_launcher.discard)


def _resident_bytes(pid: int) -> int:
    """Memory that is the process's own: mapped tensor files do not count, they can be dropped at any time."""
    return _sum_fields(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmSwap:"))


def _proportional_bytes(pid: int) -> int:
    """As :func:`_resident_bytes`, each shared page divided by the number of processes that share it."""
    return _sum_fields(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))


def _sum_fields(path: str, fields: tuple[str, ...]) -> int:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(fields))
    except OSError:  # the process has ended
        return 0


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0


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
