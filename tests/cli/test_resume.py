"""The whole command killed outright: its folder is enough to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelopt_ray.cli import main
from accelopt_ray.trajectory import RunLock, read_table, trajectory_digest

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [pytest.mark.ray]

SIZES = ("--shape", "M=256", "--shape", "N=2048", "-T", "3", "-B", "2", "-N", "3", "-K", "1")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "HOME": str(folder),
        "ACCELOPT_RAY_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "accelopt_ray", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment)


def run_id_of(folder: Path) -> str:
    return str(read_table(folder, "runs")["run_id"][0])


@pytest.mark.slow
def test_a_killed_run_reaches_the_end_of_an_undisturbed_one(tmp_path: Path):
    whole = start(tmp_path, "optimize", "silu", *SIZES, "-o", "whole")
    text, _ = whole.communicate()
    assert whole.returncode == 0, text
    killed = start(tmp_path, "optimize", "silu", *SIZES, "-o", "killed")
    assert killed.stdout is not None
    for line in killed.stdout:
        if "iteration 1/3" in line:
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate()
    before = set(read_table(tmp_path / "killed", "llm_calls")["call_id"].to_pylist())
    resumed = start(tmp_path, "resume", "killed")
    text, _ = resumed.communicate()
    assert resumed.returncode == 0, text
    assert "taking up: " in text
    calls = read_table(tmp_path / "killed", "llm_calls").to_pylist()
    again = {row["call_id"] for row in calls if row["asking"]}
    assert not before & again, "a journalled reply was asked for again"
    digests = [trajectory_digest(tmp_path / name, run_id_of(tmp_path / name)) for name in ("whole", "killed")]
    assert digests[0] == digests[1]
    [row] = read_table(tmp_path / "killed", "resumes").to_pylist()
    assert row["edits_json"] == "{}"


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, (), "holds no run that got as far as its config.yaml"),
        ({"config.yaml": "task: silu\n"}, ("--pin", "x"), "holds no candidates yet"),
        ({"config.yaml": "task: [\n"}, (), "is not YAML"),
        ({"config.yaml": "task: silu\n"}, ("-T", "0"), "iterations is 0"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], arguments: tuple[str, ...], said: str
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["resume", str(tmp_path), *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 1


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path):
    lock = RunLock(tmp_path)
    lock.acquire()
    script = (
        "import sys; from accelopt_ray.trajectory import RunLock; from accelopt_ray.outcome import UserError\n"
        "from pathlib import Path\n"
        "try: RunLock(Path(sys.argv[1])).acquire()\n"
        "except UserError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert "is being written by a run that is going on" in said
    lock.release()
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout == ""
    )
