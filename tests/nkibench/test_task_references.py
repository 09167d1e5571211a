"""Each reference against an independent computation in float64, at the reduced shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nkibench.task import list_tasks, load_task

F64 = npt.NDArray[np.float64]


def silu(x: F64) -> F64:
    return x * 0.5 * (1 + np.tanh(x / 2))


def softmax(x: F64) -> F64:
    # log-sum-exp rather than a quotient of exponentials
    top = x.max(axis=-1, keepdims=True)
    return np.exp(x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True)))


def rms(x: F64, eps: float = 0.0) -> F64:
    return np.sqrt((x * x).sum(axis=-1, keepdims=True) / x.shape[-1] + eps)


def adamw(theta: F64, g: F64, m: F64, v: F64) -> F64:
    lr, beta1, beta2 = 1e-3, 0.9, 0.999
    m_hat = (beta1 * m + (1 - beta1) * g) / (1 - beta1)
    v_hat = (beta2 * v + (1 - beta2) * g**2) / (1 - beta2)
    return theta * (1 - lr * 0.01) - lr * m_hat / (np.sqrt(v_hat) + 1e-8)


def gqa_full(q: F64, k: F64, v: F64) -> F64:
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bnhd,bmhd->bhnm", q, k, optimize=True) / np.sqrt(q.shape[-1])
    return np.einsum("bhnm,bmhd->bhnd", softmax(scores), v, optimize=True)


def mamba(delta: F64, u: F64, a: F64, b: F64, c: F64) -> F64:
    out = np.zeros_like(delta)
    for state in range(a.shape[1]):  # closed form: h_t = sum over s <= t of drive_s * exp(a * sum of delta over (s, t])
        log_decay = np.cumsum(delta * a[:, state, None], axis=1)
        h = np.exp(log_decay) * np.cumsum(delta * u * b[state] * np.exp(-log_decay), axis=1)
        out += c[state] * h
    return out


def rope(x: F64, cos: F64, sin: F64) -> F64:
    half = len(cos)
    rotated = (x[:half] + 1j * x[half:]) * (cos + 1j * sin)
    return np.concatenate([rotated.real, rotated.imag])


def conv2d(x: F64, w: F64, bias: F64) -> F64:
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return np.einsum("bcijhw,ochw->boij", windows, w, optimize=True) + bias[None, :, None, None]


INDEPENDENT: dict[str, Callable[..., F64]] = {
    "adamw": adamw,
    "add_rmsnorm_matmul": lambda x, w, eps, z, g: ((x + z) / rms(x + z, eps) * g) @ w,
    "bmm": lambda lhs, rhs: np.einsum("bmk,bkn->bmn", lhs, rhs, optimize=True),
    "bmm_softmax": lambda lhs, rhs: softmax(np.einsum("bmk,bkn->bmn", lhs, rhs, optimize=True)),
    "conv2d": conv2d,
    "gqa_full": gqa_full,
    "lora": lambda x, w, a, b: x @ (w + a @ b),
    "mamba": mamba,
    "matmul": lambda lhs, rhs: lhs @ rhs,
    "matmul_add_rmsnorm": lambda x, w, eps, z, g: g * (x @ w + z) / rms(x @ w + z, eps),
    "rmsnorm_matmul": lambda x, w: (x @ w) / rms(x),
    "rope_single_freq_apply": rope,
    "silu": silu,
    "swiglu": lambda x, w_up, w_down, w_gate: (silu(x @ w_gate) * (x @ w_up)) @ w_down,
    "transpose_matmul": lambda lhs, rhs: np.einsum("km,kn->mn", lhs, rhs, optimize=True),
}


def test_every_task_is_covered() -> None:
    assert set(INDEPENDENT) == set(list_tasks())


@pytest.mark.parametrize("name", sorted(INDEPENDENT))
def test_reference_agrees_with_float64(name: str) -> None:
    task = load_task(name).at_reduced_shape()
    inputs = task.inputs(63)
    (output,) = task.forward(inputs)
    arguments: list[Any] = [x.astype(np.float64) if isinstance(x, np.ndarray) else x for x in inputs]
    expected = INDEPENDENT[name](*arguments)
    assert output.dtype == np.float32
    assert output.shape == expected.shape
    error = np.linalg.norm((output - expected).ravel()) / np.linalg.norm(expected.ravel())
    assert error < 0.1 * task.tolerance
