"""What a run looks like while it goes on: lines that stay, and on a terminal one that moves."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from accelopt_ray.tally import Kernel, Tally

_FAILED_CALLS_SHOWN = 3


class Progress:
    """Turns a run's events into lines: the baseline, each new best kernel, each iteration's end, failing models."""

    def __init__(self, write: Callable[[str], None], iterations: int) -> None:
        """Starts the clock.

        Args:
            write: Prints a line that stays.
            iterations: How many the search is to have.
        """
        self.tally = Tally()
        self._write = write
        self._iterations = iterations
        self._started = time.monotonic()
        self._counted: Counter[str] = Counter()

    def say(self, text: str) -> None:
        """Prints a line with the time since the start."""
        self._write(f"[{time.monotonic() - self._started:6.1f} s] {text}")

    def event(self, name: str, values: Mapping[str, object]) -> None:
        """Takes note of an event and prints what is worth a line."""
        baseline, best = self.tally.baseline, self.tally.best
        self.tally.record(name, [values])
        if name == "evaluations":
            self._evaluation(values, baseline, best)
        elif name == "search_started":
            self.say("evaluating the baseline")
        elif name == "iterations" and values["iteration"]:
            self._iteration(values)
        elif name == "llm_calls" and values["outcome"] == "error" and self.tally.failed_calls <= _FAILED_CALLS_SHOWN:
            self.say(f"a call of the {values['role']} failed: {values['error_text']}")

    def status(self) -> str:
        """The line that moves: where the run stands."""
        calls, evaluations = sum(self.tally.calls.values()), self.tally.evaluations
        parts = [f"iteration {min(self.tally.iteration + 1, self._iterations)}/{self._iterations}"]
        parts.append(f"{calls} model calls, {evaluations} evaluations")
        if self.tally.best is not None and self.tally.speedup is not None:
            parts.append(f"best {describe(self.tally.best)}, {self.tally.speedup:.2f}x")
        if self.tally.cost_usd:
            parts.append(f"{self.tally.cost_usd:.2f} USD")
        return f"{time.monotonic() - self._started:.0f} s  " + "  ".join(parts)

    def _evaluation(self, values: Mapping[str, object], baseline: Kernel | None, best: Kernel | None) -> None:
        now = self.tally.best
        if self.tally.baseline is not baseline and self.tally.baseline is not None:
            self.say(f"baseline: {describe(self.tally.baseline)}")
        elif now is not best and now is not None:
            self.say(f"new best: {describe(now)}, {self.tally.speedup:.2f}x ({now.candidate_id})")
        elif values["iteration"] == 0 and values["outcome"] != "correct":
            self.say(f"the baseline is not correct: {values['outcome']} {values['error_text']}")

    def _iteration(self, values: Mapping[str, object]) -> None:
        new, self._counted = self.tally.outcomes - self._counted, Counter(self.tally.outcomes)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in new.most_common()) or "none"
        text = f"iteration {values['iteration']}/{self._iterations} done: kernels {outcomes}"
        if self.tally.best is not None:
            text += f"; best {self.tally.best.latency_ms:.4f} ms"
        self.say(text)


def describe(kernel: Kernel) -> str:
    """Latency and percent of peak in words, always with where they come from."""
    kind = "simulated" if kernel.simulated else "measured"
    peak = "" if kernel.percent_of_peak is None else f", {kernel.percent_of_peak:.1f} % of peak"
    return f"{kernel.latency_ms:.4f} ms{peak} ({kind}, {kernel.device})"


@contextmanager
def shown(iterations: int) -> Iterator[Progress]:
    """Shows a run's progress on standard output until the block ends."""
    if not sys.stdout.isatty():
        yield Progress(lambda line: print(line, flush=True), iterations)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    progress = Progress(lambda line: console.print(Text(line)), iterations)

    class Moving:
        """Renders the present status each time the terminal is refreshed."""

        def __rich__(self) -> Text:
            return Text(progress.status(), style="bold", no_wrap=True, overflow="ellipsis")

    with Live(Moving(), console=console, refresh_per_second=4, transient=True):
        yield progress
