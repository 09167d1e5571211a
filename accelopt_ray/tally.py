"""Where a run stands: counts, baseline and best kernel, kept up to date from the rows that the search records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.nki_sim.cost.confidence import can_tell_apart
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.trajectory.writer import text_sha256


@dataclass(frozen=True)
class Kernel:
    """An evaluated kernel, as far as a summary needs it. Names and units are those of the ``evaluations`` table."""

    candidate_id: str
    iteration: int
    latency_ms: float
    percent_of_peak: float | None
    device: str
    simulated: bool
    check: str
    source_sha256: str
    prediction_confidence: float | None = None


@dataclass
class Tally:
    """A run's state so far.

    Attributes:
        baseline: The kernel the search started from, once it is evaluated as correct.
        best: The fastest correct kernel so far, the baseline included.
        outcomes: Evaluations by outcome.
        calls: Model calls by role.
        failed_calls: Model calls that did not end ``ok``.
        cost_usd: What the calls cost.
        tokens: Prompt and completion tokens of the calls.
        iteration: The last iteration of which a row was recorded.
    """

    baseline: Kernel | None = None
    best: Kernel | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    failed_calls: int = 0
    cost_usd: float = 0.0
    tokens: int = 0
    iteration: int = 0
    _sources: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def evaluations(self) -> int:
        """Evaluations that are final."""
        return sum(self.outcomes.values())

    @property
    def speedup(self) -> float | None:
        """Baseline's latency over the best one's."""
        if self.baseline is None or self.best is None:
            return None
        return self.baseline.latency_ms / self.best.latency_ms

    @property
    def predicted_to_differ(self) -> bool:
        """False where baseline and best are predictions that lie closer together than the model can tell apart."""
        kernels = [kernel for kernel in (self.baseline, self.best) if kernel is not None]
        widths = [kernel.prediction_confidence for kernel in kernels if kernel.prediction_confidence is not None]
        if len(kernels) < 2 or not widths:
            return True
        return can_tell_apart(kernels[0].latency_ms, kernels[1].latency_ms, max(widths))

    @property
    def best_source(self) -> str | None:
        """Text of the best kernel, once it was recorded."""
        return None if self.best is None else self._sources.get(self.best.source_sha256)

    @property
    def baseline_source(self) -> str | None:
        """Text of the baseline, once it was recorded."""
        return None if self.baseline is None else self._sources.get(self.baseline.source_sha256)

    def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Takes note of rows of any table."""
        for row in rows:
            if table == "evaluations":
                self._evaluation(row)
            elif table == "llm_calls":
                self._call(row)
            elif table == "sources":
                text = str(row["source"])
                self._sources[str(row.get("source_sha256") or text_sha256(text))] = text
            elif table == "iterations":
                self.iteration = max(self.iteration, _integer(row["iteration"]))

    def _evaluation(self, row: Mapping[str, object]) -> None:
        self.outcomes[str(row["outcome"])] += 1
        latency = row.get("latency_ms")
        if row["outcome"] != EvaluationOutcome.CORRECT or not isinstance(latency, (int, float)):
            return
        percent, confidence = row.get("percent_of_peak"), row.get("prediction_confidence")
        kernel = Kernel(
            candidate_id=str(row["candidate_id"]),
            iteration=_integer(row["iteration"]),
            latency_ms=float(latency),
            percent_of_peak=float(percent) if isinstance(percent, (int, float)) else None,
            device=str(row.get("device") or ""),
            simulated=bool(row.get("simulated")),
            check=str(row.get("check") or ""),
            source_sha256=str(row.get("source_sha256") or ""),
            prediction_confidence=float(confidence) if isinstance(confidence, (int, float)) else None,
        )
        if self.baseline is None and kernel.iteration == 0:
            self.baseline = kernel
        if self.best is None or kernel.latency_ms < self.best.latency_ms:
            self.best = kernel

    def _call(self, row: Mapping[str, object]) -> None:
        self.calls[str(row["role"])] += 1
        self.failed_calls += row["outcome"] != "ok"
        cost = row.get("cost_usd")
        self.cost_usd += float(cost) if isinstance(cost, (int, float)) else 0.0
        self.tokens += _integer(row.get("prompt_tokens") or 0) + _integer(row.get("completion_tokens") or 0)


def best_kernel_file(tally: Tally, run_id: str, task: str) -> str | None:
    """Renders the file that holds the best kernel, headed by where it came from and how it was judged.

    Returns:
        Python text; None while there is no correct kernel whose text is known.
    """
    best, source = tally.best, tally.best_source
    if best is None or source is None:
        return None
    kind = latency_kind(best.device, best.simulated)
    lines = [
        f"Best kernel so far for task {task}, found by accelopt-ray.",
        f"run {run_id}, candidate {best.candidate_id}, iteration {best.iteration}, source sha256 {best.source_sha256}",
        f"latency {best.latency_ms:.4f} ms, {kind} on {best.device}" + _peak_text(best, kind),
    ]
    if tally.baseline is not None and tally.speedup is not None:
        lines.append(f"baseline {tally.baseline.latency_ms:.4f} ms {kind}: {tally.speedup:.2f} times faster")
    lines.append(f"passed the check '{best.check}'")
    if best.simulated:
        lines.append("A simulated latency is a model's prediction, not a result of a Trainium device.")
    return "".join(f"# {line}\n" for line in lines) + "\n" + source


def _peak_text(kernel: Kernel, kind: str) -> str:
    return "" if kernel.percent_of_peak is None else f", {kernel.percent_of_peak:.1f} % of peak ({kind})"


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"a count or iteration must be a whole number, not {value!r}")
    return value
