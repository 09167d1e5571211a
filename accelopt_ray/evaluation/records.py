"""What is asked of the profiling service and what it answers: picklable, frozen, the same on every device."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from accelopt_ray.devices.protocol import Limits
from accelopt_ray.outcome import EvaluationOutcome, StrEnum


class CheckStage(StrEnum):
    """How much of a correctness check is asked for, or was made.

    ``first`` compiles, measures and tries one set of inputs; ``rest`` tries the others; ``whole`` does both.
    """

    WHOLE = "whole"
    FIRST = "first"
    REST = "rest"


@dataclass(frozen=True)
class TaskRef:
    """A task as it travels between processes.

    Attributes:
        location: A built-in task's name, or the path of a task folder, or ``PATH#task`` in the published layout.
        parameters: Shape parameters that replace the task file's, for runs at reduced size.
    """

    location: str
    parameters: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class EvaluationJob:
    """One kernel to evaluate.

    Attributes:
        evaluation_id: Unique within the run.
        task: The task it claims to solve.
        source: Kernel source text.
        device: Device name, as in ``--device``.
        check: ``published`` or ``strict``.
        seeds: Input seeds of the check; empty means the check's own.
        limits: Bounds of each stage.
        precision: Least precise tier that the strict check accepts: ``fp32``, ``compensated`` or ``reduced``.
        task_name: The task whose search asks, for the result's row.
        iteration: The iteration that asks, for the result's row.
        stage: How much of the check to make.
        parent_source: Kernel that it came from. With the rest of its check, a device that measures runs both in turns,
            so that a gain can be told from noise.
    """

    evaluation_id: str
    task: TaskRef
    source: str
    device: str
    check: str
    seeds: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
    precision: str = "fp32"
    task_name: str = ""
    iteration: int = 0
    stage: CheckStage = CheckStage.WHOLE
    parent_source: str = ""


@dataclass(frozen=True)
class EvaluationResult:
    """How an evaluation ended. Field names and units are those of the ``evaluations`` table.

    ``latency_ms`` is present whenever the kernel was measured or predicted, even if it then proved incorrect; only a
    result whose outcome is ``correct`` may compete. With ``check_stage`` ``first`` it was tried on one set of inputs
    only; it may then be compared by latency, but has to pass the rest before anything is built on it.
    ``toolchain_output`` tells, stage by stage, what compiler, runtime and profiler printed.
    """

    evaluation_id: str
    outcome: EvaluationOutcome
    reason: str = ""
    error_text: str = ""
    check: str = ""
    check_stage: CheckStage = CheckStage.WHOLE
    precision_tier: str = ""
    device: str = ""
    simulated: bool = False
    core: str = ""
    latency_ms: float | None = None
    latency_samples_ms: tuple[float, ...] = ()
    latency_spread: float | None = None
    percent_of_peak: float | None = None
    prediction_confidence: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    explanation: Mapping[str, object] = field(default_factory=dict)
    check_details: Mapping[str, object] = field(default_factory=dict)
    compile_s: float = 0.0
    run_s: float = 0.0
    queue_s: float = 0.0
    answered_from: str = ""
    fingerprint_sha256: str = ""
    toolchain_output: str = ""

    @property
    def correct(self) -> bool:
        """Whether the kernel passed every check that was asked for."""
        return self.outcome is EvaluationOutcome.CORRECT

    @property
    def provisional(self) -> bool:
        """Whether it passed what was tried and has not been tried on everything."""
        return self.correct and self.check_stage is CheckStage.FIRST

    def completed(self, rest: EvaluationResult) -> EvaluationResult:
        """Returns a provisional result with the rest of its check.

        A kernel whose text became another program in the meantime is rejected: each stage saw a part of one of them.
        If it was measured in turns with its parent and noise explains its gain, its latency becomes the parent's.
        """
        trials = [*self.check_details.get("trials", ()), *rest.check_details.get("trials", ())]  # type: ignore[misc]
        details = {**self.check_details, "trials": trials}
        latency_ms, percent = self.latency_ms, self.percent_of_peak
        turns = rest.check_details.get("turns")
        if isinstance(turns, Mapping):
            details["turns"] = turns
            if not turns["promoted"] and latency_ms is not None and turns["parent_latency_ms"] > latency_ms:
                percent = None if percent is None else percent * latency_ms / turns["parent_latency_ms"]
                latency_ms = turns["parent_latency_ms"]
        outcome, reason, error_text = rest.outcome, rest.reason, rest.error_text
        programs = {self.check_details.get("program_sha256"), rest.check_details.get("program_sha256")} - {None, ""}
        if len(programs) > 1:
            outcome, reason = EvaluationOutcome.REJECTED, "changing_program"
            error_text = "the kernel's code makes another program each time that it is traced"
        return dataclasses.replace(
            self,
            outcome=outcome,
            reason=reason,
            error_text=error_text,
            check_stage=CheckStage.WHOLE,
            check_details=details,
            latency_ms=latency_ms,
            percent_of_peak=percent,
            compile_s=self.compile_s + rest.compile_s,
            run_s=self.run_s + rest.run_s,
            queue_s=self.queue_s + rest.queue_s,
            toolchain_output="\n\n".join(text for text in (self.toolchain_output, rest.toolchain_output) if text),
        )

    def to_json(self) -> str:
        """All of it as one line, to be kept and read back by :meth:`from_json`."""
        content = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return json.dumps(
            {**content, "outcome": str(self.outcome), "check_stage": str(self.check_stage)}, default=_plain
        )

    @classmethod
    def from_json(cls, text: str) -> EvaluationResult:
        """Reads :meth:`to_json`'s line; fields that a newer version has added are left out.

        Raises:
            ValueError: It is something else.
        """
        known = {each.name for each in dataclasses.fields(cls)}
        content = {name: value for name, value in json.loads(text).items() if name in known}
        content["outcome"] = EvaluationOutcome(content["outcome"])
        content["check_stage"] = CheckStage(content.get("check_stage", CheckStage.WHOLE))
        content["latency_samples_ms"] = tuple(content.get("latency_samples_ms", ()))
        return cls(**content)


def _plain(value: object) -> object:
    """A NumPy scalar as a number, a mapping that is no dictionary as one, anything else as text."""
    if isinstance(value, Mapping):
        return dict(value)
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
