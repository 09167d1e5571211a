"""A sweep on a local cluster that grows and shrinks: real Ray nodes of fake types, one of them killed on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ray = pytest.importorskip("ray", reason="Ray is not installed")

from scripted_endpoint import scripted_endpoint  # noqa: E402

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome  # noqa: E402
from accelopt_ray.sweep.file import load_sweep  # noqa: E402
from accelopt_ray.sweep.folder import RunStatus, SweepFolder  # noqa: E402
from accelopt_ray.trajectory import read_table  # noqa: E402
from actors.cluster import connected  # noqa: E402
from actors.profiler import Evaluator  # noqa: E402
from actors.sweep import SweepSession  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

CORES_PER_NODE = 2
MOST_NODES = 3
OBJECT_STORE_BYTES = 80 << 20


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def cluster_config(gcs_address: str, v2: bool) -> dict[str, Any]:
    """An autoscaler configuration whose provider starts further Ray nodes on this machine."""
    provider: dict[str, Any] = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
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
        "cluster_name": "local", "provider": provider, "max_workers": MOST_NODES + 1, "idle_timeout_minutes": 0.1,
        "upscaling_speed": 10.0, "head_node_type": "ray.head.default", "auth": {}, "docker": {}, "file_mounts": {},
        "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": [],
        "available_node_types": {
            "ray.head.default": {**node({"CPU": 0}, 0)},
            "trn": node({"CPU": 1, "neuron_cores": CORES_PER_NODE}, MOST_NODES),
            "gpu": node({"CPU": 1, "GPU": 1}, 1),
        },
        **{f"{name}_commands": [] for name in lists},
    }  # fmt: skip


@pytest.fixture(params=["v1", "v2"])
def autoscaling(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A head without work on ports of its own, and its autoscaler; ended process by process."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    config = tmp_path / "cluster.json"
    config.write_text(json.dumps(cluster_config(address, request.param == "v2")))
    options = {
        "port": port, "dashboard-port": free_port(), "dashboard-agent-listen-port": free_port(),
        "metrics-export-port": free_port(), "ray-client-server-port": free_port(), "num-cpus": 0,
        "object-store-memory": OBJECT_STORE_BYTES, "autoscaling-config": config, "node-ip-address": "127.0.0.1",
    }  # fmt: skip
    environment = {
        **os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1",
        "RAY_memory_monitor_refresh_ms": "0", "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
    }  # fmt: skip
    if request.param == "v2":
        from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

        environment |= {
            "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = tmp_path / "head.log"
    with log.open("wb") as stream:
        head = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    monkeypatch.setenv("RAY_ADDRESS", address)
    try:
        deadline = time.monotonic() + 120
        while b"Ray runtime started" not in log.read_bytes():
            assert time.monotonic() < deadline and head.poll() is None, log.read_text()
            time.sleep(0.5)
        yield address
    finally:
        family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        head.send_signal(signal.SIGTERM)
        for process in psutil.wait_procs(family, timeout=20)[1]:
            process.kill()


def slow_scripted_device() -> Evaluator:
    """Takes a moment, and names the node and the core that it was given."""
    node = ray.get_runtime_context().get_node_id()
    cores = os.environ["NEURON_RT_VISIBLE_CORES"]

    def evaluate(job: EvaluationJob) -> EvaluationResult:
        time.sleep(0.5)
        return EvaluationResult(
            job.evaluation_id, EvaluationOutcome.CORRECT, device="neuron", check=job.check, latency_ms=5.0,
            core=f"{node}/{cores}",
        )  # fmt: skip

    return evaluate


def model(system: str, user: str) -> str:
    return f"Plan {len(user)}.\n\n```python\nX = {time.monotonic_ns()}\n\ndef kernel(x):\n    return x\n```\n"


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, [(node["Resources"], node["Alive"]) for node in ray.nodes()]
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


def test_a_sweep_scales_up_from_zero_survives_a_lost_node_and_scales_down(autoscaling: str, tmp_path: Path) -> None:
    folder, said = SweepFolder(tmp_path / "out"), list[str]()
    seen: set[str] = set()
    killed: list[str] = []
    most_trn_nodes = 0

    def watch(text: str) -> None:
        said.append(text)

    with scripted_endpoint(model) as base_url, connected() as cluster:
        assert (cluster.neuron_cores, len(alive_nodes())) == (0, 1)
        sizes = {"iterations": 3, "beam_width": 2, "plans_per_candidate": 6, "attempts_per_plan": 2}
        base = {
            "task": "silu", "shape": {"M": 128, "N": 1024}, "device": "neuron",
            "search": {**sizes, "use_memory": False},
            "models": {"default": {"base_url": base_url, "model": "scripted"}},
        }  # fmt: skip
        content = {"name": "x", "base": base, "grid": {"seed": [0, 1, 2]}, "slots": CORES_PER_NODE * MOST_NODES}
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump({**content, "concurrent_runs": 2}), encoding="utf-8")
        sweep = load_sweep(path)
        folder.claim(sweep)

        @ray.remote(num_gpus=1, num_cpus=0)
        class ModelHost:
            """Stands for a model server, for which a GPU node must come up."""

            def ready(self) -> bool:
                return True

        host = ModelHost.remote()

        class Watching(SweepSession):
            """Kills a node once all are up."""

            def _ended(self) -> list[Any]:
                nonlocal most_trn_nodes
                trn = [node for node in alive_nodes() if node["Resources"].get("neuron_cores")]
                seen.update(node["NodeID"] for node in trn)
                most_trn_nodes = max(most_trn_nodes, len(trn))
                if len(trn) == MOST_NODES and not killed:
                    victim = trn[-1]
                    killed.append(victim["NodeID"])
                    kill_node(victim)
                return super()._ended()

        Watching(sweep, sweep.runs, folder, cluster, watch, make_evaluator=slow_scripted_device).run()
        assert ray.get(host.ready.remote(), timeout=60)
        del host
        states = folder.states(sweep.runs)
        assert [state.status if state else None for state in states] == [RunStatus.FINISHED] * 3, said
        rows = [row for run in sweep.runs for row in read_table(folder.path / run.name, "evaluations").to_pylist()]
        assert len(rows) == sum(each.evaluations for state in states if state for each in state.outcomes)
        assert {row["outcome"] for row in rows} == {"correct"}
        cores = {row["core"] for row in rows}
        assert all(core.rpartition("/")[2] in {"0", "1"} for core in cores), cores
        assert killed
        assert most_trn_nodes == MOST_NODES
        assert seen >= {core.partition("/")[0] for core in cores}
        # Down to the head alone, both kinds of nodes.
        wait_for(lambda: len(alive_nodes()) == 1)
