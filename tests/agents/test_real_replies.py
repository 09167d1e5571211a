"""Replies in the shapes that real models give: what is taken from each, or why nothing is."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from accelopt_ray.agents.parsing import NoKernelReason, extract_kernel
from experiments.damaged_replies import damaged_replies, violation

KERNEL = '''import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def kernel(x, w):
    """Fused: load once, two engines."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(x.shape[0] // 128):
        tile = nl.load(x[nl.ds(i * 128, 128), :])  # 128 partitions
        tile = nisa.activation(op=nl.silu, data=tile)
        nl.store(out[nl.ds(i * 128, 128), :], value=tile)
    return out
'''
OTHER = KERNEL.replace("nl.silu", "nl.gelu")
TABS = KERNEL.replace("    ", "\t")
LISTED = "".join(f"     {line}\n" for line in KERNEL.splitlines())
QUOTED = "".join(f"> {line}\n" for line in KERNEL.splitlines())
NUMBERED = "".join(f"{number:3}  {line}\n" for number, line in enumerate(KERNEL.splitlines(), 1))
DOCTEST = "".join(f">>> {line}\n" for line in KERNEL.splitlines())


class Shape(NamedTuple):
    """One reply and what is to come of it: a kernel, or a reason."""

    name: str
    reply: str
    kernel: str | None = KERNEL
    reason: NoKernelReason = NoKernelReason.NONE
    finish_reason: str = "stop"


def nothing(name: str, reply: str, reason: NoKernelReason, finish_reason: str = "stop") -> Shape:
    return Shape(name, reply, None, reason, finish_reason)


SHAPES = [
    Shape(
        "headings and a table",
        f"# Plan\n\n| engine | time |\n|---|---|\n| PE | 3 |\n\n## Code\n```python\n{KERNEL}```\n",
    ),
    Shape("bold title above", f"**kernel.py**\n\n```python\n{KERNEL}```\n\n**Why it is faster:** one pass."),
    Shape("file name in the tag", f"```python:kernel.py\n{KERNEL}```"),
    Shape("file name as attribute", f'```python filename="kernel.py"\n{KERNEL}```'),
    Shape("line numbers as attribute", f"```python {{linenos=true}}\n{KERNEL}```"),
    Shape("py3 tag in capitals", f"```PY\n{KERNEL}```"),
    Shape("answer in XML", f"<answer>\n```python\n{KERNEL}```\n</answer>"),
    Shape("code in XML, fenced", f"<code>\n```\n{KERNEL}```\n</code>\n<explanation>one pass</explanation>"),
    Shape("inside details", f"<details><summary>Kernel</summary>\n\n```python\n{KERNEL}```\n\n</details>"),
    Shape("channel markers left over", f"<|channel|>final<|message|>Here:\n```python\n{KERNEL}```<|return|>"),
    Shape("Chinese prose", f"下面是优化后的内核：\n\n```python\n{KERNEL}```\n\n主要改动：融合了两次加载。"),
    Shape("emoji", f"🚀 Optimised!\n\n```python\n{KERNEL}```\n✅ done"),
    Shape("two options, the later one counts", f"Option 1:\n```python\n{OTHER}```\nOption 2:\n```python\n{KERNEL}```"),
    Shape("original quoted first", f"The original:\n\n```python\n{OTHER}```\n\nMy version:\n\n```python\n{KERNEL}```"),
    Shape(
        "a test follows",
        f"```python\n{KERNEL}```\n\nTest:\n\n```python\nimport numpy as np\nassert np.ones(3).sum() == 3\n```",
    ),
    Shape("output block follows", f"```python\n{KERNEL}```\nExpected profile:\n```\nlatency: 0.5\n```"),
    Shape("pseudo code before", f"```\nfor tile in tiles: load, activate, store\n```\n```python\n{KERNEL}```"),
    Shape(
        "inline code everywhere", f"Use `nl.load` not `nl.store`; ``a`b`` too.\n```python\n{KERNEL}```\nand `kernel`."
    ),
    Shape("LaTeX around", f"$$t = \\frac{{n}}{{b}}$$\n```python\n{KERNEL}```\n$O(n)$"),
    Shape(
        "deep in a list",
        f"1. Step\n   - sub\n\n     ```python\n{LISTED}     ```\n2. Done",
    ),
    Shape("quoted mail style", f"> ```python\n{QUOTED}> ```\n"),
    Shape("tabs", f"```python\n{TABS}```", TABS),
    Shape("Windows newlines throughout", f"Here:\n\n```python\n{KERNEL}```\n\nDone.\n".replace("\n", "\r\n")),
    Shape("newlines mixed", f"Here:\r\n```python\r\n{KERNEL}```\r\n"),
    Shape("undecodable bytes in the prose", f"caf\ufffd \udcff\n```python\n{KERNEL}```"),
    Shape(
        "undecodable byte in a comment",
        f"```python\n{KERNEL.replace('# 128', '# ' + chr(0xFFFD) + '128')}```",
        KERNEL.replace("# 128", "# " + chr(0xFFFD) + "128"),
    ),
    Shape("form feed and trailing blanks", f"```python  \n{KERNEL}```  \n"),
    Shape("no blank line before the fence", f"The kernel:```python\n{KERNEL}```"),
    Shape("tilde fence", f"~~~python\n{KERNEL}~~~\n"),
    Shape("five ticks", f"`````python\n{KERNEL}`````\n"),
    Shape("JSON of a structured answer", json.dumps({"plan": "fuse", "kernel": KERNEL, "risk": None})),
    Shape("JSON in a fence with prose", "Result:\n```json\n" + json.dumps({"code": KERNEL}) + "\n```\nThat is all."),
    Shape("JSON that holds fenced code", json.dumps({"text": f"Sure.\n```python\n{KERNEL}```"})),
    Shape(
        "tool call with arguments as text", json.dumps({"name": "submit", "arguments": json.dumps({"code": KERNEL})})
    ),
    Shape("tool call with arguments as mapping", json.dumps({"tool": "submit", "arguments": {"code": KERNEL}})),
    Shape("list of messages", json.dumps([{"type": "text", "text": "Here"}, {"type": "code", "text": KERNEL}])),
    Shape(
        "several files, the kernel last",
        f"```python\n# helper.py\nX = 1\n```\n```python\n# kernel.py\n{KERNEL}```",
        "# kernel.py\n" + KERNEL,
    ),
    Shape("bare code", KERNEL),
    Shape("bare code after one line", f"Here is the kernel.\n\n{KERNEL}"),
    Shape("bare code and a closing remark", f"{KERNEL}\nThis version loads every tile once.\n"),
    Shape("cut off behind the kernel", f"```python\n{KERNEL}```\nIt is faster because", finish_reason="length"),
    Shape(
        "renamed entry",
        f"```python\n{KERNEL.replace('def kernel', 'def optimized_kernel')}```",
        KERNEL.replace("def kernel", "def optimized_kernel"),
    ),
    nothing("cut off in the kernel", f"```python\n{KERNEL[:-30]}", NoKernelReason.TRUNCATED, "length"),
    nothing("cut off in the thinking", "Let me think about the tiles. First,", NoKernelReason.TRUNCATED, "length"),
    nothing(
        "unified diff in a fence",
        "```diff\n--- a/kernel.py\n+++ b/kernel.py\n@@ -1 +1 @@\n-a\n+b\n```",
        NoKernelReason.DIFF,
    ),
    nothing(
        "patch format",
        "*** Begin Patch\n*** Update File: kernel.py\n@@ def kernel @@\n-a\n+b\n*** End Patch",
        NoKernelReason.DIFF,
    ),
    nothing("plain refusal", "I cannot help with that request.", NoKernelReason.REFUSAL),
    nothing("apology", "I'm sorry, but I am unable to provide this code.", NoKernelReason.REFUSAL),
    nothing("only a plan", "1. Fuse the loads.\n2. Use a larger tile.\n", NoKernelReason.NO_CODE),
    nothing("only a helper", "```python\ndef tile_size(n):\n    return 128\n```", NoKernelReason.NO_ENTRY),
    nothing(
        "the loop alone",
        "Replace the loop by\n```python\nfor i in nl.affine_range(8):\n    pass\n```",
        NoKernelReason.NO_ENTRY,
    ),
    nothing(
        "ellipsis in place of code",
        "```python\ndef kernel(x):\n    ... rest unchanged ...\n    return out\n```",
        NoKernelReason.SYNTAX_ERROR,
    ),
    nothing("another language", "```cpp\nvoid kernel(float* x) { x[0] = 1; }\n```", NoKernelReason.NO_CODE),
    nothing("wrong indentation", "```python\ndef kernel(x):\nreturn x\n```", NoKernelReason.SYNTAX_ERROR),
    nothing("line numbers in the code", f"```python\n{NUMBERED}```", NoKernelReason.SYNTAX_ERROR),
    nothing("prompt signs in the code", f"```python\n{DOCTEST}```", NoKernelReason.SYNTAX_ERROR),
    nothing("an empty block", "```python\n```", NoKernelReason.NO_CODE),
    nothing("a question back", "Which data type does the kernel use?", NoKernelReason.NO_CODE),
    nothing("an error page", "<html><body>502 Bad Gateway</body></html>", NoKernelReason.NO_CODE),
    nothing("JSON without code", '{"status": "ok", "kernel": null}', NoKernelReason.NO_CODE),
    nothing("broken JSON", '{"code": "def kernel(x):\\n    return x', NoKernelReason.SYNTAX_ERROR),
    nothing("only reasoning tags", "<think></think>", NoKernelReason.NO_CODE),
    nothing("blank lines", "\n\r\n \t\n", NoKernelReason.EMPTY),
]


def test_there_are_enough_of_them():
    assert len(SHAPES) >= 60
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_a_reply_holds(shape: Shape):
    extraction = extract_kernel(shape.reply, finish_reason=shape.finish_reason)
    assert extraction.code == shape.kernel
    assert extraction.reason is shape.reason
    assert (extraction.detail == "") == (shape.kernel is not None)


def test_damaged_replies_never_yield_a_kernel_that_they_do_not_hold():
    for reply in damaged_replies(1500, seed=1):
        extraction = extract_kernel(reply.text, finish_reason=reply.finish_reason)
        assert violation(reply, extraction.code) is None, reply.text
