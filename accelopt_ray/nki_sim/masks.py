"""Masks: the conditions of ``mask=`` arguments as terms over the axes of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.program import MaskTerm
from accelopt_ray.nki_sim.symbolic import Condition, Index


def resolve_mask(mask: Any) -> list[Index]:
    """The terms of a ``mask=`` argument that are not always true.

    Args:
        mask: None, a bool or a :class:`Condition`.

    Raises:
        KernelError: When it is no affine condition.
    """
    if mask is None or mask is True:
        return []
    if isinstance(mask, (bool, np.bool_)):
        return [] if mask else [Index(-1)]
    if not isinstance(mask, Condition):
        raise errors.unsupported_mask_expression()
    if mask.negated:
        raise errors.mask_not_equal()
    return [term for term in mask.terms if term.bounds()[0] < 0]


def mask_term(term: Index) -> MaskTerm:
    """A mask term as plain data.

    Raises:
        KernelError: When it is not affine over an axis.
    """
    if term.tables:
        raise errors.unsupported_mask_expression()
    strides = tuple((axis, stride) for axis, stride in enumerate(term.strides) if stride)
    return MaskTerm(term.affine(), strides)
