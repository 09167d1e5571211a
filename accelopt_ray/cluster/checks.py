"""What can be wrong with a cluster file beyond Ray's own schema, found before a node is paid for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accelopt_ray.cluster.description import ClusterFile, NodeType
from accelopt_ray.cluster.instances import Catalogue
from accelopt_ray.cluster.software import python_versions, ray_versions

NEURON_RESOURCE = "neuron_cores"

_LOGICAL_CORES = re.compile(r"NEURON_LOGICAL_NC_CONFIG=(\d+)")
_DEFAULT_CORES_PER_LOGICAL = {"trn2": 2}
"""How many physical cores the Neuron runtime joins into one logical core unless told otherwise (LNC)."""

_PLACEHOLDER_IMAGE = re.compile(r"ami-0+$")


@dataclass(frozen=True)
class Finding:
    """Something wrong, or doubtful.

    Attributes:
        error: Whether the cluster would not work; otherwise it is a warning.
        text: One sentence: what, and how to mend it.
    """

    error: bool
    text: str


def check_cluster(cluster: ClusterFile, known: Catalogue) -> list[Finding]:
    """Checks a cluster file that Ray's schema has accepted; errors come first."""
    findings: list[Finding] = []
    for node in cluster.node_types:
        for check in (_counts, _instance, _resources):
            findings += check(node, cluster, known)
    findings += _sums(cluster)
    findings += _versions(cluster, "Python", python_versions)
    findings += _versions(cluster, "Ray", ray_versions)
    findings += _authentication(cluster)
    return sorted(findings, key=lambda finding: not finding.error)


@dataclass(frozen=True)
class Need:
    """What a sweep can use at most of something that nodes offer.

    Attributes:
        resource: Ray's name of it.
        most: How much, at any time.
        why: What needs it, for people.
    """

    resource: str
    most: int
    why: str


def check_against_need(cluster: ClusterFile, need: Need) -> Iterator[Finding]:
    """Compares the nodes that offer a resource with what a sweep can use of it."""
    # Nodes with accelerators have CPUs besides, which nobody rents them for.
    accelerated = [node for node in cluster.workers if node.resources.get(NEURON_RESOURCE) or node.resources.get("GPU")]
    offering = [
        node
        for node in cluster.workers
        if node.resources.get(need.resource) and (need.resource != "CPU" or node not in accelerated)
    ]
    if not offering:
        yield Finding(True, f"no node type has {need.resource} for {need.why}: add one")
    for node in offering:
        each = node.resources[need.resource]
        useful = -(-need.most // each)
        if node.max_workers > useful:
            yield Finding(
                False,
                f"{node.name} may grow to {node.max_workers} nodes of {each} {need.resource}, but {need.why} can use "
                f"{need.most} at most: set max_workers to {useful}",
            )


def _counts(node: NodeType, cluster: ClusterFile, _: Catalogue) -> Iterator[Finding]:
    if node.min_workers < 0 or node.max_workers < 0:
        yield Finding(True, f"{node.name} has a negative number of workers: give 0 or more")
    elif node.min_workers > node.max_workers:
        yield Finding(
            True,
            f"{node.name} has min_workers {node.min_workers} above max_workers {node.max_workers}: lower the one or "
            "raise the other",
        )
    elif node.min_workers and not node.head:
        yield Finding(
            False, f"{node.name} keeps {node.min_workers} nodes running and paid for without work: set min_workers to 0"
        )
    if node.max_workers > cluster.max_workers:
        yield Finding(
            False,
            f"{node.name} has max_workers {node.max_workers}, but the cluster's max_workers is {cluster.max_workers}: "
            "raise that, or lower this",
        )


def _instance(node: NodeType, _: ClusterFile, known: Catalogue) -> Iterator[Finding]:
    if not node.instance:
        yield Finding(True, f"{node.name} names no instance type: give node_config.InstanceType")
        return
    if node.instance not in known.instances:
        close = difflib.get_close_matches(node.instance, known.instances, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known.instances)}"
        yield Finding(True, f"{node.name} has the unknown instance type {node.instance!r}: {hint}")
    if not node.image:
        yield Finding(True, f"{node.name} names no machine image: give node_config.ImageId")
    elif _PLACEHOLDER_IMAGE.match(node.image):
        yield Finding(
            False,
            f"{node.name} has the placeholder image {node.image}: put in the image of your region (docs/cluster.md)",
        )


def _resources(node: NodeType, _: ClusterFile, known: Catalogue) -> Iterator[Finding]:
    cores = node.resources.get(NEURON_RESOURCE)
    if node.head and (cores or node.resources.get("GPU") or node.resources.get("CPU") != 0):
        yield Finding(False, f"the head {node.name} takes work that can starve it: give it resources {{CPU: 0}}")
    if cores is None:
        if node.neuron:
            yield Finding(
                True,
                f"{node.name} ({node.instance}) has no {NEURON_RESOURCE}, so no profiler is placed there: state them "
                "under resources",
            )
        return
    instance = known.instances.get(node.instance)
    if instance is None:
        return
    logical = _cores_per_logical(node)
    expected = instance.neuron_cores // logical
    if cores != expected:
        joined = f" in logical cores of {logical} (NEURON_LOGICAL_NC_CONFIG)" if logical > 1 else ""
        yield Finding(
            True,
            f"{node.name} states {cores} {NEURON_RESOURCE}, but {node.instance} has {expected}{joined}: correct the "
            "number or the logical core setting",
        )


def _cores_per_logical(node: NodeType) -> int:
    stated = [int(size) for command in node.commands for size in _LOGICAL_CORES.findall(command)]
    if stated:
        return max(1, stated[-1])
    return _DEFAULT_CORES_PER_LOGICAL.get(node.instance.partition(".")[0], 1)


def _sums(cluster: ClusterFile) -> Iterator[Finding]:
    least = sum(node.min_workers for node in cluster.workers)
    if least > cluster.max_workers:
        yield Finding(
            True,
            f"the node types' min_workers add up to {least}, above the cluster's max_workers {cluster.max_workers}: "
            "raise that, or lower them",
        )
    if cluster.raw.get("idle_timeout_minutes", 5) > 30:
        yield Finding(False, "idle_timeout_minutes is above 30: idle nodes are paid for that long, set it lower")


def _versions(cluster: ClusterFile, what: str, named: Callable[[tuple[str, ...]], set[str]]) -> Iterator[Finding]:
    """All nodes of a Ray cluster need one version of Ray and one minor version of Python."""
    found = {node.name: named(node.commands) for node in cluster.node_types}
    for name, versions in found.items():
        if len(versions) > 1:
            yield Finding(
                True, f"{name}'s set-up names {what} {' and '.join(sorted(versions))}: it must lead to a single version"
            )
        elif not versions:
            yield Finding(False, f"{name}'s set-up does not say which {what} it leads to: name the version in it")
    single = {name: next(iter(versions)) for name, versions in found.items() if len(versions) == 1}
    if len(set(single.values())) > 1:
        text = ", ".join(f"{name} {version}" for name, version in single.items())
        yield Finding(True, f"the node types' set-ups lead to different versions of {what} ({text}): use one for all")


def _authentication(cluster: ClusterFile) -> Iterator[Finding]:
    starts = [command for command in cluster.start_commands if "ray start" in command]
    if not starts or any("RAY_AUTH_MODE=token" not in command for command in starts):
        yield Finding(
            False,
            "not every ray start command sets RAY_AUTH_MODE=token: whoever reaches the head's ports could run anything",
        )
    elif not any(target.endswith(".ray/auth_token") for target in cluster.file_mounts):
        yield Finding(True, "RAY_AUTH_MODE=token is set, but no token reaches the nodes: mount ~/.ray/auth_token")
