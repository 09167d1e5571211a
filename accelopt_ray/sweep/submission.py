"""A sweep as a cluster job: its command, its name, and where its results may go."""

from __future__ import annotations

import hashlib
from pathlib import Path

import platformdirs

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.file import Sweep

_UPLOADED_MARK = "working_dir_files"
"""Part of the path under which Ray unpacks a job's working folder, which it deletes in the end."""


def submission_id(sweep: Sweep, output: str) -> str:
    """Names the job: equal for the same runs into the same folder, so that submitting twice starts one job."""
    digest = hashlib.sha256(f"{sweep.sha256()} {output}".encode()).hexdigest()[:10]
    return "-".join(filter(None, ("sweep", sweep.name, sweep.scale, digest)))


def entrypoint(file: Path, working_dir: Path, output: str, scale: str) -> list[str]:
    """The command that runs the sweep from the unpacked checkout.

    Raises:
        UserError: The checkout is none, the file is not in it, or the output would be deleted with it.
    """
    root = working_dir.resolve()
    if not (root / "accelopt_ray" / "__main__.py").is_file():
        raise UserError(f"{working_dir} is no checkout of accelopt-ray: name one with --working-dir")
    try:
        inside = file.resolve().relative_to(root)
    except ValueError:
        raise UserError(f"{file} is not in {working_dir}, so it would not travel: put it there") from None
    if "://" not in output:
        if not Path(output).is_absolute():
            raise UserError(f"--output {output!r} must be an absolute path on the cluster, or a URI like s3://bucket/x")
        if Path(output).resolve().is_relative_to(root):
            raise UserError(
                f"--output {output!r} is in the checkout, which would travel with it: choose another folder"
            )
    command = ["python", "-m", "accelopt_ray", "sweep", "run", str(inside), "--output", output]
    return [*command, "--scale", scale] if scale else command


def work_folder(sweep: Sweep, output: str) -> Path:
    """Where a sweep works whose output is elsewhere: a folder of this machine that is the same each time."""
    return Path(platformdirs.user_cache_dir("accelopt-ray")) / "sweeps" / submission_id(sweep, output)


def outside_working_dir(output: str) -> Path:
    """Where results go, absolute.

    Raises:
        UserError: It is in the folder that Ray unpacked for the job and deletes after it.
    """
    path = Path(output).absolute()
    if "://" not in output and _UPLOADED_MARK in path.parts:
        raise UserError(f"--output {output!r} is in the job's working folder, which is deleted: give an absolute path")
    return path
