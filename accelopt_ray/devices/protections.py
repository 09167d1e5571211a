"""Which protections really hold on this machine, for people who decide whether to run strangers' kernels on it."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from accelopt_ray.devices import confinement
from accelopt_ray.devices.child import ChildEnd, ChildError, ChildTask, run_child
from accelopt_ray.devices.protocol import Limits

_PROBE = "accelopt_ray.devices.probe"


def protections() -> dict[str, str]:
    """Says which protections a confined child really has on this machine, by trying to get past each.

    Returns:
        For each protection, ``active`` or ``inactive``, plus ``landlock_version`` for the record.
    """
    secret_name = f"ACCELOPT_RAY_PROBE_{secrets.token_hex(4)}"
    os.environ[secret_name] = "1"
    try:
        task = ChildTask(
            f"{_PROBE}:probe",
            json.dumps({"environment": secret_name, "file": __file__, "pid": os.getpid()}).encode(),
            confined=True,
            readable=(str(Path(__file__).with_name("probe.py")),),
        )
        result = run_child(task, Limits(timeout_s=20.0))
    finally:
        del os.environ[secret_name]
    if result.end is not ChildEnd.ANSWERED:
        raise ChildError(f"the probe of the sandbox failed: {result.detail}")
    report = {name: "active" if held else "inactive" for name, held in json.loads(result.answer).items()}
    report["landlock_version"] = str(confinement.landlock_version())
    return report
