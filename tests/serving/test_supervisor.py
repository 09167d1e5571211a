"""A server of models is started, waited for, started again when it fails, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_models import alive, fake_model, starts

from accelopt_ray.outcome import UserError
from accelopt_ray.serving.model import HostedModel
from accelopt_ray.serving.process import ServerProcess
from accelopt_ray.serving.supervisor import HostState, HostStatus, Patience, Supervisor

QUICK = Patience(start_s=60.0, max_restarts=2, watch_s=0.1, silent_looks=3, pause_s=0.01, poll_s=0.05)


def supervised(
    model: HostedModel, folder: Path, use: Callable[[Supervisor], Awaitable[None]], patience: Patience = QUICK
) -> Supervisor:
    async def run() -> Supervisor:
        supervisor = Supervisor(ServerProcess(model, folder / "logs" / "fake.log"), [model.name], patience)
        supervisor.start()
        try:
            await use(supervisor)
        finally:
            await supervisor.stop()
        return supervisor

    return asyncio.run(run())


async def until(supervisor: Supervisor, *wanted: HostStatus) -> HostState:
    state = supervisor.state
    while state.status not in wanted:
        state = await supervisor.next_state(state, 60.0)
    return state


async def ask(supervisor: Supervisor) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{supervisor.base_url}/chat/completions", json=body, timeout=10.0)
    content: dict[str, Any] = answer.json()
    return content


def test_a_slow_server_is_waited_for_and_ended(tmp_path: Path):
    async def use(supervisor: Supervisor) -> None:
        assert supervisor.state.status is HostStatus.STARTING
        state = await until(supervisor, HostStatus.READY)
        assert supervisor.base_url in state.message
        assert (await ask(supervisor))["choices"]

    supervisor = supervised(fake_model(tmp_path, {"start_s": 0.5}), tmp_path, use)
    assert supervisor.state.status is HostStatus.STOPPED
    [process_id] = starts(tmp_path)
    assert not alive(process_id)
    assert "--served-model-name fake" in (tmp_path / "logs" / "fake.log").read_text()


def test_a_server_that_dies_is_started_again_at_the_same_address(tmp_path: Path):
    async def use(supervisor: Supervisor) -> None:
        await until(supervisor, HostStatus.READY)
        address = supervisor.base_url
        os.kill(starts(tmp_path)[0], signal.SIGKILL)
        state = await until(supervisor, HostStatus.RESTARTING)
        assert "SIGKILL" in state.message
        state = await until(supervisor, HostStatus.READY)
        assert (state.restarts, supervisor.base_url) == (1, address)
        assert (await ask(supervisor))["choices"]

    supervised(fake_model(tmp_path), tmp_path, use)
    assert len(starts(tmp_path)) == 2
    assert not any(alive(process_id) for process_id in starts(tmp_path))


def test_a_hung_server_is_started_again(tmp_path: Path):
    async def use(supervisor: Supervisor) -> None:
        await until(supervisor, HostStatus.READY)
        asking = asyncio.ensure_future(ask(supervisor))
        state = await until(supervisor, HostStatus.RESTARTING)
        assert "no longer answers" in state.message
        await asyncio.gather(asking, return_exceptions=True)
        await until(supervisor, HostStatus.READY)

    patient = Patience(start_s=60.0, max_restarts=2, watch_s=0.5, silent_looks=2, pause_s=0.01, poll_s=0.05)
    supervised(fake_model(tmp_path, {"hang_after": 0}, {}), tmp_path, use, patient)
    assert not any(alive(process_id) for process_id in starts(tmp_path))


def test_one_that_fails_at_every_start_is_given_up_with_its_last_words(tmp_path: Path):
    async def use(supervisor: Supervisor) -> None:
        state = await until(supervisor, HostStatus.FAILED)
        assert "ended with exit code 3: CUDA out of memory" in state.message
        assert str(tmp_path / "logs" / "fake.log") in state.message

    supervised(fake_model(tmp_path, {"exit_at_start": 3}), tmp_path, use)
    assert len(starts(tmp_path)) == 1 + QUICK.max_restarts


def test_one_that_never_gets_ready_is_given_up(tmp_path: Path):
    async def use(supervisor: Supervisor) -> None:
        state = await until(supervisor, HostStatus.FAILED)
        assert "fake did not answer" in state.message
        assert "within 0.3 s" in state.message

    supervised(
        fake_model(tmp_path, {"start_s": 3600}), tmp_path, use, Patience(start_s=0.3, max_restarts=0, poll_s=0.05)
    )
    assert not any(alive(process_id) for process_id in starts(tmp_path))


def test_a_command_that_is_not_there_is_the_users_mistake(tmp_path: Path):
    missing = HostedModel("fake", str(tmp_path), executable=str(tmp_path / "absent"))

    async def use(supervisor: Supervisor) -> None:
        state = await until(supervisor, HostStatus.FAILED)
        assert "install vllm" in state.message

    supervised(missing, tmp_path, use)

    async def start() -> None:
        await ServerProcess(missing, tmp_path / "log").start()

    with pytest.raises(UserError, match="cannot start .*absent for the model fake"):
        asyncio.run(start())


def test_the_server_ends_with_an_owner_that_is_killed(tmp_path: Path):
    fake_model(tmp_path)
    owner = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from accelopt_ray.serving.model import HostedModel
from accelopt_ray.serving.process import ServerProcess

async def run():
    folder = Path({str(tmp_path)!r})
    server = ServerProcess(HostedModel("fake", str(folder / "model"), executable=str(folder / "vllm")), folder / "log")
    await server.start()
    await asyncio.sleep(3600)

asyncio.run(run())
"""
    with subprocess.Popen([sys.executable, "-c", owner]) as process:
        while not starts(tmp_path):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    [server] = starts(tmp_path)
    deadline = time.monotonic() + 30
    while alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server)
