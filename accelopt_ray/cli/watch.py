"""``accelopt-ray watch``: where a run stands, while it goes on or after."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.cli.trajectories import opened
from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from accelopt_ray.analysis.live import Snapshot, Standing

_BEAM_SHOWN = 8
_OVER = ("finished", "stopped")


def watch(
    run: Annotated[str, typer.Argument(help="The run's folder or URI.", metavar="RUN")],
    run_id: Annotated[str | None, typer.Option(help="Which run of a sweep [the last one begun].")] = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Show where a run stands: best so far, beam, queue, rates, spending, last failures. Ctrl-C ends the view alone."""
    from rich.console import Console
    from rich.live import Live

    if not interval_s > 0:
        raise UserError(f"--interval is {interval_s}: give seconds above 0")
    console = Console()
    if _is_starting(run):
        if once:
            raise UserError(f"the run in {run} is starting and has no row yet: look again, or leave --once out")
        console.print("waiting for the run's first row")
        while _is_starting(run):
            time.sleep(interval_s)
    now = _look(run, run_id)
    if once or now.state in _OVER:
        console.print(render(now))
        return
    if not console.is_terminal:
        _follow_in_lines(run, now, interval_s)
        return
    with Live(render(now), console=console, auto_refresh=False) as live:
        while now.state not in _OVER:
            time.sleep(interval_s)
            now = _look(run, now.run_id)
            live.update(render(now), refresh=True)


def _is_starting(run: str) -> bool:
    """Whether a run has made its folder and written nothing into it yet."""
    trajectory = Path(run) / "trajectory"
    return trajectory.is_dir() and not any(path.is_dir() for path in trajectory.iterdir())


def _look(run: str, run_id: str | None) -> Snapshot:
    from accelopt_ray.analysis.live import snapshot

    with opened([run], [run_id] if run_id else None) as trajectory:
        chosen = run_id
        if chosen is None:
            begun = trajectory.runs.sort_values("created_at")["run_id"]
            if begun.empty:
                raise UserError(f"{run} holds no run that has begun: start one, or check the folder")
            chosen = str(begun.iloc[-1])
        return snapshot(trajectory if run_id else trajectory.select([chosen]), chosen)


def _follow_in_lines(run: str, now: Snapshot, interval_s: float) -> None:
    """Without a terminal: a line whenever something has changed."""
    shown = ""
    while True:
        line = summary_line(now)
        if line != shown:
            print(line, flush=True)
            shown = line
        if now.state in _OVER:
            return
        time.sleep(interval_s)
        now = _look(run, now.run_id)


def summary_line(now: Snapshot) -> str:
    """One line that tells the essentials."""
    planned = "?" if now.iterations_planned is None else now.iterations_planned
    parts = [now.run_id, now.state, f"iteration {now.iterations_done}/{planned}"]
    parts.append(f"{sum(count for _, count in now.outcomes)} evaluations, {now.calls} calls, {now.cost_usd:.2f} USD")
    parts.append("no correct kernel yet" if now.best is None else f"best {_kernel(now.best, now.simulated)}")
    return "  ".join(parts)


def render(now: Snapshot) -> RenderableType:
    """The view as a table of names and values."""
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    planned = "?" if now.iterations_planned is None else now.iterations_planned
    table.add_row("state", f"{now.state}, {now.iterations_done} of {planned} iterations done{_last_row(now)}")
    table.add_row("baseline", _kernel(now.baseline, now.simulated) if now.baseline else "no correct one yet")
    if now.best is not None:
        peak = "" if now.best_percent_of_peak is None else f", {now.best_percent_of_peak:.1f} % of peak"
        table.add_row("best so far", f"[bold]{escape(_kernel(now.best, now.simulated))}{peak}[/bold]")
    beam = [f"{each.latency_ms:.4f} ms {escape(each.candidate_id)}" for each in now.beam[:_BEAM_SHOWN]]
    beam += [f"and {len(now.beam) - _BEAM_SHOWN} more"] if len(now.beam) > _BEAM_SHOWN else []
    table.add_row("beam", "\n".join(beam) or "none selected yet")
    counts = ", ".join(f"{count} {escape(name)}" for name, count in now.outcomes)
    table.add_row("evaluations", f"{sum(count for _, count in now.outcomes)}: {counts}" if counts else "none yet")
    table.add_row(
        "queue", f"{now.calls_under_way} model calls under way, {now.waiting} kernels written and not evaluated yet"
    )
    rates = f"{now.evaluations_per_minute:.1f} evaluations, {now.calls_per_minute:.1f} model calls a minute"
    table.add_row("rates", rates)
    failed = f", {now.failed_calls} failed" if now.failed_calls else ""
    table.add_row("spent", f"{now.cost_usd:.2f} USD, {now.tokens:,} tokens in {now.calls} calls{failed}")
    if now.failures:
        table.add_row("last failures", "\n".join(escape(line) for line in now.failures))
    return Panel(table, title=escape(f"{now.task} on {now.device}, run {now.run_id}"), title_align="left", expand=False)


def _kernel(standing: Standing, simulated: bool) -> str:
    gain = "" if standing.speedup is None else f", {standing.speedup:.2f}x"
    label = " (simulated)" if simulated else ""
    return f"{standing.latency_ms:.4f} ms{gain}{label} {standing.candidate_id}"


def _last_row(now: Snapshot) -> str:
    if now.last_row_at is None or now.state in _OVER:
        return ""
    age_s = (datetime.now(timezone.utc) - now.last_row_at).total_seconds()
    return f", last row {age_s:.0f} s ago" if age_s < 600 else f", last row {age_s / 60:.0f} minutes ago"
