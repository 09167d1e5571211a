"""What a sweep came to: a line for each run, what failed and why, and a table for pandas."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accelopt_ray.sweep.file import SweepRun
from accelopt_ray.sweep.folder import SUMMARY_NAME, RunState, RunStatus
from nkibench.roofline import geometric_mean

_ERROR_SHOWN = 160


def summary_lines(names: Sequence[str], states: Mapping[str, RunState | None]) -> Iterator[str]:
    """Yields the summary as text.

    Args:
        names: All runs, in their order.
        states: How each stands; None or absent if it has not begun.
    """
    width = max(map(len, names), default=3)
    titles = f"{'speed-up':>8} {'best ms':>9} {'evals':>6} {'calls':>6} {'USD':>8} {'s':>8}"
    yield f"{'run':<{width}}  {'status':<9} {titles}"
    for name in names:
        state = states.get(name)
        if state is None:
            yield f"{name:<{width}}  not begun"
            continue
        speedup = _geomean(state)
        best = [each.best_latency_ms for each in state.outcomes if each.best_latency_ms is not None]
        yield (
            f"{name:<{width}}  {state.status!s:<9} {'-' if speedup is None else f'{speedup:.3f}x':>8} "
            f"{f'{best[0]:.4f}' if len(best) == 1 else '-':>9} {sum(each.evaluations for each in state.outcomes):>6} "
            f"{sum(each.calls for each in state.outcomes):>6} {sum(each.cost_usd for each in state.outcomes):>8.2f} "
            f"{state.elapsed_s:>8.1f}"
        )
        for text in _complaints(state):
            yield f"{'':<{width}}    {text}"
    yield totals(names, states)


def totals(names: Sequence[str], states: Mapping[str, RunState | None]) -> str:
    """One line over all runs."""
    found = [states.get(name) for name in names]
    counts = Counter("not begun" if state is None else str(state.status) for state in found)
    begun = [state for state in found if state is not None]
    outcomes = [each for state in begun for each in state.outcomes]
    simulated = " (simulated)" if any(each.simulated for each in outcomes) else ""
    speedups = [each.speedup for each in outcomes if each.speedup is not None]
    mean = f", geometric mean {geometric_mean(speedups):.3f}x{simulated}" if speedups else ""
    return (
        f"{len(names)} runs: {', '.join(f'{count} {status}' for status, count in counts.most_common())}; "
        f"{sum(each.evaluations for each in outcomes)} evaluations, {sum(each.calls for each in outcomes)} calls, "
        f"{sum(each.cost_usd for each in outcomes):.2f} USD{mean}"
    )


def comparison_lines(runs: Sequence[SweepRun], states: Mapping[str, RunState | None]) -> Iterator[str]:
    """Yields, for each value of what was varied, the geometric mean of the speed-ups of its finished runs."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    simulated = ""
    for run in runs:
        state = states.get(run.name)
        outcomes = state.outcomes if state is not None else ()
        speedups = [each.speedup for each in outcomes]
        simulated = " (simulated)" if any(each.simulated for each in outcomes) else simulated
        for label in run.labels:
            found[label] += [each for each in speedups if each is not None]
    fields = Counter(field for field, _ in found)
    for (field, value), reached in found.items():
        if fields[field] > 1 and field != "repeat" and reached:
            yield f"{field} {value}: {geometric_mean(reached):.3f}x over {len(reached)} searches{simulated}"


def write_summary(folder: Path, runs: Sequence[SweepRun], states: Mapping[str, RunState | None]) -> Path:
    """Writes ``summary.csv``: a row for each task of each run, one for a run without outcomes."""
    fields = list(dict.fromkeys(field for run in runs for field, _ in run.labels))
    columns = [
        "run", "run_id", "run_status", "task", "search_status", "reason", "speedup", "baseline_latency_ms",
        "best_latency_ms", "simulated", "evaluations", "calls", "tokens", "cost_usd", "elapsed_s", "attempts", "error",
    ]  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *fields], restval="")
    writer.writeheader()
    for run in runs:
        state = states.get(run.name)
        row: dict[str, object] = {"run": run.name, "run_status": "not begun", **dict(run.labels)}
        if state is not None:
            row |= {
                "run_id": state.run_id,
                "run_status": str(state.status),
                "elapsed_s": f"{state.elapsed_s:.3f}",
                "attempts": state.attempts,
                "error": state.error,
            }
        for each in state.outcomes if state is not None else ():
            writer.writerow(
                {
                    "reason": each.reason,
                    "search_status": each.status,
                    "speedup": each.speedup,
                    **{name: getattr(each, name) for name in columns if hasattr(each, name)},
                    **row,
                    "task": each.task,
                }
            )
        if state is None or not state.outcomes:
            writer.writerow(row)
    path = folder / SUMMARY_NAME
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text.getvalue(), encoding="utf-8")
    temporary.replace(path)
    return path


def _complaints(state: RunState) -> Iterator[str]:
    if state.status is not RunStatus.FINISHED and state.error:
        yield state.error if len(state.error) <= _ERROR_SHOWN else state.error[:_ERROR_SHOWN] + "..."
    for each in state.outcomes:
        if each.status != "completed" or each.speedup is None:
            yield f"{each.task}: {each.reason or each.status}"


def _geomean(state: RunState) -> float | None:
    speedups = [each.speedup for each in state.outcomes if each.speedup is not None]
    return geometric_mean(speedups) if speedups else None
