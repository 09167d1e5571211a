"""``accelopt-ray fidelity`` and ``calibrate``: how far the simulator's latencies can be trusted, and fitting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.nki_sim.measurements import MeasuredKernel

_OWN_NOTE = (
    "Predicted: this project's baselines. Measured: published trn1 profiles of their counterparts, which compute the "
    "same at the same shapes but differ in detail."
)


def fidelity(
    suite: Annotated[Path | None, typer.Option(help="Checkout of the published kernels, with summary.json.")] = None,
    measured: Annotated[Path | None, typer.Option(help="CSV with your own measurements.", metavar="FILE.csv")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Also refit the constants without each task in turn; takes minutes.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Also print the error without each rule; takes minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the simulator's latencies and counters with measured ones, kernel by kernel."""
    from accelopt_ray.nki_sim.calibration import ablate, leave_one_task_out
    from accelopt_ray.nki_sim.fidelity import compare

    kernels = _kernels(suite, measured)
    table = compare(kernels, note="" if suite or measured else _OWN_NOTE)
    unseen = leave_one_task_out(kernels).median_error if held_out else None
    without = ablate(kernels) if ablation else []
    if as_json:
        record = table.as_json()
        if unseen is not None:
            record["leave_one_task_out_median_latency_error"] = unseen
        if ablation:
            record["ablation"] = [vars(each) for each in without]
        print(json.dumps(record, indent=2))
        return
    print(table.as_text())
    if unseen is not None:
        print(f"Constants refitted without each task in turn: median latency error {unseen:.1%}.")
    for each in without:
        hbm = "" if each.hbm_error is None else f", HBM bytes {each.hbm_error:.1%}"
        print(f"{each.rule}: latency {each.latency_error:.1%}{hbm} (mean logarithmic error)")


def calibrate(
    measured: Annotated[Path, typer.Argument(help="CSV with your own measurements.", metavar="FILE.csv")],
    to: Annotated[Path, typer.Option(help="Device profile to write.", metavar="FILE")],
    device: Annotated[str, typer.Option(help="Hardware generation to start from.")] = "trn1",
) -> None:
    """Fit the simulator's few free constants to measurements of your own."""
    from accelopt_ray.nki_sim.calibration import calibrate as fit
    from accelopt_ray.nki_sim.cost.constants import save_device_profile
    from accelopt_ray.nki_sim.fidelity import compare
    from accelopt_ray.nki_sim.measurements import measured_file

    if to.exists():
        raise UserError(f"{to} exists already: choose another file with --to")
    kernels = measured_file(measured, device)
    before = compare(kernels, device)
    fitted = fit(kernels, device, name=to.stem)
    after = compare(kernels, fitted)
    try:
        save_device_profile(fitted, to)
    except OSError as error:
        raise UserError(f"cannot write {to} ({error.strerror}): choose another file with --to") from None
    print(f"median latency error over {len(kernels)} kernels: {before.median_error:.1%}, now {after.median_error:.1%}")
    print(f"wrote {to}")


def _kernels(suite: Path | None, measured: Path | None) -> list[MeasuredKernel]:
    from accelopt_ray.nki_sim.measurements import measured_file, own_baselines, published_suite
    from nkibench.task import TaskError

    if suite is not None and measured is not None:
        raise UserError("--suite and --measured are two sources: give one")
    try:
        if suite is not None:
            return published_suite(suite)
        return measured_file(measured) if measured is not None else own_baselines()
    except TaskError as error:
        raise UserError(str(error)) from None
