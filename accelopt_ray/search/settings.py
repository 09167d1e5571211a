"""Everything that decides how a search behaves, checked once before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from accelopt_ray.outcome import StrEnum, UserError


class SelectionRule(StrEnum):
    """How the next beam is chosen; see :mod:`accelopt_ray.search.beam`."""

    PUBLISHED = "published"
    PAPER = "paper"
    BASELINE = "baseline"


class MemoryRule(StrEnum):
    """How old experience items make room for new ones; see :mod:`accelopt_ray.search.memory`."""

    PUBLISHED = "published"
    PAPER = "paper"
    WEIGHTED = "weighted"


class StageOrder(StrEnum):
    """What waits for what within an iteration; see :mod:`accelopt_ray.search.stages`."""

    OVERLAPPED = "overlapped"
    BARRIERS = "barriers"
    PUBLISHED = "published"


@dataclass(frozen=True)
class SearchSettings:
    """Settings of one task's search. Symbols in brackets are the paper's.

    Attributes:
        preset: Name under which the settings were put together; recorded, never interpreted.
        iterations: Search iterations after the baseline's evaluation (T).
        beam_width: Candidates carried between iterations (B).
        plans_per_candidate: Plans sampled from the planner for each candidate (N).
        attempts_per_plan: Implementations sampled from the executor for each plan (K).
        positive_threshold: A rewrite is a positive example when its speed-up exceeds this (t_pos).
        negative_threshold: A rewrite is a negative example when its speed-up is below 1 over this (t_neg).
        experiences_per_iteration: At most this many new experience items an iteration (TopK).
        memory_capacity: Experience items kept for the planner (ExpN).
        seed: Root of every random stream.
        check: Correctness check of every evaluation, ``published`` or ``strict``; no preset changes it.
        staged_check: Whether a kernel is tried on one set of inputs first, and on the others only where it would enter
            the beam or the memory or become the best; beam, memory and best are the same without.
        device: Device that measures.
        selection_rule: How the next beam is chosen.
        selection_share: Share of an iteration's attempts that have to be final before the next beam is chosen (q);
            below 1 the outcome depends on who arrives in time, and lessons are shown one iteration later, so that
            nobody waits for the summarizer either.
        stage_order: What waits for what within an iteration; what comes out is the same, the time it takes is not.
        memory_rule: How old experience items make room.
        use_memory: Whether rewrites are summarised and shown to the planner.
        deduplicate: Whether a kernel equal to an earlier one in canonical form is answered without evaluation.
        plan_resamples: How often a plan that repeats one tried from the same kernel is sampled again, at most; 0 takes
            every plan as it comes. One that repeats to the end is not carried out.
        kernel_resamples: How often the executor is asked again, at most, where its kernel is its parent or another that
            an ended iteration had; 0 takes every kernel as it comes.
        plan_similarity: Least share of common three-word runs at which a plan with the same numbers is a repetition.
        show_tried_plans: At most so many titles of plans tried from the same kernel are shown to the planner.
        remeasure_parents: Whether a measured beam member is measured again at the start of an iteration. Predicted
            latencies are never predicted again, since they could not differ.
        plan_while_remeasuring: Whether planners are asked meanwhile and shown the profile that their kernel was chosen
            by, in place of the new one; speed-ups are against the new latency in any case.
        feedback_attempts: How many of the last attempts, with their outcome, the planner is shown.
        fix_attempts: Repairs asked of the fixer for a kernel that fails.
        show_percent_of_peak: Whether the planner is told how far from the hardware's limit the kernel is.
        show_bottleneck: Whether the planner is told what the device takes for the bottleneck.
        stop_after_no_improvement: End when the best latency has not improved for this many iterations.
        target_percent_of_peak: End when the best kernel reaches this percentage of the hardware's limit.
        max_evaluations: No executor call starts that could lead beyond this many evaluations.
        max_cost_usd: No model call starts once this much is spent.
        max_total_tokens: No model call starts once prompts and completions have taken this many.
        max_device_s: No model call starts once evaluations have run on devices for this long together, in seconds.
        max_wall_s: No model call starts once the search has run this long, in seconds.
        stop_file: No model call starts once a file exists at this path.
        pins: Candidates that are carried beside every beam, each from the iteration given with it on.
    """

    preset: str = "beyond"
    iterations: int = 16
    beam_width: int = 6
    plans_per_candidate: int = 12
    attempts_per_plan: int = 2
    positive_threshold: float = 1.04
    negative_threshold: float = 1.15
    experiences_per_iteration: int = 8
    memory_capacity: int = 16
    seed: int = 0
    check: str = "strict"
    staged_check: bool = True
    device: str = "sim-trn1"
    selection_rule: SelectionRule = SelectionRule.PAPER
    selection_share: float = 1.0
    stage_order: StageOrder = StageOrder.OVERLAPPED
    memory_rule: MemoryRule = MemoryRule.PAPER
    use_memory: bool = True
    deduplicate: bool = True
    plan_resamples: int = 2
    plan_similarity: float = 0.9
    kernel_resamples: int = 0
    show_tried_plans: int = 40
    remeasure_parents: bool = True
    plan_while_remeasuring: bool = False
    feedback_attempts: int = 0
    fix_attempts: int = 0
    show_percent_of_peak: bool = True
    show_bottleneck: bool = True
    stop_after_no_improvement: int | None = None
    target_percent_of_peak: float | None = None
    max_evaluations: int | None = None
    max_cost_usd: float | None = None
    max_total_tokens: int | None = None
    max_device_s: float | None = None
    max_wall_s: float | None = None
    stop_file: str | None = None
    pins: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks every range.

        Raises:
            UserError: Names the first field that is out of range and the range.
        """
        for name, low, high in (
            ("iterations", 1, 10_000),
            ("beam_width", 1, 1_000),
            ("plans_per_candidate", 1, 1_000),
            ("attempts_per_plan", 1, 1_000),
            ("experiences_per_iteration", 0, 1_000),
            ("memory_capacity", 0, 10_000),
            ("seed", 0, 2**63 - 1),
            ("feedback_attempts", 0, 100),
            ("fix_attempts", 0, 10),
            ("plan_resamples", 0, 100),
            ("kernel_resamples", 0, 100),
            ("show_tried_plans", 0, 1_000),
        ):
            _check_integer(name, getattr(self, name), low, high)
        for name in ("stop_after_no_improvement", "max_evaluations", "max_total_tokens"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, 10**15)
        for name in ("positive_threshold", "negative_threshold"):
            _check_number(name, getattr(self, name), 1.0, 1000.0)
        _check_number("plan_similarity", self.plan_similarity, 0.0, 1.0)
        _check_number("selection_share", self.selection_share, 0.01, 1.0)
        for name, high_number in (
            ("target_percent_of_peak", 100.0),
            ("max_cost_usd", 1e9),
            ("max_device_s", 1e9),
            ("max_wall_s", 1e9),
        ):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 0.0, high_number)
        if self.check not in ("published", "strict"):
            raise UserError(f"check is {self.check!r}: choose published or strict")
        for candidate_id, iteration in self.pins.items():
            _check_integer(f"pins.{candidate_id}", iteration, 1, 10_000)
        # A value from YAML arrives as text; the enumerations accept it and reject anything else in one line.
        object.__setattr__(self, "selection_rule", _member(SelectionRule, "selection_rule", self.selection_rule))
        object.__setattr__(self, "memory_rule", _member(MemoryRule, "memory_rule", self.memory_rule))
        object.__setattr__(self, "stage_order", _member(StageOrder, "stage_order", self.stage_order))
        if self.selection_share < 1.0 and self.stage_order is not StageOrder.OVERLAPPED:
            raise UserError(
                f"stage_order {self.stage_order} waits for all and selection_share {self.selection_share:g} does not: "
                "leave one of them out"
            )

    def replace(self, **changes: object) -> SearchSettings:
        """Returns a checked copy with some fields changed.

        Raises:
            UserError: A field is unknown or out of range.
        """
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise UserError(f"there is no search setting {name!r}: the settings are {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name} is {value!r}: give a whole number from {low} to {high}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UserError(f"{name} is {value!r}: give a number from {low:g} to {high:g}")


def _member(kind: type[StrEnum], name: str, value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(str(member) for member in kind)
        raise UserError(f"{name} is {value!r}: choose one of {choices}") from None
