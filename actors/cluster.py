"""The Ray cluster of a run: the one that is there, or a quiet local one that leaves nothing behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from accelopt_ray.outcome import UserError

NEURON_RESOURCE = "neuron_cores"
"""Ray's name for NeuronCores; an actor that takes one is given NEURON_RT_VISIBLE_CORES."""

_LAST_CLUSTER = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"

_OBJECT_STORE_BYTES = 200 << 20
"""Kernels and results are small; tensors travel as files. Ray's default would reserve 30 % of the memory."""


@dataclass(frozen=True)
class Cluster:
    """What the run can use.

    Attributes:
        local: Whether this process started it, and will end it.
        address: Address of its head.
        cpus: CPUs of all nodes.
        neuron_cores: NeuronCores of all nodes.
    """

    local: bool
    address: str
    cpus: int
    neuron_cores: int


@contextmanager
def connected(cpus: int | None = None) -> Iterator[Cluster]:
    """Connects to the cluster that RAY_ADDRESS names, as under ``ray job submit``; starts a local one otherwise.

    A local cluster of Ray 2.60 would switch token authentication on and write a token into the home folder, after
    which job submission behaves differently on this machine for good. So authentication is off, unless the user has
    chosen a mode: the cluster listens on this machine alone and lives no longer than the run.

    Args:
        cpus: CPUs that a local cluster offers; this machine's by default.

    Raises:
        UserError: The cluster that RAY_ADDRESS names does not answer.
    """
    existing = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with _ray_signals_translated():
            if existing:
                _connect(existing)
            else:
                _start_local(cpus)
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        yield Cluster(
            local=not existing,
            address=ray.get_runtime_context().gcs_address,
            cpus=int(resources.get("CPU", 0)),
            neuron_cores=int(resources.get(NEURON_RESOURCE, 0)),
        )
    finally:
        ray.shutdown()


def places_of(resource: str) -> int:
    """How much of a resource the connected cluster has now, over all its living nodes."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get(resource, 0))


@contextmanager
def joined() -> Iterator[None]:
    """Connects to a cluster that is running: the one that RAY_ADDRESS names, or this machine's.

    Raises:
        UserError: None is.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    address = os.environ.get("RAY_ADDRESS") or _last_local_address()
    try:
        with _ray_signals_translated():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        yield
    except ConnectionError:
        raise UserError(f"no Ray cluster answers at {address}: set RAY_ADDRESS to the head of one that runs") from None
    finally:
        ray.shutdown()


def _last_local_address() -> str:
    """Address of the cluster that was started last on this machine, if it still listens.

    Ray notes it in a file that outlives the cluster, and would wait most of a minute for one that is gone.
    """
    try:
        address = _LAST_CLUSTER.read_text(encoding="ascii").strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        raise UserError(
            "no Ray cluster is running on this machine: set RAY_ADDRESS to the head of the one to look at"
        ) from None
    return address


def _start_local(cpus: int | None) -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray's memory monitor watches the machine, not us: when anything else fills it, it kills the run's own actors.
    # Candidates have limits of their own.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as error:  # Ray raises it bare when its processes take too long to start
        ray.shutdown()
        cause = str(error).partition(". ")[0]
        raise UserError(
            f"the local Ray cluster did not start ({cause}): try again when the machine is less busy"
        ) from error


@contextmanager
def _ray_signals_translated() -> Iterator[None]:
    """Keeps SIGTERM's handler, which Ray replaces with one that exits without the caller's cleaning up.

    Raises:
        KeyboardInterrupt: SIGTERM came while Ray's handler was in place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def _connect(address: str) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except ConnectionError as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({first_line}): start it, or unset RAY_ADDRESS to run on "
            "this machine alone"
        ) from None
