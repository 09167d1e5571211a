"""``accelopt-ray cluster``: cluster files, checked before anything is paid for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.cluster.checks import Need
    from accelopt_ray.sweep.file import Sweep

app = typer.Typer(help="Checks of Ray cluster files.", no_args_is_help=True)


@app.callback()
def _cluster() -> None:
    """Checks of Ray cluster files."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Cluster file.", metavar="CLUSTER.yaml")],
    sweep: Annotated[Path | None, typer.Option(help="Sweep that is to run there.", metavar="SWEEP.yaml")] = None,
    scale: Annotated[str | None, typer.Option(help="One of the sweep's scales.")] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="Your price of an instance type.", metavar="TYPE=USD_PER_HOUR")
    ] = None,
) -> None:
    """Validate a cluster file offline and print its price by the hour. Exit code 1 if the cluster would not work."""
    from accelopt_ray.cluster.bill import hourly_bill
    from accelopt_ray.cluster.checks import check_against_need, check_cluster
    from accelopt_ray.cluster.description import describe, read_mapping
    from accelopt_ray.cluster.instances import catalogue

    known = catalogue().with_prices(_prices(price or []))
    content = read_mapping(file)
    from actors.cluster_schema import check_with_ray

    check_with_ray(file, content)
    cluster = describe(file, content)
    findings = check_cluster(cluster, known)
    if sweep is not None:
        from accelopt_ray.sweep.file import load_sweep

        for need in _needs(load_sweep(sweep, scale)):
            findings += check_against_need(cluster, need)
    for finding in findings:
        print(f"{'error' if finding.error else 'warning'}: {finding.text}")
    bill = hourly_bill(cluster, known)
    print(f"{'node type':<20} {'instance':<16} {'market':<10} {'min':>4} {'max':>4}  resources")
    for node in cluster.node_types:
        resources = ", ".join(f"{name} {count}" for name, count in node.resources.items())
        least, most = (1, 1) if node.head else (node.min_workers, node.max_workers)
        market = "spot" if node.spot else "on demand"
        print(f"{node.name:<20} {node.instance:<16} {market:<10} {least:>4} {most:>4}  {resources}")
    print(
        f"price: {bill.minimum_usd_per_hour:.2f} USD an hour at minimum, {bill.maximum_usd_per_hour:.2f} at maximum "
        f"({cluster.max_workers} workers, on-demand list prices of {known.as_of}, {known.source}; "
        "disks and traffic extra)"
    )
    if bill.spot:
        print(f"spot types cost less, when there are any: {', '.join(bill.spot)}")
    if bill.unpriced:
        print(f"without a list price, counted as 0: {', '.join(bill.unpriced)}; give yours with --price TYPE=USD")
    if any(finding.error for finding in findings):
        raise typer.Exit(1)


def _needs(sweep: Sweep) -> Iterator[Need]:
    """What the sweep's evaluations and the models that it brings up can use."""
    from accelopt_ray.cluster.checks import NEURON_RESOURCE, Need
    from accelopt_ray.sweep.demand import most_evaluations_at_once

    devices = {run.config.device for run in sweep.runs}
    for resource, some in ((NEURON_RESOURCE, devices & {"neuron"}), ("CPU", devices - {"neuron"})):
        if some:
            yield Need(resource, most_evaluations_at_once(sweep, some), f"evaluations on {', '.join(sorted(some))}")
    models = {model.name: model for run in sweep.runs for model in run.config.hosted_models()}
    if gpus := sum(model.gpus for model in models.values()):
        yield Need("GPU", gpus, f"the models {', '.join(sorted(models))}")


def _prices(pairs: Sequence[str]) -> dict[str, float]:
    prices = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = -1.0
        if not name or not 0 <= prices[name] < float("inf"):
            raise UserError(f"--price {pair!r} is not TYPE=USD_PER_HOUR, for instance trn2.48xlarge=40.5")
    return prices
