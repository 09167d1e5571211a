"""Finding pools in a cluster and showing what they do."""

from __future__ import annotations

import sys

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.cli.pool import render  # noqa: E402
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome  # noqa: E402
from actors.pool_state import PoolStatistics, Slot, SlotState  # noqa: E402
from actors.pools import find_pools  # noqa: E402
from actors.profiler import Evaluator  # noqa: E402
from actors.shared import start_pool  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def incorrect() -> Evaluator:
    return lambda job: EvaluationResult(job.evaluation_id, EvaluationOutcome.INCORRECT)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_pool_is_found_while_it_lives_and_tells_what_it_did():
    holder = start_pool(["sim-trn1"], 1, 1, 60.0, incorrect)
    ray.get(holder.start.remote())
    job = EvaluationJob("e", TaskRef("silu"), "", "sim-trn1", "published")
    ray.get(holder.evaluate.remote(job, "someone"))
    (status,) = [pool for name, pool in find_pools().items() if name.startswith("shared-")]
    assert status.evaluated == 1 and status.outcomes == {"incorrect": 1}
    assert (status.slots[0].state, status.slots[0].core, status.slots[0].evaluated) == (SlotState.IDLE, "slot 0", 1)
    ray.kill(holder)
    assert not find_pools()


def test_the_status_names_idle_and_retired_cores_with_the_reason():
    statistics = PoolStatistics()
    statistics.note(EvaluationResult("e", EvaluationOutcome.TIMEOUT))
    slots = {
        0: Slot(0, "core 4", SlotState.BUSY, "e17", 3),
        1: Slot(1, "core 9", SlotState.RETIRED, "a known kernel gave a wrong result"),
    }
    lines = "\n".join(render("run-1", statistics.status(slots, waiting=5)))
    assert "1 busy, 1 retired" in lines and "waiting    5" in lines and "1 timeout" in lines
    assert "core 9" in lines and "a known kernel gave a wrong result" in lines and "e17" in lines
