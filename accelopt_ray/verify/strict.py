"""The check for anything that may win: a kernel that is not really correct does not pass.

Beyond the published tolerance it asks for the right type and shape, finite and fully written outputs, small errors in
every row and every element, under several input distributions and with seeds that no kernel can know; for outputs that
move when the inputs are perturbed; for fp32 arithmetic; for a latency that the hardware can reach; and for a text that
stays within the language of kernels. See :mod:`accelopt_ray.verify.policy`, :mod:`accelopt_ray.verify.elementwise`,
:mod:`accelopt_ray.verify.perturbation` and :mod:`accelopt_ray.verify.precision` for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accelopt_ray.devices.protocol import Artifact
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.verify.checks import Attempt, Finding, Trial, Verdict
from accelopt_ray.verify.elementwise import Bounds, compare_changes, examine
from accelopt_ray.verify.perturbation import INFLUENCE
from accelopt_ray.verify.policy import find_violation
from accelopt_ray.verify.precision import PrecisionTier
from accelopt_ray.verify.references import ReferenceCache
from nkibench.distributions import DISTRIBUTIONS, ORDINARY
from nkibench.hardware import HARDWARE
from nkibench.roofline import bound
from nkibench.task import Task

# How far below the roofline a latency may lie before it is not believed: rounding of the constants.
_ROOFLINE_SLACK = 1e-3


@dataclass(frozen=True)
class StrictCheck:
    """The strict check.

    Attributes:
        precision_tiers: Tiers that a kernel may have.
    """

    precision_tiers: frozenset[str] = frozenset({str(PrecisionTier.FP32)})

    @property
    def name(self) -> str:
        """``strict``."""
        return "strict"

    def inspect_source(self, source: str, entry: str) -> Finding | None:
        """Rejects a text that reaches beyond the language of kernels."""
        violation = find_violation(source, entry)
        if violation is None:
            return None
        return Finding(EvaluationOutcome.REJECTED, violation.reason, violation.text)

    def inspect_artifact(self, artifact: Artifact) -> Finding | None:
        """Rejects processes left behind and precision below what the run allows."""
        if artifact.stragglers:
            text = f"the kernel's code left {artifact.stragglers} processes running"
            return Finding(EvaluationOutcome.REJECTED, "background_process", text)
        if artifact.precision_tier and artifact.precision_tier not in self.precision_tiers:
            allowed = ", ".join(sorted(self.precision_tiers))
            text = f"the kernel computes in '{artifact.precision_tier}' precision; this run allows {allowed}"
            return Finding(EvaluationOutcome.PRECISION_VIOLATION, f"precision:{artifact.precision_tier}", text)
        return None

    def inspect_latency(
        self, task: Task, hardware: str, latency_ms: float, counters: Mapping[str, float]
    ) -> Finding | None:
        """Rejects a latency that the hardware cannot reach."""
        if not latency_ms > 0:
            return Finding(EvaluationOutcome.REJECTED, "implausible:latency", f"a latency of {latency_ms} ms")
        for name, value in counters.items():
            if name.endswith(("_active_time_percent", "_estimated_percent")) and value > 1.0 + _ROOFLINE_SLACK:
                text = f"{name} is {value:.1%}, more than the hardware has"
                return Finding(EvaluationOutcome.REJECTED, f"implausible:{name}", text)
        if task.counts is not None and hardware in HARDWARE:
            limit = bound(task.counts, HARDWARE[hardware])
            if latency_ms < limit.latency_ms * (1.0 - _ROOFLINE_SLACK):
                text = (
                    f"{latency_ms:.4g} ms is less than the {limit.latency_ms:.4g} ms that its {limit.limit} work needs"
                )
                return Finding(EvaluationOutcome.REJECTED, "implausible:faster_than_roofline", text)
        return None

    def trials(self, task: Task, seeds: Sequence[int], references: ReferenceCache, repeatable: bool) -> Sequence[Trial]:
        """Ordinary inputs of a secret seed compared whole, then each other distribution, then the perturbed inputs.

        Where the device does not guarantee the same outputs for the same inputs, one trial is repeated at the end.
        Given seeds take the secret one's place, in turn.
        """
        given = itertools.cycle(seeds or [references.secret_seed(task, "inputs")])
        trials = [
            Trial(next(given), name, whole=name == ORDINARY, accuracy=True)
            for name in (ORDINARY, *(name for name in DISTRIBUTIONS if name != ORDINARY))
        ]
        trials.append(Trial(trials[0].seed, INFLUENCE, whole=False, accuracy=True, compared_with=0))
        if not repeatable:
            trials.append(replace(trials[0], compared_with=0, repeats=True))
        return trials

    def compare(self, task: Task, attempt: Attempt, before: Attempt | None) -> Verdict:
        """Compares type, shape, every row and every element, and the movement against an earlier trial."""
        expected = attempt.reference.outputs
        if len(attempt.outputs) != len(expected):
            text = f"{len(attempt.outputs)} outputs where the reference has {len(expected)}"
            return Verdict(Finding(EvaluationOutcome.INCORRECT, "output_count", text))
        bounds = Bounds.of(
            task.strict_tolerance, attempt.reference.accuracy, attempt.reference.distribution == ORDINARY
        )
        details: dict[str, Any] = {"used_of_l2": 0.0, "used_of_row": 0.0, "used_of_element": 0.0}
        for position, (output, reference) in enumerate(zip(attempt.outputs, expected, strict=True)):
            if output.shape != reference.shape:
                text = f"output {position} has shape {output.shape}, the reference {reference.shape}"
                return Verdict(Finding(EvaluationOutcome.INCORRECT, "output_shape", text))
            if str(output.dtype) != reference.dtype:
                text = f"output {position} has type {output.dtype}, the reference {reference.dtype}"
                return Verdict(Finding(EvaluationOutcome.INCORRECT, "output_dtype", text))
            if not attempt.reference.finite:
                continue  # where the mathematics itself overflows, nothing can be asked of a kernel
            if before is not None and attempt.trial.repeats and not np.array_equal(before.outputs[position], output):
                text = f"output {position} differs when the kernel runs again on the same inputs"
                return Verdict(Finding(EvaluationOutcome.INCORRECT, "not_repeatable", text), details)
            measured, deviation = examine(output, reference, bounds)
            for name, value in (("l2", measured.l2), ("row", measured.row_l2), ("element", measured.element)):
                details[f"used_of_{name}"] = max(details[f"used_of_{name}"], value)
            if deviation is None and before is not None and before.reference.finite:
                deviation = compare_changes(
                    before.outputs[position], output, before.reference.outputs[position], reference, bounds
                )
            if deviation is not None:
                text = f"output {position}: {deviation.text}"
                return Verdict(Finding(EvaluationOutcome.INCORRECT, deviation.reason, text), details)
        return Verdict(details=details)
