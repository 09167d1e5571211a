"""What a cluster costs by the hour."""

from __future__ import annotations

from dataclasses import dataclass

from accelopt_ray.cluster.description import ClusterFile, NodeType
from accelopt_ray.cluster.instances import Catalogue


@dataclass(frozen=True)
class Bill:
    """US dollars per hour.

    Attributes:
        minimum_usd_per_hour: Nothing runs but the head and the nodes that always do.
        maximum_usd_per_hour: As many nodes as may run, the dearest first.
        unpriced: Node types whose price is not known; they count as nothing.
        spot: Node types bought on the spot market; they count at the on-demand price, which they stay below.
    """

    minimum_usd_per_hour: float
    maximum_usd_per_hour: float
    unpriced: tuple[str, ...]
    spot: tuple[str, ...]


def hourly_bill(cluster: ClusterFile, known: Catalogue) -> Bill:
    """Adds up the instances' prices; disks, traffic and addresses come on top."""

    def price(node: NodeType) -> float | None:
        instance = known.instances.get(node.instance)
        return None if instance is None else instance.usd_per_hour

    head = sum(price(node) or 0.0 for node in cluster.node_types if node.head)
    minimum = head + sum(node.min_workers * (price(node) or 0.0) for node in cluster.workers)
    # Nodes that always run take their places first; the dearest take what is left.
    places = cluster.max_workers - sum(node.min_workers for node in cluster.workers)
    maximum = minimum
    for node in sorted(cluster.workers, key=lambda each: -(price(each) or 0.0)):
        more = max(0, min(node.max_workers - node.min_workers, places))
        places -= more
        maximum += more * (price(node) or 0.0)
    return Bill(
        minimum_usd_per_hour=minimum,
        maximum_usd_per_hour=maximum,
        unpriced=tuple(node.name for node in cluster.node_types if price(node) is None),
        spot=tuple(node.name for node in cluster.node_types if node.spot),
    )
