"""Whatever a child does, its end is typed, its limits hold, and nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from devices import hostile

from accelopt_ray.devices import confinement
from accelopt_ray.devices.child import ChildEnd, ChildResult, ChildTask, run_child
from accelopt_ray.devices.launching import LAUNCHER
from accelopt_ray.devices.protections import protections
from accelopt_ray.devices.protocol import Limits

TESTS = str(Path(__file__).resolve().parent.parent)
NAMESPACES = confinement.available()["namespaces"]
LANDLOCK = confinement.available()["landlock"]
SECCOMP = confinement.available()["seccomp"]


def run(
    function: object, argument: bytes = b"", confined: bool = True, limits: Limits | None = None, **more: object
) -> ChildResult:
    task = ChildTask(
        f"devices.hostile:{function.__name__}",  # type: ignore[attr-defined]
        argument,
        confined=confined,
        import_paths=(TESTS,),
        readable=(TESTS,),
        **more,  # type: ignore[arg-type]
    )
    return run_child(task, limits or Limits(timeout_s=20.0, memory_bytes=1 << 30))


def own_processes() -> set[int]:
    """Everything below this process but the launcher, which stays."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() != os.getpid() or "launcher.serve" not in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def temporary_folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("accelopt-ray-*")}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    # A place of its own: other programs on this machine make such folders as well.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    run(hostile.echo)  # the launcher exists from here on
    processes, folders = own_processes(), temporary_folders()
    yield
    for _ in range(100):
        left = own_processes() - processes
        if not left:
            break
        time.sleep(0.02)
    assert not [psutil.Process(pid) for pid in left]
    assert not temporary_folders() - folders


@pytest.fixture(params=[True, False], ids=["confined", "plain"])
def confined(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_an_answer_comes_back_with_what_was_printed(confined):
    result = run(hostile.echo, b"abc", confined)
    assert (result.end, result.answer, result.output) == (ChildEnd.ANSWERED, b"cba", "hello\n")
    assert result.stragglers == 0


def test_an_exception_comes_back_as_text(confined):
    result = run(hostile.fail, confined=confined)
    assert result.end is ChildEnd.RAISED
    assert "ValueError: told to" in result.detail


def test_what_keeps_a_worker_from_being_imported_is_told(monkeypatch, confined):
    """A confined child may not even read the module, so it is the launcher's import that has to be told of."""
    monkeypatch.setattr("accelopt_ray.devices.launching._PRELOAD", ("devices.broken",))
    LAUNCHER.discard()
    try:
        task = ChildTask("devices.broken:answer", b"", confined=confined)
        result = run_child(task, Limits(timeout_s=20.0, memory_bytes=1 << 30))
    finally:
        LAUNCHER.discard()
    assert result.end is ChildEnd.RAISED
    assert "ImportError: a library is missing" in result.detail


@pytest.mark.parametrize("function", [hostile.sleep_for_ever, hostile.spin_for_ever, hostile.ignore_signals])
def test_a_child_that_does_not_end_is_ended_at_its_deadline(function, confined):
    result = run(function, confined=confined, limits=Limits(timeout_s=0.3))
    assert result.end is ChildEnd.TIMEOUT
    assert "0.3 s" in result.detail
    assert result.wall_s < 5


def test_memory_is_bounded(confined):
    result = run(hostile.eat_memory, confined=confined, limits=Limits(timeout_s=20, memory_bytes=400 << 20))
    assert result.end is ChildEnd.MEMORY_LIMIT
    assert "400 MiB" in result.detail


def test_memory_is_bounded_for_all_processes_together():
    limits = Limits(timeout_s=20, memory_bytes=400 << 20)
    result = run(hostile.eat_memory_in_children, confined=False, limits=limits)
    assert result.end is ChildEnd.MEMORY_LIMIT


def test_exiting_without_a_result_is_a_crash_even_with_code_0(confined):
    result = run(hostile.exit_quietly, confined=confined)
    assert (result.end, result.detail) == (ChildEnd.CRASHED, "ended with exit code 0 and without a result")


def test_sys_exit_does_not_pass_for_an_answer(confined):
    result = run(hostile.exit_loudly, confined=confined)
    assert result.end is ChildEnd.RAISED
    assert "SystemExit: gone" in result.detail


@pytest.mark.parametrize("function, name", [(hostile.segfault, "SIGSEGV"), (hostile.kill_self, "SIGKILL")])
def test_a_signal_is_named(function, name, confined):
    result = run(function, confined=confined)
    assert (result.end, result.detail) == (ChildEnd.CRASHED, f"ended by signal {name}")


def test_a_flood_of_output_is_cut_and_does_no_harm(confined):
    result = run(hostile.flood, confined=confined, limits=Limits(timeout_s=20, output_bytes=1000))
    assert (result.end, result.answer) == (ChildEnd.ANSWERED, b"done")
    assert result.output == "x" * 1000 and result.output_truncated


def test_descendants_are_found_and_killed_even_in_sessions_of_their_own(monkeypatch, confined):
    # As on a system that cannot forbid second processes.
    monkeypatch.setitem(confinement.available(), "seccomp", False)
    result = run(hostile.leave_children, confined=confined)
    assert result.end is ChildEnd.ANSWERED
    if sys.platform == "linux":
        assert result.stragglers == 2


@pytest.mark.skipif(not SECCOMP, reason="a fork bomb is let loose only where it cannot go off")
def test_a_fork_bomb_does_not_go_off():
    result = run(hostile.fork_bomb, limits=Limits(timeout_s=0.5))
    assert result.end is ChildEnd.TIMEOUT and result.stragglers == 0


@pytest.mark.skipif(not SECCOMP, reason="needs seccomp")
def test_a_confined_child_starts_threads_but_no_processes():
    assert run(hostile.start_thread).answer == b"from a thread"
    result = run(hostile.leave_children)
    assert result.end is ChildEnd.RAISED and "PermissionError" in result.detail


@pytest.mark.skipif(not NAMESPACES, reason="needs unprivileged user namespaces")
def test_a_confined_child_cannot_kill_others():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        result = run(hostile.kill_family, str(bystander.pid).encode())
        assert bystander.poll() is None
        assert result.end in (ChildEnd.ANSWERED, ChildEnd.CRASHED)
        assert run(hostile.echo, b"ab").answer == b"ba"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_plain_child_that_kills_its_supervisor_is_a_crash():
    result = run(hostile.kill_family, str(2**22 + 1).encode(), confined=False)
    assert result.end is ChildEnd.CRASHED
    assert "supervising process" in result.detail


@pytest.mark.skipif(not LANDLOCK, reason="needs Landlock")
def test_a_confined_child_cannot_delete_what_is_not_its_own(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    assert run(hostile.delete_files, str(precious).encode()).end is ChildEnd.ANSWERED
    assert precious.read_text() == "kept"


def test_the_private_folder_is_removed_whatever_was_done_to_it():
    assert run(hostile.delete_files, b"/nonexistent/file", confined=False).end is ChildEnd.ANSWERED


@pytest.mark.skipif(not NAMESPACES, reason="needs a private mount")
def test_a_confined_child_cannot_fill_the_disk():
    result = run(hostile.fill_disk)
    assert result.end is ChildEnd.RAISED
    assert "No space left" in result.detail


def test_the_environment_holds_no_secrets(monkeypatch, confined):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    seen = run(hostile.show_environment, confined=confined).answer.decode()
    assert "sk-secret" not in seen
    assert "HOME=" in seen and f"HOME={Path.home()}\n" not in seen


def test_an_answer_beyond_its_bound_is_refused(confined):
    result = run(hostile.return_much, b"5000", confined, max_answer_bytes=1000)
    assert result.end is ChildEnd.CRASHED
    assert "more than the 1000 allowed" in result.detail


def test_children_run_side_by_side():
    results: list[ChildResult] = []
    threads = [threading.Thread(target=lambda: results.append(run(hostile.echo, b"xy"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.answer for result in results] == [b"yx"] * 8


def test_children_end_when_their_parent_is_killed(tmp_path):
    program = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = {[TESTS, str(Path(TESTS).parent)]!r}
        from accelopt_ray.devices.child import ChildTask, run_child
        from accelopt_ray.devices.protocol import Limits
        print("started", flush=True)
        run_child(
            ChildTask("devices.hostile:ignore_signals", b"", True, ({TESTS!r},), ({TESTS!r},)),
            Limits(timeout_s=120.0),
        )
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"started\n"
    below: list[psutil.Process] = []
    for _ in range(200):
        below = psutil.Process(parent.pid).children(recursive=True)
        if len(below) >= 3:
            break
        time.sleep(0.02)
    assert len(below) >= 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not psutil.wait_procs(below, timeout=10)[1]


def test_a_lost_launcher_is_replaced():
    launcher = psutil.Process().children()[0]
    launcher.kill()
    launcher.wait()
    # The first request may still go into the dead launcher's socket; it is repeated.
    assert run(hostile.echo, b"ab").answer == b"ba"


def test_protections_are_measured():
    report = protections()
    assert report["clean_environment"] == "active"
    if NAMESPACES:
        assert report["no_network"] == report["no_signals_to_others"] == "active"
    if SECCOMP:
        assert report["no_second_process"] == report["no_other_programs"] == "active"
    if LANDLOCK:
        assert report["no_foreign_files_read"] == report["no_foreign_files_written"] == "active"
