"""EC2 instance types: what they have and what an hour costs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

_TABLE = Path(__file__).with_name("instances.yaml")


@dataclass(frozen=True)
class Instance:
    """One instance type.

    Attributes:
        name: As AWS writes it.
        usd_per_hour: On-demand list price; None where none is published.
        vcpus: Virtual CPUs.
        gpus: GPUs.
        neuron_cores: Physical NeuronCores.
    """

    name: str
    usd_per_hour: float | None
    vcpus: int
    gpus: int = 0
    neuron_cores: int = 0


@dataclass(frozen=True)
class Catalogue:
    """The instance types that are known.

    Attributes:
        as_of: Date of the prices, ISO format.
        source: Where they were read.
        instances: By name.
    """

    as_of: str
    source: str
    instances: Mapping[str, Instance]

    def with_prices(self, usd_per_hour: Mapping[str, float]) -> Catalogue:
        """The same with prices of one's own; names that are not known are ignored."""
        instances = {
            name: Instance(name, usd_per_hour.get(name, each.usd_per_hour), each.vcpus, each.gpus, each.neuron_cores)
            for name, each in self.instances.items()
        }
        return Catalogue(self.as_of, self.source, instances)


@functools.cache
def catalogue() -> Catalogue:
    """The package's own table."""
    content = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    instances = {name: Instance(name, **entry) for name, entry in content["instances"].items()}
    return Catalogue(str(content["as_of"]), content["source"], instances)
