"""A Ray cluster file as far as checks and prices need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accelopt_ray.outcome import UserError


@dataclass(frozen=True)
class NodeType:
    """One kind of node.

    Attributes:
        name: Its key in the file.
        head: Whether it is the head's.
        instance: EC2 instance type; empty where the file names none.
        image: Machine image; empty where the file names none.
        spot: Whether it is bought on the spot market.
        min_workers: Nodes that always run.
        max_workers: Nodes at most.
        resources: Ray resources of each node.
        commands: Shell commands that set the node up, in their order.
    """

    name: str
    head: bool
    instance: str
    image: str
    spot: bool
    min_workers: int
    max_workers: int
    resources: Mapping[str, int]
    commands: tuple[str, ...]

    @property
    def neuron(self) -> bool:
        """Whether the instance type is one with NeuronCores."""
        return self.instance.startswith(("trn", "inf"))


@dataclass(frozen=True)
class ClusterFile:
    """A cluster file.

    Attributes:
        path: Where it was read.
        raw: All of it.
        max_workers: Nodes at most, the head not counted.
        node_types: The head's first.
        start_commands: Commands that start Ray, the head's and the workers'.
        file_mounts: Paths on the nodes to paths here.
    """

    path: Path
    raw: Mapping[str, Any]
    max_workers: int
    node_types: tuple[NodeType, ...]
    start_commands: tuple[str, ...]
    file_mounts: Mapping[str, str]

    @property
    def workers(self) -> tuple[NodeType, ...]:
        """Node types without the head's."""
        return tuple(each for each in self.node_types if not each.head)


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads the file as plain data.

    Raises:
        UserError: It cannot be read or is no YAML mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the cluster file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of fields to values, not a {type(content).__name__}")
    return content


def describe(path: Path, raw: Mapping[str, Any]) -> ClusterFile:
    """Reads what matters out of a file that Ray's own schema has accepted."""
    shared = _texts(raw.get("setup_commands"))
    worker_commands = (*shared, *_texts(raw.get("worker_setup_commands")))
    head_commands = (*shared, *_texts(raw.get("head_setup_commands")))
    max_workers = int(raw.get("max_workers", 2))
    types = []
    for name, entry in raw["available_node_types"].items():
        head = name == raw["head_node_type"]
        node = entry.get("node_config", {})
        market = node.get("InstanceMarketOptions", {})
        # A worker type's own list replaces both shared lists; Ray has no such list for the head.
        own = entry.get("worker_setup_commands")
        types.append(
            NodeType(
                name=name,
                head=head,
                instance=str(node.get("InstanceType", "")),
                image=str(node.get("ImageId", "")),
                spot=market.get("MarketType") == "spot",
                min_workers=int(entry.get("min_workers", 0)),
                max_workers=int(entry.get("max_workers", 0 if head else max_workers)),
                resources=entry.get("resources", {}),
                commands=head_commands if head else worker_commands if own is None else _texts(own),
            )
        )
    return ClusterFile(
        path=path,
        raw=raw,
        max_workers=max_workers,
        node_types=tuple(sorted(types, key=lambda each: not each.head)),
        start_commands=_texts(raw.get("head_start_ray_commands")) + _texts(raw.get("worker_start_ray_commands")),
        file_mounts=raw.get("file_mounts", {}),
    )


def _texts(commands: Sequence[object] | None) -> tuple[str, ...]:
    return tuple(str(command) for command in commands or ())
