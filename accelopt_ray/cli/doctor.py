"""``accelopt-ray doctor``: what this machine offers, and what is missing for what."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from accelopt_ray.cli.finding import Finding
from accelopt_ray.cli.neuron_checks import neuron_findings

_PROBE_TIMEOUT_S = 15.0


def doctor(
    endpoint: Annotated[str | None, typer.Option(help="Model endpoint to ask, like http://host:8000/v1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine offers: devices, toolchain, GPUs, Ray, model endpoints. Exit code 1 on a problem."""
    findings = list(_findings(endpoint))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(f"{finding.subject:<{width}}  {finding.state:<7}  {finding.detail}")
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def _findings(endpoint: str | None) -> Iterator[Finding]:
    from accelopt_ray.version import code_version

    yield Finding(
        "accelopt-ray", "ok", f"{code_version()} on Python {platform.python_version()}, {platform.platform()}"
    )
    yield _machine()
    checks: list[Callable[[], Finding]] = [_ray, _cache, _gpus, _vllm]
    for check in checks:
        yield check()
    yield from neuron_findings()
    yield _protections()
    yield Finding("simulator", "ok", "sim-trn1, sim-trn2: predicted latencies, always labelled simulated")
    yield _endpoint(endpoint or os.environ.get("OPENAI_BASE_URL"))


def _machine() -> Finding:
    import psutil

    memory_gib = psutil.virtual_memory().total / 2**30
    return Finding("machine", "ok", f"{os.cpu_count()} CPUs, {memory_gib:.0f} GiB memory")


def _ray() -> Finding:
    version = _version("ray")
    if version is None:
        return Finding("ray", "problem", "not installed: pip install 'ray[default]'; optimize needs it")
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return Finding("ray", "ok", f"{version}; RAY_ADDRESS is not set, so a run starts a local cluster of its own")
    answer = _output(["ray", "status", "--address", address])
    if answer is None:
        return Finding(
            "ray", "problem", f"{version}; no cluster answers at RAY_ADDRESS={address}: start it or unset it"
        )
    return Finding("ray", "ok", f"{version}; cluster at {address}")


def _cache() -> Finding:
    from accelopt_ray.verify.references import CACHE_VARIABLE, default_folder

    folder = default_folder()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        return Finding("cache", "problem", f"{folder} cannot be written: set {CACHE_VARIABLE} to a folder that can")
    free_gib = shutil.disk_usage(existing).free / 2**30
    return Finding("cache", "ok", f"{folder}, {free_gib:.0f} GiB free")


def _protections() -> Finding:
    from accelopt_ray.devices.child import ChildError
    from accelopt_ray.devices.protections import protections

    try:
        report = protections()
    except ChildError as error:
        return Finding("protections", "problem", str(error))
    active = [name for name, state in report.items() if state == "active"]
    missing = [name for name, state in report.items() if state == "inactive"]
    detail = f"active: {', '.join(active) or 'none'}"
    return Finding("protections", "ok", detail + (f"; not on this machine: {', '.join(missing)}" if missing else ""))


def _gpus() -> Finding:
    executable = shutil.which("nvidia-smi")
    answer = _output([executable, "--query-gpu=name,memory.total", "--format=csv,noheader"]) if executable else None
    if not answer:
        return Finding("gpus", "absent", "no GPU: models come from an endpoint elsewhere, or the offline rewriter")
    names = [line.strip() for line in answer.splitlines() if line.strip()]
    return Finding("gpus", "ok", f"{len(names)}: {'; '.join(sorted(set(names)))}")


def _vllm() -> Finding:
    version = _version("vllm")
    if version is None or importlib.util.find_spec("vllm") is None:
        return Finding("vllm", "absent", "not installed: pip install 'accelopt-ray[gpu]' on GPU nodes")
    return Finding("vllm", "ok", version)


def _endpoint(base_url: str | None) -> Finding:
    from accelopt_ray.outcome import UserError

    if base_url is None:
        return Finding(
            "model endpoint", "absent", "none named: optimize uses the offline rewriter (--endpoint names one)"
        )
    try:
        models = _models_of(base_url, "OPENAI_API_KEY")
    except UserError as error:
        return Finding("model endpoint", "problem", str(error))
    return Finding("model endpoint", "ok", f"{base_url}: {', '.join(models) or 'names no models'}")


def _models_of(base_url: str, api_key_env: str) -> list[str]:
    """Names an endpoint's models; none when it answers but does not list them.

    Raises:
        UserError: It does not answer, or refuses the key.
    """
    import httpx

    from accelopt_ray.outcome import UserError

    key = os.environ.get(api_key_env, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{base_url.rstrip('/')}/models", headers=headers, timeout=_PROBE_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"the endpoint {base_url} does not answer ({reason}): start it, or correct its URL") from None
    if answer.status_code in (401, 403):
        raise UserError(f"the endpoint {base_url} refuses the key: put a valid one into the variable {api_key_env}")
    if answer.status_code >= 500:
        raise UserError(f"the endpoint {base_url} answers with HTTP {answer.status_code}: wait until it is ready")
    try:
        return [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    """What a command prints; None if it fails, hangs or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
