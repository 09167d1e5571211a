"""The perturbed inputs differ from the ordinary ones in every tile, and only as allowed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.verify.perturbation import perturb
from nkibench.task_file import InputDeclaration


def declaration(nonnegative: bool = False, scale: float = 10.0) -> InputDeclaration:
    return InputDeclaration(name="x", shape=("M", "N"), nonnegative=nonnegative, scale=scale)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 400), st.integers(1, 1200), st.integers(0, 1000))
def test_every_tile_changes_in_one_place(depth, rows, columns, seed):
    x = np.random.default_rng(seed).standard_normal((depth, rows, columns), dtype=np.float32) + np.float32(1e-3)
    (changed,) = perturb([x], [declaration()], seed)
    moved = changed != x
    for d in range(depth):
        for i in range(0, rows, 128):
            for j in range(0, columns, 512):
                tile = moved[d, i : i + 128, j : j + 512]
                # An array of one element has no deviation to move by.
                assert tile.sum() == (1 if x.size > 1 else 0)


def test_the_seed_decides_and_the_original_stays():
    x = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    before = x.copy()
    first, again, other = (perturb([x], [declaration()], seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(x, before) and np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.dtype == np.float32


def test_declared_ranges_are_respected():
    x = np.abs(np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32))
    (changed,) = perturb([x], [declaration(nonnegative=True)], 3)
    assert (changed >= x).all()
    (careful,) = perturb([x], [declaration(scale=1)], 3)
    assert 0 < np.abs(careful - x).max() < np.abs(changed - x).max()


def test_numbers_and_integers_stay():
    indices = np.arange(10)
    values = perturb([1e-5, indices], [declaration(), declaration()], 0)
    assert values[0] == 1e-5 and values[1] is indices
