"""Things that a child process may try; each is a target for ``run_child``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time


def echo(argument: bytes) -> bytes:
    print("hello")
    return argument[::-1]


def fail(argument: bytes) -> bytes:
    raise ValueError("told to")


def sleep_for_ever(argument: bytes) -> bytes:
    while True:
        time.sleep(60)


def spin_for_ever(argument: bytes) -> bytes:
    while True:
        pass


def ignore_signals(argument: bytes) -> bytes:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    return sleep_for_ever(argument)


def eat_memory(argument: bytes) -> bytes:
    kept = []
    while True:
        kept.append(bytearray(b"x") * (16 << 20))


def eat_memory_in_children(argument: bytes) -> bytes:
    for _ in range(6):
        if os.fork() == 0:
            kept = bytearray(b"x") * (100 << 20)
            time.sleep(60)
            os._exit(len(kept) > 0)
    return sleep_for_ever(argument)


def exit_quietly(argument: bytes) -> bytes:
    os._exit(0)


def exit_loudly(argument: bytes) -> bytes:
    sys.exit("gone")


def segfault(argument: bytes) -> bytes:
    ctypes.string_at(0)
    return b"unreachable"


def kill_self(argument: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b"unreachable"


def flood(argument: bytes) -> bytes:
    line = b"x" * (1 << 16)
    for _ in range(800):
        os.write(1, line)
    return b"done"


def leave_children(argument: bytes) -> bytes:
    """Leaves a child, a grandchild in a session of its own, and a daemon by double fork."""
    for double in (False, True):
        if os.fork() == 0:
            os.setsid()
            if double and os.fork():
                os._exit(0)
            time.sleep(300)
            os._exit(0)
    time.sleep(0.1)
    return b"done"


def fork_bomb(argument: bytes) -> bytes:
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


def start_thread(argument: bytes) -> bytes:
    said: list[bytes] = []
    thread = threading.Thread(target=lambda: said.append(b"from a thread"))
    thread.start()
    thread.join()
    return said[0]


def kill_family(argument: bytes) -> bytes:
    """Sends SIGKILL to everything it can name: its group, its parent and the process id in the argument."""
    for pid in (os.getppid(), int(argument)):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return b"survived"


def delete_files(argument: bytes) -> bytes:
    """Tries to delete the file named in the argument, then fills its own folder and locks it."""
    with contextlib.suppress(OSError):
        os.unlink(argument.decode())
    os.makedirs("deep/er")
    with open("deep/er/file", "wb") as file:
        file.write(b"x" * 1000)
    os.chmod("deep/er", 0)
    os.chmod("deep", 0)
    return b"done"


def fill_disk(argument: bytes) -> bytes:
    block = b"x" * (1 << 20)
    for number in range(100_000):
        with open(f"file{number}", "wb") as file:
            for _ in range(64):
                file.write(block)
    return b"done"


def show_environment(argument: bytes) -> bytes:
    return "\n".join(f"{name}={value}" for name, value in os.environ.items()).encode()


def return_much(argument: bytes) -> bytes:
    return b"x" * int(argument)


def scribble_over_descriptors(argument: bytes) -> bytes:
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"Averdict: correct")
        except OSError:
            continue
    os._exit(0)
