"""Measures the trajectory's and the analysis' promised figures on generated data.

    python -m experiments.benchmark_analysis [--evaluations 1000000] [--folder DIR] [--json]

It generates a sweep (compacted, one part for each run's table; and not) and a long run, and measures each question in a
fresh process: seconds from the first line after the imports, and the process' peak memory. Targets are for two cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accelopt_ray.analysis import load
from accelopt_ray.analysis.report import write_report
from accelopt_ray.trajectory import ManyPartsWarning, TrajectoryWriter
from accelopt_ray.trajectory.schema import named_table
from experiments.generated_run import generate_run

EVALUATIONS_PER_RUN = 10_000
REPORT_EVALUATIONS = 2_000
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
COUNTERS = (
    "dma_active_time_percent",
    "hbm_read_bytes",
    "hbm_write_bytes",
    "mbu_estimated_percent",
    "sbuf_read_bytes",
    "sbuf_write_bytes",
    "scalar_engine_active_time_percent",
    "spill_reload_bytes",
    "spill_save_bytes",
    "tensor_engine_active_time_percent",
    "total_time",
    "vector_engine_active_time_percent",
)
SMALL_PART_ROWS = 100
"""Rows of a part file of a run that nobody has compacted."""

OUTCOMES = ("correct", "incorrect", "compile_error", "duplicate")

TARGETS: Mapping[str, tuple[float, str]] = {
    "sweep: load and best_so_far": (10.0, "s"),
    "sweep: peak memory of load and best_so_far": (3.0, "GB"),
    "sweep, not compacted: load and best_so_far": (20.0, "s"),
    "sweep: one run's evaluations": (0.5, "s"),
    "sweep: best_so_far in DuckDB": (2.0, "s"),
    "recorder: seconds for 500 rows of 20 kB": (1.0, "s"),
    "recorder: flush latency p99": (0.2, "s"),
    "report: seconds": (20.0, "s"),
    "report: size": (5.0, "MB"),
}


def generate_sweep(folder: Path, evaluations: int, seed: int = 0, part_rows: int | None = None) -> None:
    """Writes a sweep's ``evaluations`` and ``runs``.

    Args:
        folder: The sweep's.
        evaluations: Rows in all.
        seed: Of everything random.
        part_rows: Rows of a part file, written as a run's recorder does; by default one compacted part a run.
    """
    random = np.random.default_rng(seed)
    for number, first in enumerate(range(0, evaluations, EVALUATIONS_PER_RUN)):
        run_id = f"silu-{number:05d}"
        rows = min(EVALUATIONS_PER_RUN, evaluations - first)
        partition = folder / "trajectory" / "evaluations" / f"p_run={run_id}"
        partition.mkdir(parents=True)
        table = _evaluations(run_id, rows, random)
        for part, start in enumerate(range(0, rows, part_rows or rows)):
            path = partition / f"part-{part:06d}.parquet"
            piece = table.slice(start, part_rows or rows)
            pq.write_table(piece, path, compression="zstd", use_dictionary=part_rows is None)
        TrajectoryWriter(folder / "trajectory", run_id).write("runs", [_run(number)])


def _run(seed: int) -> dict[str, object]:
    config = {"task": "silu", "seed": seed, "preset": "paper", "search": {"iterations": 16}}
    return {
        "created_at": START,
        "preset": "paper",
        "seed": seed,
        "device": "sim-trn1",
        "models": {"planner": "m", "executor": "m"},
        "config_json": json.dumps(config),
    }


def _evaluations(run_id: str, rows: int, random: np.random.Generator) -> pa.Table:
    schema = named_table("evaluations").schema
    index = np.arange(rows)
    outcome = np.array(OUTCOMES)[random.choice(len(OUTCOMES), rows, p=[0.5, 0.1, 0.3, 0.1])]
    outcome[0] = "correct"
    ok = outcome == "correct"
    latency = np.where(ok, 2.0 / (1 + index / rows * random.random(rows)), np.nan)
    iteration = (index * 16 // rows + (index > 0)).astype(np.int32)
    names = [f"silu.i{i}.c{n % 6}.p{n // 6 % 12}.a{n}" for i, n in zip(iteration, index, strict=True)]
    hashes = [f"{value:064x}" for value in random.integers(0, 2**62, rows)]
    offsets = pa.array(np.concatenate([[0], np.cumsum(np.where(ok, len(COUNTERS), 0))]).astype(np.int32))
    counters = pa.MapArray.from_arrays(
        offsets, pa.array(list(COUNTERS) * int(ok.sum())), pa.array(random.random(len(COUNTERS) * int(ok.sum())))
    )
    null_latency = pa.array(latency, from_pandas=True)
    columns: dict[str, object] = {
        "schema_version": pa.array(np.ones(rows, np.int32)),
        "run_id": pa.array([run_id] * rows),
        "task": pa.array(["silu"] * rows),
        "iteration": pa.array(iteration),
        "evaluation_id": pa.array(names),
        "candidate_id": pa.array(names),
        "parent_candidate_id": pa.array([None, *(["silu.i0.c0"] * (rows - 1))]),
        "plan_id": pa.array([None, *(name.rpartition(".")[0] for name in names[1:])]),
        "call_id": pa.array([None, *(f"{name}.executor" for name in names[1:])]),
        "source_sha256": pa.array(hashes),
        "canonical_sha256": pa.array(hashes),
        "outcome": pa.array(outcome.tolist()),
        "error_text": pa.array(["" if good else "error: " + "x" * 300 for good in ok], pa.large_string()),
        "device": pa.array(["sim-trn1"] * rows),
        "simulated": pa.array(np.ones(rows, bool)),
        "latency_ms": null_latency,
        "latency_samples_ms": pa.array([[value] if good else [] for value, good in zip(latency, ok, strict=True)]),
        "baseline_latency_ms": pa.array(np.full(rows, latency[0])),
        "percent_of_peak": pa.array(50.0 / latency, from_pandas=True),
        "counters": counters,
        "ended_at": pa.array([START + timedelta(seconds=int(n)) for n in index], schema.field("ended_at").type),
    }
    arrays = [columns.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    return pa.table(arrays, schema=schema)


def sweep_best_so_far(folder: Path) -> dict[str, float]:
    """All evaluations in pandas."""
    started = time.perf_counter()
    best = load(folder).best_so_far()
    seconds = time.perf_counter() - started
    assert best["best_speedup"].notna().all()
    return {"sweep: load and best_so_far": seconds, "sweep: peak memory of load and best_so_far": _peak_gb()}


def sweep_of_small_parts(folder: Path) -> dict[str, float]:
    """The same without compaction."""
    small = folder.with_name("small-parts")
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ManyPartsWarning)
        best = load(small).best_so_far()
    seconds = time.perf_counter() - started
    assert best["best_speedup"].notna().all()
    return {"sweep, not compacted: load and best_so_far": seconds}


def sweep_one_run(folder: Path) -> dict[str, float]:
    """One run's evaluations out of the sweep's."""
    started = time.perf_counter()
    one = load(folder, run_ids=["silu-00007"]).evaluations
    seconds = time.perf_counter() - started
    assert one["run_id"].eq("silu-00007").all()
    return {"sweep: one run's evaluations": seconds}


def sweep_duckdb(folder: Path) -> dict[str, float]:
    """The same question in SQL."""
    started = time.perf_counter()
    rows = duckdb.sql(
        f"""
        SELECT run_id, task, ended_at, baseline_latency_ms / min(latency_ms) FILTER (outcome = 'correct') OVER (
            PARTITION BY run_id, task ORDER BY ended_at ROWS UNBOUNDED PRECEDING) AS best_speedup
        FROM read_parquet('{folder}/trajectory/evaluations/**/*.parquet')
        """
    ).fetch_arrow_table()
    assert len(rows) > 0
    return {"sweep: best_so_far in DuckDB": time.perf_counter() - started}


def recorder(folder: Path) -> dict[str, float]:
    """500 rows a second of 20 kB each, flushed in groups as a run's recorder does."""
    random = np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(32, 126, 20_000))) for _ in range(50)]
    writer = TrajectoryWriter(folder / "recorder" / "trajectory", "r")
    flushes = []
    started = time.perf_counter()
    for flush in range(100):
        rows = [{"call_id": f"{flush}.{n}", "role": "planner", "reply_text": text} for n, text in enumerate(texts)]
        before = time.perf_counter()
        writer.write("llm_calls", rows)
        flushes.append(time.perf_counter() - before)
    seconds = time.perf_counter() - started
    return {
        "recorder: seconds for 500 rows of 20 kB": seconds / 10,
        "recorder: flush latency p99": float(np.quantile(flushes, 0.99)),
    }


def report(folder: Path) -> dict[str, float]:
    """The report of a run of 2,000 evaluations with plans and sources."""
    run = folder / "long-run"
    generate_run(run, evaluations=REPORT_EVALUATIONS)
    started = time.perf_counter()
    path = write_report(load(run), run / "report.html")
    return {"report: seconds": time.perf_counter() - started, "report: size": path.stat().st_size / 1e6}


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


QUESTIONS: Mapping[str, Callable[[Path], dict[str, float]]] = {
    "best-so-far": sweep_best_so_far,
    "small-parts": sweep_of_small_parts,
    "one-run": sweep_one_run,
    "duckdb": sweep_duckdb,
    "recorder": recorder,
    "report": report,
}


def main() -> int:
    """Generates, measures, prints; returns 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keeps the generated data here and uses what is there")
    parser.add_argument("--only", choices=QUESTIONS, help="one question")
    parser.add_argument("--measure", choices=QUESTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(QUESTIONS[options.measure](options.folder)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "sweep").is_dir():
            generate_sweep(folder / "sweep", options.evaluations)
        if not (folder / "small-parts").is_dir() and options.only in (None, "small-parts"):
            generate_sweep(folder / "small-parts", options.evaluations, part_rows=SMALL_PART_ROWS)
        values: dict[str, float] = {}
        for question in [options.only] if options.only else QUESTIONS:
            where = folder / "sweep" if QUESTIONS[question].__name__.startswith("sweep") else folder
            command = [sys.executable, "-m", __spec__.name if __spec__ else "", "--measure", question]
            done = subprocess.run([*command, "--folder", str(where)], check=True, capture_output=True, text=True)
            values.update(json.loads(done.stdout.splitlines()[-1]))
    missed = [name for name, value in values.items() if value > TARGETS[name][0]]
    if options.json:
        print(json.dumps(values, indent=2))
    else:
        for name, value in values.items():
            target, unit = TARGETS[name]
            print(f"{name:45} {value:8.3f} {unit:3} target {target:g} {'missed' if name in missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
