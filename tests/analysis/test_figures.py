"""Figures: each draws a run and a sweep, says what its axes are, marks simulated data, and has nothing global."""

from __future__ import annotations

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from accelopt_ray.analysis import Trajectory
from accelopt_ray.analysis.figures import FIGURES, best_so_far, outcome_mix, percent_of_peak, render
from accelopt_ray.analysis.figures.style import OUTCOME_LOOKS, SIMULATED_NOTE, shows_nothing
from accelopt_ray.outcome import EvaluationOutcome

WITHOUT_LATENCIES = {"outcome-mix", "spending"}
"""Figures of counts and money, to which it does not matter whether latencies are simulated."""


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_its_axes_and_marks_simulated_data(name: str, sweep: Trajectory):
    figure = FIGURES[name].draw(sweep)
    assert isinstance(figure, Figure)
    assert not shows_nothing(figure)
    named = [axes for axes in figure.axes if axes.get_xlabel() or axes.get_ylabel()]
    assert named, "no axis has a name"
    labels = [text.get_text() for text in figure.texts] + [figure.get_supxlabel()]
    assert (SIMULATED_NOTE in labels) == (name not in WITHOUT_LATENCIES)


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_the_same_figure_is_the_same_file(kind: str, run: Trajectory):
    first, second = (render(best_so_far(run.best_so_far()), kind) for _ in range(2))
    assert first == second
    assert len(first) > 1000


def test_nothing_global_is_changed(run: Trajectory):
    with mpl.rc_context({"font.size": 33.0}):
        render(percent_of_peak(run.profiles()))
        assert mpl.rcParams["font.size"] == 33.0


def test_a_measured_run_is_not_called_simulated(run: Trajectory):
    points = run.best_so_far()
    points["simulated"] = False
    assert best_so_far(points).get_supxlabel() == ""


def test_figures_of_nothing_say_why(run: Trajectory):
    points = run.best_by_cost()
    points["cost_usd"] = 0.0
    figure = best_so_far(points, "cost_usd")
    assert shows_nothing(figure)
    assert "no dollars" in figure.axes[0].texts[0].get_text()
    assert shows_nothing(outcome_mix(run.outcomes().head(0)))


def test_every_outcome_has_a_look_of_its_own():
    assert set(OUTCOME_LOOKS) == {str(outcome) for outcome in EvaluationOutcome}
    assert len(set(OUTCOME_LOOKS.values())) == len(OUTCOME_LOOKS)
