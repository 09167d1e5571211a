"""What the operating system can do to confine a process, without privileges and without a compiler.

Everything here is called in a freshly forked, single-threaded process and narrows what that process may do for the rest
of its life. On Linux: user, process, network, mount and IPC namespaces, Landlock rules and ``prctl`` flags. Elsewhere
the functions return False and only resource limits apply.

Constants are those of the Linux user API headers (``sched.h``, ``prctl.h``, ``landlock.h``, ``capability.h``).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import accelopt_ray

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MNT_DETACH = 2
_MS_REC_PRIVATE = 16384 | (1 << 18)

# Landlock's system calls have the same numbers on every architecture that Linux added them to together.
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1

_FS_WRITE_FILE = 1 << 1
_FS_READ_FILE = 1 << 2
_FS_READ_DIR = 1 << 3
_FS_TRUNCATE = 1 << 14
_FS_DEVICE_CONTROL = 1 << 15
# Highest file-system right each ABI version knows, as a mask of all rights up to it.
_FS_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_FS_ALL = (1 << 16) - 1
_FS_MAKE_DEVICE = (1 << 6) | (1 << 11)
_FS_EXECUTE = 1 << 0
_NET_ALL = 0b11
_SCOPE_ALL = 0b11

_LINUX = sys.platform.startswith("linux")
_libc = ctypes.CDLL(None, use_errno=True) if _LINUX else None


class _RulesetAttr(ctypes.Structure):
    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def enter_namespaces() -> bool:
    """Moves the process into namespaces of its own: no network, no foreign processes, private mounts.

    The next fork becomes the first process of the new process namespace; when that one ends, the kernel kills every
    other process in it, whatever session or group it moved to.

    Returns:
        Whether the namespaces were entered; False where the system does not offer them to this user.
    """
    if _libc is None or not hasattr(_libc, "unshare"):
        return False
    if not _unshare_as_ourselves(_CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWIPC):
        return False
    _libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None)
    return True


def leave_network() -> bool:
    """Moves the process into a network namespace without any interface; everything else stays as it is.

    Returns:
        Whether it did; False where the system does not offer that to this user.
    """
    return _libc is not None and hasattr(_libc, "unshare") and _unshare_as_ourselves(_CLONE_NEWNET)


def _unshare_as_ourselves(flags: int) -> bool:
    assert _libc is not None
    user_id, group_id = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWUSER | flags) != 0:
        return False
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user_id} {user_id} 1")
        _write("/proc/self/gid_map", f"{group_id} {group_id} 1")
    except OSError:
        # Some systems allow the namespace but not the mapping: the process then acts as the overflow user, which is
        # less, not more, than it had.
        pass
    return True


def mount_private_folder(folder: str, size_bytes: int) -> bool:
    """Mounts an empty memory file system of limited size over ``folder`` (needs :func:`enter_namespaces`)."""
    if _libc is None:
        return False
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    options = f"size={size_bytes},nr_inodes=4096,mode=0700".encode()
    return bool(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) == 0)


def unmount(folder: str) -> None:
    """Takes the file system that :func:`mount_private_folder` mounted away again."""
    if _libc is not None:
        _libc.umount2(os.fsencode(folder), _MNT_DETACH)


def landlock_version() -> int:
    """Returns the version of the Landlock interface that the running kernel offers, 0 if none."""
    if _libc is None:
        return 0
    version = int(_libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION))
    return max(version, 0)


def restrict_files(readable: Sequence[str], writable: Sequence[str], programs: bool = False) -> bool:
    """Leaves read access below ``readable``, full access below ``writable``, and nothing else.

    No program can be run, unless ``programs``: then those below ``readable`` and ``writable`` can. Where the kernel's
    Landlock is new enough, TCP and signals to processes outside are refused as well.

    Returns:
        Whether the rules are in force.
    """
    version = landlock_version()
    if version < 1 or _libc is None:
        return False
    handled = _FS_RIGHTS_BY_ABI.get(version, _FS_ALL)
    attr = _RulesetAttr(handled, _NET_ALL if version >= 4 else 0, _SCOPE_ALL if version >= 6 else 0)
    size = 8 if version < 4 else (16 if version < 6 else 24)
    ruleset = int(_libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, ctypes.byref(attr), ctypes.c_size_t(size), 0))
    if ruleset < 0:
        return False
    try:
        run = _FS_EXECUTE if programs else 0
        for path in readable:
            _allow(ruleset, path, (_FS_READ_FILE | _FS_READ_DIR | run) & handled)
        for path in writable:
            _allow(ruleset, path, handled & ~(0 if programs else _FS_EXECUTE) & ~_FS_MAKE_DEVICE)
        forbid_new_privileges()
        return int(_libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)


def forbid_new_privileges() -> None:
    """Makes set-user-id programs and file capabilities ineffective for this process and its descendants."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def drop_capabilities() -> None:
    """Gives up every capability, those that a user namespace granted included."""
    if _libc is not None and hasattr(_libc, "capset"):
        header = _CapHeader(0x20080522, 0)
        _libc.capset(ctypes.byref(header), ctypes.byref((_CapData * 2)()))


def become_subreaper() -> bool:
    """Makes orphaned descendants children of this process instead of the system's first one."""
    return _libc is not None and int(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def limit_resources(limits: Sequence[tuple[str, int]]) -> None:
    """Sets hard and soft resource limits by name, such as ``RLIMIT_AS``; names the system lacks are left out."""
    for name, value in limits:
        number = getattr(resource, name, None)
        if number is None:
            continue
        _, hard = resource.getrlimit(number)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (bound, bound))
        except (ValueError, OSError):
            # macOS refuses some limits below what the process already uses; the memory watch and the deadline of the
            # parent process still hold.
            continue


@lru_cache(maxsize=1)
def python_paths() -> tuple[str, ...]:
    """What an interpreter with NumPy needs to read at run time; no site-packages folder as a whole."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    paths |= {str(Path(sys.base_prefix) / "lib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"}
    paths |= {"/dev/null", "/dev/zero", "/dev/urandom", "/etc/localtime", "/usr/share/zoneinfo"}
    for name in ("numpy", "ml_dtypes"):
        module = __import__(name)
        package = Path(module.__file__ or "").resolve().parent
        paths |= {str(package), str(package.with_name(f"{name}.libs"))}
    paths.add(str(Path(accelopt_ray.__file__).resolve().parent / "nki_sim"))
    return tuple(sorted(path for path in paths if os.path.exists(path)))


_PROBE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from accelopt_ray.devices import confinement, seccomp
namespaces = confinement.enter_namespaces()
if namespaces:
    # Entering succeeds on some systems where nothing can be started inside.
    child = os.fork()
    if child == 0:
        os._exit(0)
    namespaces = os.waitpid(child, 0)[1] == 0
print(json.dumps({"namespaces": namespaces, "seccomp": seccomp.forbid_processes()}))
"""


@lru_cache(maxsize=1)
def available() -> dict[str, bool]:
    """Which of the strong protections this system offers: ``namespaces``, ``seccomp`` and ``landlock``."""
    root = str(Path(accelopt_ray.__file__).resolve().parent.parent)
    # In a process of its own: what is tried cannot be undone.
    probe = subprocess.run(
        [sys.executable, "-S", "-c", _PROBE, root],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    found = json.loads(probe.stdout) if probe.returncode == 0 else {"namespaces": False, "seccomp": False}
    return {**found, "landlock": landlock_version() >= 1}


def _allow(ruleset: int, path: str, rights: int) -> None:
    assert _libc is not None
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FS_EXECUTE | _FS_READ_FILE | _FS_WRITE_FILE | _FS_TRUNCATE | _FS_DEVICE_CONTROL
        rule = _PathBeneathAttr(rights, handle)
        _libc.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(handle)


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)
