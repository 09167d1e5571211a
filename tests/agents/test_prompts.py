"""What each role is sent: its name first, the kernel last, and nothing that its setting leaves out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.agents.lessons import parse_lesson
from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.agents.rendering import (
    PROFILE_COUNTERS,
    ProfileLine,
    Prompt,
    PromptLibrary,
    ShownAttempt,
    ShownExperience,
    ShownPlan,
    explanation_lines,
    profile_lines,
)
from accelopt_ray.outcome import UserError

LIBRARY = PromptLibrary()
PROBLEM = "def forward(x):\n    return x * 2"
KERNEL = "def kernel(a):\n    return a\n"
COUNTERS = {name: float(index + 1) for index, name in enumerate(PROFILE_COUNTERS)}


def planner(**changes: object) -> Prompt:
    return LIBRARY.planner(problem=PROBLEM, kernel=KERNEL, profile=profile_lines(1.5, COUNTERS), **changes)  # type: ignore[arg-type]


PROMPTS = {
    "planner": planner(),
    "executor": LIBRARY.executor(problem=PROBLEM, kernel=KERNEL, plan="Fuse.", entry="kernel"),
    "summarizer": LIBRARY.summarizer(slow="def kernel(a):\n    return a + 0\n", fast=KERNEL, speedup=1.25),
    "fixer": LIBRARY.fixer(
        problem=PROBLEM, kernel=KERNEL, plan="Fuse.", outcome="compile_error", error_text="boom", entry="kernel"
    ),
}


@pytest.mark.parametrize("role", PROMPTS)
def test_the_first_line_names_the_role(role: str) -> None:
    assert PROMPTS[role].system.split("\n", 1)[0].startswith(f"You are the {role} ")


@pytest.mark.parametrize("role", PROMPTS)
def test_the_kernel_is_the_last_block(role: str) -> None:
    assert extract_kernel(PROMPTS[role].user).code == KERNEL
    assert PROMPTS[role].user.rstrip().endswith("```")


@pytest.mark.parametrize("role", PROMPTS)
def test_no_template_syntax_is_left(role: str) -> None:
    text = PROMPTS[role].system + PROMPTS[role].user
    assert "{%" not in text
    assert "{{" not in text
    assert "\n\n\n" not in text


def test_the_summarizer_sees_slow_then_fast_and_the_speedup() -> None:
    user = PROMPTS["summarizer"].user
    assert user.index("return a + 0") < user.index("return a\n")
    assert "1.250" in user


def test_all_seventeen_lines_of_the_profile_are_shown() -> None:
    lines = [line for line in planner().user.splitlines() if line.partition(":")[0] in {*PROFILE_COUNTERS, "latency"}]
    assert len(lines) == 17
    assert "latency: 1.5" in lines
    assert "hbm_read_bytes: 1" in lines


def test_the_profile_is_shuffled_by_its_stream_alone() -> None:
    def order(seed: int) -> list[ProfileLine]:
        return profile_lines(1.5, COUNTERS, random.Random(seed))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(map(str, order(1))) == sorted(map(str, order(2)))


def test_absent_and_other_counters() -> None:
    lines = profile_lines(None, {"spill_save_bytes": 0.0, "total_time": 1.0, "hfu_estimated_percent": 0.123456789})
    assert lines == [ProfileLine("spill_save_bytes", "0"), ProfileLine("hfu_estimated_percent", "0.123457")]


def test_options_are_shown_only_when_asked_for() -> None:
    plain = planner()
    assert "percent of what" not in plain.user
    assert "What takes the time" not in plain.user
    assert "Experience" not in plain.system
    assert "Earlier attempts" not in plain.user
    full = planner(
        percent_of_peak=40.04,
        bottleneck=explanation_lines({"bound": "dma", "busy": {"vector": 0.25}, "loops": ["i", "j"]}),
        experiences=[ShownExperience("Fuse passes", "Use silu.", 1.26)],
        feedback=[ShownAttempt("Hoist.", "compile_error", 0.0, "out of scope", ())],
    )
    assert "reaches 40.0 percent" in full.user
    assert "- bound: dma\n- busy.vector: 0.25\n- loops: i, j" in full.user
    assert "### Experience 1: Fuse passes (1.26x)\nUse silu." in full.system
    assert "Hoist." in full.user
    assert "out of scope" in full.user
    assert extract_kernel(full.user).code == KERNEL


def test_the_hash_is_of_both_messages() -> None:
    assert planner().sha256 == planner().sha256
    assert planner().sha256 != planner(percent_of_peak=40.0).sha256
    assert planner().system_sha256 == planner(percent_of_peak=40.0).system_sha256
    assert Prompt("a", "bc").sha256 != Prompt("ab", "c").sha256


@given(plan=st.text(alphabet="`~ab\n", max_size=60))
def test_no_plan_can_break_out_of_its_block(plan: str) -> None:
    prompt = LIBRARY.executor(problem=PROBLEM, kernel=KERNEL, plan=plan, entry="kernel")
    assert extract_kernel(prompt.user).code == KERNEL


def test_a_folder_replaces_single_files(tmp_path: Path) -> None:
    (tmp_path / "planner.user.j2").write_text("Improve this:\n{{ kernel|fenced('python') }}\n")
    library = PromptLibrary(tmp_path)
    prompt = library.planner(problem=PROBLEM, kernel=KERNEL, profile=[])
    assert prompt.user == f"Improve this:\n```python\n{KERNEL}```\n"
    assert prompt.system == planner().system


@pytest.mark.parametrize("text", ["{% if %}", "{{ nothing_of_that_name }}"])
def test_a_broken_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "executor.user.j2").write_text(text)
    with pytest.raises(UserError) as raised:
        PromptLibrary(tmp_path).executor(problem=PROBLEM, kernel=KERNEL, plan="x", entry="kernel")
    assert "executor" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prompt folder .*nowhere.*variants, compact"):
        PromptLibrary(tmp_path / "nowhere")
    with pytest.raises(UserError, match="generation 'generation_z': choose one of generation_a"):
        PromptLibrary(generation="generation_z")


def test_a_folder_goes_before_a_variant_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compact = PromptLibrary(Path("compact")).executor(problem=PROBLEM, kernel=KERNEL, plan="x", entry="kernel")
    (tmp_path / "compact").mkdir()
    own = PromptLibrary(Path("compact")).executor(problem=PROBLEM, kernel=KERNEL, plan="x", entry="kernel")
    assert len(compact.system) < len(own.system) / 2
    assert own == LIBRARY.executor(problem=PROBLEM, kernel=KERNEL, plan="x", entry="kernel")


CONTEXT_TOKENS = 8_192
LETTERS_PER_TOKEN = 2.5
"""Of kernels, at least: those of the benchmark have 2.9 to 3.7 by the tokeniser of SmolLM2."""


def test_compact_prompts_of_a_long_search_leave_room_for_a_reply_in_a_small_context() -> None:
    library = PromptLibrary(Path("compact"))
    problem, kernel, long = "x = 1\n" * 150, "y = nl.load(x)\n" * 250, "word " * 2_000
    shown = [ShownAttempt(long, "incorrect", 0.5, long, profile_lines(1.5, COUNTERS))] * 30
    planned = library.planner(
        problem=problem,
        kernel=kernel,
        profile=profile_lines(1.5, COUNTERS),
        experiences=[ShownExperience("Fuse", long, 1.5)] * 30,
        percent_of_peak=40.0,
        feedback=shown,
        tried=[ShownPlan("Fuse the passes of the loop", "incorrect", 0.9)] * 100,
    )
    written = library.executor(problem=problem, kernel=kernel, plan=long, entry="kernel")
    mended = library.fixer(
        problem=problem, kernel=kernel, plan=long, outcome="incorrect", error_text=long, entry="kernel"
    )
    lesson = library.summarizer(slow=kernel, fast=kernel, speedup=1.5)
    for prompt, reply_letters in ((planned, 1500), (written, len(kernel)), (mended, len(kernel)), (lesson, 1500)):
        letters = len(prompt.system) + len(prompt.user) + reply_letters
        assert letters / LETTERS_PER_TOKEN < CONTEXT_TOKENS
        assert kernel.strip() in prompt.user
    assert problem.strip() in planned.user


def test_what_a_compact_prompt_cuts_is_marked() -> None:
    library = PromptLibrary(Path("compact"))
    prompt = library.executor(problem=PROBLEM, kernel=KERNEL, plan="word " * 2_000, entry="kernel")
    assert "\n[...]\n```" in prompt.user
    whole = LIBRARY.executor(problem=PROBLEM, kernel=KERNEL, plan="word " * 2_000, entry="kernel")
    assert "word " * 1_999 in whole.user
    assert "[...]" not in whole.user


@pytest.mark.parametrize(
    ("reply", "title"),
    [
        ("Title: Fuse the passes\nPlan: use silu.", "Fuse the passes"),
        ("**Title:** Fuse the passes\nUse silu.", "Fuse the passes"),
        ("## Title: `Fuse the passes`\n\nUse silu.", "Fuse the passes"),
        ("Sure.\n\n### Fuse the passes\nUse silu.", "Fuse the passes"),
        ("Optimization: Fuse the passes\r\nUse silu.", "Fuse the passes"),
        ("Fuse the passes\nUse silu.", "Fuse the passes"),
        ("Title: Fuse\nIf no optimization was found there, " + "look here. " * 20, "Fuse"),
    ],
)
def test_lessons_have_titles(reply: str, title: str) -> None:
    lesson = parse_lesson(reply)
    assert lesson.title == title
    assert "silu" in lesson.text or "look here" in lesson.text


@pytest.mark.parametrize(
    "reply", ["No optimization found", "no optimisation found.", "**No optimization found**\n\nThey agree.", "", "  \n"]
)
def test_no_lesson(reply: str) -> None:
    lesson = parse_lesson(reply)
    assert (lesson.title, lesson.text) == ("", "")
