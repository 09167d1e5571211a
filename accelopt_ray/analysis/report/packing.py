"""Data inside an HTML file: JSON, compressed, as text; shortened if a file would become too large to pass around."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence

from accelopt_ray.analysis.report.tree import Tree

BUDGET_BYTES = 3_000_000
"""Packed size of all trees; figures and the rest of a report stay below 2 MB."""

LEFT_OUT = "Left out to keep this file small; it is in the trajectory."


def pack_trees(trees: Sequence[Tree], budget_bytes: int = BUDGET_BYTES) -> tuple[str, bool]:
    """Packs trees for the report's script.

    Args:
        trees: The trees; where the budget is exceeded, the texts of kernels that never entered a beam are left out.
        budget_bytes: The most characters to return, as far as leaving texts out achieves it.

    Returns:
        Base64 text of zlib-compressed JSON, and whether anything was left out.
    """
    packed = _pack(trees, frozenset())
    if len(packed) <= budget_bytes:
        return packed, False
    left_out: frozenset[str] = frozenset()
    for fields in ({"output"}, {"diff"}, {"plan"}, {"error", "counters"}):
        left_out |= fields
        packed = _pack(trees, left_out)
        if len(packed) <= budget_bytes:
            break
    return packed, True


def _pack(trees: Sequence[Tree], leave_out: frozenset[str]) -> str:
    content = [
        {
            "run": tree.run_id,
            "task": tree.task,
            "baselineSource": tree.baseline_source,
            "bestSource": tree.best_source,
            "nodes": [_node(node, leave_out) for node in tree.nodes],
        }
        for tree in trees
    ]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", "replace"), 9)).decode()


def _node(node: dict[str, object], leave_out: frozenset[str]) -> dict[str, object]:
    if node["selected"] or node["path"] or not leave_out:
        return node
    return {name: _replaced(value) if name in leave_out else value for name, value in node.items()}


def _replaced(value: object) -> object:
    return (LEFT_OUT if value else "") if isinstance(value, str) else {}
