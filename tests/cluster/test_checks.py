"""What ``accelopt-ray cluster check`` finds in a cluster file, and what it costs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.cluster.bill import hourly_bill
from accelopt_ray.cluster.checks import Finding, Need, check_against_need, check_cluster
from accelopt_ray.cluster.description import ClusterFile, describe, read_mapping
from accelopt_ray.cluster.instances import catalogue
from accelopt_ray.cluster.software import python_versions, ray_versions
from accelopt_ray.outcome import UserError

SHIPPED = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture
def content() -> dict[str, Any]:
    return copy.deepcopy(read_mapping(SHIPPED))


def _errors(content: dict[str, Any]) -> list[str]:
    return [finding.text for finding in _findings(content) if finding.error]


def _findings(content: dict[str, Any]) -> list[Finding]:
    return check_cluster(describe(SHIPPED, content), catalogue())


def test_the_shipped_file_has_no_errors_and_warns_of_nothing_but_placeholder_images(content: dict[str, Any]) -> None:
    findings = _findings(content)
    assert findings
    assert all(not finding.error and "placeholder image" in finding.text for finding in findings)


def test_the_shipped_file_runs_nothing_but_the_head_without_work(content: dict[str, Any]) -> None:
    cluster = describe(SHIPPED, content)
    assert all(node.min_workers == 0 for node in cluster.workers)
    assert {node.instance for node in cluster.workers} >= {
        "p5.48xlarge", "g6e.12xlarge", "trn1.32xlarge", "trn1.2xlarge", "trn2.48xlarge"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("node_type", "change", "expected"),
    [
        ("trn1-32", {"min_workers": 11}, "min_workers 11 above max_workers 10"),
        ("trn1-32", {"max_workers": -1}, "negative number of workers"),
        ("trn1-32", {"resources": {"CPU": 128}}, "has no neuron_cores"),
        ("trn1-32", {"resources": {"neuron_cores": 64}}, "states 64 neuron_cores, but trn1.32xlarge has 32"),
        ("gpu-p5", {"node_config": {"InstanceType": "p5.49xlarge", "ImageId": "ami-1"}}, "did you mean p5.48xlarge?"),
        ("gpu-p5", {"node_config": {"ImageId": "ami-1"}}, "names no instance type"),
        ("gpu-p5", {"node_config": {"InstanceType": "p5.48xlarge"}}, "names no machine image"),
        (
            "gpu-p5",
            {"worker_setup_commands": ["python3.12 -m venv v", "v/bin/pip install ray==2.60.0"]},
            "different versions of Python (head 3.10, cpu 3.10, gpu-p5 3.12",
        ),
        (
            "gpu-p5",
            {"worker_setup_commands": ["python3.10 -m venv v", "v/bin/pip install 'ray[llm]==2.59.1'"]},
            "different versions of Ray",
        ),
        ("gpu-p5", {"worker_setup_commands": ["python3.10; python3.12; pip install ray==2.60.0"]}, "single version"),
    ],
)
def test_a_node_type_that_would_not_work_is_an_error(
    content: dict[str, Any], node_type: str, change: dict[str, Any], expected: str
) -> None:
    content["available_node_types"][node_type].update(change)
    assert any(expected in text for text in _errors(content))


def test_more_nodes_that_always_run_than_the_cluster_allows_is_an_error(content: dict[str, Any]) -> None:
    content["max_workers"] = 3
    content["available_node_types"]["trn1-32"]["min_workers"] = 4
    assert any("add up to 4" in text for text in _errors(content))


def test_a_set_up_that_does_not_say_its_versions_is_a_warning(content: dict[str, Any]) -> None:
    content["available_node_types"]["gpu-p5"]["worker_setup_commands"] = ["./install-everything.sh"]
    assert not _errors(content)
    assert sum("gpu-p5's set-up does not say which" in finding.text for finding in _findings(content)) == 2


@pytest.mark.parametrize(
    ("cores", "command", "accepted"),
    [
        (128, "export NEURON_LOGICAL_NC_CONFIG=1", True),
        (64, "export NEURON_LOGICAL_NC_CONFIG=2", True),
        (64, "true", True),
        (128, "true", False),
        (64, "export NEURON_LOGICAL_NC_CONFIG=1", False),
        (128, "export NEURON_LOGICAL_NC_CONFIG=2", False),
    ],
)
def test_trn2_cores_must_agree_with_the_logical_core_setting(
    content: dict[str, Any], cores: int, command: str, accepted: bool
) -> None:
    entry = content["available_node_types"]["trn2-48"]
    entry["resources"]["neuron_cores"] = cores
    entry["worker_setup_commands"][0] = command
    assert (not _errors(content)) == accepted


def test_open_ports_are_told(content: dict[str, Any]) -> None:
    content["worker_start_ray_commands"] = ["ray start --address=$RAY_HEAD_IP:6379"]
    assert any("RAY_AUTH_MODE=token" in finding.text for finding in _findings(content))


def test_a_token_mode_without_a_token_is_an_error(content: dict[str, Any]) -> None:
    content["file_mounts"] = {}
    assert any("no token reaches the nodes" in text for text in _errors(content))


@pytest.mark.parametrize(
    ("resource", "most", "warned"),
    [
        ("neuron_cores", 320, set()),
        ("neuron_cores", 288, {"trn1-32", "trn1-32-spot"}),
        ("CPU", 64, set()),
        ("CPU", 18, {"cpu"}),
        ("GPU", 32, set()),
        ("GPU", 2, {"gpu-p5", "gpu-g6e", "gpu-g6e-spot"}),
    ],
)
def test_nodes_that_a_sweep_cannot_use_are_told(
    content: dict[str, Any], resource: str, most: int, warned: set[str]
) -> None:
    content["available_node_types"]["trn2-48"]["max_workers"] = 1
    content["available_node_types"]["trn1-2"]["max_workers"] = 1
    findings = list(check_against_need(describe(SHIPPED, content), Need(resource, most, "the sweep")))
    assert not any(finding.error for finding in findings)
    assert {finding.text.partition(" ")[0] for finding in findings} == warned


def test_a_sweep_on_a_cluster_without_what_it_needs_is_an_error(content: dict[str, Any]) -> None:
    types = content["available_node_types"]
    content["available_node_types"] = {name: types[name] for name in ("head", "trn1-32")}
    cluster = describe(SHIPPED, content)
    for resource, errors in (("neuron_cores", []), ("CPU", [True]), ("GPU", [True])):
        assert [each.error for each in check_against_need(cluster, Need(resource, 320, "the sweep"))] == errors


def _cluster(max_workers: int, workers: list[tuple[str, int, int]]) -> ClusterFile:
    types: dict[str, Any] = {"head": {"node_config": {"InstanceType": "m7i.2xlarge"}, "resources": {"CPU": 0}}}
    for index, (instance, least, most) in enumerate(workers):
        entry = {"node_config": {"InstanceType": instance}, "min_workers": least, "max_workers": most, "resources": {}}
        types[f"type-{index}"] = entry
    return describe(SHIPPED, {"head_node_type": "head", "max_workers": max_workers, "available_node_types": types})


def test_the_bill_fills_the_places_with_the_dearest_nodes() -> None:
    bill = hourly_bill(_cluster(3, [("trn1.2xlarge", 1, 4), ("trn1.32xlarge", 0, 1)]), catalogue())
    assert bill.minimum_usd_per_hour == pytest.approx(0.4032 + 1.34375)
    assert bill.maximum_usd_per_hour == pytest.approx(0.4032 + 2 * 1.34375 + 21.50)


def test_a_price_of_ones_own_replaces_a_missing_one() -> None:
    cluster = _cluster(1, [("trn2.48xlarge", 0, 1)])
    assert hourly_bill(cluster, catalogue()).unpriced == ("type-0",)
    priced = hourly_bill(cluster, catalogue().with_prices({"trn2.48xlarge": 40.0}))
    assert priced.unpriced == ()
    assert priced.maximum_usd_per_hour == pytest.approx(40.4032)


_WORKERS = st.lists(
    st.tuples(st.sampled_from(sorted(catalogue().instances)), st.integers(0, 3), st.integers(0, 5)).map(
        lambda each: (each[0], each[1], each[1] + each[2])
    ),
    max_size=4,
)


@given(_WORKERS, st.integers(0, 20), st.integers(0, 20))
def test_a_larger_cluster_never_costs_less(workers: list[tuple[str, int, int]], places: int, more: int) -> None:
    small = hourly_bill(_cluster(places, workers), catalogue())
    large = hourly_bill(_cluster(places + more, workers), catalogue())
    assert small.minimum_usd_per_hour == large.minimum_usd_per_hour
    assert small.minimum_usd_per_hour <= small.maximum_usd_per_hour <= large.maximum_usd_per_hour


@pytest.mark.parametrize(
    ("command", "python", "ray"),
    [
        ("python3.10 -m venv v && pip install 'ray[default,llm]==2.60.0'", {"3.10"}, {"2.60.0"}),
        ("uv venv --python 3.12; uv pip install ray==2.60.0", {"3.12"}, {"2.60.0"}),
        ("conda create -n x python=3.11", {"3.11"}, set()),
        ("pip install -U ray 'xray==1.0.0'", set(), set()),
    ],
)
def test_versions_are_read_off_commands(command: str, python: set[str], ray: set[str]) -> None:
    assert python_versions([command]) == python
    assert ray_versions([command]) == ray


@pytest.mark.parametrize("text", ["- a list", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        read_mapping(path)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda c: c.update(wat=1), "wat"),
        (lambda c: c.update(max_workers="many"), "max_workers"),
        (lambda c: c.update(head_node_type="nobody"), "head_node_type"),
        (lambda c: c["available_node_types"]["trn1-32"].update(max_worker=3), "available_node_types.trn1-32"),
        (lambda c: c["available_node_types"]["trn1-32"].pop("resources"), "resources"),
        (lambda c: c["available_node_types"]["trn1-32"]["resources"].update(neuron_cores=-1), "neuron_cores"),
    ],
)
def test_what_ray_would_refuse_is_one_line(content: dict[str, Any], break_it: Any, expected: str) -> None:
    from actors.cluster_schema import check_with_ray

    check_with_ray(SHIPPED, content)
    break_it(content)
    with pytest.raises(UserError, match=expected) as caught:
        check_with_ray(SHIPPED, content)
    assert "\n" not in str(caught.value)


@pytest.mark.ray
def test_the_command_prints_findings_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accelopt_ray.cli import main

    with pytest.raises(SystemExit) as done:
        main(["cluster", "check", str(SHIPPED), "--price", "trn2.48xlarge=40"])
    assert done.value.code == 0
    assert "0.40 USD an hour at minimum" in capsys.readouterr().out
    broken = read_mapping(SHIPPED)
    broken["available_node_types"]["trn1-2"]["min_workers"] = 9
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(broken), encoding="utf-8")
    with pytest.raises(SystemExit) as done:
        main(["cluster", "check", str(path)])
    assert done.value.code == 1
    assert "error: trn1-2 has min_workers 9" in capsys.readouterr().out
