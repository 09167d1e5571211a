"""``accelopt-ray pool``: what the profiling service is doing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from actors.pool_state import PoolStatus

app = typer.Typer(help="Look at the pools that evaluate kernels.", no_args_is_help=True)


@app.callback()
def _top() -> None:
    """Keeps ``status`` a command of its own while it is the only one."""


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show every pool of the running cluster: cores by state, queue, evaluations a minute, outcomes."""
    from actors.cluster import joined
    from actors.pools import find_pools

    with joined():
        pools = find_pools()
    if as_json:
        print(json.dumps({name: asdict(pool) for name, pool in pools.items()}, indent=2))
        return
    if not pools:
        print("no pool: nothing is being evaluated on this cluster")
    for name, pool in pools.items():
        print("\n".join(render(name, pool)))


def render(name: str, pool: PoolStatus) -> list[str]:
    """A pool as lines for people."""
    states = Counter(str(slot.state) for slot in pool.slots)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(pool.outcomes.items()))
    lines = [
        f"pool {name}",
        f"  slots      {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}",
        f"  waiting    {pool.waiting}",
        f"  evaluated  {pool.evaluated} ({pool.per_minute} in the last minute)",
        f"  answered   {pool.answered_from_store} from the store",
        f"  outcomes   {outcomes or 'none yet'}",
        f"  workers    {pool.workers_lost} lost, {pool.retried} evaluations dispatched again",
    ]
    for slot in pool.slots:
        detail = f"  {slot.detail}" if slot.detail else ""
        lines.append(
            f"  {slot.core or f'slot {slot.number}':<10} {slot.state:<9} {slot.evaluated:>6} evaluated{detail}"
        )
    return lines
