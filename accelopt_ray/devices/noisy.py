"""A simulator that measures instead of predicting: its latencies carry noise, drift and the faults of slow cores.

For testing whatever has to tell gain from noise. The noise follows from a seed, the core and the number of runs made so
far, so that the same sequence of measurements gives the same samples.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Union
from urllib.parse import parse_qsl

from accelopt_ray.devices.neuron.toolchain import CORES_VARIABLE
from accelopt_ray.devices.noise import NOISE_RULES, NoiseRule, measure_rounds
from accelopt_ray.devices.protocol import Artifact, Failure, KernelRequest, Limits, Measurement, RunResult
from accelopt_ray.devices.simulator import SimulatorDevice
from accelopt_ray.outcome import UserError


@dataclass(frozen=True)
class Noise:
    """How measurements differ from the prediction.

    Attributes:
        relative: Standard deviation of a run's latency, relative to it; outliers are slower, never faster than half.
        drift_per_run: Relative growth of the latency with every run made on the core.
        slow_factor: Factor on the latency of ``slow_core``.
        slow_core: The core that is slow, as ``NEURON_RT_VISIBLE_CORES`` names it; empty for none.
        seed: Of the noise.
    """

    relative: float = 0.0
    drift_per_run: float = 0.0
    slow_factor: float = 1.0
    slow_core: str = ""
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Noise:
        """Reads what follows ``?`` in a device's name, such as ``relative=0.01&drift_per_run=1e-5&seed=3``.

        Raises:
            UserError: A name or value is unknown.
        """
        values: dict[str, Union[float, int, str]] = {}
        for name, value in parse_qsl(text, keep_blank_values=True):
            default = getattr(cls, name, None)
            if default is None:
                known = ", ".join(cls.__dataclass_fields__)
                raise UserError(f"unknown kind of noise '{name}': choose from {known}")
            try:
                values[name] = type(default)(value)
            except ValueError:
                raise UserError(f"noise '{name}' must be a number, not '{value}'") from None
        return cls(**values)  # type: ignore[arg-type]


@dataclass
class NoisyDevice:
    """A simulated core whose latencies are measured in rounds, as on a real one.

    Attributes:
        name: Name with the noise in it.
        device: The simulator behind it.
        noise: What is added.
        core: The core it stands for.
        rule: How often to measure.
    """

    name: str
    device: SimulatorDevice
    noise: Noise
    core: str
    rule: NoiseRule
    _runs: int = field(default=0, repr=False)

    @classmethod
    def open(cls, name: str, device: SimulatorDevice, options: str) -> NoisyDevice:
        """Makes the device for this process's core.

        Raises:
            UserError: The options cannot be understood.
        """
        core = os.environ.get(CORES_VARIABLE, "0")
        return cls(name, device, Noise.parse(options), core, NOISE_RULES[device.hardware])

    @property
    def hardware(self) -> str:
        """Hardware of the simulator."""
        return self.device.hardware

    @property
    def simulated(self) -> bool:
        """Always True."""
        return True

    @property
    def predicts_latency(self) -> bool:
        """Always False."""
        return False

    def fingerprint(self) -> Mapping[str, str]:
        """The simulator's, and the noise."""
        return {**self.device.fingerprint(), "device": self.name, "noise": repr(self.noise)}

    def compile(self, request: KernelRequest, limits: Limits) -> Union[Artifact, Failure]:
        """As the simulator."""
        return self.device.compile(request, limits)

    def run(
        self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], folder: Path, limits: Limits
    ) -> Union[RunResult, Failure]:
        """As the simulator."""
        return self.device.run(artifact, inputs, folder, limits)

    def measure(
        self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], limits: Limits
    ) -> Union[Measurement, Failure]:
        """Samples the predicted latency with noise, in rounds until one is quiet."""
        predicted = self.device.measure(artifact, inputs, limits)
        if isinstance(predicted, Failure):
            return predicted
        rounds = measure_rounds(lambda: self._round(predicted.latency_ms), self.rule)
        return replace(
            predicted,
            latency_ms=rounds.latency_ms,
            latency_samples_ms=rounds.kept_ms,
            latency_spread=rounds.spread,
            confidence=None,
            explanation={
                **predicted.explanation,
                "rounds_ms": [list(samples) for samples in rounds.samples_ms],
                "kept_round": rounds.kept,
            },
        )

    def _round(self, latency_ms: float) -> list[float]:
        runs = [self._sample(latency_ms) for _ in range(self.rule.warmup_runs + self.rule.timed_runs)]
        return runs[self.rule.warmup_runs :]

    def _sample(self, latency_ms: float) -> float:
        # A generator for each run, so that a sample depends on nothing but its number.
        chance = random.Random(f"{self.noise.seed} {self.core} {self._runs}")
        factor = max(0.5, 1 + chance.gauss(0.0, self.noise.relative))
        factor *= 1 + self.noise.drift_per_run * self._runs
        if self.noise.slow_core and self.core == self.noise.slow_core:
            factor *= self.noise.slow_factor
        self._runs += 1
        return latency_ms * factor
