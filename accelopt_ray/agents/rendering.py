"""From a kernel and its profile to the exact text a role is sent.

Prompts are Jinja files, one folder for each generation of the toolchain. Another folder may replace any of them file by
file: the user's own, or a variant that the package brings, ``compact`` for models with a context of 8,192 tokens.
The text is a pure function of its arguments, so its hash identifies it.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from accelopt_ray.outcome import UserError

PROFILE_COUNTERS = (
    "hbm_read_bytes",
    "hbm_write_bytes",
    "psum_read_bytes",
    "psum_write_bytes",
    "sbuf_read_bytes",
    "sbuf_write_bytes",
    "spill_save_bytes",
    "spill_reload_bytes",
    "hardware_flops",
    "transpose_flops",
    "peak_flops_bandwidth_ratio",
    "mm_arithmetic_intensity",
    "hfu_estimated_percent",
    "scalar_engine_active_time_percent",
    "vector_engine_active_time_percent",
    "gpsimd_engine_active_time_percent",
)
"""The profiler's counters that the published method shows to its planner; ``latency`` makes seventeen."""

_FOLDER = Path(__file__).parent / "prompts"
_ROLES = ("planner", "executor", "summarizer", "fixer")


@dataclass(frozen=True)
class Prompt:
    """The two messages of one call."""

    system: str
    user: str

    @property
    def system_sha256(self) -> str:
        """Hash of the system message, under which it is stored once."""
        return hashlib.sha256(self.system.encode()).hexdigest()

    @property
    def sha256(self) -> str:
        """Hash of both messages."""
        return hashlib.sha256(f"{len(self.system)}:{self.system}{self.user}".encode()).hexdigest()


@dataclass(frozen=True)
class ProfileLine:
    """One ``name: value`` line."""

    name: str
    value: str


@dataclass(frozen=True)
class ShownExperience:
    """An experience item as a planner sees it; ``speedup`` is slow over fast latency, at least 1."""

    title: str
    text: str
    speedup: float


@dataclass(frozen=True)
class ShownAttempt:
    """An earlier attempt as a planner sees it; ``speedup`` is over its parent, 0 if it was not correct."""

    plan: str
    outcome: str
    speedup: float
    error_text: str
    profile: Sequence[ProfileLine] = ()


@dataclass(frozen=True)
class ShownPlan:
    """A plan tried before from the same kernel, in one line; ``speedup`` is over that kernel, 0 if there is none."""

    title: str
    outcome: str
    speedup: float


class PromptLibrary:
    """Renders the prompts of every role."""

    def __init__(self, folder: Path | None = None, generation: str = "generation_a") -> None:
        """Reads and checks the prompt files.

        Args:
            folder: Files here, such as ``planner.user.j2``, replace the package's of the same name. The name of a
                variant of the generation, such as ``compact``, stands for its folder unless there is one of that name.
            generation: Which of the package's prompt folders to use.

        Raises:
            UserError: A folder does not exist or a file does not parse.
        """
        package = _FOLDER / generation
        if not package.is_dir():
            known = ", ".join(sorted(each.name for each in _FOLDER.iterdir()))
            raise UserError(f"there are no prompts for the generation {generation!r}: choose one of {known}")
        folders = [package] if folder is None else [_replacement(folder, package), package]
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folders),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            # A run's prompts are those it started with, whatever happens to the files meanwhile.
            auto_reload=False,
        )
        self._environment.filters["fenced"] = fenced
        for role in _ROLES:
            for part in ("system", "user"):
                self._template(f"{role}.{part}.j2")

    def planner(
        self,
        *,
        problem: str,
        kernel: str,
        profile: Sequence[ProfileLine],
        experiences: Sequence[ShownExperience] = (),
        percent_of_peak: float | None = None,
        bottleneck: Sequence[ProfileLine] = (),
        feedback: Sequence[ShownAttempt] = (),
        tried: Sequence[ShownPlan] = (),
    ) -> Prompt:
        """Renders the request for a plan.

        Args:
            problem: The NumPy reference's source.
            kernel: Source of the kernel to improve.
            profile: Its profile, in the order to show; see :func:`profile_lines`.
            experiences: Items to show, in order.
            percent_of_peak: Shown unless None.
            bottleneck: What the device takes for the cause, shown unless empty; see :func:`explanation_lines`.
            feedback: Earlier attempts to show, oldest first.
            tried: Plans tried before from the same kernel, oldest first.
        """
        return self._render(
            "planner",
            problem=problem,
            kernel=kernel,
            profile=profile,
            experiences=experiences,
            percent_of_peak=percent_of_peak,
            bottleneck=bottleneck,
            feedback=feedback,
            tried=tried,
        )

    def executor(self, *, problem: str, kernel: str, plan: str, entry: str) -> Prompt:
        """Renders the request to carry out a plan on a kernel."""
        return self._render("executor", problem=problem, kernel=kernel, plan=plan, entry=entry)

    def summarizer(self, *, slow: str, fast: str, speedup: float) -> Prompt:
        """Renders the request for the lesson in a pair of kernels; ``speedup`` is slow over fast latency."""
        return self._render("summarizer", slow=slow, fast=fast, speedup=speedup)

    def fixer(self, *, problem: str, kernel: str, plan: str, outcome: str, error_text: str, entry: str) -> Prompt:
        """Renders the request to repair a kernel that failed."""
        return self._render(
            "fixer", problem=problem, kernel=kernel, plan=plan, outcome=outcome, error_text=error_text, entry=entry
        )

    def _render(self, role: str, **values: object) -> Prompt:
        try:
            system = self._template(f"{role}.system.j2").render(**values)
            user = self._template(f"{role}.user.j2").render(**values)
        except jinja2.TemplateError as error:
            raise UserError(f"the {role}'s prompt cannot be rendered: {error}; mend its file") from error
        return Prompt(system.strip() + "\n", user.strip() + "\n")

    def _template(self, name: str) -> jinja2.Template:
        try:
            return self._environment.get_template(name)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"prompt file {error.filename}, line {error.lineno}: {error.message}") from error


def _replacement(folder: Path, package: Path) -> Path:
    if folder.is_dir():
        return folder
    variants = {each.name: each for each in package.iterdir() if each.is_dir()}
    if str(folder) not in variants:
        raise UserError(
            f"there is no prompt folder {folder}: name one with files such as planner.user.j2, or one of the package's "
            f"variants, {', '.join(sorted(variants))}"
        )
    return variants[str(folder)]


def fenced(text: str, language: str) -> str:
    """Puts a text into a code fence longer than any it contains, so that nothing in it can close the fence."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def profile_lines(
    latency_ms: float | None, counters: Mapping[str, float], order: random.Random | None = None
) -> list[ProfileLine]:
    """Returns the profile's lines: latency in milliseconds and the published method's counters, as far as present.

    Args:
        latency_ms: Latency, if known.
        counters: Counters under the profiler's names; others than :data:`PROFILE_COUNTERS` are left out.
        order: Shuffles the lines, so that a model cannot learn to look at the first ones only; None keeps the order.
    """
    lines = [] if latency_ms is None else [ProfileLine("latency", _number(latency_ms))]
    lines += [ProfileLine(name, _number(counters[name])) for name in PROFILE_COUNTERS if name in counters]
    if order is not None:
        order.shuffle(lines)
    return lines


def explanation_lines(explanation: Mapping[str, object]) -> list[ProfileLine]:
    """Returns a device's bottleneck explanation as lines, nested entries joined by dots."""
    lines: list[ProfileLine] = []
    for name, value in explanation.items():
        if isinstance(value, Mapping):
            lines += [ProfileLine(f"{name}.{line.name}", line.value) for line in explanation_lines(value)]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            lines.append(ProfileLine(name, _number(float(value))))
        elif isinstance(value, (list, tuple)):
            lines.append(ProfileLine(name, ", ".join(map(str, value))))
        else:
            lines.append(ProfileLine(name, str(value)))
    return lines


def _number(value: float) -> str:
    """Writes a number for a model to read: whole numbers whole, others to six significant digits."""
    if math.isfinite(value) and value == int(value) and abs(value) >= 1:
        return str(int(value))
    return f"{value:.6g}"
