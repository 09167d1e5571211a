"""A whole search whose model Ray's LLM serving hosts: the real ``ray.serve.llm`` with a real vLLM engine on the CPU.

Runs in the environment of ``make test-serve``. The model has random weights and writes no kernels; that it comes up,
that every call and attempt is accounted for, and that nothing of it is left is what is tested.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
pytest.importorskip(
    "ray.serve.llm", reason="Ray's LLM serving is not installed: use make test-serve", exc_type=ImportError
)

from ray import serve  # noqa: E402
from real_runs import (  # noqa: E402
    ASKED,
    check_that_everything_is_accounted_for,
    configured,
    made_models,
    run_to_its_end,
)

from actors.cluster import Cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]


def test_a_whole_run_on_ray_serve(tmp_path: Path, cluster: Cluster):
    hosted = made_models(tmp_path / "models", Path(sys.executable), ("tiny",))
    models = {"default": {"hosted": "tiny", **ASKED}}
    # A replica takes a little of a CPU, of which the cluster has two.
    config = configured(tmp_path / "run", hosted=hosted, models=models, hosting="serve", slots=1)
    try:
        run_to_its_end(config, "served", cluster)
        check_that_everything_is_accounted_for(tmp_path / "run")
        assert not serve.status().applications
    finally:
        serve.shutdown()
