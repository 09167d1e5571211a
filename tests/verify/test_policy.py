"""What a kernel's text may not reach for, and what it may."""

from __future__ import annotations

import pytest

from accelopt_ray.verify.policy import find_violation
from nkibench.task import list_tasks, load_task

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import numpy as np
from dataclasses import dataclass
from neuronxcc.nki.language import par_dim
import math

def helper(x):
    {helper}
    return x

@nki.jit
def kernel(x):
    {body}
    return helper(x)

def test_it():
    import os
    np.random.seed(0)
    print(open("anything").read())

if __name__ == "__main__":
    import subprocess
    test_it()
"""


def violation(body: str = "pass", helper: str = "pass") -> str:
    found = find_violation(KERNEL.format(body=body, helper=helper), "kernel")
    return found.reason if found else ""


def test_what_the_entry_does_not_reach_is_nobodys_business():
    assert violation() == ""


@pytest.mark.parametrize("name", list_tasks())
def test_the_baselines_are_within_the_policy(name):
    task = load_task(name)
    assert find_violation(task.baseline_source(), task.entry) is None


@pytest.mark.parametrize(
    "statement",
    [
        "y = nl.load(x)",
        "y = np.arange(4).reshape(2, 2)",
        "y = np.dtype(np.float32).type(1)",
        "y = getattr(nl, 'exp')",
        "y = math.ceil(x.shape[0] / 128)",
        "y = kernel.__name__",
        "print('tracing')",
        "load = nl.load; y = load(x)",
        "save = lambda t: nl.store(x, value=t)",
        "input = nl.load(x); y = nl.exp(input)",
        "y = [np.dtype(kind) for kind in (np.float32, np.int32)]",
        "y = np.linalg.inv(np.eye(4))",
        "part = np.linalg; y = part.inv(np.eye(4))",
        "from collections import abc; y = isinstance(x, abc.Sequence)",
        "y = lambda vars: vars.shape",
        """class Shape:
        def __init__(self, rows):
            self.rows = rows""",
    ],
)
def test_ordinary_code_is_allowed(statement):
    assert violation(statement) == ""
    assert violation(helper=statement) == ""


@pytest.mark.parametrize(
    "statement, reason",
    [
        ("import os", "forbidden_import:os"),
        ("from os import path", "forbidden_import:os"),
        ("from . import sibling", "forbidden_import:."),
        ("import numpy.random", "forbidden_import:numpy.random"),
        ("from numpy import load", "forbidden_import:numpy.load"),
        ("np.random.randn(3)", "forbidden_name:numpy.random"),
        ("n = np; m = n; m.random", "forbidden_name:numpy.random"),
        ("np.lib.format", "forbidden_name:numpy.lib"),
        ("getattr(np, 'random')", "forbidden_name:numpy.random"),
        ("getattr(np, 'ran' + 'dom')", "computed_attribute"),
        ("getattr(np, name)", "computed_attribute"),
        ("np.__dict__", "internals:__dict__"),
        ("getattr(np, '__dict__')", "internals:__dict__"),
        ("nl.exp = nl.load", "patches:nl.exp"),
        ("del nl.exp", "patches:nl.exp"),
        ("nl.exp += 1", "patches:nl.exp"),
        ("for nl.exp in range(3): pass", "patches:nl.exp"),
        ("eval('1')", "forbidden_name:eval"),
        ("f = open", "forbidden_name:open"),
        ("y = [open for open in ()]; open('f')", "forbidden_name:open"),
        ("from numpy import *", "forbidden_import:numpy.*"),
        ("np.core.multiarray.fromfile('f')", "forbidden_name:numpy.core"),
        ("import dataclasses as d; d.sys.modules", "forbidden_name:dataclasses.sys"),
        ("import collections; collections._sys", "forbidden_name:collections._sys"),
        ("from enum import sys", "forbidden_import:enum.sys"),
        ("from operator import attrgetter", "forbidden_import:operator.attrgetter"),
        ("from typing import get_type_hints", "forbidden_import:typing.get_type_hints"),
        ("find = getattr", "computed_attribute"),
        ("__loader__.get_data('f')", "internals:__loader__"),
        ("import math as np; np.random", "forbidden_name:numpy.random"),
        ("sorted(x, key=np)", "hands_on:numpy"),
        ("n, m = np, nl", "hands_on:numpy"),
        ("part = lambda: np.linalg", "hands_on:numpy.linalg"),
        ("(i for i in ()).gi_frame.f_back", "internals:f_back"),
        ("np.zeros(3).tofile('f')", "forbidden_name:tofile"),
        ("match x:\n        case object(__class__=c): pass", "internals:__class__"),
        ("self = nl; self.load = nl.zeros", "patches:self.load"),
        ("y = " + "+".join("1" * 2000), "nested_too_deeply"),
        ("globals()['x'] = 1", "forbidden_name:globals"),
    ],
)
def test_reaching_further_is_named(statement, reason):
    assert violation(statement) == reason
    assert violation(helper=statement) == reason


def test_modules_that_lead_to_each_other_end_the_search():
    assert violation("np = np.polynomial.polynomial.np; np.random") == "forbidden_name:numpy.random"


@pytest.mark.parametrize(
    "source, reason",
    [
        ("import os\ndef kernel(x):\n    return x\n", "forbidden_import:os"),
        ("class A:\n    import os\ndef kernel(x):\n    return x\n", "forbidden_import:os"),
        ("def kernel(x, y=open('f')):\n    return x\n", "forbidden_name:open"),
        ("@open\ndef other(x):\n    return x\ndef kernel(x):\n    return x\n", "forbidden_name:open"),
        ("table = {'f': open}\ndef kernel(x):\n    return x\n", "forbidden_name:open"),
        (
            "__name__ = '__main__'\nif __name__ == '__main__':\n    import os\ndef kernel(x):\n    return x\n",
            "patches:",
        ),
        (
            "if __name__ == '__main__':\n    pass\nelse:\n    import os\ndef kernel(x):\n    return x\n",
            "forbidden_import:os",
        ),
        (
            "def f():\n    import os\nfirst = f\ndef f():\n    pass\ndef kernel(x):\n    return x\n",
            "forbidden_import:os",
        ),
        ("def other(x: open('f')):\n    return x\ndef kernel(x):\n    return x\n", "forbidden_name:open"),
        (
            "if f'''{\"\"\"\x01\"\"\"}''':\n    pass\nimport os\ndef kernel(x):\n    return x\n",
            "forbidden_import:os",
        ),
        ("if '__main__' == __name__:\n    import os\ndef kernel(x):\n    return x\n", ""),
        ("if __name__ != '__main__':\n    import os\ndef kernel(x):\n    return x\n", "forbidden_import:os"),
        ("def kernel(x):\n    x[f'''{\"\"\"\x01\"\"\"}'''].load = 1\n    return x\n", "patches:load"),
        ("class __name__:\n    pass\ndef kernel(x):\n    return x\n", "patches:__name__"),
        ("def kernel(input, vars=1):\n    return input\n", ""),
        ("def dump(x):\n    return x\ndef kernel(x):\n    return dump(x)\n", ""),
        ("def kernel(x:\n", ""),
        ("def optimized_kernel(x):\n    import os\n", "forbidden_import:os"),
    ],
)
def test_whatever_runs_when_the_file_is_loaded_counts(source, reason):
    found = find_violation(source, "kernel")
    assert (found.reason if found else "").startswith(reason) and bool(found) == bool(reason)
