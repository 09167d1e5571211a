"""Options that several commands share: budgets and other reasons to end a search."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

# Optional, not "| None": these are evaluated at run time, also by Python 3.10's typer.
MaxEvaluations = Annotated[Optional[int], typer.Option(help="Budget of evaluations, all tasks together.")]  # noqa: UP045
MaxUsd = Annotated[Optional[float], typer.Option(help="Budget of US dollars, all tasks together.")]  # noqa: UP045
MaxMinutes = Annotated[Optional[float], typer.Option(help="No model call starts after this time.")]  # noqa: UP045
MaxTotalTokens = Annotated[Optional[int], typer.Option(help="Budget of tokens, prompts and completions.")]  # noqa: UP045
MaxDeviceMinutes = Annotated[Optional[float], typer.Option(help="Budget of time on devices.")]  # noqa: UP045
StopAtPercentOfPeak = Annotated[Optional[float], typer.Option(help="Good enough: end there.")]  # noqa: UP045
Patience = Annotated[Optional[int], typer.Option(help="End after this many iterations without gain.")]  # noqa: UP045


def budgets(
    max_evaluations: int | None,
    max_usd: float | None,
    max_total_tokens: int | None,
    max_device_minutes: float | None,
    max_minutes: float | None,
    stop_at_percent_of_peak: float | None,
    patience: int | None,
) -> dict[str, object]:
    """The options as search settings; None where nothing was said."""
    return {
        "max_evaluations": max_evaluations,
        "max_cost_usd": max_usd,
        "max_total_tokens": max_total_tokens,
        "max_device_s": None if max_device_minutes is None else max_device_minutes * 60.0,
        "max_wall_s": None if max_minutes is None else max_minutes * 60.0,
        "target_percent_of_peak": stop_at_percent_of_peak,
        "stop_after_no_improvement": patience,
    }
