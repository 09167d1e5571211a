"""What plans are about: a coarse sorting by the words they use.

A heuristic for orientation, not a measurement: the category whose words occur most often in the plan's headline wins,
or in its whole text if the headline has none; the earlier one of equals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

from accelopt_ray.analysis.lineage import plan_title

OTHER = "other"

CATEGORIES: Mapping[str, str] = {
    "keep in SBUF": r"\breload|\bkeep\b.{0,40}\b(?:sbuf|on chip|resident)|\bresident|\bcache[sd]?\b|\breus(?:e|ing)",
    "fewer spills": r"\bspill",
    "hoist out of loop": r"\bhoist|\bout of the loop|\bloop[- ]invariant|\bmov(?:e|ing)\b.{0,30}\boutside",
    "fuse operations": r"\bfus(?:e|es|ing|ion)\b|\bcombin(?:e|ing)\b|\bone (?:instruction|activation|pass)\b|\bmerge",
    "tile shape": r"\btil(?:e|es|ing)\b.{0,30}\b(?:wide|larger|bigger|size|shape)|\bwider|\bblock size|\bwiden",
    "loop order": r"\breorder|\binterchange|\bloop order|\bswap\b.{0,20}\bloops?\b",
    "transfers": r"\bdma\b|\bcoalesc|\bcontiguous|\bprefetch|\bdouble[- ]buffer|\btransfers?\b",
    "engine choice": r"\b(?:vector|scalar|gpsimd|tensor) engine\b.{0,60}\binstead|\bbalance\b.{0,40}\bengines?\b",
    "matrix unit": r"\bnc_matmul|\bmatmul\b|\bpsum\b|\btranspos",
    "algebra": r"\balgebra|\bfactor(?:is|iz)|\breciprocal|\brsqrt\b|\bdistribut|\bprecomput",
}
"""Name to the pattern of its words, the more specific ones first."""

_PATTERNS = {name: re.compile(pattern, re.IGNORECASE | re.DOTALL) for name, pattern in CATEGORIES.items()}


def plan_category(text: str) -> str:
    """Returns the category of a plan, ``other`` when none of the words occur."""
    for passage in (plan_title(text, characters=300), text):
        counts = {name: len(pattern.findall(passage)) for name, pattern in _PATTERNS.items()}
        best = max(counts, key=lambda name: counts[name])
        if counts[best]:
            return best
    return OTHER


def plan_effects(evaluations: pd.DataFrame, plans: pd.DataFrame) -> pd.DataFrame:
    """Joins attempts with the category of their plan.

    Returns:
        One row for each attempt: ``run_id``, ``task``, ``iteration``, ``plan_id``, ``category``, ``outcome``,
        ``speedup_vs_parent`` (NaN unless correct), ``simulated``.
    """
    texts = plans["plan_text"].fillna("").astype(str)
    known = {text: plan_category(text) for text in texts.unique()}
    categories = plans[["run_id", "plan_id"]].assign(category=texts.map(known))
    columns = ["run_id", "task", "iteration", "plan_id", "outcome", "speedup_vs_parent", "simulated"]
    attempts = evaluations.dropna(subset=["call_id", "plan_id"])[columns]
    return attempts.merge(categories.drop_duplicates(["run_id", "plan_id"]), on=["run_id", "plan_id"], how="inner")
