"""When a measured latency is settled, and when one kernel counts as faster than another.

A round is a few warm-up runs and then the timed ones. Rounds are repeated until one is quiet, that is, until
``(max - min) / min`` of its samples is within the hardware's threshold, or the cap is reached; the quietest round is
the measurement. The thresholds, the cap and the numbers of runs are those of the published evaluation (AccelOpt, arXiv
2511.15915: 1 % on trn1, 4 % on trn2, at most 10 rounds of 2 warm-up and 10 timed runs).

Two kernels whose latencies lie close together are told apart by running them alternately on one core, so that drift
meets both: see :func:`compare_interleaved`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseRule:
    """How to measure on one kind of hardware.

    Attributes:
        threshold: Largest spread of a quiet round.
        max_rounds: Rounds after which the quietest one is taken as it is.
        warmup_runs: Runs before each round that are not timed.
        timed_runs: Samples of a round.
    """

    threshold: float
    max_rounds: int = 10
    warmup_runs: int = 2
    timed_runs: int = 10


NOISE_RULES: Mapping[str, NoiseRule] = {"trn1": NoiseRule(0.01), "trn2": NoiseRule(0.04), "trn3": NoiseRule(0.04)}
"""By hardware. Nothing is published for trn3; it is treated as trn2."""


@dataclass(frozen=True)
class Rounds:
    """All rounds of a measurement.

    Attributes:
        samples_ms: Timed runs, round by round.
        kept: Index of the quietest round, the first of equals.
    """

    samples_ms: tuple[tuple[float, ...], ...]
    kept: int

    @property
    def kept_ms(self) -> tuple[float, ...]:
        """Samples of the quietest round."""
        return self.samples_ms[self.kept]

    @property
    def latency_ms(self) -> float:
        """Their mean."""
        return statistics.fmean(self.kept_ms)

    @property
    def spread(self) -> float:
        """Their spread."""
        return spread(self.kept_ms)


def spread(samples_ms: Sequence[float]) -> float:
    """Returns ``(max - min) / min``; infinity for samples that are not all positive and finite.

    Raises:
        ValueError: There is no sample.
    """
    if not samples_ms:
        raise ValueError("a spread needs at least one sample")
    if not all(math.isfinite(sample) and sample > 0 for sample in samples_ms):
        return math.inf
    return (max(samples_ms) - min(samples_ms)) / min(samples_ms)


def measure_rounds(take_round: Callable[[], Sequence[float]], rule: NoiseRule) -> Rounds:
    """Takes rounds until one is quiet.

    Args:
        take_round: Runs one round, warm-up included, and returns its timed samples in milliseconds.
        rule: When to stop.
    """
    taken: list[tuple[float, ...]] = []
    while len(taken) < rule.max_rounds:
        taken.append(tuple(take_round()))
        if spread(taken[-1]) <= rule.threshold:
            break
    return Rounds(tuple(taken), min(range(len(taken)), key=lambda index: spread(taken[index])))


@dataclass(frozen=True)
class Comparison:
    """Two kernels measured in turns.

    Attributes:
        parent_ms: Latencies of the first kernel, in the order taken.
        child_ms: Latencies of the second, each taken right after its counterpart.
    """

    parent_ms: tuple[float, ...]
    child_ms: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """Median over the turns of the first kernel's latency over the second's."""
        return statistics.median(self._ratios)

    @property
    def noise(self) -> float:
        """Relative uncertainty of :attr:`speedup`.

        It is half the range of the turns' ratios: what one turn may differ from the next although nothing changed.
        """
        return (max(self._ratios) - min(self._ratios)) / 2

    def promotes(self, margin: float) -> bool:
        """Whether the second kernel is faster by more than ``margin`` above what noise explains.

        Args:
            margin: Relative gain that is asked for beyond the noise; 0.01 is one per cent.
        """
        return self.speedup > 1 + margin + self.noise

    @property
    def _ratios(self) -> list[float]:
        return [parent / child for parent, child in zip(self.parent_ms, self.child_ms, strict=True)]


def compare_interleaved(
    measure_parent: Callable[[], float], measure_child: Callable[[], float], turns: int
) -> Comparison:
    """Measures two kernels alternately: A, B, A, B and so on.

    Args:
        measure_parent: Measures the first kernel once and returns milliseconds.
        measure_child: The same for the second.
        turns: How often each.

    Raises:
        ValueError: Fewer than two turns, which say nothing about noise.
    """
    if turns < 2:
        raise ValueError("telling noise from gain takes at least two turns")
    parent, child = [], []
    for _ in range(turns):
        parent.append(measure_parent())
        child.append(measure_child())
    return Comparison(tuple(parent), tuple(child))
