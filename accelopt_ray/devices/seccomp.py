"""A system-call filter under which a process can start threads, but neither processes nor programs.

A limit on the number of processes would be the gentler tool, but the kernel does not apply it to root, and a fork bomb
is faster than any watch: on a loaded machine a second of it is thousands of processes. A kernel being traced has no use
for a second process, so it gets none. The filter is inherited, cannot be taken off, and needs no privileges.

Numbers are those of the Linux user API headers (``seccomp.h``, ``filter.h``, ``audit.h``, ``unistd.h``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from dataclasses import dataclass

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_FIRST_ARGUMENT = 0, 4, 16
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
_CLONE_THREAD = 0x00010000
_X32_BIT = 0x40000000


@dataclass(frozen=True)
class _Architecture:
    """Numbers of one processor architecture: of itself, of ``clone``, and of the calls that are refused outright."""

    audit: int
    clone: int
    refused: tuple[int, ...]


_CLONE3 = 435
_ARCHITECTURES = {
    # fork, vfork, execve, execveat, ptrace, unshare, setns, mount, umount2
    "x86_64": _Architecture(0xC000003E, 56, (57, 58, 59, 322, 101, 272, 308, 165, 166)),
    # execve, execveat, ptrace, unshare, setns, mount, umount2; there is no fork
    "aarch64": _Architecture(0xC00000B7, 220, (221, 281, 117, 97, 268, 40, 39)),
}


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def forbid_processes() -> bool:
    """Applies the filter to the calling thread and everything it starts from now on.

    Returns:
        Whether it is in force; False where the system or the processor architecture is not supported.
    """
    if not sys.platform.startswith("linux"):
        return False
    architecture = _ARCHITECTURES.get(os.uname().machine)
    if architecture is None or sys.maxsize < 2**32:
        return False
    instructions = _filter(architecture)
    program = _Program(
        len(instructions), (_Instruction * len(instructions))(*(_Instruction(*fields) for fields in instructions))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return int(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)) == 0


def _filter(architecture: _Architecture) -> list[tuple[int, int, int, int]]:
    """Builds the program; jumps count instructions after the next one."""
    refuse = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    body = [
        (_LOAD_WORD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        refuse,  # the same processor's other system-call tables
        (_LOAD_WORD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32_BIT),
        refuse,
        # Its flags lie in memory, where a filter cannot look; the C library falls back to clone.
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in architecture.refused:
        body += [(_JUMP_EQUAL, 0, 1, number), refuse]
    return [
        *body,
        (_JUMP_EQUAL, 1, 0, architecture.clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD_WORD, 0, 0, _OFFSET_FIRST_ARGUMENT),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
