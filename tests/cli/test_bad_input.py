"""A user's mistake is one line on standard error, exit code 2, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelopt_ray.cli import main

TASK_FILES = ("task.yaml", "reference.py", "baseline.py")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Runs the command line in this process; returns the exit code and standard error."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    code = caught.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def task_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(capsys, "new-task", "mine", "--to", str(tmp_path))[0] == 0
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optimize"], "task is missing"),
        (["optimize", "slu"], "did you mean 'silu'?"),
        (["optimize", "no/such/folder"], "no task and no task folder 'no/such/folder'"),
        (["optimize", "silu", "--shape", "M"], "NAME=VALUE"),
        (["optimize", "silu", "--shape", "Q=3"], "no parameter 'Q'"),
        (["optimize", "silu", "-T", "0"], "iterations is 0: give a whole number from 1"),
        (["optimize", "silu", "-B", "many"], "--beam-width"),
        (["optimize", "silu", "--positive-threshold", "0.5"], "positive_threshold is 0.5"),
        (["optimize", "silu", "--seed", "-1"], "seed is -1"),
        (["optimize", "silu", "--preset", "best"], "no preset 'best'"),
        (["optimize", "silu", "--device", "sim-trn9"], "unknown device 'sim-trn9'"),
        (["optimize", "silu", "--check", "none"], "check is 'none'"),
        (["optimize", "silu", "--timeout", "0"], "evaluation.timeout_s is 0"),
        (["optimize", "silu", "--slots", "0"], "slots is 0"),
        (["optimize", "silu", "--model", "m"], "name it with --endpoint"),
        (["optimize", "silu", "--endpoint", "http://127.0.0.1:9/v1"], "--endpoint needs --model"),
        (["optimize", "silu", "--endpoint", "127.0.0.1", "--model", "m"], "base_url is '127.0.0.1'"),
        (["optimize", "silu", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"], "http://127.0.0.1:9/v1"),
        (["optimize", "silu", "--config", "absent.yaml"], "cannot read the configuration"),
        (["optimize", "silu", "--frobnicate"], "--frobnicate"),
        (["optimise", "silu"], "Did you mean 'optimize'?"),
        (["profile", "absent.py", "--task", "silu"], "cannot read the kernel absent.py"),
        (["profile", "absent.py"], "give either --task NAME or --reference FILE.py"),
        (["bench", "slu"], "did you mean 'silu'?"),
        (["bench", "--suite", "nowhere"], "nowhere"),
        (["bench", "--check", "strikt"], "did you mean 'strict'?"),
        (["new-task", "9 lives"], "no task name"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, arguments: list[str], said: str
):
    code, error = run(capsys, *arguments)
    assert code == 2
    assert said in error
    assert error.count("\n") == 1
    assert error.startswith("accelopt-ray: ")
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def kernel(x:\n", "line 1: is not Python"),
        ("def karnel(x):\n    return x\n", "defines karnel and not the entry 'kernel'"),
        ("", "defines no function and not the entry 'kernel'"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_broken_kernel_file_is_named(capsys: pytest.CaptureFixture[str], empty_folder: Path, text: str, said: str):
    kernel = empty_folder / "kernel.py"
    kernel.write_bytes(text.encode("utf-8", "surrogateescape"))
    code, error = run(capsys, "profile", str(kernel), "--task", "silu")
    assert (code, error.count("\n")) == (2, 1)
    assert said in error


@pytest.mark.parametrize("missing", TASK_FILES)
def test_a_task_folder_with_a_missing_file_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], task_folder: Path, empty_folder: Path, missing: str
):
    (task_folder / missing).unlink()
    code, error = run(capsys, "optimize", str(task_folder))
    assert (code, error.count("\n")) == (2, 1)
    assert missing in error
    assert list(empty_folder.iterdir()) == []


def test_a_reference_that_raises_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], task_folder: Path, empty_folder: Path
):
    reference = task_folder / "reference.py"
    reference.write_text(
        reference.read_text().replace("def forward(", "def forward(*_): raise KeyError('beta')\ndef _f(")
    )
    code, error = run(capsys, "optimize", str(task_folder))
    assert (code, error.count("\n")) == (2, 1)
    assert "reference.py" in error
    assert "beta" in error
    assert list(empty_folder.iterdir()) == []


def test_a_second_run_into_the_same_folder_is_refused(capsys: pytest.CaptureFixture[str], empty_folder: Path):
    (empty_folder / "run").mkdir()
    (empty_folder / "run" / "config.yaml").write_text("task: silu\n")
    code, error = run(capsys, "optimize", "silu", "--output", "run")
    assert (code, error.count("\n")) == (2, 1)
    assert "choose a new folder with --output" in error
    assert [path.name for path in (empty_folder / "run").iterdir()] == ["config.yaml"]


def test_an_output_folder_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str], empty_folder: Path):
    (empty_folder / "file").write_text("")
    code, error = run(capsys, "optimize", "silu", "--output", "file/run")
    assert (code, error.count("\n")) == (2, 1)
    assert "choose another folder with --output" in error


def test_a_cluster_that_does_not_answer_is_named_and_the_folder_taken_away_again(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("ray", reason="Ray is not installed")
    actors_cluster = pytest.importorskip("actors.cluster")

    def refuse(**_: object) -> None:
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(actors_cluster.ray, "init", refuse)
    code, error = run(capsys, "optimize", "silu", "--output", "run")
    assert (code, error.count("\n")) == (2, 1)
    assert "RAY_ADDRESS=127.0.0.1:1" in error
    assert os.listdir(empty_folder) == []
