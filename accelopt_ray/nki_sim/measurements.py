"""Measured kernels: published profiles, a checkout of the published suite, a user's own CSV file.

The published profiles of the 14 baseline kernels are kept in the package. They come from AccelOpt's public repository
(Apache-2.0, commit 47e29a7, ``experiments/full_complete_local/profile_results.csv``).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Union

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim.program import Program
from accelopt_ray.nki_sim.tracer import trace_kernel
from accelopt_ray.outcome import UserError
from nkibench.task import Task, list_tasks, load_suite, load_task

InputSpec = Union[tuple[tuple[int, ...], str], float, int]

PUBLISHED_FILE = "trn1_published_baselines.csv"
PUBLISHED_SOURCE = (
    "github.com/zhang677/AccelOpt, commit 47e29a7, experiments/full_complete_local/profile_results.csv (Apache-2.0)"
)
REQUIRED_COLUMNS = ("kernel", "entry", "inputs", "latency_ms")
OTHER_COLUMNS = ("name", "task", "latency_kind", "source")

COUNTERS = (
    "hbm_read_bytes", "hbm_write_bytes", "spill_save_bytes", "spill_reload_bytes", "psum_read_bytes",
    "psum_write_bytes", "sbuf_read_bytes", "sbuf_write_bytes", "hardware_flops", "transpose_flops",
    "peak_flops_bandwidth_ratio", "mm_arithmetic_intensity", "hfu_estimated_percent",
    "scalar_engine_active_time_percent", "vector_engine_active_time_percent", "gpsimd_engine_active_time_percent",
)  # fmt: skip
"""Profiler fields that measured files may carry, under the profiler's names and in its units."""


@dataclass(frozen=True)
class Measurement:
    """What a device reported.

    Attributes:
        latency_ms: Measured latency in milliseconds.
        counters: Profiler fields that were reported.
    """

    latency_ms: float
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel with a measurement to compare with.

    Attributes:
        name: Unique within the comparison.
        task: Kernels of one task belong together; a fold of the leave-one-task-out error leaves them out together.
        program: The traced kernel.
        measurement: What the device reported.
    """

    name: str
    task: str
    program: Program
    measurement: Measurement


def published_measurements() -> dict[str, Measurement]:
    """The published trn1 profiles of the 14 baseline kernels, by task name (source: :data:`PUBLISHED_SOURCE`)."""
    text = (resources.files("accelopt_ray.nki_sim") / "data" / PUBLISHED_FILE).read_text(encoding="utf-8")
    return {row["task"]: _measurement(row, PUBLISHED_FILE) for row in csv.DictReader(text.splitlines())}


def own_baselines() -> list[MeasuredKernel]:
    """This project's baselines beside the published measurements of their counterparts.

    They compute the same at the same shapes with the same kind of inefficiencies but differ in detail.
    """
    measurements = published_measurements()
    names = [name for name in list_tasks() if name in measurements]
    return [_from_task(load_task(name), measurements[name]) for name in names]


def published_suite(path: Path) -> list[MeasuredKernel]:
    """The published kernels themselves, from a checkout of their suite.

    Args:
        path: Folder with the suite's ``summary.json``.

    Raises:
        UserError: If no kernel of the suite has a published measurement.
    """
    measurements = published_measurements()
    kernels = [_from_task(task, measurements[task.name]) for task in load_suite(path) if task.name in measurements]
    if not kernels:
        raise UserError(
            f"the suite {path} holds none of the kernels with published measurements; pass --measured instead"
        )
    return kernels


def measured_file(path: Path, target: str = "trn1") -> list[MeasuredKernel]:
    """A user's measurements.

    The CSV has one row per kernel with the columns ``kernel`` (a Python file, relative to the CSV), ``entry`` (function
    name), ``inputs`` (arguments in order, separated by semicolons: ``float32[4096,1024]`` for a tensor or a number) and
    ``latency_ms``; optionally ``name``, ``task``, ``latency_kind`` and ``source`` (for the reader), and any of the
    profiler's fields in :data:`COUNTERS`. The package's ``data/trn1_second_fitting_set.csv`` is an example: it names
    public kernels whose files are not part of this package.

    Args:
        path: The CSV file.
        target: Hardware generation the kernels were written for.

    Raises:
        UserError: If the file, a column or a value is wrong; the message names the row.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the measurements {path}: {error}") from error
    if not rows:
        raise UserError(f"the measurements {path} hold no rows; the first line must name the columns")
    columns = set(rows[0])
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise UserError(
            f"the measurements {path} lack the column {missing[0]!r}; needed are {', '.join(REQUIRED_COLUMNS)}"
        )
    unknown = sorted(str(name) for name in columns - {*REQUIRED_COLUMNS, *OTHER_COLUMNS, *COUNTERS})
    if unknown:
        raise UserError(f"the measurements {path} have an unknown column {unknown[0]!r}; see the documented columns")
    kernels = []
    for number, row in enumerate(rows, start=2):
        where = f"{path}, line {number}"
        file = path.parent / str(row["kernel"])
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot read the kernel {file}: {error}") from error
        name = row.get("name") or str(row["kernel"])
        program = trace_kernel(source, _specs(parse_inputs(str(row["inputs"]), where)), str(row["entry"]), target)
        kernels.append(MeasuredKernel(name, row.get("task") or name, program, _measurement(row, where)))
    return kernels


_TENSOR = re.compile(r"^(\w+)\[(\d+(?:,\d+)*)\]$")


def parse_inputs(text: str, where: str = "inputs") -> list[InputSpec]:
    """Parses ``float32[4096,1024];1e-5`` into shapes with dtypes and numbers.

    Raises:
        UserError: If an entry is neither.
    """
    specs: list[InputSpec] = []
    for entry in (part.replace(" ", "") for part in text.split(";")):
        match = _TENSOR.match(entry)
        if match:
            specs.append((tuple(int(extent) for extent in match[2].split(",")), match[1]))
            continue
        try:
            value = float(entry)
        except ValueError:
            raise UserError(f"{where}: {entry!r} is neither a tensor such as float32[128,512] nor a number") from None
        specs.append(int(value) if re.fullmatch(r"-?\d+", entry) else value)
    return specs


def _measurement(row: Mapping[str, str], where: str) -> Measurement:
    values: dict[str, float] = {}
    for name in ("latency_ms", *COUNTERS):
        text = row.get(name)
        if text is None or text.strip() == "":
            continue
        try:
            values[name] = float(text)
        except ValueError:
            raise UserError(f"{where}: the value {text!r} of {name} is not a number") from None
    latency = values.pop("latency_ms", 0.0)
    if not latency > 0 or math.isinf(latency):
        raise UserError(f"{where}: latency_ms must be a positive number of milliseconds")
    for name, value in values.items():
        if name.endswith("_percent") and not 0.0 <= value <= 1.0:
            raise UserError(f"{where}: {name} must be a fraction between 0 and 1, as in the profiler's JSON")
    return Measurement(latency, values)


def _from_task(task: Task, measurement: Measurement) -> MeasuredKernel:
    return MeasuredKernel(task.name, task.name, _traced_task(task), measurement)


@cache
def _traced(source: str, specs: tuple[InputSpec, ...], entry: str) -> Program:
    return trace_kernel(source, _specs(specs), entry, "trn1")


def _traced_task(task: Task) -> Program:
    return _traced(task.baseline_source(), task.input_specs(), task.entry)


def _specs(specs: Iterable[InputSpec]) -> list[TensorSpec | float | int]:
    return [TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in specs]
