"""When a pool opens slots, and which it gives back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.elasticity import SlotDemand, dispensable

MOMENTS = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 12)), min_size=1, max_size=40)


@given(MOMENTS, st.integers(1, 10), st.floats(0.5, 60.0))
def test_the_most_wanted_within_the_window_stays_open(
    moments: list[tuple[float, int]], most: int, keep_s: float
) -> None:
    demand, now_s = SlotDemand(most, keep_s), 0.0
    noted: list[tuple[float, int]] = []
    for pause_s, wanted in moments:
        now_s += pause_s
        noted.append((now_s, wanted))
        lately = [each for at_s, each in noted if at_s >= now_s - keep_s]
        assert demand.note(wanted, now_s) == min(most, max(lately))


NODES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 4))


@given(NODES, st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2)), st.integers(-3, 20))
def test_whole_idle_nodes_are_given_back_and_no_more_than_may_go(
    sizes: dict[str, int], in_use: dict[str, int], surplus: int
) -> None:
    numbers = iter(range(100))
    idle = {node: [next(numbers) for _ in range(size)] for node, size in sizes.items()}
    chosen = set(dispensable(idle, in_use, surplus))
    assert len(chosen) <= max(0, surplus)
    free = [node for node in idle if not in_use.get(node)]
    assert chosen == {slot for node in free if chosen & set(idle[node]) for slot in idle[node]}
    left = [idle[node] for node in free if not chosen & set(idle[node])]
    assert all(len(chosen) + len(slots) > surplus for slots in left)
