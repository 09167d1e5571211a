"""What a run looks like while it goes on: lines that stay, and on a terminal one that moves."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.tally import Kernel, Tally

_FAILED_CALLS_SHOWN = 3


class Progress:
    """Turns a run's events into lines: the baseline, each new best kernel, each iteration's end, failing models."""

    def __init__(self, write: Callable[[str], None], iterations: int, tasks: Sequence[str] = ("",)) -> None:
        """Starts the clock.

        Args:
            write: Prints a line that stays.
            iterations: How many each search is to have.
            tasks: Names of the run's tasks; of several, lines say which they are about.
        """
        self.tallies = {task: Tally() for task in tasks}
        self._write = write
        self._iterations = iterations
        self._started = time.monotonic()
        self._counted: dict[str, Counter[str]] = {task: Counter() for task in tasks}

    @property
    def tally(self) -> Tally:
        """The first task's state."""
        return next(iter(self.tallies.values()))

    def say(self, text: str, task: str = "") -> None:
        """Prints a line with the time since the start."""
        about = f"{task}: " if task and len(self.tallies) > 1 else ""
        self._write(f"[{time.monotonic() - self._started:6.1f} s] {about}{text}")

    def event(self, name: str, values: Mapping[str, object]) -> None:
        """Takes note of an event and prints what is worth a line."""
        if name == "resumed":
            self._resumed(values)
            return
        task = str(values.get("task", ""))
        tally = self.tallies.get(task, self.tally)
        baseline, best = tally.baseline, tally.best
        tally.record(name, [values])
        if name == "evaluations":
            self._evaluation(task, tally, values, baseline, best)
        elif name == "search_started" and tally.baseline is None:
            self.say("evaluating the baseline", task)
        elif name == "warning":
            self.say(f"warning: {values['message']}", task)
        elif name == "hosting":
            self.say(str(values["message"]))
        elif name == "iterations" and values["iteration"]:
            self._iteration(task, tally, values)
        elif name == "llm_calls" and values["outcome"] == "error" and tally.failed_calls <= _FAILED_CALLS_SHOWN:
            self.say(f"a call of the {values['role']} failed: {values['error_text']}", task)

    def status(self) -> str:
        """The line that moves: where the run stands."""
        tallies = list(self.tallies.values())
        calls, evaluations = (
            sum(sum(each.calls.values()) for each in tallies),
            sum(each.evaluations for each in tallies),
        )
        done = min(each.iteration for each in tallies)
        parts = [f"iteration {min(done + 1, self._iterations)}/{self._iterations}"]
        parts.append(f"{calls} model calls, {evaluations} evaluations")
        if len(tallies) > 1:
            faster = sum((each.speedup or 1.0) > 1.0 for each in tallies)
            parts.append(f"{faster} of {len(tallies)} tasks faster")
        elif self.tally.best is not None and self.tally.speedup is not None:
            parts.append(f"best {describe(self.tally.best)}, {self.tally.speedup:.2f}x")
        cost_usd = sum(each.cost_usd for each in tallies)
        if cost_usd:
            parts.append(f"{cost_usd:.2f} USD")
        return f"{time.monotonic() - self._started:.0f} s  " + "  ".join(parts)

    def _resumed(self, values: Mapping[str, object]) -> None:
        """Takes in, without a word on each, what an earlier session had recorded."""
        tables = values["tables"]
        assert isinstance(tables, Mapping)
        for table, rows in tables.items():
            for row in rows:
                self.tallies.get(str(row["task"]), self.tally).record(table, [row])
        self._counted = {task: Counter(tally.outcomes) for task, tally in self.tallies.items()}
        for task, tally in self.tallies.items():
            best = "" if tally.best is None else f", best {describe(tally.best)}"
            calls = sum(tally.calls.values())
            self.say(f"taking up: {calls} model calls, {tally.evaluations} evaluations{best}", task)
        if values["lost_calls"]:
            self.say(f"{values['lost_calls']} calls were in flight when the run ended; they count as lost")

    def _evaluation(
        self, task: str, tally: Tally, values: Mapping[str, object], baseline: Kernel | None, best: Kernel | None
    ) -> None:
        now = tally.best
        if tally.baseline is not baseline and tally.baseline is not None:
            self.say(f"baseline: {describe(tally.baseline)}", task)
        elif now is not best and now is not None:
            self.say(f"new best: {describe(now)}, {tally.speedup:.2f}x ({now.candidate_id})", task)
        elif values["iteration"] == 0 and values["outcome"] != "correct":
            self.say(f"the baseline is not correct: {values['outcome']} {values['error_text']}", task)

    def _iteration(self, task: str, tally: Tally, values: Mapping[str, object]) -> None:
        known = self._counted.get(task, Counter())
        new, self._counted[task] = tally.outcomes - known, Counter(tally.outcomes)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in new.most_common()) or "none"
        text = f"iteration {values['iteration']}/{self._iterations} done: kernels {outcomes}"
        if tally.best is not None:
            text += f"; best {tally.best.latency_ms:.4f} ms"
        self.say(text, task)


def describe(kernel: Kernel) -> str:
    """Latency and percent of peak in words, always with where they come from."""
    kind = latency_kind(kernel.device, kernel.simulated)
    peak = "" if kernel.percent_of_peak is None else f", {kernel.percent_of_peak:.1f} % of peak"
    return f"{kernel.latency_ms:.4f} ms{peak} ({kind}, {kernel.device})"


@contextmanager
def shown(iterations: int, tasks: Sequence[str]) -> Iterator[Progress]:
    """Shows a run's progress on standard output until the block ends."""
    if not sys.stdout.isatty():
        yield Progress(lambda line: print(line, flush=True), iterations, tasks)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    progress = Progress(lambda line: console.print(Text(line)), iterations, tasks)

    class Moving:
        """Renders the present status each time the terminal is refreshed."""

        def __rich__(self) -> Text:
            return Text(progress.status(), style="bold", no_wrap=True, overflow="ellipsis")

    with Live(Moving(), console=console, refresh_per_second=4, transient=True):
        yield progress
