"""Child processes that have the Neuron toolchain and one core, and how their ends become typed outcomes."""

from __future__ import annotations

import glob
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import accelopt_ray
from accelopt_ray.devices.child import ChildEnd, ChildResult, ChildTask, run_child
from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.devices.messages import unpack
from accelopt_ray.devices.neuron.toolchain import CORES_VARIABLE, TARGET_VARIABLE, TOOLS_FOLDER, visible_core
from accelopt_ray.devices.protocol import Failure, Limits
from accelopt_ray.outcome import EvaluationOutcome

CONFINEMENT_VARIABLE = "ACCELOPT_RAY_NEURON_CONFINEMENT"
"""Set to ``off`` where a driver or compiler turns out to need what confined processes are refused."""

_PACKAGE = Path(accelopt_ray.__file__).resolve().parent
"""An editable installation has it outside of ``sys.path``."""

COMPILER_FLAGS = "--auto-cast=none"
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/sys", "/proc", "/var/lib")
_DEVICE_FILES = ("/dev/neuron*", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/shm")
_PASSED_ON = (TARGET_VARIABLE, "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_LOG_LEVEL")
_MAX_CHARACTERS = 4000
_MAX_OUTPUT_CHARACTERS = 64_000
"""Of what a stage prints; a compiler's log is told from its beginning and its end."""

# Core and hardware trouble in the runtime's own words (NRT status names, and the message of a core that is in use).
_FAULTS = re.compile(
    r"NeuronCore\(s\) not available|NRT_EXEC_NC_BUSY|NRT_LOAD_NOT_ENOUGH_NC|NRT_HW_ERROR|NRT_EXEC_HW_ERR_\w+"
    r"|NRT_EXEC_UNIT_UNRECOVERABLE|NRT_UNINITIALIZED|NRT_EXEC_SW_NQ_OVERFLOW"
)
_RUNTIME_TIMEOUT = "NRT_TIMEOUT"
_OUTCOMES = {
    ChildEnd.TIMEOUT: EvaluationOutcome.TIMEOUT,
    ChildEnd.MEMORY_LIMIT: EvaluationOutcome.MEMORY_LIMIT,
    ChildEnd.CRASHED: EvaluationOutcome.CRASHED,
}


@dataclass(frozen=True)
class Answer:
    """What a worker returned, and what it, compiler and runtime printed meanwhile."""

    header: Mapping[str, Any]
    payload: bytes
    output: str


def run_with_core(
    target: str,
    argument: bytes,
    limits: Limits,
    readable: Sequence[str] = (),
    writable: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Union[Answer, Failure]:
    """Runs a worker function with the toolchain and this process's core.

    Args:
        target: ``module:function``.
        argument: Its argument.
        limits: Time, memory and output; the address space is not limited, because drivers map far more than they use.
        readable: Paths it needs besides toolchain and interpreter.
        writable: Paths it may write.
        environment: Variables besides those that every such process gets.

    Returns:
        Its answer, or the kernel's failure.

    Raises:
        DeviceFault: The runtime reported trouble with core or hardware.
        UserError: No core was assigned to this process.
    """
    task = ChildTask(
        target,
        argument,
        confined=os.environ.get(CONFINEMENT_VARIABLE) != "off",
        toolchain=True,
        import_paths=(str(_PACKAGE.parent), *(path for path in sys.path if path)),
        readable=(*_readable(), *readable),
        writable=(*_matching(_DEVICE_FILES), *writable),
        environment={**_environment(), **(environment or {})},
    )
    return _interpret(run_child(task, limits))


def _interpret(result: ChildResult) -> Union[Answer, Failure]:
    output = kept_output(result.output)
    if result.end in _OUTCOMES:
        _raise_on_fault(result.output)
        text = f"the kernel {result.detail}\n{result.output}".strip()
        return Failure(_OUTCOMES[result.end], _trim(text), str(result.end), output)
    if result.end is ChildEnd.RAISED:
        last_line = (result.detail.strip().splitlines() or [""])[-1]
        raise DeviceFault(f"the Neuron worker failed: {last_line}\n{_trim(result.detail)}")
    try:
        header, payload = unpack(result.answer)
        if "outcome" not in header:
            return Answer(header, payload, output)
        outcome, message = EvaluationOutcome(header["outcome"]), str(header["message"])
    except (ValueError, KeyError):
        text = "the kernel's process left a result that cannot be read"
        return Failure(EvaluationOutcome.CRASHED, text, "bad_result", output)
    _raise_on_fault(f"{message}\n{result.output}")
    if _RUNTIME_TIMEOUT in message:
        outcome = EvaluationOutcome.TIMEOUT
    text = f"{message}\n{result.output}".strip() if result.output else message
    return Failure(outcome, _trim(text), output=output)


def _raise_on_fault(text: str) -> None:
    found = _FAULTS.search(text)
    if found:
        line = next(line for line in text.splitlines() if found.group() in line)
        raise DeviceFault(line.strip()[:_MAX_CHARACTERS])


def _environment() -> dict[str, str]:
    path = os.environ.get("PATH", os.defpath)
    fixed = {CORES_VARIABLE: visible_core(), "NEURON_CC_FLAGS": COMPILER_FLAGS, "PATH": f"{path}:{TOOLS_FOLDER}"}
    return fixed | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _readable() -> tuple[str, ...]:
    interpreter = {sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))}
    folders = (path for path in sys.path if os.path.isdir(path))
    return (*_SYSTEM_FOLDERS, str(_PACKAGE), *sorted(interpreter), *folders)


def _matching(patterns: Sequence[str]) -> list[str]:
    return [path for pattern in patterns for path in sorted(glob.glob(pattern))]


def kept_output(text: str) -> str:
    """What is kept of a stage's output: all of it, or its beginning and its end."""
    return _trim(text.strip(), _MAX_OUTPUT_CHARACTERS)


def _trim(text: str, characters: int = _MAX_CHARACTERS) -> str:
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def file_written(path: Path) -> bool:
    """Whether a file that candidate code was to write is a plain file of its own, not a link to another's."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return path.is_file() and not path.is_symlink() and status.st_nlink == 1
