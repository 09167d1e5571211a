"""What a correctness check is to the evaluation, and the published one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from accelopt_ray.devices.protocol import Artifact
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.verify import published
from accelopt_ray.verify.references import ReferenceCache, ReferenceSet
from nkibench.distributions import ORDINARY
from nkibench.task import Task


@dataclass(frozen=True)
class Finding:
    """Why a kernel does not pass.

    Attributes:
        outcome: Typed outcome.
        reason: Short machine-readable cause.
        text: The same in words, for people and prompts.
    """

    outcome: EvaluationOutcome
    reason: str
    text: str


@dataclass(frozen=True)
class Trial:
    """One set of inputs that a kernel has to get right.

    Attributes:
        seed: Seed of the inputs.
        distribution: Their distribution.
        whole: Whether outputs are compared whole however large they are.
        accuracy: Whether the comparison needs the reference's own accuracy.
        compared_with: Index of an earlier trial whose outputs this one's are compared with as well.
        repeats: Whether it has the same inputs as that one, so that the outputs have to be the same.
    """

    seed: int
    distribution: str = ORDINARY
    whole: bool = True
    accuracy: bool = False
    compared_with: int | None = None
    repeats: bool = False


@dataclass(frozen=True)
class Attempt:
    """What a kernel made of a trial.

    Attributes:
        trial: The trial.
        outputs: Its outputs in the reference's layout; memory maps.
        reference: The reference data of the trial.
    """

    trial: Trial
    outputs: Sequence[npt.NDArray[Any]]
    reference: ReferenceSet


@dataclass(frozen=True)
class Verdict:
    """What comparing one trial's outputs gave.

    Attributes:
        finding: What is wrong, or None.
        details: Measured errors by name, for the evaluation's row.
    """

    finding: Finding | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Check(Protocol):
    """A correctness check. Cheap looks come first; the first finding ends the evaluation."""

    @property
    def name(self) -> str:
        """Name as given to ``--check``."""

    def inspect_source(self, source: str, entry: str) -> Finding | None:
        """Looks at the text, before anything runs."""

    def inspect_artifact(self, artifact: Artifact) -> Finding | None:
        """Looks at what compiling revealed."""

    def inspect_latency(
        self, task: Task, hardware: str, latency_ms: float, counters: Mapping[str, float]
    ) -> Finding | None:
        """Looks at whether the latency can be true."""

    def trials(self, task: Task, seeds: Sequence[int], references: ReferenceCache, repeatable: bool) -> Sequence[Trial]:
        """Lists the inputs to try, most telling first.

        Args:
            task: The task.
            seeds: Seeds to use instead of the check's own; may be empty.
            references: Cache that the reference data come from.
            repeatable: Whether the device guarantees the same outputs for the same inputs.
        """

    def compare(self, task: Task, attempt: Attempt, before: Attempt | None) -> Verdict:
        """Judges the outputs of one trial.

        Args:
            task: The task.
            attempt: What the kernel made of the trial.
            before: What it made of the trial that this one is compared with (:attr:`Trial.compared_with`).
        """


class PublishedCheck:
    """The published check: relative L2 error over five seeds, and no ``float16`` in the text."""

    @property
    def name(self) -> str:
        """``published``."""
        return "published"

    def inspect_source(self, source: str, entry: str) -> Finding | None:
        """Applies the published ban on half precision."""
        if published.banned_text(source):
            text = f"the source contains '{published.BANNED_TEXT}', which the published check does not allow"
            return Finding(EvaluationOutcome.INCORRECT, "float16_text", text)
        return None

    def inspect_artifact(self, artifact: Artifact) -> Finding | None:
        """Finds nothing: the published check does not look."""
        return None

    def inspect_latency(
        self, task: Task, hardware: str, latency_ms: float, counters: Mapping[str, float]
    ) -> Finding | None:
        """Finds nothing: the published check does not look."""
        return None

    def trials(self, task: Task, seeds: Sequence[int], references: ReferenceCache, repeatable: bool) -> Sequence[Trial]:
        """The given seeds, or the five published ones."""
        return [Trial(seed) for seed in seeds or published.SEEDS]

    def compare(self, task: Task, attempt: Attempt, before: Attempt | None) -> Verdict:
        """Compares by relative L2 error."""
        expected = attempt.reference.outputs
        result = published.compare(
            attempt.outputs,
            [output.values() for output in expected],
            task.tolerance,
            [output.norm for output in expected],
        )
        details = {"relative_l2": max(result.relative_l2, default=float("nan"))}
        if result.passed:
            return Verdict(details=details)
        return Verdict(Finding(EvaluationOutcome.INCORRECT, "relative_l2", result.text), details)
