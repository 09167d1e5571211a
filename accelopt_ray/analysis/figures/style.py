"""One look for all figures: readable in print, in grey and with any colour vision, units on every axis.

Colours are those of Okabe and Ito, which keep apart for all common kinds of colour blindness; whatever a colour tells,
a marker, a hatch or a label tells too. Figures are made without pyplot, so that nothing global is touched and no window
system is needed.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#000000", "#8C8C8C"
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))

OUTCOME_LOOKS: Mapping[str, tuple[str, str]] = {
    "correct": (GREEN, ""),
    "duplicate": ("#BBBBBB", "||"),
    "incorrect": (VERMILION, "///"),
    "compile_error": (ORANGE, "xxx"),
    "runtime_error": (PURPLE, "\\\\\\"),
    "timeout": (BLUE, "+++"),
    "memory_limit": (SKY, "///"),
    "crashed": (BLACK, ""),
    "no_code": (YELLOW, "--"),
    "precision_violation": ("#A0522D", "xxx"),
    "rejected": ("#7A0019", "\\\\\\"),
    "unsupported": ("#5B5B5B", "///"),
    "cancelled": ("#DDDDDD", ""),
}
"""Colour and hatch of each outcome."""

SIMULATED_NOTE = "simulated: latencies are predictions of a model, not results of a Trainium device"

_RC: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "accelopt-ray",
    "pdf.fonttype": 42,
}

_NOTHING = "nothing-to-show"

_Draw = TypeVar("_Draw", bound=Callable[..., Figure])


def styled(draw: _Draw) -> _Draw:
    """Makes a function draw in this style, whatever the caller's own settings of matplotlib are."""

    @functools.wraps(draw)
    def wrapper(*arguments: Any, **options: Any) -> Figure:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(cast(Any, _RC))
            return draw(*arguments, **options)

    return cast(_Draw, wrapper)


class ShownFigure(Figure):
    """A figure that notebooks show by itself, without pyplot."""

    def _repr_svg_(self) -> str:
        return render(self, "svg").decode()


def new_figure(rows: int = 1, columns: int = 1, width: float = 6.4, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Makes a figure of ``width`` x ``height`` inches and its axes, row by row."""
    figure = ShownFigure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    return figure, [axes for row in grid for axes in row]


def finish(figure: Figure, simulated: bool) -> Figure:
    """Adds the note that simulated data must carry."""
    if simulated:
        figure.supxlabel(SIMULATED_NOTE, fontsize=7.5, color=VERMILION, style="italic")
    return figure


def any_simulated(frame: Any) -> bool:
    """Whether a frame's ``simulated`` column is true anywhere."""
    return bool(frame["simulated"].fillna(False).astype(bool).any())


def nothing_to_show(why: str, width: float = 6.4) -> Figure:
    """A figure that says why there is none."""
    figure, (axes,) = new_figure(width=width, height=1.2)
    figure.set_gid(_NOTHING)
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center", va="center", color="#555555", transform=axes.transAxes, wrap=True)
    return figure


def shows_nothing(figure: Figure) -> bool:
    """Whether a figure only says why there is nothing to show."""
    return figure.get_gid() == _NOTHING


def render(figure: Figure, kind: str = "svg") -> bytes:
    """Returns a figure as a file's content: ``svg``, ``png`` or ``pdf``, the same bytes for the same figure."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, _RC))
        figure.savefig(stream, format=kind, metadata=metadata)
    return stream.getvalue()
