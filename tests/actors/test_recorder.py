"""Many actors record at once through one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.trajectory import read_table  # noqa: E402
from actors.recorder import Recorder  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def test_concurrent_commits_are_durable_and_share_flushes(tmp_path: Path):
    recorder = ray.remote(Recorder).options(num_cpus=0).remote(str(tmp_path), "r")
    ray.get([recorder.commit.remote("llm_calls", [{"call_id": str(index)}]) for index in range(200)])
    calls = read_table(tmp_path, "llm_calls")["call_id"].to_pylist()
    assert sorted(calls, key=int) == [str(index) for index in range(200)]
    assert len(list((tmp_path / "llm_calls").rglob("part-*.parquet"))) < 100
    ray.get(recorder.add.remote("plans", [{"plan_id": "p"}]))
    ray.get(recorder.close.remote())
    assert read_table(tmp_path, "plans").num_rows == 1
    ray.kill(recorder)
