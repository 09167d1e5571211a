"""A sweep as a job of a local cluster that grows and shrinks: real Ray nodes of fake types, one killed on the way.

Everything is what a user would run, but three things that this machine lacks: nodes are further Ray processes here, the
toolchain on the Trainium nodes is the stand-in, and the `vllm` command on the GPU node serves the offline rewriter.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ray = pytest.importorskip("ray", reason="Ray is not installed")

from heads import OBJECT_STORE_BYTES, Head, accelopt, copied_checkout, free_port, job_id, started_head  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "standin"))

from standin_toolchain import StandinToolchain, lay_out  # noqa: E402

from accelopt_ray.sweep.file import load_sweep  # noqa: E402
from accelopt_ray.sweep.folder import SUMMARY_NAME, RunStatus, SweepFolder  # noqa: E402
from accelopt_ray.trajectory import read_table  # noqa: E402
from actors.cluster import connected  # noqa: E402
from actors.pools import find_pools  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

CORES_PER_NODE = 2
MOST_NODES = 3
PATIENCE_S = 360.0


def cluster_config(gcs_address: str, v2: bool) -> dict[str, Any]:
    """An autoscaler configuration whose provider starts further Ray nodes on this machine."""
    provider: dict[str, Any] = {
        "type": "external",
        "module": "separate_nodes.SeparateNodesProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "gcs_address": gcs_address,
    }
    if v2:
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

        provider |= {"launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID}

    def node(resources: dict[str, int], most: int) -> dict[str, Any]:
        all_resources = {"object_store_memory": OBJECT_STORE_BYTES, **resources}
        return {"resources": all_resources, "node_config": {}, "min_workers": 0, "max_workers": most}

    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "local", "provider": provider, "max_workers": MOST_NODES + 1, "idle_timeout_minutes": 0.2,
        "upscaling_speed": 10.0, "head_node_type": "ray.head.default", "auth": {}, "docker": {}, "file_mounts": {},
        "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": [],
        "available_node_types": {
            "ray.head.default": {**node({"CPU": 0}, 0)},
            "trn": node({"CPU": 1, "neuron_cores": CORES_PER_NODE}, MOST_NODES),
            "gpu": node({"CPU": 1, "GPU": 1}, 1),
        },
        **{f"{name}_commands": [] for name in lists},
    }  # fmt: skip


@pytest.fixture
def toolchain(tmp_path: Path) -> StandinToolchain:
    return lay_out("a", tmp_path / "toolchain")


@pytest.fixture(params=["v1", "v2"])
def head(request: pytest.FixtureRequest, tmp_path: Path, toolchain: StandinToolchain) -> Iterator[Head]:
    """A head without work whose autoscaler, of either version, starts nodes that have the stand-in toolchain."""
    port = free_port()
    config = tmp_path / "cluster.json"
    config.write_text(json.dumps(cluster_config(f"127.0.0.1:{port}", request.param == "v2")))
    environment = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "5", "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1",
        "PYTHONPATH": os.pathsep.join([str(toolchain.folder), str(Path(__file__).parent)]),
        "PATH": os.pathsep.join([str(toolchain.folder), os.environ["PATH"]]),
    }  # fmt: skip
    if request.param == "v2":
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

        environment |= {
            "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }  # fmt: skip
    options = {"autoscaling-config": config}
    with started_head(tmp_path, cpus=0, port=port, environment=environment, **options) as started:
        yield started


def model_command(folder: Path, gate: Path) -> Path:
    """A `vllm` command that serves the offline rewriter, once the gate's file is there."""
    path = folder / "vllm"
    # $6 and $8: vllm serve SOURCE --served-model-name NAME --host HOST --port PORT ...
    path.write_text(
        f'#!/bin/sh\nuntil [ -e "{gate}" ]; do sleep 0.2; done\n'
        f'exec "{sys.executable}" -m accelopt_ray serve-rewriter --host "$6" --port "$8"\n'
    )
    path.chmod(0o755)
    return path


def sweep_content(model: Path) -> Mapping[str, Any]:
    hosted = {"source": "none", "executable": str(model), "gpus_per_replica": 1, "cpus_per_replica": 0}
    base = {
        "task": "silu", "shape": {"M": 128, "N": 1024}, "device": "neuron",
        "search": {"iterations": 1, "beam_width": 1, "plans_per_candidate": 1, "attempts_per_plan": 1},
        "evaluation": {"timeout_s": 600},
        "models": {"default": {"hosted": "offline-rewriter"}}, "hosted": {"offline-rewriter": hosted},
        "hosting": "process",
    }  # fmt: skip
    cores = CORES_PER_NODE * MOST_NODES
    return {
        "name": "scaled", "base": base, "grid": {"seed": list(range(cores))}, "slots": cores, "concurrent_runs": cores
    }  # fmt: skip


def alive_nodes(resource: str = "") -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and (not resource or node["Resources"].get(resource))]


def ready_cores() -> set[str]:
    """Names of the cores whose profilers are ready, over all pools of the cluster."""
    return {slot.core for pool in find_pools().values() for slot in pool.slots if slot.core}


def wait_for(condition: Callable[[], object], what: str, told: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {alive_nodes()}\n{told()}"
        time.sleep(0.5)


def kill_node(node: dict[str, Any]) -> None:
    """Takes a node away as a spot market does, its raylet without a chance to say so."""
    [raylet] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"]
        and process.info["cmdline"][0].endswith("raylet/raylet")
        and any(node["RayletSocketName"] in argument for argument in process.info["cmdline"])
    ]
    raylet.kill()


def test_a_submitted_sweep_scales_from_zero_survives_a_lost_node_and_scales_to_zero(
    head: Head, toolchain: StandinToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, output = tmp_path / "model-may-come-up", tmp_path / "out"
    checkout = copied_checkout(tmp_path / "checkout")
    file = checkout / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep_content(model_command(tmp_path, gate))), encoding="utf-8")
    runs, folder = load_sweep(file).runs, SweepFolder(output)
    monkeypatch.setenv("RAY_ADDRESS", head.gcs_address)
    with connected() as cluster:
        assert (cluster.cpus, cluster.neuron_cores, len(alive_nodes())) == (0, 0, 1)
        submitted = accelopt(
            "submit", str(file), "--working-dir", str(checkout), "--output", str(output), "--address", head.dashboard,
            "--no-wait",
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
        job = (job_id(submitted.stdout), "--address", head.dashboard)

        def told() -> str:
            return accelopt("logs", *job).stdout

        # A node for the model; none is paid for to profile what there is not yet.
        wait_for(lambda: alive_nodes("GPU"), "no GPU node", told)
        assert len(alive_nodes()) == 2
        # Every run's baseline waits for a core: as many nodes as may be.
        toolchain.behave(toolchain="waits")
        gate.touch()
        wait_for(lambda: len(ready_cores()) == CORES_PER_NODE * MOST_NODES, "too few profilers", told)
        nodes = alive_nodes("neuron_cores")
        assert len(nodes) == MOST_NODES
        assert ready_cores() == {
            f"core {core} of {node['NodeID'][-8:]}" for node in nodes for core in range(CORES_PER_NODE)
        }

        toolchain.behave(toolchain="")
        wait_for(lambda: any(output.glob("*/trajectory/results/*/part-*")), "nothing is evaluated", told)
        kill_node(nodes[-1])
        accelopt("logs", *job, "--follow")
        assert accelopt("status", *job).stdout.startswith("SUCCEEDED"), told()
        wait_for(lambda: len(alive_nodes()) == 1, "nodes are left", told)

    states = folder.states(runs)
    assert [state.status if state else None for state in states] == [RunStatus.FINISHED] * len(runs)
    rows = [row for run in runs for row in read_table(output / run.name, "evaluations").to_pylist()]
    assert len(rows) == sum(each.evaluations for state in states if state for each in state.outcomes)
    failures = [row for row in rows if row["outcome"] not in ("correct", "duplicate")]
    assert not failures, [{name: value for name, value in row.items() if value} for row in failures]
    cores = {row["core"] for row in rows if row["core"]}
    assert {core.partition(" of ")[0] for core in cores} <= {f"core {number}" for number in range(CORES_PER_NODE)}
    with (output / SUMMARY_NAME).open(encoding="utf-8") as stream:
        assert [row["run_status"] for row in csv.DictReader(stream)] == ["finished"] * len(runs)
