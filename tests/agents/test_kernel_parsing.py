"""What counts as a kernel in a reply: the last complete block that parses and defines the entry."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.agents.lessons import parse_lesson
from accelopt_ray.agents.parsing import NoKernelReason, extract_kernel

KERNEL = """import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def kernel(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(4):
        nl.store(out[i * 128 + nl.arange(128)[:, None], nl.arange(512)[None, :]], value=a)
    return out
"""
OTHER = KERNEL.replace("affine_range(4)", "affine_range(8)")
HELPER = "def helper(x):\n    return x\n"
INDENTED = "".join(f"    {line}" if line.strip() else line for line in KERNEL.splitlines(keepends=True))
WITH_FENCES_INSIDE = KERNEL.replace("    out = nl.nd", '    """Example:\n\n```\nkernel(x)\n```\n"""\n    out = nl.nd')


@pytest.mark.parametrize("tag", ["python", "py", "Python3", "PYTHON", "", "nki", "python title=kernel.py", "{.python}"])
@pytest.mark.parametrize("fence", ["```", "````", "~~~", "~~~~~~"])
def test_any_fence_and_tag(tag: str, fence: str) -> None:
    reply = f"Here it is.\n\n{fence}{tag}\n{KERNEL}{fence}\n\nIt loads once."
    assert extract_kernel(reply).code == KERNEL


@pytest.mark.parametrize(
    ("name", "reply", "expected"),
    [
        ("two blocks, the last one counts", f"Before:\n```python\n{OTHER}```\nAfter:\n```python\n{KERNEL}```", KERNEL),
        ("a usage example follows", f"```python\n{KERNEL}```\nUse it:\n```python\n{HELPER}```", KERNEL),
        ("shell commands follow", f"```python\n{KERNEL}```\n```bash\npip install x\n```", KERNEL),
        ("a broken block follows", f"```python\n{KERNEL}```\nor\n```python\ndef kernel(a:\n```", KERNEL),
        ("nested in a longer fence", f"````markdown\n# Kernel\n```python\n{KERNEL}```\n````", KERNEL),
        ("nested in an equal fence", f"```markdown\n# Kernel\n```python\n{KERNEL}```\n```", KERNEL),
        ("fences in the docstring", f"```python\n{WITH_FENCES_INSIDE}```", WITH_FENCES_INSIDE),
        ("fences in the docstring, unclosed", f"```python\n{WITH_FENCES_INSIDE}", WITH_FENCES_INSIDE),
        ("first block never closed", f"```python\n{OTHER}\nBetter:\n```python\n{KERNEL}```", KERNEL),
        ("no closing fence", f"Text\n```python\n{KERNEL}", KERNEL),
        ("only a closing fence", f"{KERNEL}```\nDone.", KERNEL),
        ("no fence", KERNEL, KERNEL),
        ("no fence, text before", f"Sure, here you are:\n\n{KERNEL}", KERNEL),
        ("no fence, text before and after", f"Sure:\n\n{KERNEL}\nThis kernel stores a tile.\n", KERNEL),
        (
            "Windows newlines",
            f"Text\r\n```python\r\n{KERNEL}```\r\n".replace("\n", "\r\n").replace("\r\r", "\r"),
            KERNEL,
        ),
        ("old Mac newlines", f"```python\n{KERNEL}```".replace("\n", "\r"), KERNEL),
        ("byte order mark", f"\ufeff```python\n{KERNEL}```", KERNEL),
        ("in a list item", "1. Do this:\n\n    ```python\n" + INDENTED + "    ```\n", KERNEL),
        ("fence indented, code not", f"   ```python\n{KERNEL}   ```", KERNEL),
        ("code indented, fence not", f"```python\n{INDENTED}```", KERNEL),
        ("quoted", "> ```python\n" + "".join(f"> {line}\n" for line in KERNEL.splitlines()) + "> ```\n", KERNEL),
        ("code on the fence's line", f"```{KERNEL}```", KERNEL),
        ("code behind the tag", f"```python {KERNEL}```", KERNEL),
        ("closing fence behind the code", f"```python\n{KERNEL.rstrip()}```\nDone", KERNEL),
        ("tag on the next line stays out", f"```\n\n{KERNEL}\n\n```", KERNEL),
        ("JSON", json.dumps({"explanation": "faster", "code": KERNEL}), KERNEL),
        ("JSON with a fence in it", json.dumps({"answer": f"```python\n{KERNEL}```"}), KERNEL),
        ("fenced JSON", "```json\n" + json.dumps({"code": KERNEL}, indent=2) + "\n```", KERNEL),
        ("JSON with raw newlines", '{"code": "' + KERNEL.replace('"', '\\"') + '"}', KERNEL),
        (
            "tool call",
            json.dumps([{"name": "write", "arguments": json.dumps({"path": "k.py", "content": KERNEL})}]),
            KERNEL,
        ),
        ("inline code starts a line", f"```x``` is slow.\n```python\n{KERNEL}```", KERNEL),
        ("a fence of the other kind inside", f"~~~python\n{KERNEL}~~~\n```\ntext\n```", KERNEL),
        ("entry bound by assignment", "```python\ndef f(a):\n    return a\nkernel = f\n```", None),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 and "\n" not in value else "",
)
def test_replies_that_hold_a_kernel(name: str, reply: str, expected: str | None) -> None:
    extraction = extract_kernel(reply)
    assert extraction.reason is NoKernelReason.NONE, name
    assert extraction.code == (expected if expected is not None else "def f(a):\n    return a\nkernel = f\n"), name


@pytest.mark.parametrize(
    ("reply", "finish_reason", "reason"),
    [
        ("", "stop", NoKernelReason.EMPTY),
        (" \n\t\n", "stop", NoKernelReason.EMPTY),
        ("I'm sorry, but I can't help with that.", "stop", NoKernelReason.REFUSAL),
        ("The kernel is memory bound, so nothing can be gained.", "stop", NoKernelReason.NO_CODE),
        (f"```python\n{KERNEL}", "length", NoKernelReason.TRUNCATED),
        (KERNEL, "length", NoKernelReason.TRUNCATED),
        (f"```python\n{KERNEL[:200]}", "length", NoKernelReason.TRUNCATED),
        ("```diff\n-    x = 1\n+    x = 2\n```", "stop", NoKernelReason.DIFF),
        ("--- a/kernel.py\n+++ b/kernel.py\n@@ -1,2 +1,2 @@\n-a\n+b\n", "stop", NoKernelReason.DIFF),
        (f"```python\n{HELPER}```", "stop", NoKernelReason.NO_ENTRY),
        ("```python\ndef kernel(a):\n    return (a\n```", "stop", NoKernelReason.SYNTAX_ERROR),
        ("```python\nclass K:\n    def kernel(self):\n        return 1\n```", "stop", NoKernelReason.NO_ENTRY),
        ("```python\nprint('def kernel(a): pass')\n```", "stop", NoKernelReason.NO_ENTRY),
        ("def kernel(a):\n    return (a +\n\nIt is faster.", "stop", NoKernelReason.SYNTAX_ERROR),
        ('{"code": null}', "stop", NoKernelReason.NO_CODE),
        ("\x00" * 10, "stop", NoKernelReason.NO_CODE),
    ],
)
def test_replies_without_a_kernel_say_why(reply: str, finish_reason: str, reason: NoKernelReason) -> None:
    extraction = extract_kernel(reply, finish_reason=finish_reason)
    assert extraction.code is None
    assert extraction.reason is reason
    assert extraction.detail.endswith(".")


def test_a_complete_block_survives_truncation_behind_it() -> None:
    reply = f"```python\n{KERNEL}```\nAnd a second version:\n```python\n{OTHER[:150]}"
    assert extract_kernel(reply, finish_reason="length").code == KERNEL


def test_a_truncated_second_kernel_that_parses_does_not_replace_the_complete_one() -> None:
    reply = f"```python\n{KERNEL}```\nAnd:\n```python\n{OTHER}"
    assert extract_kernel(reply, finish_reason="length").code == KERNEL
    assert extract_kernel(reply, finish_reason="stop").code == OTHER


def test_an_error_inside_an_unfenced_kernel_does_not_shorten_it() -> None:
    broken = KERNEL.replace("    return out", "    retrn out")
    assert extract_kernel(f"Here:\n{broken}").code is None


def test_the_entry_can_have_another_name() -> None:
    reply = f"```python\n{KERNEL.replace('def kernel', 'def fused_silu')}```"
    assert extract_kernel(reply).code is None
    assert extract_kernel(reply, entry="fused_silu").code is not None


def test_optimized_kernel_is_accepted_for_kernel_alone() -> None:
    reply = f"```python\n{KERNEL.replace('def kernel', 'def optimized_kernel')}```"
    assert extract_kernel(reply).code is not None
    assert extract_kernel(reply, entry="other").code is None


PROSE = st.text(
    alphabet=st.characters(blacklist_characters="`~\r\x00", blacklist_categories=("Cs",)), max_size=80
).filter(lambda text: "kernel" not in text)


@given(
    before=PROSE, after=PROSE, fence=st.sampled_from(["```", "````", "~~~"]), tag=st.sampled_from(["", "python", "x"])
)
def test_prose_around_a_block_never_changes_it(before: str, after: str, fence: str, tag: str) -> None:
    assert extract_kernel(f"{before}\n{fence}{tag}\n{KERNEL}{fence}\n{after}").code == KERNEL


@given(st.text(max_size=400))
def test_no_reply_raises(reply: str) -> None:
    extraction = extract_kernel(reply)
    assert (extraction.code is None) == (extraction.reason is not NoKernelReason.NONE)


@settings(max_examples=300)
@given(data=st.data())
def test_a_damaged_reply_yields_one_of_its_kernels_or_none(data: st.DataObject) -> None:
    """Damage outside the code: fences cut, doubled, swapped, the reply cut short. Code is never joined or shortened."""
    pieces = ["Plan.\n", "```python\n", OTHER, "```\n", "Better:\n", "~~~\n", "```py\n", KERNEL, "```\n", "Done.\n"]
    kept = [piece for piece in pieces if data.draw(st.integers(0, 5)) > 0 or "def kernel" in piece]
    for _ in range(data.draw(st.integers(0, 3))):
        kept.insert(
            data.draw(st.integers(0, len(kept))), data.draw(st.sampled_from(["```\n", "~~~\n", "````\n", "x\n"]))
        )
    code = extract_kernel("".join(kept), finish_reason=data.draw(st.sampled_from(["stop", "length", ""]))).code
    if code is not None:
        ast.parse(code)
        # A stray line at either end may have become part of the block; the kernel in it is whole.
        assert KERNEL in code or OTHER in code


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "reply",
    [
        "kernel " * 100_000,
        " " * 200_000 + "kernel```",
        "> " * 100_000 + "kernel",
        "`" * 200_000 + "kernel",
        "a `" * 100_000 + "```",
        "import kernel\nfrom here on it is prose\n" * 5_000,
        "```\nkernel\n" * 5_000,
        '{"kernel": ' * 20_000,
        "(" * 100_000 + "kernel",
        "# " * 100_000 + "title kernel",
    ],
    ids=["words", "blanks", "quotes", "ticks", "inline code", "imports", "fences", "JSON", "parentheses", "headings"],
)
def test_no_reply_takes_for_ever(reply: str) -> None:
    assert extract_kernel(reply).code is None
    parse_lesson(reply)
