"""Evaluates one kernel: compile, measure, check, in the order of what each costs."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, Union

import numpy as np

from accelopt_ray.devices.noise import Comparison
from accelopt_ray.devices.protocol import Artifact, Device, Failure, KernelRequest, Measurement, RunResult, TensorSpec
from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, EvaluationResult
from accelopt_ray.evaluation.remeasure import as_details, remeasure
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.scratch import scratch_folder
from accelopt_ray.verify.checks import Attempt, Check, Finding, Trial
from accelopt_ray.verify.references import ReferenceCache
from accelopt_ray.verify.registry import get_check
from nkibench.hardware import HARDWARE
from nkibench.roofline import percent_of_peak
from nkibench.task import OutputMismatch, Task, TaskError, load_task

_MAX_TEXT = 4000
_Answer = TypeVar("_Answer", Artifact, RunResult, Measurement, Comparison)


def compile_job(job: EvaluationJob, device: Device) -> Union[Artifact, Failure]:
    """Compiles a job's kernel, for an evaluation elsewhere.

    Raises:
        UserError: The task of the job does not exist or is defective.
    """
    return _compile(job, device, _task(job))


def evaluate(
    job: EvaluationJob,
    device: Device,
    references: ReferenceCache,
    compiled: Union[Artifact, Failure, None] = None,
) -> EvaluationResult:
    """Evaluates one kernel and says how it ended; never raises for what the kernel does.

    Stages: a look at the text, compile, measurement (before the numbers where the device predicts, after the first
    trial elsewhere), then one trial after the other. The first finding ends the evaluation; what was measured by then
    stays in the result.

    Args:
        job: What to evaluate.
        device: Where.
        references: Cache of inputs and reference outputs.
        compiled: What :func:`compile_job` gave for it on a device of this kind; None to compile here.

    Raises:
        UserError: The task or the check of the job does not exist or is defective.
    """
    run = _Run(job, device, references, _task(job), get_check(job.check, job.precision), compiled)
    try:
        run.go()
        outcome, reason, text = EvaluationOutcome.CORRECT, "", ""
    except _Ended as ended:
        outcome, reason, text = ended.finding.outcome, ended.finding.reason, ended.finding.text
    return replace(run.result(), outcome=outcome, reason=reason, error_text=text[:_MAX_TEXT])


def fingerprint_sha256(device: Device) -> str:
    """Returns a hash over everything about a device that a result depends on."""
    return hashlib.sha256(json.dumps(dict(device.fingerprint()), sort_keys=True).encode()).hexdigest()


def _task(job: EvaluationJob) -> Task:
    try:
        return load_task(job.task.location, dict(job.task.parameters))
    except TaskError as error:
        raise UserError(str(error)) from error


def _compile(job: EvaluationJob, device: Device, task: Task) -> Union[Artifact, Failure]:
    try:
        specs = task.input_specs()
    except TaskError as error:
        raise UserError(str(error)) from error
    inputs = tuple(TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in specs)
    return device.compile(KernelRequest(job.source, inputs, task.entry), job.limits)


class _Ended(Exception):
    """The evaluation is over because of a finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


@dataclass
class _Run:
    """The state of one evaluation as it goes through its stages."""

    job: EvaluationJob
    device: Device
    references: ReferenceCache
    task: Task
    check: Check
    compiled: Union[Artifact, Failure, None] = None
    artifact: Artifact | None = None
    measurement: Measurement | None = None
    run_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = False
    turns: dict[str, object] | None = None
    toolchain_outputs: list[str] = field(default_factory=list)

    def go(self) -> None:
        _end_on(self.check.inspect_source(self.job.source, self.task.entry))
        with self._stage("compile"):
            self.artifact = self._compile()
        _end_on(self.check.inspect_artifact(self.artifact))
        rest = self.job.stage is CheckStage.REST
        if self.device.predicts_latency and not rest:
            self._measure(self.artifact, ())
        trials = self.check.trials(self.task, self.job.seeds, self.references, self.artifact.repeatable)
        kept = {trial.compared_with for trial in trials}
        judged = _judged(trials, self.job.stage)
        # What others are compared with runs in their stage as well.
        tried = judged | {trial.compared_with for position, trial in enumerate(trials) if position in judged}
        self.whole = self.job.stage is CheckStage.WHOLE or len(trials) == 1
        attempts: dict[int, Attempt] = {}
        with ExitStack() as until_the_end:
            for position, trial in enumerate(trials):
                if position not in tried:
                    continue
                with ExitStack() as until_the_next:
                    stack = until_the_end if position in kept else until_the_next
                    attempt = self._try(self.artifact, trial, stack)
                    if position in judged:
                        before = None if trial.compared_with is None else attempts[trial.compared_with]
                        self._judge(trial, attempt, before)
                    if position == 0 and not rest and not self.device.predicts_latency:
                        self._measure(self.artifact, attempt.reference.kernel_inputs)
                    if position in kept:
                        attempts[position] = attempt
                    if rest and position == max(judged) and not self.device.predicts_latency and self.job.parent_source:
                        self._measure_against_parent(self.artifact, attempt.reference.kernel_inputs)

    def result(self) -> EvaluationResult:
        """What is known so far, with an outcome to be filled in."""
        measured: dict[str, Any] = {}
        if self.measurement is not None:
            measured = {
                "latency_ms": self.measurement.latency_ms,
                "latency_samples_ms": self.measurement.latency_samples_ms,
                "latency_spread": self.measurement.latency_spread,
                "counters": self.measurement.counters,
                "prediction_confidence": self.measurement.confidence,
                "explanation": self.measurement.explanation,
                "percent_of_peak": self._percent_of_peak(self.measurement.latency_ms),
            }
        return EvaluationResult(
            evaluation_id=self.job.evaluation_id,
            outcome=EvaluationOutcome.CANCELLED,
            check=self.check.name,
            check_stage=CheckStage.WHOLE if self.whole else self.job.stage,
            precision_tier=self.artifact.precision_tier if self.artifact else "",
            device=self.device.name,
            simulated=self.device.simulated,
            check_details={
                "trials": self.trials,
                "stage_s": self.stage_s,
                "program_sha256": self.artifact.program_sha256 if self.artifact else "",
                **({} if self.turns is None else {"turns": self.turns}),
            },
            compile_s=self.stage_s.get("compile", 0.0),
            run_s=self.run_s,
            toolchain_output="\n\n".join(self.toolchain_outputs),
            fingerprint_sha256=fingerprint_sha256(self.device),
            **measured,
        )

    def _unless_failed(self, stage: str, answer: Union[_Answer, Failure]) -> _Answer:
        """Returns a stage's answer, or ends the evaluation; keeps what its toolchain printed."""
        output = getattr(answer, "output", "")
        if output:
            self.toolchain_outputs.append(f"[{stage}]\n{output}")
        if isinstance(answer, Failure):
            raise _Ended(Finding(answer.outcome, answer.reason, answer.error_text))
        return answer

    def _compile(self) -> Artifact:
        if self.compiled is None:
            return self._unless_failed("compile", _compile(self.job, self.device, self.task))
        if isinstance(self.compiled, Artifact):
            self.stage_s["compile"] = self.compiled.compile_s
        return self._unless_failed("compile", self.compiled)

    def _measure(self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]]) -> None:
        with self._stage("measure"):
            self.measurement = self._unless_failed("measure", self.device.measure(artifact, inputs, self.job.limits))
        _end_on(
            self.check.inspect_latency(
                self.task, self.device.hardware, self.measurement.latency_ms, self.measurement.counters
            )
        )

    def _measure_against_parent(self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]]) -> None:
        with self._stage("turns"):
            parent = _compile(replace(self.job, source=self.job.parent_source), self.device, self.task)
            if isinstance(parent, Failure):
                return
            comparison = remeasure(self.device, parent, artifact, inputs, self.job.limits)
        if comparison is not None:
            self.turns = as_details(self._unless_failed("turns", comparison))

    def _try(self, artifact: Artifact, trial: Trial, stack: ExitStack) -> Attempt:
        """Runs the kernel on a trial's inputs; what the attempt refers to lives as long as ``stack``."""
        with self._stage("reference"):
            reference = stack.enter_context(
                self.references.use(
                    self.task, trial.seed, trial.distribution, whole=trial.whole, accuracy=trial.accuracy
                )
            )
        output_bytes = sum(4 * math.prod(output.shape) for output in artifact.outputs)
        folder = stack.enter_context(scratch_folder(output_bytes))
        with self._stage("run"):
            ran = self._unless_failed(
                "run", self.device.run(artifact, reference.kernel_inputs, folder, self.job.limits)
            )
        self.run_s += ran.run_s
        raw = [np.load(path, mmap_mode="r") for path in ran.outputs]
        try:
            outputs = self.task.task_outputs(raw, reference.layout())
        except OutputMismatch as error:
            raise _Ended(Finding(EvaluationOutcome.INCORRECT, "output_shape", str(error))) from error
        return Attempt(trial, outputs, reference)

    def _judge(self, trial: Trial, attempt: Attempt, before: Attempt | None) -> None:
        with self._stage("check"):
            verdict = self.check.compare(self.task, attempt, before)
        self.trials.append({"seed": trial.seed, "distribution": trial.distribution, **verdict.details})
        if verdict.finding is not None:
            where = f"seed {trial.seed}, {trial.distribution} inputs: "
            raise _Ended(replace(verdict.finding, text=where + verdict.finding.text))

    def _percent_of_peak(self, latency_ms: float) -> float | None:
        hardware = HARDWARE.get(self.device.hardware)
        if self.task.counts is None or hardware is None or not latency_ms > 0:
            return None
        return percent_of_peak(self.task.counts, hardware, latency_ms)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stage_s[name] = self.stage_s.get(name, 0.0) + time.perf_counter() - started


def _judged(trials: Sequence[Trial], stage: CheckStage) -> set[int]:
    """Positions of the trials that belong to a stage."""
    if stage is CheckStage.FIRST:
        return {0}
    return set(range(1 if stage is CheckStage.REST else 0, len(trials)))


def _end_on(finding: Finding | None) -> None:
    if finding is not None:
        raise _Ended(finding)
