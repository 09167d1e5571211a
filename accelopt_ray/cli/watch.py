"""``accelopt-ray watch``: where a run stands, while it goes on or after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.cli.trajectories import opened
from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from accelopt_ray.analysis.live import Snapshot, Standing

_BEAM_SHOWN = 8
_OVER = ("finished", "stopped")


def watch(
    run: Annotated[
        str, typer.Argument(help="The run's folder or URI, or the name of a run of the cluster.", metavar="RUN")
    ],
    run_id: Annotated[str | None, typer.Option(help="Which run of a sweep.", show_default="the last one begun")] = None,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Show where a run stands: best so far, beam, queue, rates, spending, last failures. Ctrl-C ends the view alone.

    A run whose folder is on another machine of a Ray cluster (RAY_ADDRESS) is watched through its driver there, by its
    name, the folder it has there, or the last part of that.
    """
    from accelopt_ray.analysis.locations import leads_somewhere

    if not interval_s > 0:
        raise UserError(f"--interval is {interval_s}: give seconds above 0")
    if leads_somewhere(run):
        _show(_LocalRun(run, run_id), interval_s, once)
        return
    with _through_the_cluster(run, run_id) as look:
        _show(look, interval_s, once)


class _LocalRun:
    """Looks at a run whose folder can be read from here."""

    def __init__(self, location: str, run_id: str | None) -> None:
        self._location = location
        self._run_id = run_id

    def __call__(self) -> Snapshot | None:
        """Where the run stands; None before its first row."""
        from accelopt_ray.analysis.live import snapshot

        if _is_starting(self._location):
            return None
        with opened([self._location], [self._run_id] if self._run_id else None) as trajectory:
            if self._run_id is None:
                begun = trajectory.runs.sort_values("created_at")["run_id"]
                if begun.empty:
                    raise UserError(f"{self._location} holds no run that has begun: start one, or check the folder")
                self._run_id = str(begun.iloc[-1])
            return snapshot(trajectory.select([self._run_id]), self._run_id)


@contextmanager
def _through_the_cluster(run: str, run_id: str | None) -> Iterator[Callable[[], Snapshot | None]]:
    """Gives a look at a run that goes on in the running Ray cluster.

    Raises:
        UserError: There is no such run, or no cluster; or the run has ended, and with it the way to its folder.
    """
    try:
        from actors.cluster import joined
        from actors.watching import RunEndedError, held_run
    except ImportError:
        raise UserError(f"there is no folder {run}: give the output folder of a run or sweep") from None
    with ExitStack() as stack:
        try:
            stack.enter_context(joined())
        except UserError as error:
            raise UserError(f"there is no folder {run}, and {error}") from None
        held = held_run(run_id or run)
        try:
            yield held.snapshot
        except RunEndedError:
            raise UserError(
                f"run {held.run_id} has ended: where it stands is in {held.folder} on the machine that it ran on"
            ) from None


def _show(look: Callable[[], Snapshot | None], interval_s: float, once: bool) -> None:
    """Shows a run until it is over."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    now = look()
    if now is None:
        if once:
            raise UserError("the run is starting and has no row yet: look again, or leave --once out")
        console.print("waiting for the run's first row")
        while now is None:
            time.sleep(interval_s)
            now = look()
    if once or now.state in _OVER:
        console.print(render(now))
        return
    if not console.is_terminal:
        _follow_in_lines(look, now, interval_s)
        return
    with Live(render(now), console=console, auto_refresh=False) as live:
        while now.state not in _OVER:
            time.sleep(interval_s)
            now = look() or now
            live.update(render(now), refresh=True)


def _is_starting(run: str) -> bool:
    """Whether a run has made its folder and written nothing into it yet."""
    trajectory = Path(run) / "trajectory"
    return trajectory.is_dir() and not any(path.is_dir() for path in trajectory.iterdir())


def _follow_in_lines(look: Callable[[], Snapshot | None], now: Snapshot, interval_s: float) -> None:
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
        now = look() or now


def summary_line(now: Snapshot) -> str:
    """One line that tells the essentials."""
    planned = "?" if now.iterations_planned is None else now.iterations_planned
    parts = [now.run_id, now.state, f"iteration {now.iterations_done}/{planned}"]
    parts.append(f"{sum(count for _, count in now.outcomes)} evaluations, {now.calls} calls, {now.cost_usd:.2f} USD")
    parts.append("no correct kernel yet" if now.best is None else f"best {_kernel(now.best, now)}")
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
    table.add_row("baseline", _kernel(now.baseline, now) if now.baseline else "no correct one yet")
    if now.best is not None:
        peak = "" if now.best_percent_of_peak is None else f", {now.best_percent_of_peak:.1f} % of peak"
        table.add_row("best so far", f"[bold]{escape(_kernel(now.best, now))}{peak}[/bold]")
    beam = [f"{each.latency_ms:.4f} ms {escape(each.candidate_id)}" for each in now.beam[:_BEAM_SHOWN]]
    beam += [f"and {len(now.beam) - _BEAM_SHOWN} more"] if len(now.beam) > _BEAM_SHOWN else []
    table.add_row("beam", "\n".join(beam) or "none selected yet")
    counts = ", ".join(f"{count} {escape(name)}" for name, count in now.outcomes)
    table.add_row("evaluations", f"{sum(count for _, count in now.outcomes)}: {counts}" if counts else "none yet")
    table.add_row("queue", f"{now.calls_under_way} model calls under way, {now.waiting} kernels not evaluated yet")
    rates = f"{now.evaluations_per_minute:.1f} evaluations, {now.calls_per_minute:.1f} model calls a minute"
    table.add_row("rates", rates)
    failed = f", {now.failed_calls} failed" if now.failed_calls else ""
    table.add_row("spent", f"{now.cost_usd:.2f} USD, {now.tokens:,} tokens in {now.calls} calls{failed}")
    if now.failures:
        table.add_row("last failures", "\n".join(escape(line) for line in now.failures))
    return Panel(table, title=escape(f"{now.task} on {now.device}, run {now.run_id}"), title_align="left", expand=False)


def _kernel(standing: Standing, now: Snapshot) -> str:
    gain = "" if standing.speedup is None else f", {standing.speedup:.2f}x"
    label = f" ({latency_kind(now.device, now.simulated)})" if now.simulated else ""
    return f"{standing.latency_ms:.4f} ms{gain}{label} {standing.candidate_id}"


def _last_row(now: Snapshot) -> str:
    if now.last_row_at is None or now.state in _OVER:
        return ""
    age_s = (datetime.now(timezone.utc) - now.last_row_at).total_seconds()
    return f", last row {age_s:.0f} s ago" if age_s < 600 else f", last row {age_s / 60:.0f} minutes ago"
