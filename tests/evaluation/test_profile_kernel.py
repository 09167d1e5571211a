"""``accelopt_ray.profile_kernel``: one kernel, the caller's arrays, no exception for what the kernel does."""

from __future__ import annotations

import numpy as np
import pytest

import accelopt_ray
from accelopt_ray.outcome import EvaluationOutcome, UserError

SCALE = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x, factor):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, value=nl.multiply(nl.load(x), factor))
    return out
"""


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((128, 512), dtype=np.float32)


def test_it_returns_latency_counters_and_outputs(x):
    profile = accelopt_ray.profile_kernel(SCALE, [x, 3.0])
    assert profile.outcome is EvaluationOutcome.CORRECT, profile.error_text
    assert profile.check == "" and profile.simulated and profile.latency_ms > 0
    assert profile.counters["hbm_write_bytes"] == x.nbytes
    assert np.array_equal(profile.outputs[0], x * np.float32(3))


def test_it_compares_with_references(x):
    good = accelopt_ray.profile_kernel(SCALE, [x, np.float32(2)], reference_outputs=[x * 2])
    assert (good.outcome, good.check) == (EvaluationOutcome.CORRECT, "published")
    bad = accelopt_ray.profile_kernel(SCALE, [x, 2.0], reference_outputs=[x * 2.1])
    assert bad.outcome is EvaluationOutcome.INCORRECT and bad.latency_ms > 0
    assert "relative L2" in bad.error_text
    loose = accelopt_ray.profile_kernel(SCALE, [x, 2.0], reference_outputs=[x * 2.1], tolerance=0.1)
    assert loose.outcome is EvaluationOutcome.CORRECT


def test_it_reads_files_and_other_entries(x, tmp_path):
    path = tmp_path / "scale.py"
    path.write_text(SCALE.replace("def kernel", "def scale"))
    assert accelopt_ray.profile_kernel(path, [x, 1.0], entry="scale").correct
    assert accelopt_ray.profile_kernel(str(path), [x, 1.0], entry="scale", device="sim-trn2").correct


def test_a_kernels_failure_is_an_outcome(x):
    profile = accelopt_ray.profile_kernel(SCALE.replace("nl.load(x)", "nl.lood(x)"), [x, 1.0])
    assert profile.outcome in (EvaluationOutcome.COMPILE_ERROR, EvaluationOutcome.UNSUPPORTED)
    assert "lood" in profile.error_text and profile.latency_ms is None and profile.outputs == ()


def test_the_users_mistakes_are_told_in_one_line(x, tmp_path):
    with pytest.raises(UserError, match=r"missing\.py"):
        accelopt_ray.profile_kernel(tmp_path / "missing.py", [x, 1.0])
    with pytest.raises(UserError, match="input 1"):
        accelopt_ray.profile_kernel(SCALE, [x, "1.0"])
    with pytest.raises(UserError, match="unknown device"):
        accelopt_ray.profile_kernel(SCALE, [x, 1.0], device="abacus")


def test_unknown_names_of_the_package_are_errors():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = accelopt_ray.no_such_name
