"""Planner, executor and summariser: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewrite_kernels import assert_equal_results, hand_style

from accelopt_ray.agents.lessons import parse_lesson
from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.agents.rendering import PromptLibrary, ShownExperience, profile_lines
from accelopt_ray.rewrite.catalogue import BY_ID
from accelopt_ray.rewrite.planner import options_for, rank
from accelopt_ray.rewrite.prompt import Experience, Role, kernels_in, read_request
from accelopt_ray.rewrite.replies import answers
from accelopt_ray.rewrite.steps import Step, carry_out, parse_steps, self_check

SILU = hand_style(
    [
        ("e", "activation", "exp", "x", {"scale": -1.0}),
        ("d", "tensor_scalar", "e", "add", 1.0),
        ("r", "reciprocal", "d"),
        ("y", "tensor_tensor", "x", "r", "multiply"),
    ]
)
PROBLEM = "def forward(x, z, v):\n    return x / (1 + np.exp(-x))\n"
COUNTERS = {"vector_engine_active_time_percent": 0.9, "scalar_engine_active_time_percent": 0.3}


def _messages(system: str, user: str) -> list[Mapping[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _planner(kernel: str = SILU, experiences: tuple[ShownExperience, ...] = ()) -> list[Mapping[str, str]]:
    prompt = PromptLibrary().planner(
        problem=PROBLEM, kernel=kernel, profile=profile_lines(1.5, COUNTERS), experiences=experiences
    )
    return _messages(prompt.system, prompt.user)


def _executor(plan: str, kernel: str = SILU) -> list[Mapping[str, str]]:
    prompt = PromptLibrary().executor(problem=PROBLEM, kernel=kernel, plan=plan, entry="kernel")
    return _messages(prompt.system, prompt.user)


def _summarizer(slow: str, fast: str, speedup: float = 1.4) -> list[Mapping[str, str]]:
    prompt = PromptLibrary().summarizer(slow=slow, fast=fast, speedup=speedup)
    return _messages(prompt.system, prompt.user)


@pytest.mark.parametrize("seed", range(6))
def test_plan_to_kernel_to_lesson(seed: int) -> None:
    plan = answers(_planner(), seed, 1)[0]
    assert parse_steps(plan)
    reply = answers(_executor(plan), seed, 1)[0]
    kernel = extract_kernel(reply, "kernel").code
    assert kernel is not None and kernel != SILU
    assert self_check(kernel) == ""
    assert_equal_results(SILU, kernel)
    lesson = parse_lesson(answers(_summarizer(SILU, kernel), seed, 1)[0])
    assert lesson.title in {rule.title for rule in BY_ID.values()}
    assert "1.40 times" in lesson.text


def test_answers_are_a_function_of_prompt_and_seed() -> None:
    assert answers(_planner(), 7, 3) == answers(_planner(), 7, 3)


def test_samples_of_one_request_differ_and_seeds_reach_every_option() -> None:
    options = options_for(SILU)
    plans = answers(_planner(), 3, len(options))
    assert len(set(plans)) == len(options) > 3
    first = [answers(_planner(), seed, 1)[0] for seed in range(60)]
    assert len(set(first)) >= min(len(options), 4)


def test_the_best_option_is_drawn_most_often() -> None:
    best = rank(options_for(SILU), {**COUNTERS, "latency": 1.5}, ())[0]
    drawn = [tuple(parse_steps(answers(_planner(), seed, 1)[0])) for seed in range(60)]
    assert max(set(drawn), key=drawn.count) == best.steps


def _mentions(steps: tuple[Step, ...], rule: str) -> bool:
    return any(step.rule == rule for step in steps)


def test_experience_moves_what_worked_up_and_what_failed_down() -> None:
    title = BY_ID["reciprocal-activation"].title
    worked = Experience(f"Experience 1: {title} (1.60x)", title, 1.6, False)
    failed = Experience(f"Experience 1: Avoid: {title.lower()} (1.60x)", title, 1.6, True)
    options = options_for(SILU)

    def place(experiences: tuple[Experience, ...]) -> int:
        ranked = rank(options, COUNTERS, experiences)
        return next(n for n, option in enumerate(ranked) if option.steps == (Step("reciprocal-activation"),))

    assert place((worked,)) < place(()) or place(()) == 0
    assert place((failed,)) == len(options) - 1


def test_experience_is_read_from_the_planners_prompt() -> None:
    slow_to_fast = answers(_summarizer(SILU, carry_out(SILU, [Step("recognise-silu")]).source), 0, 1)[0]
    lesson = parse_lesson(slow_to_fast)
    undone = parse_lesson(answers(_summarizer(carry_out(SILU, [Step("recognise-silu")]).source, SILU), 0, 1)[0])
    shown = (
        ShownExperience(lesson.title, lesson.text, 1.4),
        ShownExperience(undone.title, undone.text, 1.2),
    )
    messages = _planner(experiences=shown)
    request = read_request(messages)
    assert [item.warns for item in request.experiences] == [False, True]
    assert [item.speedup for item in request.experiences] == [1.4, 1.2]


@pytest.mark.parametrize(
    ("system", "role"),
    [
        ("You are the planner of a search.", Role.PLANNER),
        ("# Executor\nYou carry out what the planner wrote.", Role.EXECUTOR),
        ("\n\nYou act as summariser; planners will read it.", Role.SUMMARIZER),
        ("The fixer repairs kernels.", Role.FIXER),
    ],
)
def test_the_role_is_the_word_the_system_message_opens_with(system: str, role: Role) -> None:
    assert read_request(_messages(system, f"```\n{SILU}```")).role is role


def test_every_role_of_the_prompt_files_is_recognised() -> None:
    library = PromptLibrary()
    fixer = library.fixer(
        problem=PROBLEM, kernel=SILU, plan="p", outcome="compile_error", error_text="no", entry="kernel"
    )
    assert read_request(_planner()).role is Role.PLANNER
    assert read_request(_executor("plan")).role is Role.EXECUTOR
    assert read_request(_summarizer(SILU, SILU)).role is Role.SUMMARIZER
    assert read_request(_messages(fixer.system, fixer.user)).role is Role.FIXER


@pytest.mark.parametrize("fence", ["```", "```python", "~~~py", "````nki"])
def test_the_kernel_is_the_last_block_that_defines_an_entry(fence: str) -> None:
    mark = fence.rstrip("abcdefghijklmnopqrstuvwxyz")
    text = (
        f"{fence}\n{PROBLEM}{mark}\nolder:\n{fence}\n{SILU.replace('e_tile', 'old')}{mark}\n"
        f"now\n{fence}\n{SILU}{mark}\n{fence}\ndef kernel(\n{mark}\n{fence}\nprint('no kernel')\n{mark}"
    )
    assert kernels_in(text)[-1].strip() == SILU.strip()


def test_a_decorated_function_of_any_name_is_an_entry() -> None:
    other = SILU.replace("def kernel(", "def my_silu(")
    assert kernels_in(f"```\n{other}```") == [other]


def test_a_plan_in_other_words_is_carried_out_by_its_keywords() -> None:
    reply = answers(_executor("Please use the SiLU function instead of the long chain."), 0, 1)[0]
    code = extract_kernel(reply, "kernel").code
    assert code is not None and "nl.silu" in code


@pytest.mark.parametrize(
    "plan", ["Make it faster.", "", "Rewrite: strip-fusion at loop `q`.", "Rewrite: no-such-rule."]
)
def test_a_plan_that_does_not_apply_changes_nothing_and_says_so(plan: str) -> None:
    reply = answers(_executor(plan), 0, 1)[0]
    assert "No change was made" in reply
    code = extract_kernel(reply, "kernel").code
    assert code is not None and code.strip() == SILU.strip()


def test_prompts_without_a_kernel_get_words() -> None:
    for role in ("planner", "executor"):
        reply = answers(_messages(f"You are the {role}.", "Hello."), 0, 1)[0]
        assert "no kernel" in reply
    assert answers(_messages("You are the summarizer.", "Hello."), 0, 1) == ["No optimization found"]


def test_equal_kernels_teach_nothing() -> None:
    assert answers(_summarizer(SILU, SILU.replace("# the input", "# same")), 0, 1) == ["No optimization found"]


def test_an_unknown_change_is_told_by_its_difference() -> None:
    fast = SILU.replace(
        "nl.load(z[first : first + 128, 0:columns])", "nl.load(z[first : first + 128, 0:columns], mask=None)"
    )
    lesson = parse_lesson(answers(_summarizer(SILU, fast), 0, 1)[0])
    assert lesson.title == "Local rewrite of the instruction sequence"


def test_steps_survive_writing_and_reading() -> None:
    steps = [
        Step("recognise-silu"),
        Step("widen-tiles", "loop `block`", 0, (("width", 2048),)),
        Step("strip-fusion", "loop `b` after loop `a`", 1),
    ]
    assert parse_steps("Intro.\n\n" + "\n".join(f"- {step.text()}" for step in steps)) == steps


@settings(max_examples=60)
@given(st.text(alphabet="ab `~\n#:kernel def(x){}", max_size=200), st.integers(0, 2**63 - 1))
def test_no_text_makes_the_rewriter_fail(text: str, seed: int) -> None:
    for role in ("planner", "executor", "summarizer", "fixer", ""):
        assert all(isinstance(reply, str) for reply in answers(_messages(f"the {role}", text), seed, 2))


HOSTILE = [
    "def kernel(a):\n    while True:\n        a = a[a]\n    return a\n",
    "@nki.jit\ndef kernel(*args, **kwargs):\n    return [nl.load(x) for x in args]\n",
    "def kernel(a):\n    for i, j in zip(a, a):\n        with a as b:\n            b[i] = j\n    return b\n",
    "async def other(): ...\ndef kernel():\n    nl.store()\n    nl.load()\n    nisa.activation()\n    x = nl.add()\n",
    "def kernel(a):\n    t = nl.load(a[0:1, ...])\n    t[:, None] += t[::2] @ -t\n    lambda: t\n    return t\n",
    "def kernel(a):\n    for i in nl.affine_range(a.shape[0] // 0):\n        nl.store(a[i % 0], nl.load(a[i ** -1]))\n",
    "kernel = 3\ndef kernel(a): return nl.exp(nl.exp(nl.exp(a)))\n",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_strange_kernels_are_planned_without_failure(source: str) -> None:
    for seed in range(3):
        plan = answers(_planner(source), seed, 1)[0]
        reply = answers(_executor(plan, source), seed, 1)[0]
        assert reply
        answers(_summarizer(source, SILU), seed, 1)
