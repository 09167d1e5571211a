"""Sweeps as Ray jobs: submitted once however often one asks, followed, stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from accelopt_ray.outcome import UserError

_ACTIVE = frozenset({JobStatus.PENDING, JobStatus.RUNNING})
_MOST_SUBMISSIONS = 10_000
_TALKATIVE = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env")
"""Ray's loggers that tell of every packed file and closed socket."""


@dataclass(frozen=True)
class Submission:
    """What came of a submission.

    Attributes:
        submission_id: Names the job.
        new: Whether it was started now; otherwise it was there already.
        status: How it stands, in Ray's words.
    """

    submission_id: str
    new: bool
    status: str


class Jobs:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        """Connects to a cluster's dashboard.

        Args:
            address: For instance ``http://127.0.0.1:8265``, where ``ray dashboard`` tunnels to.

        Raises:
            UserError: It does not answer, or wants another token.
        """
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            self._client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0].rstrip(".:")
            hint = (
                "set RAY_AUTH_MODE=token and use the cluster's ~/.ray/auth_token"
                if "auth" in str(error).lower()
                else "start it, or open the tunnel with `ray dashboard cluster.yaml`"
            )
            raise UserError(f"no Ray cluster can be used at {address} ({first_line}): {hint}") from None

    def submit(
        self,
        base_id: str,
        entrypoint: str,
        working_dir: Path,
        env_vars: Mapping[str, str],
        excludes: Sequence[str] = (),
    ) -> Submission:
        """Starts a job unless the same one is going on or has succeeded.

        Ray takes each id once. So a job that ended badly is started again under the id with the next number.

        Args:
            base_id: Stands for the work; equal work has an equal id.
            entrypoint: Shell command.
            working_dir: Folder that travels; what its .rayignore and .gitignore name stays.
            env_vars: Environment of the job.
            excludes: Further patterns that stay.

        Raises:
            UserError: The folder cannot be packed, or the cluster refuses the job.
        """
        for number in range(1, _MOST_SUBMISSIONS):
            submission_id = base_id if number == 1 else f"{base_id}-{number}"
            status = self._status(submission_id)
            if status is None:
                break
            if status in _ACTIVE or status == JobStatus.SUCCEEDED:
                return Submission(submission_id, False, str(status.value))
        runtime_env: dict[str, Any] = {"working_dir": str(working_dir), "env_vars": dict(env_vars)}
        if excludes:
            runtime_env["excludes"] = list(excludes)
        try:
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=submission_id, runtime_env=runtime_env, metadata={"sweep": base_id}
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(f"the cluster refuses the job: {' '.join(str(error).split())[:300]}") from None
        return Submission(submission_id, True, str(JobStatus.PENDING.value))

    def status(self, submission_id: str) -> str:
        """How a job stands, in Ray's words, with its message.

        Raises:
            UserError: There is no such job.
        """
        self._require(submission_id)
        info = self._client.get_job_info(submission_id)
        message = " ".join((info.message or "").split())
        return f"{info.status.value}: {message}" if message else str(info.status.value)

    def succeeded(self, submission_id: str) -> bool:
        """Whether a job has ended well."""
        return bool(self._client.get_job_status(submission_id) == JobStatus.SUCCEEDED)

    def logs(self, submission_id: str) -> str:
        """All that a job has printed.

        Raises:
            UserError: There is no such job.
        """
        self._require(submission_id)
        return str(self._client.get_job_logs(submission_id))

    def follow(self, submission_id: str) -> None:
        """Prints what a job prints until it ends.

        Raises:
            UserError: There is no such job.
        """
        self._require(submission_id)

        async def tail() -> None:
            async for text in self._client.tail_job_logs(submission_id):
                print(text, end="", flush=True)

        asyncio.run(tail())

    def stop(self, submission_id: str) -> bool:
        """Asks a job to end; returns False if it had ended already.

        Raises:
            UserError: There is no such job.
        """
        self._require(submission_id)
        return bool(self._client.stop_job(submission_id))

    def _status(self, submission_id: str) -> JobStatus | None:
        try:
            return self._client.get_job_status(submission_id)
        except RuntimeError:
            return None

    def _require(self, submission_id: str) -> None:
        if self._status(submission_id) is None:
            raise UserError(f"the cluster has no job {submission_id!r}: see `ray job list`, or submit the sweep first")
