"""Programs survive the way through bytes, and bytes that are no program are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_texts import trace

from accelopt_ray.nki_sim.program import Program
from accelopt_ray.nki_sim.serialize import ProgramFormatError, dumps, loads

_MAGIC_LENGTH = len(b"accelopt-ray program 1\n")

_BODY = """
eye = nl.load(nl.shared_constant(np.identity(128, dtype=np.float32)))
i_p = nl.arange(128)[:, None]
i_f = nl.arange(512)[None, :]
rows = nl.load(y)
total = nl.zeros((128, 1), dtype=nl.float32)
best = nl.ndarray((128, 1), dtype=nl.float32)
for i in nl.affine_range(3):
    t = nl.load(x[i * 128 + i_p, i_f], mask=i * 128 + i_p < 300)
    g = nl.load(x[rows[i_p, 0], i_f])
    s = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
    s += nisa.nc_matmul(eye, t, mask=i * 128 + i_p < 300)
    c = nisa.affine_select(pred=i_f >= i_p + i * 2, on_true_tile=nl.copy(s), on_false_value=float("-inf"))
    best[...] = nl.loop_reduce(nl.max(c, axis=1), op=np.max, loop_indices=[i])
    part = nisa.tensor_reduce(np.add, c, axis=[1], mask=i_f < 100)
    total += part
    q = nisa.iota(i_f + i * 4, dtype=nl.int32)
    z = t[i_p, i_f // 4]
    nl.store(out[i * 128 + i_p, i_f], nl.add(z, g), mask=i * 128 + i_p < 300)
nl.store(out[0:128, 0:1], best)
nl.store(out[0:128, 1:2], total)
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(
        _BODY, np.zeros((300, 512), np.float32), np.zeros((128, 1), np.int32), parameters="x, y", out="(300, 512)"
    )


def equal(left: Program, right: Program) -> bool:
    return (
        left.buffers == right.buffers
        and left.body == right.body
        and left.inputs == right.inputs
        and left.outputs == right.outputs
        and left.target == right.target
        and left.constants.keys() == right.constants.keys()
        and all(
            values.dtype == right.constants[key].dtype and np.array_equal(values, right.constants[key])
            for key, values in left.constants.items()
        )
    )


def test_a_program_comes_back_as_it_was(program: Program) -> None:
    assert equal(loads(dumps(program)), program)


def test_equal_accesses_are_one_object_after_reading(program: Program) -> None:
    reread = loads(dumps(program))
    seen: dict[object, object] = {}
    for _, node in reread.walk():
        for access in node.outputs:
            key = (access.buffer, access.shape, repr(access.index), access.view_shape)
            assert seen.setdefault(key, access) is access


def test_small_types_of_constants_survive() -> None:
    import ml_dtypes

    program = trace("nl.store(out, nl.load(nl.shared_constant(np.ones((128, 512)), dtype=nl.bfloat16)))")
    reread = loads(dumps(program))
    (values,) = reread.constants.values()
    assert values.dtype == ml_dtypes.bfloat16
    assert (values == 1).all()


def parts(payload: bytes) -> tuple[dict[str, object], bytes]:
    start = _MAGIC_LENGTH + 8
    length = int.from_bytes(payload[_MAGIC_LENGTH:start], "little")
    return json.loads(payload[start : start + length]), payload[start + length :]


def joined(header: object, blobs: bytes) -> bytes:
    text = json.dumps(header).encode()
    return dumps_magic() + len(text).to_bytes(8, "little") + text + blobs


def dumps_magic() -> bytes:
    return b"accelopt-ray program 1\n"


@pytest.mark.parametrize("payload", [b"", b"x" * 100, b"accelopt-ray program 1\n", b"\x80\x04K\x01."])
def test_other_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(ProgramFormatError, match="not a program"):
        loads(payload)


def test_every_truncation_is_refused(program: Program) -> None:
    payload = dumps(program)
    for length in range(0, len(payload), max(1, len(payload) // 200)):
        with pytest.raises(ProgramFormatError):
            loads(payload[:length])
    with pytest.raises(ProgramFormatError):
        loads(payload + b"x")


@pytest.mark.parametrize("junk", [None, True, -1, 1.5, "text", [], [[]], {}, [1, 2, 3]])
def test_a_header_with_junk_in_any_place_is_refused_or_read_as_plain_data(program: Program, junk: object) -> None:
    header, blobs = parts(dumps(program))

    def replaced(value: object, path: list[object]) -> list[tuple[object, list[object]]]:
        found = [(value, path)]
        if isinstance(value, list):
            for position, entry in enumerate(value[:12]):
                found += replaced(entry, [*path, position])
        if isinstance(value, dict):
            for key, entry in value.items():
                found += replaced(entry, [*path, key])
        return found

    for _, path in replaced(header, []):
        if not path:
            continue
        changed = json.loads(json.dumps(header))
        target = changed
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = junk
        try:
            loads(joined(changed, blobs))
        except ProgramFormatError:
            continue


@given(st.binary(max_size=200))
def test_random_headers_are_refused(text: bytes) -> None:
    with pytest.raises(ProgramFormatError):
        loads(dumps_magic() + len(text).to_bytes(8, "little") + text)


def test_deep_nesting_is_refused(program: Program) -> None:
    header, blobs = parts(dumps(program))
    depth = 3000
    nest = "".join(f'[{1000 + level},2,"affine",0,[' for level in range(depth)) + "]]" * depth
    text = json.dumps({**header, "body": ["nest"]}).replace('"nest"', nest).encode()
    with pytest.raises(ProgramFormatError):
        loads(dumps_magic() + len(text).to_bytes(8, "little") + text + blobs)
    shallow = json.dumps({**header, "body": ["nest"]}).replace('"nest"', nest[: nest.index("[1150")] + "]]" * 150)
    with pytest.raises(ProgramFormatError, match="nested too deeply"):
        loads(dumps_magic() + len(shallow).to_bytes(8, "little") + shallow.encode() + blobs)
