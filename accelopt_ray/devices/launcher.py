"""The process that starts child processes: it has the heavy imports done once, and forks for each request.

Importing NumPy alone takes longer than tracing most kernels, and forking a large, threaded parent is unsafe. So
:mod:`accelopt_ray.devices.child` starts this single-threaded program once, with a cleaned environment, and sends it
requests over a socket. For each request three processes are made::

    launcher ── supervisor ── [first process of a namespace] ── worker

The **worker** confines itself and calls the target. The **supervisor** watches the control socket: when the parent
hangs up, by dying or because a deadline has passed, everything below is killed. Where process namespaces exist, their
first process reports how the worker ended and its own end takes all others along; elsewhere the supervisor collects
orphans itself.

Only the standard library is imported at module level, because this runs before any path is set up.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from accelopt_ray.devices import confinement, seccomp

HEADER = struct.Struct("!I")
DESCRIPTORS_PER_REQUEST = 4

# First byte of a result: what follows is the target's answer, a traceback, or nothing because memory ran out.
FRAME_ANSWER = b"A"
FRAME_EXCEPTION = b"X"
FRAME_MEMORY = b"M"

_EXIT_WITHOUT_PROTECTION = 113

_failed_imports: dict[str, str] = {}
"""What went wrong with modules that were to be imported before the first request, by name."""


def serve(server: socket.socket, preload: list[str]) -> None:
    """Forks a supervisor for each request until the other side closes the socket.

    Args:
        server: Socket on which requests arrive: a length header that carries four descriptors (control socket, argument
            file, result file, output pipe), then that many bytes of JSON (see :func:`_call_target` and
            :func:`_confine` for its keys).
        preload: Modules to import before the first request. One that cannot be is what the child that needs it answers
            with: confined as it is, it could not find out why.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception:
            _failed_imports[name] = traceback.format_exc()
    gc.collect()
    gc.freeze()
    while True:
        header, descriptors = _receive_header(server)
        if not header:
            return
        body = _receive_exactly(server, HEADER.unpack(header)[0])
        if body is None or len(descriptors) != DESCRIPTORS_PER_REQUEST:
            return
        if os.fork() == 0:
            # Nothing may escape into the launcher's own loop, so every path below ends the process.
            try:
                server.close()
                _supervise(json.loads(body), *descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_header(server: socket.socket) -> tuple[bytes, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(server, HEADER.size, DESCRIPTORS_PER_REQUEST)
    if header and len(header) < HEADER.size:
        header += _receive_exactly(server, HEADER.size - len(header)) or b""
    return header, descriptors


def _receive_exactly(server: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = server.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _supervise(request: dict[str, Any], control: int, argument: int, result: int, output: int) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A handler is needed for the wake-up descriptor to be written; waiting happens in the loop below.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    confined = bool(request["confined"])
    supervisor = os.getpid()
    namespaces = confined and bool(request["namespaces"]) and confinement.enter_namespaces()
    if request["network"]:
        confinement.leave_network()
    if not namespaces:
        confinement.become_subreaper()
    _tell(control, {"pid": supervisor, "namespaces": namespaces})

    def start_worker() -> int:
        worker = os.fork()
        if worker == 0:
            signal.set_wakeup_fd(-1)
            _work(request, namespaces, argument, result, output)
        for descriptor in (argument, result, output):
            os.close(descriptor)
        return worker

    if namespaces:
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            _be_first_process(start_worker, control)
        for descriptor in (argument, result, output):
            os.close(descriptor)
    else:
        child = start_worker()

    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if control in ready:  # the parent never writes, so this is the end of its side
            _kill_group(child)
            _kill_descendants()
            # The parent does this too, unless it was killed.
            if namespaces:
                confinement.unmount(request["folder"])
            shutil.rmtree(request["folder"], ignore_errors=True)
            os._exit(0)
        try:
            os.read(wake_read, 4096)
        except BlockingIOError:
            continue
        # Other children are orphans that were handed to this process; only the end of the worker ends the loop.
        status = _wait_for(child)
        if status is not None:
            if not namespaces:
                _kill_group(child)
                stragglers = _kill_descendants()
                _tell(control, {**_describe(status), "stragglers": stragglers})
            os._exit(0)


def _be_first_process(start_worker: Callable[[], int], control: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = start_worker()
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == worker:
            break
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        stragglers = 0
    else:
        stragglers = _reap_all()
    _tell(control, {**_describe((status, usage.ru_maxrss)), "stragglers": stragglers})
    os._exit(0)


def _wait_for(child: int) -> tuple[int, int] | None:
    try:
        pid, status, usage = os.wait4(child, os.WNOHANG)
    except ChildProcessError:
        return (0, 0)
    return (status, usage.ru_maxrss) if pid == child else None


def _describe(ended: tuple[int, int]) -> dict[str, Any]:
    status, max_rss = ended
    code = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"exit_code": code, "max_rss_bytes": max_rss * unit}


def _kill_group(child: int) -> None:
    for kill in (os.kill, os.killpg):
        try:
            kill(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _reap_all() -> int:
    count = 0
    while True:
        try:
            _, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return count
        # What had ended by itself was no straggler.
        count += os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def _kill_descendants() -> int:
    """Kills what is left below this process, orphans included (Linux), and returns how many processes that were.

    A process that frees gigabytes takes a while to die, hence the patience.
    """
    seen: set[int] = set()
    for _ in range(2000):
        _reap_ended()
        living = descendants(os.getpid())
        if not living:
            break
        seen |= living
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        select.select([], [], [], 0.002)
    return len(seen)


def _reap_ended() -> None:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def descendants(root: int) -> set[int]:
    """Returns the ids of all processes below ``root`` (Linux; empty elsewhere and for a process that has ended)."""
    found: set[int] = set()
    pending = [root]
    while pending:
        parent = pending.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as listing:
                    children = {int(pid) for pid in listing.read().split()}
            except OSError:
                continue
            pending.extend(children - found)
            found |= children
    return found


def _tell(control: int, message: dict[str, Any]) -> None:
    try:
        os.write(control, json.dumps(message).encode() + b"\n")
    except OSError:
        # The parent hung up; the supervisor's loop acts on that.
        return


def _work(request: dict[str, Any], namespaces: bool, argument: int, result: int, output: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        argument, result = _arrange_descriptors(argument, result, output)
        _confine(request, namespaces)
        frame = _call_target(request, argument)
        _write_all(result, frame)
        code = 0
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Handlers that the target registered to run at exit have no business here.
        os._exit(code)


def _arrange_descriptors(argument: int, result: int, output: int) -> tuple[int, int]:
    null = os.open(os.devnull, os.O_RDWR)
    high = [os.dup2(descriptor, 200 + index) for index, descriptor in enumerate((null, output, argument, result))]
    os.dup2(high[0], 0)
    os.dup2(high[1], 1)
    os.dup2(high[1], 2)
    os.dup2(high[2], 3)
    os.dup2(high[3], 4)
    os.closerange(5, 1024)
    return 3, 4


def _confine(request: dict[str, Any], namespaces: bool) -> None:
    folder = request["folder"]
    if namespaces:
        confinement.mount_private_folder(folder, request["folder_bytes"])
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    os.environ.update(request["environment"])
    tempfile.tempdir = folder
    if request["toolchain"]:  # the parent's whole search path, which may have changed since the launcher's start
        sys.path[:] = request["import_paths"] or sys.path
    else:
        sys.path.extend(path for path in request["import_paths"] if path not in sys.path)
    confinement.limit_resources([(name, value) for name, value in request["resources"]])
    confinement.forbid_new_privileges()
    if request["confined"]:
        confinement.drop_capabilities()
        writable = [folder, *request["writable"]]
        if request["landlock"] and not confinement.restrict_files(
            request["readable"], writable, programs=request["toolchain"]
        ):
            os._exit(_EXIT_WITHOUT_PROTECTION)
        if request["seccomp"] and not seccomp.forbid_processes():
            os._exit(_EXIT_WITHOUT_PROTECTION)


def _call_target(request: dict[str, Any], argument: int) -> bytes:
    try:
        module_name, function_name = request["target"].split(":")
        try:
            module = importlib.import_module(module_name)
        except Exception:
            if module_name in _failed_imports:
                raise ImportError(_failed_imports[module_name]) from None
            raise
        function = getattr(module, function_name)
        return FRAME_ANSWER + bytes(function(_read_all(argument)))
    except MemoryError:
        return FRAME_MEMORY
    except BaseException:  # SystemExit of a kernel included: this is the process's outermost frame
        return FRAME_EXCEPTION + traceback.format_exc()[-8000:].encode(errors="replace")


def _read_all(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
