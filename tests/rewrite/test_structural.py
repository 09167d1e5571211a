"""Rules on loops and layouts: three kernels each that they were not written for, and near misses."""

# ruff: noqa: E501 (kernel texts)

from __future__ import annotations

import pytest
from rewrite_kernels import HEADER, assert_equal_results

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.catalogue import CLEANUP, STRUCTURAL
from accelopt_ray.rewrite.steps import Step, carry_out, sites_of

Case = tuple[str, tuple[tuple[int, ...], ...]]


def _kernel(body: str, arguments: str) -> str:
    indented = "\n".join("    " + line if line else "" for line in body.strip("\n").split("\n"))
    return f"{HEADER}\n\n@nki.jit\ndef kernel({arguments}):\n{indented}\n"


# Row-wise functions in passes over tensors that are kept for all rows.
CENTRED = _kernel(
    """
rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
kept = nl.ndarray((rows // 128, columns // 256, nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.sbuf)
peaks = nl.ndarray((rows // 128, nl.par_dim(128), 1), dtype=nl.float32, buffer=nl.sbuf)
for c in nl.affine_range(columns // 256):
    for r in nl.affine_range(rows // 128):
        tile = nl.load(a[nl.ds(r * 128, 128), nl.ds(c * 256, 256)])
        kept[r, c, 0:128, 0:256] = nisa.activation(op=nl.exp, data=tile, scale=0.5)
        peak = nisa.tensor_reduce(nl.max, data=kept[r, c, 0:128, 0:256], axis=[1], keepdims=True)
        peaks[r, 0:128, 0:1] = nl.loop_reduce(peak, op=np.max, loop_indices=[c])
for r in nl.affine_range(rows // 128):
    for c in nl.affine_range(columns // 256):
        shifted = nisa.tensor_scalar(data=kept[r, c, 0:128, 0:256], op0=nl.subtract, operand0=peaks[r, 0:128, 0:1])
        nl.store(out[nl.ds(r * 128, 128), nl.ds(c * 256, 256)], value=shifted)
return out
""",
    "a",
)
GRIDS = _kernel(
    """
w9 = nl.ndarray((2, 2, 128, 512), dtype=np.float32, buffer=nl.shared_hbm)
w1 = nl.ndarray((2, 2, 2, nl.par_dim(128), 256), dtype=np.float32, buffer=nl.sbuf)
w2 = nl.ndarray((2, 2, nl.par_dim(128), 1), dtype=np.float32, buffer=nl.sbuf)
w3 = nl.ndarray((2, 2, 2, nl.par_dim(128), 1), dtype=np.float32, buffer=nl.sbuf)
w4 = nl.ndarray((2, 2, nl.par_dim(128), 512), dtype=np.float32, buffer=nl.sbuf)
for j0 in nl.affine_range(2):
    for j1 in nl.affine_range(2):
        for j2 in nl.affine_range(2):
            w1[j2, j0, j1, nl.arange(128)[:, None], nl.arange(256)[None, :]] = nl.load(v1[j2, j1, nl.arange(128)[:, None], 256 * j0 + nl.arange(256)[None, :]])
            w3[j2, j0, j1, nl.arange(128)[:, None], 0] = nisa.tensor_reduce(nl.add, data=w1[j2, j0, j1, nl.arange(128)[:, None], nl.arange(256)[None, :]], axis=[1], mask=None)
            w2[j2, j1, nl.arange(128)[:, None], 0] = nl.loop_reduce(w3[j2, j0, j1, nl.arange(128)[:, None], 0], op=np.add, loop_indices=[j0])
            ' end loop j2 '
for k0 in nl.affine_range(2):
    for k1 in nl.affine_range(2):
        for k2 in nl.affine_range(2):
            w4[k0, k1, nl.arange(128)[:, None], 256 * k2 + nl.arange(256)[None, :]] = nisa.tensor_scalar(data=w1[k0, k2, k1, nl.arange(128)[:, None], nl.arange(256)[None, :]], op0=nl.multiply, operand0=w2[k0, k1, nl.arange(128)[:, None], 0])
        nl.store(w9[k0, k1, nl.arange(128)[:, None], nl.arange(512)[None, :]], value=w4[k0, k1, nl.arange(128)[:, None], nl.arange(512)[None, :]])
return w9
""",
    "v1",
)
PRODUCT_PASSES = _kernel(
    """
depth, m = left.shape
_, n = right.shape
out = nl.ndarray((m, n), dtype=left.dtype, buffer=nl.shared_hbm)
scores = nl.ndarray((n // 512, m // 128, nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.sbuf)
for block in nl.affine_range(n // 512):
    columns = nl.load(right[0:depth, nl.ds(block * 512, 512)])
    for group in nl.affine_range(m // 256):
        for member in nl.affine_range(2):
            row = group * 2 + member
            rows = nl.load(left[0:depth, nl.ds(row * 128, 128)])
            product = nisa.nc_matmul(rows, columns)
            scores[block, row, 0:128, 0:512] = nl.copy(product)
for row in nl.affine_range(m // 128):
    total = nl.ndarray((nl.par_dim(128), 1), dtype=nl.float32, buffer=nl.sbuf)
    for block in nl.affine_range(n // 512):
        part = nisa.tensor_reduce(nl.add, data=scores[block, row, 0:128, 0:512], axis=[1], keepdims=True)
        total[0:128, 0:1] = nl.loop_reduce(part, op=np.add, loop_indices=[block])
    for block in nl.affine_range(n // 512):
        scaled = nisa.tensor_scalar(data=scores[block, row, 0:128, 0:512], op0=nl.add, operand0=total)
        nl.store(out[nl.ds(row * 128, 128), nl.ds(block * 512, 512)], value=scaled)
return out
""",
    "left, right",
)

RECURRENCE = _kernel(
    """
rows, steps = gain.shape
out = nl.ndarray((rows, steps), dtype=gain.dtype, buffer=nl.shared_hbm)
for tile in nl.affine_range(rows // 128):
    g = nl.load(gain[nl.ds(tile * 128, 128), 0:steps])
    d = nl.load(drive[nl.ds(tile * 128, 128), 0:steps])
    damped = nisa.activation(op=nl.sigmoid, data=g, scale=-0.5)
    state = nisa.tensor_tensor_scan(damped, d, initial=0, op0=np.multiply, op1=np.add)
    nl.store(out[nl.ds(tile * 128, 128), 0:steps], value=nl.multiply(state, g))
return out
""",
    "gain, drive",
)
STATES = _kernel(
    """
rows, steps = gain.shape
_, kinds = rate.shape
out = nl.ndarray((rows, steps), dtype=gain.dtype, buffer=nl.shared_hbm)
acc = nl.zeros((rows // 128, nl.par_dim(128), steps), dtype=nl.float32, buffer=nl.sbuf)
for kind in nl.affine_range(kinds):
    for tile in nl.affine_range(rows // 128):
        g = nl.load(gain[nl.ds(tile * 128, 128), 0:steps])
        column = nl.load(rate[nl.ds(tile * 128, 128), kind])
        decay = nisa.activation(op=nl.sigmoid, data=g, scale=column)
        first = nisa.tensor_tensor_scan(decay, g, initial=1.0, op0=nl.multiply, op1=nl.add)
        second = nisa.tensor_tensor_scan(decay, first, initial=0.0, op0=nl.multiply, op1=nl.maximum)
        acc[tile, 0:128, 0:steps] += second
for tile in nl.affine_range(rows // 128):
    nl.store(out[nl.ds(tile * 128, 128), 0:steps], value=acc[tile, 0:128, 0:steps])
return out
""",
    "gain, rate",
)
FIXED_ROW = _kernel(
    """
assert gain.shape == (64, 3072)
out = nl.ndarray((64, 3072), dtype=gain.dtype, buffer=nl.shared_hbm)
for part in nl.affine_range(1):
    g = nl.load(gain[0:64, 0:3072])
    row = nl.load(weight[0:1, 0:3072])
    h = nisa.tensor_tensor_scan(nl.sigmoid(g), row.broadcast_to((64, 3072)), initial=0, op0=np.multiply, op1=np.add)
    nl.store(out[0:64, 0:3072], value=h)
return out
""",
    "gain, weight",
)

ROTATION = _kernel(
    """
_, width = q.shape
height, half = 128, 64
out = nl.ndarray((height, width), dtype=q.dtype, buffer=nl.shared_hbm)
for i in nl.affine_range(width // 256):
    whole = nl.load(q[0:height, nl.ds(i * 256, 256)])
    c = nl.load(cosine[0:half, nl.ds(i * 256, 256)])
    s = nl.load(sine[0:half, nl.ds(i * 256, 256)])
    low = nl.copy(whole[half:height, 0:256])
    result = nl.ndarray((nl.par_dim(height), 256), dtype=q.dtype, buffer=nl.sbuf)
    result[half:height, 0:256] = nl.add(nl.multiply(whole[0:half, 0:256], s), nl.multiply(low, c))
    result[0:half, 0:256] = nl.subtract(nl.multiply(c, whole[0:half, 0:256]), nl.multiply(s, low))
    nl.store(out[0:height, nl.ds(i * 256, 256)], value=result)
return out
""",
    "q, cosine, sine",
)
ROTATION_RANGE = ROTATION.replace("for i in nl.affine_range(width // 256):", "for at in range(0, width, 256):").replace(
    "nl.ds(i * 256, 256)", "at : at + 256"
)
ROTATION_OUTER = _kernel(
    """
out = nl.ndarray((3, 64, 512), dtype=v1.dtype, buffer=nl.shared_hbm)
for h in nl.affine_range(3):
    t = nl.load(v1[h, 0:64, 0:512])
    c = nl.load(v2[h, 0:32, 0:512])
    s = nl.load(v3[h, 0:32, 0:512])
    b = nl.copy(t[32:64, 0:512])
    a_c = nisa.tensor_tensor(t[0:32, 0:512], c, op=nl.multiply)
    b_s = nisa.tensor_tensor(b, s, op=nl.multiply)
    b_c = nisa.tensor_tensor(b, c, op=nl.multiply)
    a_s = nisa.tensor_tensor(t[0:32, 0:512], s, op=nl.multiply)
    r = nl.ndarray((nl.par_dim(64), 512), dtype=v1.dtype, buffer=nl.sbuf)
    r[0:32, 0:512] = nisa.tensor_tensor(a_c, b_s, op=nl.subtract)
    r[32:64, 0:512] = nisa.tensor_tensor(b_c, a_s, op=nl.add)
    nl.store(out[h, 0:64, 0:512], value=r)
return out
""",
    "v1, v2, v3",
).replace(
    "def kernel(v1, v2, v3):",
    "def kernel(v1, v2, v3):\n    assert v1.shape == (3, 64, 512)\n    assert v2.shape == (3, 32, 512)",
)

HIGH_LEVEL = _kernel(
    """
m, k = x.shape
_, n = w.shape
out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
for row in nl.affine_range(m // 128):
    strip = nl.load(x[nl.ds(row * 128, 128), 0:k])
    for column in nl.affine_range(n // 256):
        acc = nl.zeros((nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.psum)
        for inner in nl.affine_range(k // 128):
            tile = nl.load(w[nl.ds(inner * 128, 128), nl.ds(column * 256, 256)])
            acc += nl.matmul(strip[0:128, nl.ds(inner * 128, 128)], tile)
        nl.store(out[nl.ds(row * 128, 128), nl.ds(column * 256, 256)], value=nl.copy(acc))
return out
""",
    "x, w",
)
HIGH_LEVEL_SLICES = HIGH_LEVEL.replace(
    "strip[0:128, nl.ds(inner * 128, 128)]", "strip[:, inner * 128 : (inner + 1) * 128]"
)
HIGH_LEVEL_NARROW = HIGH_LEVEL.replace("128", "64")

DEFERRED = _kernel(
    """
m, k = p.shape
_, d = value.shape
out = nl.ndarray((m, d), dtype=p.dtype, buffer=nl.shared_hbm)
identity = nl.load(nl.shared_constant(np.identity(128, dtype=np.float32)))
for row in nl.affine_range(m // 128):
    weights = nl.load(p[nl.ds(row * 128, 128), 0:k])
    scale = nl.load(factor[nl.ds(row * 128, 128), 0:1])
    turned = nl.ndarray((k // 128, nl.par_dim(128), 128), dtype=nl.float32, buffer=nl.sbuf)
    for block in nl.affine_range(k // 256):
        scaled = nisa.tensor_scalar(data=weights[0:128, nl.ds(block * 256, 256)], op0=nl.multiply, operand0=scale)
        for part in nl.affine_range(2):
            flipped = nisa.nc_matmul(scaled[0:128, nl.ds(part * 128, 128)], identity, is_moving_onezero=True, is_transpose=True)
            turned[block * 2 + part, 0:128, 0:128] = nl.copy(flipped)
    acc = nl.zeros((nl.par_dim(128), d), dtype=nl.float32, buffer=nl.psum)
    for block in nl.affine_range(k // 128):
        acc += nisa.nc_matmul(turned[block, 0:128, 0:128], nl.load(value[nl.ds(block * 128, 128), 0:d]))
    nl.store(out[nl.ds(row * 128, 128), 0:d], value=nl.copy(acc))
return out
""",
    "p, value, factor",
)
DEFERRED_TRANSPOSE = DEFERRED.replace(
    "nisa.nc_matmul(scaled[0:128, nl.ds(part * 128, 128)], identity, is_moving_onezero=True, is_transpose=True)",
    "nisa.nc_transpose(scaled[0:128, nl.ds(part * 128, 128)])",
)
DEFERRED_RENAMED = DEFERRED.replace("scaled", "probabilities").replace("turned", "columns_of").replace("row", "line")

BLOCKED = _kernel(
    """
m, k = a.shape
_, n = b.shape
out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
for column in nl.affine_range(n // 512):
    right = nl.ndarray((k // 128, nl.par_dim(128), 512), dtype=b.dtype, buffer=nl.sbuf)
    for inner in nl.affine_range(k // 128):
        right[inner, 0:128, 0:512] = nl.load(b[nl.ds(inner * 128, 128), nl.ds(column * 512, 512)])
    for row in nl.affine_range(m // 128):
        strip = nl.load(a[nl.ds(row * 128, 128), 0:k])
        left = nl.ndarray((k // 128, nl.par_dim(128), 128), dtype=a.dtype, buffer=nl.sbuf)
        for part in nl.affine_range(k // 128):
            left[part, 0:128, 0:128] = nl.copy(nisa.nc_transpose(strip[0:128, nl.ds(part * 128, 128)]))
        acc = nl.zeros((nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.psum)
        for step in nl.affine_range(k // 128):
            acc += nisa.nc_matmul(left[step, 0:128, 0:128], right[step, 0:128, 0:512])
        nl.store(out[nl.ds(row * 128, 128), nl.ds(column * 512, 512)], value=nl.copy(acc))
return out
""",
    "a, b",
)
BLOCKED_PIECES = _kernel(
    """
assert first.shape == (256, 256)
assert second.shape == (256, 1024)
out = nl.ndarray((256, 1024), dtype=first.dtype, buffer=nl.shared_hbm)
for c in nl.affine_range(2):
    w = nl.ndarray((2, nl.par_dim(128), 512), dtype=np.float32, buffer=nl.sbuf)
    for k0 in nl.affine_range(2):
        w[k0, 0:128, 0:512] = nl.load(second[nl.ds(k0 * 128, 128), nl.ds(c * 512, 512)])
    for r in nl.affine_range(2):
        t = nl.ndarray((2, nl.par_dim(128), 128), dtype=np.float32, buffer=nl.sbuf)
        for k1 in nl.affine_range(2):
            x = nl.load(first[nl.ds(r * 128, 128), nl.ds(k1 * 128, 128)])
            t[k1, 0:128, 0:128] = nl.copy(nisa.nc_transpose(x))
        y = nl.ndarray((nl.par_dim(128), 512), dtype=np.float32, buffer=nl.sbuf)
        for h in nl.affine_range(2):
            p = nl.zeros((nl.par_dim(128), 256), dtype=np.float32, buffer=nl.psum)
            for k2 in nl.affine_range(2):
                p[0:128, 0:256] += nisa.nc_matmul(t[k2, 0:128, 0:128], w[k2, 0:128, nl.ds(h * 256, 256)])
            y[0:128, nl.ds(h * 256, 256)] = nisa.activation(op=nl.tanh, data=p)
        nl.store(out[nl.ds(r * 128, 128), nl.ds(c * 512, 512)], value=y)
return out
""",
    "first, second",
)
SUMS = _kernel(
    """
kinds, rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
for tile in nl.affine_range(rows // 128):
    acc = nl.zeros((nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.sbuf)
    for kind in nl.affine_range(kinds):
        part = nl.load(a[kind, nl.ds(tile * 128, 128), 0:256])
        squared = nisa.activation(op=nl.square, data=part)
        acc[0:128, 0:256] += squared
    nl.store(out[nl.ds(tile * 128, 128), 0:256], value=acc)
return out
""",
    "a",
)

PIECES = _kernel(
    """
rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
for tile in nl.affine_range(rows // 128):
    for block in nl.affine_range(columns // 512):
        big = nl.load(a[nl.ds(tile * 128, 128), nl.ds(block * 512, 512)])
        answer = nl.ndarray((nl.par_dim(128), 512), dtype=a.dtype, buffer=nl.sbuf)
        for piece in nl.affine_range(2):
            small = big[0:128, nl.ds(piece * 256, 256)]
            grown = nisa.activation(op=nl.exp, data=small)
            answer[0:128, nl.ds(piece * 256, 256)] = nisa.tensor_tensor(grown, small, op=nl.add)
        nl.store(out[nl.ds(tile * 128, 128), nl.ds(block * 512, 512)], value=answer)
return out
""",
    "a",
)
STREAM = _kernel(
    """
rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
for tile in nl.affine_range(rows // 128):
    for block in nl.affine_range(columns // 256):
        big = nl.load(a[nl.ds(tile * 128, 128), nl.ds(block * 256, 256)])
        nl.store(out[nl.ds(tile * 128, 128), nl.ds(block * 256, 256)], value=nl.exp(big))
return out
""",
    "a",
)
STREAM_RANGE = _kernel(
    """
rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
for at in range(0, columns, 256):
    big = nl.load(a[0:rows, at : at + 256])
    nl.store(out[0:rows, at : at + 256], value=nl.exp(big))
return out
""",
    "a",
)
COUNTED = _kernel(
    """
out = nl.ndarray((128, 1024), dtype=np.float32, buffer=nl.shared_hbm)
t0 = nl.ndarray((4, nl.par_dim(128), 256), dtype=np.float32, buffer=nl.sbuf)
t1 = nl.ndarray((4, nl.par_dim(128), 256), dtype=np.float32, buffer=nl.sbuf)
for i in nl.affine_range(4):
    t0[i, nl.arange(128)[:, None], nl.arange(256)[None, :]] = nl.load(a[nl.arange(128)[:, None], 256 * i + nl.arange(256)[None, :]])
    t1[i, nl.arange(128)[:, None], nl.arange(256)[None, :]] = nisa.activation(op=nl.tanh, data=t0[i, nl.arange(128)[:, None], nl.arange(256)[None, :]])
    nl.store(out[nl.arange(128)[:, None], 256 * i + nl.arange(256)[None, :]], value=t1[i, nl.arange(128)[:, None], nl.arange(256)[None, :]])
return out
""",
    "a",
)
SEQUENTIAL = STREAM.replace("affine_range(columns", "sequential_range(columns")

BETWEEN = _kernel(
    """
rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
for tile in nl.affine_range(rows // 128):
    p = nl.load(a[nl.ds(tile * 128, 128), 0:256])
    q = nl.load(b[nl.ds(tile * 128, 128), 0:256])
    product = nisa.tensor_tensor(p, q, op=nl.multiply)
    total = nisa.tensor_tensor(product, q, op=nl.add)
    nl.store(out[nl.ds(tile * 128, 128), 0:256], value=total)
return out
""",
    "a, b",
)

SQUARE: tuple[tuple[int, ...], ...] = ((256, 512),)
FIRES: dict[str, list[Case]] = {
    "strip-fusion": [
        (CENTRED, ((256, 1024),)),
        (GRIDS, ((2, 2, 128, 512),)),
        (PRODUCT_PASSES, ((64, 512), (64, 1024))),
    ],
    "tile-scan": [
        (RECURRENCE, ((128, 4096), (128, 4096))),
        (STATES, ((256, 2304), (256, 3))),
        (FIXED_ROW, ((64, 3072), (1, 3072))),
    ],
    "pack-rotation": [
        (ROTATION, ((128, 512), (64, 512), (64, 512))),
        (ROTATION_RANGE, ((128, 512), (64, 512), (64, 512))),
        (ROTATION_OUTER, ((3, 64, 512), (3, 32, 512), (3, 32, 512))),
    ],
    "shared-transpose": [
        (HIGH_LEVEL, ((256, 256), (256, 512))),
        (HIGH_LEVEL_SLICES, ((128, 384), (384, 512))),
        (HIGH_LEVEL_NARROW, ((128, 256), (256, 512))),
    ],
    "row-blocking": [
        (BLOCKED, ((512, 256), (256, 1024))),
        (BLOCKED_PIECES, ((256, 256), (256, 1024))),
        (BLOCKED.replace("column", "cc").replace("row", "rr").replace("512", "256"), ((384, 128), (128, 512))),
    ],
    "defer-row-scale": [
        (DEFERRED, ((256, 512), (512, 64), (256, 1))),
        (DEFERRED_TRANSPOSE, ((256, 512), (512, 64), (256, 1))),
        (DEFERRED_RENAMED, ((128, 256), (256, 32), (128, 1))),
    ],
    "sum-on-tensor-engine": [
        (SUMS, ((3, 256, 256),)),
        (SUMS.replace("nl.load(a[kind", "nl.load(a[kind * 1"), ((2, 128, 256),)),
        (SUMS.replace("value=acc)", "value=nl.exp(acc))").replace("op=nl.square", "op=nl.tanh"), ((3, 128, 256),)),
    ],
    "merge-pieces": [
        (PIECES, ((256, 1024),)),
        (COUNTED, ((128, 1024),)),
        (PIECES.replace("256", "128").replace("512", "256"), ((256, 512),)),
    ],
    "widen-tiles": [
        (STREAM, ((256, 1536),)),
        (STREAM_RANGE, ((96, 2048),)),
        (STREAM.replace("block", "chunk_at"), ((128, 1280),)),
    ],
    "affine-loop": [
        (STREAM_RANGE, ((96, 512),)),
        (SEQUENTIAL, ((128, 1024),)),
        (ROTATION_RANGE, ((128, 512), (64, 512), (64, 512))),
    ],
    "operand-in-psum": [
        (BETWEEN, ((256, 256), (256, 256))),
        (BETWEEN.replace("product, q, op=nl.add", "q, product, op=nl.subtract"), ((256, 256), (256, 256))),
        (
            SUMS.replace("nisa.activation(op=nl.square, data=part)", "nisa.tensor_tensor(part, part, op=nl.maximum)"),
            ((2, 128, 256),),
        ),
    ],
}
ROWS = _kernel(
    """
height, width = x.shape
out = nl.ndarray((height, width), dtype=x.dtype, buffer=nl.shared_hbm)
for t in nl.affine_range(height // 128):
    big = nl.load(x[nl.ds(t * 128, 128), 0:384])
    gain = nl.load(g[0:1, 0:384])
    shift = nl.load(g[1:2, 0:384])
    grown = nisa.tensor_tensor(big, gain.broadcast_to((128, 384)), op=nl.multiply)
    moved = nl.add(grown, shift.broadcast_to((128, 384)))
    nl.store(out[nl.ds(t * 128, 128), 0:384], value=moved)
return out
""",
    "x, g",
)
NARROW_ROWS = _kernel(
    """
out = nl.ndarray((96, 1024), dtype=p.dtype, buffer=nl.shared_hbm)
unit = nl.ones((nl.par_dim(1), 96), dtype=nl.float32, buffer=nl.sbuf)
for c in nl.affine_range(4):
    part = nl.load(p[0:96, nl.ds(c * 256, 256)])
    row = nl.load(q[c:c + 1, 0:256])
    spread = nl.broadcast_to(row, shape=(96, 256))
    nl.store(out[0:96, nl.ds(c * 256, 256)], value=nl.subtract(spread, part))
return out
""",
    "p, q",
)
FIRES["broadcast-in-psum"] = [
    (ROWS, ((256, 384), (2, 384))),
    (NARROW_ROWS, ((96, 1024), (4, 256))),
    (
        ROWS.replace("384", "512").replace("nl.affine_range(height // 128)", "range(height // 128)"),
        ((256, 512), (2, 512)),
    ),
]
IN_PASSES = _kernel(
    """
rows, columns = x.shape
out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
for t in nl.affine_range(rows // 128):
    big = nl.load(x[nl.ds(t * 128, 128), 0:columns])
    grown = nl.ndarray((columns // 256, nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((nl.par_dim(128), 1), dtype=nl.float32, buffer=nl.sbuf)
    for i in nl.affine_range(columns // 256):
        grown[i, 0:128, 0:256] = nisa.activation(op=nl.exp, data=big[0:128, nl.ds(i * 256, 256)], scale=0.5)
        part = nisa.tensor_reduce(nl.add, data=grown[i, 0:128, 0:256], axis=[1], keepdims=True)
        sums[0:128, 0:1] = nl.loop_reduce(part, op=np.add, loop_indices=[i])
    inverse = nisa.reciprocal(sums)
    halves = nl.ndarray((nl.par_dim(128), columns), dtype=nl.float32, buffer=nl.sbuf)
    for j in nl.affine_range(columns // 256):
        for h in nl.affine_range(2):
            halves[0:128, nl.ds(j * 256 + h * 128, 128)] = nl.copy(grown[j, 0:128, nl.ds(h * 128, 128)])
    nl.store(out[nl.ds(t * 128, 128), 0:columns], value=nisa.tensor_scalar(halves, op0=nl.multiply, operand0=inverse))
return out
""",
    "x",
)
IN_PASSES_2D = _kernel(
    """
out = nl.ndarray((128, 768), dtype=first.dtype, buffer=nl.shared_hbm)
kept = nl.ndarray((nl.par_dim(128), 768), dtype=nl.float32, buffer=nl.sbuf)
for one in nl.affine_range(3):
    kept[0:128, nl.ds(one * 256, 256)] = nl.load(first[0:128, nl.ds(one * 256, 256)])
for two in nl.affine_range(3):
    nl.store(out[0:128, nl.ds(two * 256, 256)], value=nl.exp(kept[0:128, nl.ds(two * 256, 256)]))
return out
""",
    "first",
)
IN_PASSES_SUM = _kernel(
    """
k, m = a.shape
out = nl.ndarray((m, 256), dtype=a.dtype, buffer=nl.shared_hbm)
kept = nl.ndarray((2, 2, nl.par_dim(128), 128), dtype=nl.float32, buffer=nl.sbuf)
for i in nl.affine_range(2):
    for j in nl.affine_range(2):
        kept[i, j, 0:128, 0:128] = nl.exp(nl.load(a[nl.ds((i * 2 + j) * 128, 128), 0:128]))
total = nl.zeros((nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.psum)
for p in nl.affine_range(2):
    for q in nl.affine_range(2):
        right = nl.load(b[nl.ds((p * 2 + q) * 128, 128), 0:256])
        total[0:128, 0:256] += nisa.nc_matmul(kept[p, q, 0:128, 0:128], right)
nl.store(out[0:128, 0:256], value=nl.copy(total))
return out
""",
    "a, b",
)
FIRES["fuse-loops"] = [
    (IN_PASSES, ((256, 1024),)),
    (IN_PASSES_2D, ((128, 768),)),
    (IN_PASSES_SUM, ((512, 128), (512, 256))),
]
ROWS_OUTSIDE = _kernel(
    """
m, k = a.shape
_, n = b.shape
out = nl.ndarray((m, 512), dtype=a.dtype, buffer=nl.shared_hbm)
for row in nl.affine_range(m // 128):
    strip = nl.load(a[nl.ds(row * 128, 128), 0:k])
    left = nl.ndarray((k // 128, nl.par_dim(128), 128), dtype=a.dtype, buffer=nl.sbuf)
    for part in nl.affine_range(k // 128):
        left[part, 0:128, 0:128] = nl.copy(nisa.nc_transpose(strip[0:128, nl.ds(part * 128, 128)]))
    whole = nl.ndarray((nl.par_dim(128), 512), dtype=a.dtype, buffer=nl.sbuf)
    for column in nl.affine_range(n // 256):
        acc = nl.zeros((nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.psum)
        for step in nl.affine_range(k // 128):
            right = nl.load(b[nl.ds(step * 128, 128), nl.ds(column * 256, 256)])
            acc += nisa.nc_matmul(left[step, 0:128, 0:128], right)
        whole[0:128, nl.ds(column * 256, 256)] = nl.copy(acc)
    extra = nl.load(c[nl.ds(row * 128, 128), 0:512])
    moved = nl.add(whole, extra)
    peak = nl.ndarray((nl.par_dim(128), 1), dtype=nl.float32, buffer=nl.sbuf)
    grown = nisa.activation_reduce(op=nl.square, data=moved, reduce_op=nl.add, reduce_res=peak[0:128, 0:1])
    nl.store(out[nl.ds(row * 128, 128), 0:512], value=nl.divide(grown, peak))
return out
""",
    "a, b, c",
)
FIRES["resident-operand"] = [
    (ROWS_OUTSIDE, ((384, 256), (256, 512), (384, 512))),
    (HIGH_LEVEL, ((256, 256), (256, 512))),
    (
        carry_out(HIGH_LEVEL_NARROW, [Step("shared-transpose")]).source,
        ((128, 128), (128, 512)),
    ),
]
FIRES["row-blocking"].append((ROWS_OUTSIDE, ((768, 256), (256, 512), (768, 512))))
PARTIAL = _kernel(
    """
k, m = a.shape
n = b.shape[1]
out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
for row in nl.affine_range(m // 128):
    total = nl.zeros((nl.par_dim(128), 384), dtype=nl.float32, buffer=nl.sbuf)
    for step in nl.affine_range(k // 128):
        left = nl.load(a[nl.ds(step * 128, 128), nl.ds(row * 128, 128)])
        right = nl.load(b[nl.ds(step * 128, 128), 0:384])
        total[0:128, 0:384] += nisa.nc_matmul(left, right)
    nl.store(out[nl.ds(row * 128, 128), 0:384], value=nl.exp(total, scale=0.01))
return out
""".replace("nl.exp(total, scale=0.01)", "nisa.activation(op=nl.tanh, data=total[0:128, 0:384], scale=0.01)"),
    "a, b",
)
PARTIAL_SEQUENCE = PARTIAL.replace("nl.affine_range(k // 128)", "nl.sequential_range(k // 128)").replace(
    "total[0:128, 0:384] += nisa.nc_matmul(left, right)",
    "product = nisa.nc_matmul(left, right)\n            total[0:128, 0:384] = nl.add(total[0:128, 0:384], product)",
)
PARTIAL_UPDATE = PARTIAL.replace(
    "total[0:128, 0:384] += nisa.nc_matmul(left, right)",
    "product = nisa.nc_matmul(left, right)\n            total[...] += product",
)
PARTIAL_REDUCE = PARTIAL.replace("nl.zeros((nl.par_dim(128), 384)", "nl.ndarray((nl.par_dim(128), 384)").replace(
    "total[0:128, 0:384] += nisa.nc_matmul(left, right)",
    "product = nisa.nc_matmul(left, right)\n"
    "            total[0:128, 0:384] = nl.loop_reduce(product, op=np.add, loop_indices=[step])",
)
FIRES["accumulate-in-psum"] = [
    (kernel, ((384, 256), (384, 384))) for kernel in (PARTIAL, PARTIAL_SEQUENCE, PARTIAL_UPDATE, PARTIAL_REDUCE)
]
SIDE = _kernel(
    """
k, m = x.shape
n = w.shape[1]
out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
for row in nl.affine_range(m // 128):
    main = nl.zeros((nl.par_dim(128), 384), dtype=nl.float32, buffer=nl.psum)
    for step in nl.affine_range(k // 128):
        left = nl.load(x[nl.ds(step * 128, 128), nl.ds(row * 128, 128)])
        main += nisa.nc_matmul(left, nl.load(w[nl.ds(step * 128, 128), 0:384]))
    kept = nl.copy(main)
    few = nl.load(t[0:64, nl.ds(row * 128, 128)])
    side = nisa.nc_matmul(few, nl.load(b[0:64, 0:384]))
    added = nl.copy(side)
    total = nl.add(kept, added)
    nl.store(out[nl.ds(row * 128, 128), 0:384], value=total)
return out
""",
    "x, w, t, b",
)
# The side product comes first, read where it is; the sum goes into a part of a wider tile.
SIDE_FIRST = _kernel(
    """
m, k = one.shape
out = nl.ndarray((m, 1024), dtype=one.dtype, buffer=nl.shared_hbm)
for band in nl.affine_range(m // 64):
    strip = nl.load(one[nl.ds(band * 64, 64), 0:k])
    other = nl.load(three[nl.ds(band * 64, 64), 0:128])
    wide = nl.ndarray((nl.par_dim(64), 1024), dtype=nl.float32, buffer=nl.sbuf)
    for piece in nl.affine_range(2):
        low = nl.matmul(other, nl.load(four[0:128, nl.ds(piece * 512, 512)]))
        acc = nl.zeros((nl.par_dim(64), 512), dtype=nl.float32, buffer=nl.psum)
        for part in nl.affine_range(k // 128):
            right = nl.load(two[nl.ds(part * 128, 128), nl.ds(piece * 512, 512)])
            acc[0:64, 0:512] += nl.matmul(strip[0:64, nl.ds(part * 128, 128)], right)
        high = nl.ndarray((nl.par_dim(64), 512), dtype=nl.float32, buffer=nl.sbuf)
        high[0:64, 0:512] = nisa.tensor_copy(acc[0:64, 0:512])
        wide[0:64, nl.ds(piece * 512, 512)] = nisa.tensor_tensor(high[0:64, 0:512], low, op=np.add)
    nl.store(out[nl.ds(band * 64, 64), 0:1024], value=wide)
return out
""",
    "one, two, three, four",
)
# Three products, two of them in the same loops, all under one name; the sum is formed inside a call.
THREE_SUMS = _kernel(
    """
v9 = nl.ndarray((256, 256), dtype=np.float32, buffer=nl.shared_hbm)
p, c = nl.arange(128)[:, None], nl.arange(256)[None, :]
r = nl.arange(128)[None, :]
for i in nl.affine_range(2):
    v5 = nl.ndarray((nl.par_dim(128), 256), dtype=np.float32, buffer=nl.psum)
    v5[p, c] = nisa.nc_matmul(nl.load(v1[p, 128 * i + r]), nl.load(v2[p, c]))
    v6 = nl.copy(v5[p, c], dtype=np.float32)
    v5 = nl.zeros((nl.par_dim(128), 256), dtype=np.float32, buffer=nl.psum)
    v7 = nl.zeros((nl.par_dim(128), 256), dtype=np.float32, buffer=nl.psum)
    for j in nl.affine_range(2):
        v5[p, c] += nisa.nc_matmul(nl.load(v1[128 * j + p, 128 * i + r]), nl.load(v3[128 * j + p, c]))
        v7[p, c] += nisa.nc_matmul(nl.load(v4[128 * j + p, 128 * i + r]), nl.load(v2[128 * j + p, c]))
    v8 = v6 + nl.copy(v7)
    nl.store(v9[128 * i + p, c], value=nl.tanh(nl.add(nl.copy(v5), v8)))
return v9
""",
    "v1, v2, v3, v4",
)
FIRES["join-products"] = [
    (SIDE, ((256, 256), (256, 384), (64, 256), (64, 384))),
    (SIDE_FIRST, ((128, 256), (256, 1024), (128, 128), (128, 1024))),
    (THREE_SUMS, ((256, 256),) * 4),
]
# Products of normalised rows with a gain, and a right side that is loaded once.
GAIN = _kernel(
    """
m, k = x.shape
_, n = w.shape
out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
gain = nl.load(g.reshape((1, k))[0:1, 0:k])
right = nl.ndarray((k // 128, nl.par_dim(128), 512), dtype=w.dtype, buffer=nl.sbuf)
for inner in nl.affine_range(k // 128):
    right[inner, 0:128, 0:512] = nl.load(w[nl.ds(inner * 128, 128), 0:512])
for row in nl.affine_range(m // 128):
    strip = nl.load(x[nl.ds(row * 128, 128), 0:k])
    peak = nl.max(strip, axis=[1], keepdims=True)
    lowered = nl.subtract(strip, peak)
    scaled = nl.multiply(lowered, gain.broadcast_to((128, k)))
    acc = nl.zeros((nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.psum)
    for step in nl.affine_range(k // 128):
        acc += nl.matmul(scaled[0:128, nl.ds(step * 128, 128)], right[step, 0:128, 0:512])
    nl.store(out[nl.ds(row * 128, 128), 0:512], value=nl.copy(acc))
return out
""",
    "x, w, g",
)
# Pieces, transposes that are kept, weights in blocks of columns that are loaded once in the middle of the loops.
GAIN_PIECES = _kernel(
    """
m, k = a.shape
n = b.shape[1]
out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
identity = nl.load(nl.shared_constant(np.identity(128, dtype=np.float32)))
line = nl.load(c.reshape((1, k))[0:1, 0:k])
spread = nl.broadcast_to(line, shape=(128, k))
for column in nl.affine_range(n // 256):
    tiles = nl.ndarray((nl.par_dim(128), k // 128, 256), dtype=b.dtype, buffer=nl.sbuf)
    for part in nl.affine_range(k // 128):
        tiles[0:128, part, 0:256] = nl.load(b[nl.ds(part * 128, 128), nl.ds(column * 256, 256)])
    for row in nl.affine_range(m // 128):
        strip = nl.load(a[nl.ds(row * 128, 128), 0:k])
        turned = nl.ndarray((k // 128, nl.par_dim(128), 128), dtype=a.dtype, buffer=nl.sbuf)
        for piece in nl.affine_range(k // 256):
            grown = nisa.tensor_tensor(spread[0:128, nl.ds(piece * 256, 256)], strip[0:128, nl.ds(piece * 256, 256)], op=nl.multiply)
            for half in nl.affine_range(2):
                flipped = nisa.nc_matmul(grown[0:128, nl.ds(half * 128, 128)], identity, is_moving_onezero=True, is_transpose=True)
                turned[2 * piece + half, 0:128, 0:128] = nl.copy(flipped)
        acc = nl.zeros((nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.psum)
        for step in nl.affine_range(k // 128):
            acc += nisa.nc_matmul(turned[step, 0:128, 0:128], tiles[0:128, step, 0:256])
        nl.store(out[nl.ds(row * 128, 128), nl.ds(column * 256, 256)], value=nl.copy(acc))
return out
""",
    "a, b, c",
)
# One contraction tile of 64, two right sides, another factor in the same instruction.
GAIN_TWO = (
    _kernel(
        """
rows, depth = p.shape
out = nl.ndarray((rows, 256), dtype=p.dtype, buffer=nl.shared_hbm)
first = nl.load(q[0:64, 0:256])
second = nl.load(s[0:64, 0:256])
row = nl.load(t[0:1, 0:64])
for i in nl.affine_range(rows // 128):
    tile = nl.load(p[nl.ds(128 * i, 128), 0:64])
    size = nl.max(tile, axis=[1], keepdims=True)
    both = nisa.scalar_tensor_tensor(data=tile, op0=nl.multiply, operand0=size, op1=nl.multiply, operand1=row.broadcast_to((128, 64)))
    turned = nl.copy(nisa.nc_transpose(both))
    one = nl.tanh(nisa.nc_matmul(turned, first))
    two = nisa.nc_matmul(turned, second)
    nl.store(out[nl.ds(128 * i, 128), 0:256], value=nl.multiply(one, two))
return out
""",
        "p, q, s, t",
    )
    .replace("rows, depth = p.shape", "rows, depth = p.shape\n    _, length = t.shape")
    .replace("t[0:1, 0:64]", "t.reshape((1, 64))[0:1, 0:64]")
)
FIRES["gain-into-weight"] = [
    (GAIN, ((256, 384), (384, 512), (384,))),
    (GAIN_PIECES, ((256, 512), (512, 512), (512,))),
    (GAIN_TWO, ((256, 64), (64, 256), (64, 256), (1, 64))),
]
# Scores and attention of query heads in groups, with the depth on the partitions.
HEADS = _kernel(
    """
_, depth, n = q.shape
out = nl.ndarray((8, n, n), dtype=q.dtype, buffer=nl.shared_hbm)
for h in nl.affine_range(8):
    for row in nl.affine_range(n // 128):
        left = nl.load(q[h, 0:64, nl.ds(row * 128, 128)])
        for block in nl.affine_range(n // 256):
            keys = nl.load(k[h // 4, 0:64, nl.ds(block * 256, 256)])
            product = nisa.nc_matmul(left, keys)
            nl.store(out[h, nl.ds(row * 128, 128), nl.ds(block * 256, 256)], value=nl.copy(product))
return out
""",
    "q, k",
)
# The group from the shapes, a name for the key head, keys that are transposed, and a product with values.
HEADS_TURNED = _kernel(
    """
heads, n, _ = q.shape
kv_heads, length, _ = k.shape
group = heads // kv_heads
out = nl.ndarray((heads, n, 128), dtype=q.dtype, buffer=nl.shared_hbm)
for head in nl.affine_range(heads):
    key_head = head // group
    for row in nl.affine_range(n // 128):
        left = nl.copy(nisa.nc_transpose(nl.load(q[head, nl.ds(row * 128, 128), 0:128])))
        acc = nl.zeros((nl.par_dim(128), 128), dtype=nl.float32, buffer=nl.psum)
        for part in nl.affine_range(length // 128):
            keys = nl.load(k[key_head, nl.ds(part * 128, 128), 0:128])
            turned = nl.copy(nisa.nc_transpose(keys))
            weights = nl.tanh(nisa.nc_matmul(turned, left))
            acc += nisa.nc_matmul(weights, nl.load(v[key_head, nl.ds(part * 128, 128), 0:128]))
        nl.store(out[head, nl.ds(row * 128, 128), 0:128], value=nl.copy(acc))
return out
""",
    "q, k, v",
)
# Heads side by side in the rows; the total is a product of sizes; the member is used as well.
HEADS_WIDE = _kernel(
    """
rows, width = a.shape
rows, kv_width = b.shape
kv_heads = kv_width // 64
group = 3
out = nl.ndarray((rows, width), dtype=a.dtype, buffer=nl.shared_hbm)
for i in nl.affine_range(group * kv_heads):
    for t in nl.affine_range(rows // 128):
        one = nl.load(a[nl.ds(t * 128, 128), nl.ds(i * 64, 64)])
        other = nl.exp(nl.load(b[nl.ds(t * 128, 128), nl.ds((i // group) * 64, 64)]))
        same = nl.load(c[nl.ds(t * 128, 128), nl.ds((i % group) * 64, 64)])
        nl.store(out[nl.ds(t * 128, 128), nl.ds(i * 64, 64)], value=nl.multiply(nl.add(one, other), same))
return out
""",
    "a, b, c",
)
HEADS_BY_SHAPE = HEADS_WIDE.replace("group = 3", "heads = width // 64\n    group = heads // kv_heads").replace(
    "group * kv_heads", "heads"
)
HEADS_NESTED = (
    HEADS.replace(
        "    for h in nl.affine_range(8):", "    for g in nl.affine_range(2):\n     for member in nl.affine_range(4):"
    )
    .replace("h // 4", "g")
    .replace("[h,", "[4 * g + member,")
)
FIRES["resident-operand"].append((HEADS_NESTED, ((8, 64, 256), (2, 64, 256))))
FIRES["share-group-tiles"] = [
    (HEADS, ((8, 64, 256), (2, 64, 256))),
    (HEADS_TURNED, ((4, 128, 128), (2, 256, 128), (2, 256, 128))),
    (HEADS_WIDE, ((256, 384), (256, 128), (256, 192))),
    (HEADS_BY_SHAPE, ((256, 256), (256, 128), (256, 128))),
]
TAIL = _kernel(
    """
rows, n = x.shape
out = nl.ndarray((rows, n), dtype=x.dtype, buffer=nl.shared_hbm)
p = nl.arange(128)[:, None]
c = nl.arange(512)[None, :]
d = nl.arange(1024)[None, :]
for block in nl.affine_range((n + 1023) // 1024):
    whole = nl.ndarray((nl.par_dim(128), 1024), dtype=x.dtype, buffer=nl.sbuf)
    for piece in nl.affine_range(2):
        at = piece * 512 + c
        inside = block * 1024 + at < n
        part = nl.load(x[p, block * 1024 + at], mask=inside)
        whole[p, at] = nl.exp(part, mask=inside)
    nl.store(out[p, block * 1024 + d], value=whole[p, d], mask=block * 1024 + d < n)
return out
""",
    "x",
)
TAIL_PRODUCT = _kernel(
    """
depth, m = left.shape
width = right.shape[1]
out = nl.ndarray((m, width), dtype=left.dtype, buffer=nl.shared_hbm)
column = nl.arange(256)[None, :]
lane = nl.arange(128)[:, None]
stationary = nl.load(left[0:128, 0:m])
for b in nl.affine_range((width + 256 - 1) // 256):
    moving = nl.ndarray((nl.par_dim(128), 256), dtype=right.dtype, buffer=nl.sbuf)
    moving[lane, column] = nl.load(right[lane, 256 * b + column], mask=256 * b + column < width)
    for t in nl.affine_range(m // 128):
        total = nl.zeros((nl.par_dim(128), 256), dtype=nl.float32, buffer=nl.psum)
        total[lane, column] += nisa.nc_matmul(stationary[0:128, nl.ds(t * 128, 128)], moving[lane, column])
        done = nl.copy(total[lane, column])
        nl.store(out[t * 128 + lane, 256 * b + column], value=done[lane, column], mask=256 * b + column < width)
return out
""",
    "left, right",
)
TAIL_LITERAL = _kernel(
    """
v2 = nl.ndarray((64, 608), dtype=np.float32, buffer=nl.shared_hbm)
for i0 in nl.affine_range(2):
    v3 = nl.load(v1[nl.arange(64)[:, None], i0 * 512 + nl.arange(512)[None, :]], mask=i0 * 512 + nl.arange(512)[None, :] < 608)
    v4 = nisa.activation(op=nl.square, data=v3[nl.arange(64)[:, None], nl.arange(512)[None, :]], mask=i0 * 512 + nl.arange(512)[None, :] < 608)
    nl.store(v2[nl.arange(64)[:, None], i0 * 512 + nl.arange(512)[None, :]], value=v4[nl.arange(64)[:, None], nl.arange(512)[None, :]], mask=i0 * 512 + nl.arange(512)[None, :] < 608)
return v2
""",
    "v1",
)
FIRES["exact-tiles"] = [
    (TAIL, ((128, 1520),)),
    (TAIL, ((128, 1013),)),  # a prime: no width divides it
    (TAIL, ((128, 2048),)),
    (TAIL_PRODUCT, ((128, 256), (128, 600))),
    (TAIL_LITERAL, ((64, 608),)),
]
TURNED = _kernel(
    """
m, k = x.shape
_, n = w.shape
out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
right = nl.load(w[0:k, 0:n])
for row in nl.affine_range(m // 128):
    product = nisa.nc_matmul(nl.load_transpose2d(x[nl.ds(row * 128, 128), 0:k]), right)
    nl.store(out[nl.ds(row * 128, 128), 0:n], value=nl.copy(product))
return out
""",
    "x, w",
)
TURNED_LONG = _kernel(
    """
out = nl.ndarray((64, 1024), dtype=first.dtype, buffer=nl.shared_hbm)
for half in nl.affine_range(2):
    tall = nl.load_transpose2d(first[nl.ds(512 * half, 512), 0:64], dtype=nl.float32)
    nl.store(out[0:64, nl.ds(512 * half, 512)], value=nl.exp(tall))
return out
""",
    "first",
)
TURNED_GRIDS = _kernel(
    """
v9 = nl.ndarray((2, 96, 160), dtype=np.float32, buffer=nl.shared_hbm)
v5 = nl.ndarray((2, nl.par_dim(96), 160), dtype=np.float32, buffer=nl.sbuf)
for i0 in nl.affine_range(2):
    v5[i0, nl.arange(96)[:, None], nl.arange(160)[None, :]] = nisa.dma_transpose(v1[i0, nl.arange(160)[:, None], 96 + nl.arange(96)[None, :]], axes=(1, 0))
    nl.store(v9[i0, nl.arange(96)[:, None], nl.arange(160)[None, :]], value=v5[i0, nl.arange(96)[:, None], nl.arange(160)[None, :]])
return v9
""",
    "v1",
)
FIRES["transpose-on-tensor-engine"] = [
    (TURNED, ((256, 96), (96, 256))),
    (TURNED_LONG, ((1024, 64),)),
    (TURNED_GRIDS, ((2, 160, 192),)),
]
ROW_KEPT = _kernel(
    """
m, n = x.shape
out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
for row in nl.affine_range(m // 128):
    whole = nl.load(x[nl.ds(row * 128, 128), 0:n])
    grown = nl.ndarray((nl.par_dim(128), n), dtype=nl.float32, buffer=nl.sbuf)
    for c in nl.affine_range(n // 256):
        for half in nl.affine_range(2):
            grown[0:128, nl.ds(c * 256 + half * 128, 128)] = nl.exp(whole[0:128, nl.ds(c * 256 + half * 128, 128)])
        nl.store(out[nl.ds(row * 128, 128), nl.ds(c * 256, 256)], value=grown[0:128, nl.ds(c * 256, 256)])
return out
""",
    "x",
)
FIRES["coalesce-stores"] = [
    (ROW_KEPT, ((256, 1024),)),
    (STREAM, ((128, 1536),)),
    (HIGH_LEVEL, ((256, 256), (256, 512))),
    (carry_out(COUNTED, [Step("sink-buffer")]).source, ((128, 1024),)),
    (PIECES, ((128, 1536),)),
]
NEIGHBOURS = _kernel(
    """
m, n = x.shape
out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
for row in nl.affine_range(m // 128):
    for c in nl.affine_range(n // 512):
        low = nl.load(x[nl.ds(row * 128, 128), nl.ds(c * 512, 256)])
        grown = nl.exp(low)
        high = nl.load(x[nl.ds(row * 128, 128), nl.ds(c * 512 + 256, 256)])
        first = nl.subtract(grown, high)
        second = nl.add(high[0:128, 0:256], low[0:128, 0:256])
        nl.store(out[nl.ds(row * 128, 128), nl.ds(c * 512, 256)], value=first)
        nl.store(out[nl.ds(row * 128, 128), nl.ds(c * 512 + 256, 256)], value=second)
return out
""",
    "x",
)
NEIGHBOURS_GRIDS = _kernel(
    """
v9 = nl.ndarray((2, 64, 128), dtype=np.float32, buffer=nl.shared_hbm)
for i0 in nl.affine_range(2):
    v4 = nl.load(v1[i0, nl.arange(64)[:, None], 256 + nl.arange(128)[None, :]], dtype=np.float32)
    v3 = nl.load(v1[i0, nl.arange(64)[:, None], 128 + nl.arange(128)[None, :]], dtype=np.float32)
    v2 = nl.load(v1[i0, nl.arange(64)[:, None], nl.arange(128)[None, :]], dtype=np.float32)
    v5 = nisa.tensor_tensor(v2[nl.arange(64)[:, None], nl.arange(128)[None, :]], v4[nl.arange(64)[:, None], nl.arange(128)[None, :]], op=np.multiply)
    v6 = nisa.tensor_scalar(data=v5, op0=np.add, operand0=v3[nl.arange(64)[:, None], 5])
    nl.store(v9[i0, nl.arange(64)[:, None], nl.arange(128)[None, :]], value=v6)
return v9
""",
    "v1",
)
NEIGHBOURS_PRODUCT = _kernel(
    """
k, m = left.shape
out = nl.ndarray((256, 256), dtype=left.dtype, buffer=nl.shared_hbm)
a = nl.load(left[0:k, 0:128])
b = nl.load(left[0:k, 128:256])
moving = nl.load(right[0:k, 0:256])
nl.store(out[0:128, 0:256], value=nl.copy(nisa.nc_matmul(a, moving)))
nl.store(out[128:256, 0:256], value=nl.copy(nisa.nc_matmul(b, moving)))
return out
""",
    "left, right",
)
FIRES["coalesce-loads"] = [
    (NEIGHBOURS, ((256, 1024),)),
    (NEIGHBOURS_GRIDS, ((2, 64, 384),)),
    (NEIGHBOURS_PRODUCT, ((96, 256), (96, 256))),
]
MASKED_ROWS = _kernel(
    """
rows, columns = a.shape
out = nl.ndarray((rows, columns), dtype=a.dtype, buffer=nl.shared_hbm)
p = nl.arange(128)[:, None]
c = nl.arange(256)[None, :]
for tile in nl.affine_range((rows + 127) // 128):
    at = tile * 128 + p
    inside = at < rows
    for block in nl.affine_range(columns // 256):
        one = nl.load(a[at, block * 256 + c], mask=inside)
        two = nl.load(b[at, block * 256 + c], mask=inside)
        result = nl.ndarray((nl.par_dim(128), 256), dtype=a.dtype, buffer=nl.sbuf)
        grown = nisa.activation(op=nl.exp, data=one, scale=0.5, mask=inside)
        result[p, c] = nl.subtract(grown[p, c], two, mask=inside)
        nl.store(out[at, block * 256 + c], value=result, mask=inside)
return out
""",
    "a, b",
)
MASKED_WHOLE_ROWS = _kernel(
    """
v9 = nl.ndarray((300, 64), dtype=np.float32, buffer=nl.shared_hbm)
for i0 in nl.affine_range(3):
    v2 = nl.load(v1[i0 * 128 + nl.arange(128)[:, None], nl.arange(64)[None, :]], mask=i0 * 128 + nl.arange(128)[:, None] < 300)
    v3 = nisa.tensor_scalar(data=v2[nl.arange(128)[:, None], nl.arange(64)[None, :]], op0=np.multiply, operand0=3.0, mask=i0 * 128 + nl.arange(128)[:, None] < 300)
    nl.store(v9[i0 * 128 + nl.arange(128)[:, None], nl.arange(64)[None, :]], value=nl.square(v3), mask=i0 * 128 + nl.arange(128)[:, None] < 300)
return v9
""",
    "v1",
)
FIRES["flatten-rows"] = [
    (MASKED_ROWS, ((200, 512), (200, 512))),
    (MASKED_ROWS, ((83, 256), (83, 256))),
    (MASKED_ROWS.replace("128", "64").replace("127", "63"), ((100, 768), (100, 768))),
    (
        MASKED_ROWS.replace("((rows + 127) // 128)", "(tiles)").replace(
            "p = nl", "tiles = (rows + 127) // 128\n    p = nl"
        ),
        ((200, 512), (200, 512)),
    ),
    (MASKED_WHOLE_ROWS, ((300, 64),)),
    (carry_out(MASKED_ROWS, [Step("widen-tiles")]).source, ((160, 1024), (160, 1024))),
]
FIRES["sink-buffer"] = [
    (COUNTED, ((128, 1024),)),
    (carry_out(CENTRED, [Step("strip-fusion")]).source, ((256, 1024),)),
    (carry_out(GRIDS, [Step("strip-fusion")]).source, ((2, 2, 128, 512),)),
]

MISSES: dict[str, list[str]] = {
    "flatten-rows": [
        # No mask; another mask; other rows; a row that all share; a value of each row; a sum over the row.
        MASKED_ROWS.replace(", mask=inside", ""),
        MASKED_ROWS.replace("inside = at < rows", "inside = at < 100"),
        MASKED_ROWS.replace("b[at, block", "b[at + 1, block"),
        MASKED_ROWS.replace("two = nl.load(b[at, block * 256 + c]", "two = nl.load(b[at, c]"),
        MASKED_ROWS.replace("scale=0.5", "scale=nl.load(b[at, 0:1], mask=inside)"),
        MASKED_ROWS.replace(
            "nl.subtract(grown[p, c], two, mask=inside)", "nl.subtract(grown, nl.max(two, axis=[1]), mask=inside)"
        ),
        # Not all rows or columns; a loop in order; a number that depends on the row; a tensor that is read
        # later, or has more columns.
        MASKED_ROWS.replace("(rows + 127) // 128", "rows // 128"),
        MASKED_ROWS.replace("columns // 256", "columns // 512"),
        MASKED_ROWS.replace("for tile in nl.affine_range", "for tile in nl.sequential_range"),
        MASKED_ROWS.replace("scale=0.5", "scale=0.5 * tile"),
        MASKED_ROWS.replace("    return out", "    spare = nl.load(out[0:128, 0:256])\n    return out"),
        MASKED_WHOLE_ROWS.replace("nl.ndarray((300, 64)", "nl.ndarray((300, 65)"),
    ],
    "coalesce-stores": [
        # A mask; gaps between the chunks; the row or the chunk changes afterwards; a tensor that is read in between.
        TAIL,
        ROW_KEPT.replace(
            "out[nl.ds(row * 128, 128), nl.ds(c * 256, 256)]", "out[nl.ds(row * 128, 128), nl.ds(c * 512, 256)]"
        ),
        ROW_KEPT.replace("nl.ds(c * 256 + half * 128, 128)] = ", "nl.ds(c * 256 + half * 256, 128)] = "),
        ROW_KEPT.replace(
            "    return out",
            "            grown[0:128, nl.ds(c * 256, 256)] = nl.exp(whole[0:128, 0:256])\n    return out",
        ),
        STREAM.replace(
            "    return out", "            spare = nl.load(out[nl.ds(tile * 128, 128), 0:256])\n    return out"
        ),
        # Rows that move with the chunk; a row that does not fit; a tile that is a sum over the chunks.
        STREAM.replace("out[nl.ds(tile * 128, 128)", "out[nl.ds((tile + block) * 128, 128)"),
        STREAM.replace("256", "4096"),
        SUMS,
        PARTIAL_REDUCE,
    ],
    "coalesce-loads": [
        # A gap; other rows; a mask; a tensor that is written in between; a view under another name.
        NEIGHBOURS.replace(
            "high = nl.load(x[nl.ds(row * 128, 128), nl.ds(c * 512 + 256",
            "high = nl.load(x[nl.ds(row * 128, 128), nl.ds(c * 512 + 255",
        ),
        NEIGHBOURS.replace("high = nl.load(x[nl.ds(row * 128", "high = nl.load(x[nl.ds(row * 64"),
        NEIGHBOURS.replace("256, 256)])\n            first", "256, 256)], mask=c < 2)\n            first"),
        NEIGHBOURS.replace(
            "grown = nl.exp(low)",
            "grown = nl.exp(low)\n            nl.store(x[nl.ds(row * 128, 128), nl.ds(c * 512 + 256, 256)], value=grown)",
        ),
        NEIGHBOURS.replace(
            "grown = nl.exp(low)", "part = low[0:128, 0:256]\n            grown = nl.exp(part[0:128, 0:64])"
        ),
        NEIGHBOURS.replace("256", "2304"),
    ],
    "transpose-on-tensor-engine": [
        # A mask; a height that is not known, or a prime; whole numbers; the upper partitions of a tile; own placement.
        TURNED_LONG.replace("0:64], dtype=nl.float32", "0:64], mask=nl.arange(512)[:, None] < 500"),
        TURNED.replace("nl.ds(row * 128, 128), 0:k]), right", "nl.ds(row * 128, m // 2), 0:k]), right"),
        TURNED_LONG.replace("512 * half, 512), 0:64]", "512 * half, 509), 0:64]"),
        TURNED_LONG.replace("dtype=nl.float32)", "dtype=nl.int32)"),
        TURNED_GRIDS.replace("v5[i0, nl.arange(96)[:, None]", "v5[i0, 32 + nl.arange(96)[:, None]"),
        TURNED_GRIDS.replace("axes=(1, 0)", "axes=(0, 1)"),
        TURNED_GRIDS.replace("np.float32, buffer=nl.sbuf", "np.float32, buffer=ncc.sbuf.alloc(place)"),
    ],
    "strip-fusion": [
        # The second loop reads all rows, a shifted row, or something else in between; or a loop carries a value.
        CENTRED.replace("operand0=peaks[r, 0:128, 0:1]", "operand0=peaks[0, 0:128, 0:1]"),
        CENTRED.replace("data=kept[r, c, 0:128, 0:256], op0", "data=kept[rows // 128 - 1 - r, c, 0:128, 0:256], op0"),
        CENTRED.replace(
            "for r in nl.affine_range(rows // 128):\n        for c",
            "spare = nl.copy(kept[0, 0, 0:128, 0:256])\n    for r in nl.affine_range(rows // 128):\n        for c",
        ),
        CENTRED.replace("for c in nl.affine_range", "for c in nl.sequential_range"),
        CENTRED.replace("return out", "return out, kept"),
    ],
    "sink-buffer": [
        CENTRED,
        COUNTED.replace("data=t0[i, ", "data=t0[3 - i, ").replace("value=t1[i, ", "value=t1[3 - i, "),
    ],
    "tile-scan": [
        # A state that is not a number, rows used in parts, a reduction over the row.
        RECURRENCE.replace("initial=0,", "initial=g[0:128, 0:1],"),
        RECURRENCE.replace(
            "nisa.activation(op=nl.sigmoid, data=g, scale=-0.5)",
            "nisa.activation(op=nl.exp, data=g, scale=nl.max(g, axis=[1]))",
        ),
        RECURRENCE.replace("value=nl.multiply(state, g)", "value=nl.matmul(state, g)"),
        FIXED_ROW.replace("3072", "512"),
    ],
    "pack-rotation": [
        # No rotation: both are sums, other factors, or a half is used elsewhere.
        ROTATION.replace("nl.subtract", "nl.add"),
        ROTATION.replace("nl.multiply(low, c))", "nl.multiply(low, s))"),
        ROTATION.replace("value=result)", "value=nl.add(result, whole))").replace(
            "low = nl.copy(whole[half:height, 0:256])",
            "low = nl.copy(whole[half:height, 0:256])\n        extra = nl.exp(c)",
        ),
    ],
    "shared-transpose": [
        HIGH_LEVEL.replace("    strip = nl.load", "    unused = nl.load").replace(
            "            tile = nl",
            "            strip = nl.load(x[nl.ds(row * 128, 128), 0:k])\n                tile = nl",
        ),
        HIGH_LEVEL.replace(
            "nl.matmul(strip[0:128, nl.ds(inner * 128, 128)], tile)",
            "nl.matmul(strip[0:128, nl.ds(inner * 128, 128)], tile, transpose_x=True)",
        ),
        HIGH_LEVEL.replace("strip[0:128, nl.ds(inner * 128, 128)]", "strip[0:128, nl.ds(inner * 64, 128)]"),
    ],
    "row-blocking": [
        # The contraction runs backwards, the left side depends on the columns, or too many accumulators would be open.
        BLOCKED.replace("right[step, 0:128, 0:512])", "right[k // 128 - 1 - step, 0:128, 0:512])"),
        BLOCKED.replace(
            "strip = nl.load(a[nl.ds(row * 128, 128), 0:k])",
            "strip = nl.load(a[nl.ds((row + column) * 128, 128), 0:k])",
        ),
        BLOCKED.replace("for column in nl.affine_range", "for column in nl.sequential_range"),
        ROWS_OUTSIDE.replace("for row in nl.affine_range", "for row in nl.sequential_range"),
        ROWS_OUTSIDE.replace("nl.ds(step * 128, 128), nl.ds(column * 256, 256)]", "nl.ds(row * 128, 128), 0:256]"),
        BLOCKED.replace("for step in nl.affine_range(k // 128)", "for step in nl.affine_range(k // 256)"),
        BLOCKED_PIECES.replace("for h in nl.affine_range(2)", "for h in nl.affine_range(4)")
        .replace("256]", "128]")
        .replace("(h * 256, 256)", "(h * 128, 128)")
        .replace("0:256", "0:128")
        .replace("nl.par_dim(128), 256)", "nl.par_dim(128), 128)"),
    ],
    "defer-row-scale": [
        # The scaled tile has another reader, the scale is a row, the scale changes inside the sum.
        DEFERRED.replace("        for part", "        spare = nl.exp(scaled)\n            for part", 1),
        DEFERRED.replace("operand0=scale)", "operand0=0.5)"),
        DEFERRED.replace(
            "data=weights[0:128, nl.ds(block * 256, 256)], op0=nl.multiply, operand0=scale)",
            "data=weights[0:128, nl.ds(block * 256, 256)], op0=nl.multiply, operand0=weights[0:128, nl.ds(block, 1)])",
        ),
        DEFERRED.replace("op0=nl.multiply", "op0=nl.add"),
    ],
    "sum-on-tensor-engine": [
        SUMS.replace("256", "1024"),
        SUMS.replace("nl.zeros((nl.par_dim(128), 256)", "nl.full((nl.par_dim(128), 256), 1.0"),
        SUMS.replace("for kind in nl.affine_range", "for kind in nl.sequential_range"),
        SUMS.replace("acc[0:128, 0:256] += squared", "acc[0:128, 0:256] *= squared"),
    ],
    "resident-operand": [
        # The operand depends on the row, does not fit, or is masked; the outer loop carries something.
        HIGH_LEVEL.replace("nl.ds(column * 256, 256)])\n", "nl.ds((row + column) * 256, 256)])\n"),
        HIGH_LEVEL.replace("n // 256", "64").replace("k // 128", "8"),
        HIGH_LEVEL.replace("nl.ds(column * 256, 256)])\n", "nl.ds(column * 256, 256)], mask=column < 2)\n"),
        HIGH_LEVEL.replace("for row in nl.affine_range", "for row in nl.sequential_range"),
    ],
    "fuse-loops": [
        # Tiles of other iterations, another range, the complete sum, a value from between, a carried loop.
        IN_PASSES.replace("grown[j, 0:128, nl.ds", "grown[columns // 256 - 1 - j, 0:128, nl.ds"),
        IN_PASSES.replace("for j in nl.affine_range(columns // 256)", "for j in nl.affine_range(columns // 512)"),
        IN_PASSES.replace("nl.copy(grown[j, 0:128, nl.ds(h * 128, 128)])", "nl.add(grown[j, 0:128, 0:128], sums)"),
        IN_PASSES.replace("nl.copy(grown[j, 0:128, nl.ds(h * 128, 128)])", "nl.add(grown[j, 0:128, 0:128], inverse)"),
        IN_PASSES.replace("for i in nl.affine_range", "for i in nl.sequential_range"),
        IN_PASSES_2D.replace(
            "nl.exp(kept[0:128, nl.ds(two * 256, 256)])", "nl.exp(kept[0:128, nl.ds(two * 128, 256)])"
        ),
        IN_PASSES_2D.replace("for two", "kept[0:128, 0:256] = nl.load(first[0:128, 256:512])\n    for two"),
    ],
    "accumulate-in-psum": [
        # Wider than a bank; not zero at first; read inside the loop; a maximum; another tile every time.
        PARTIAL.replace("384", "1024"),
        PARTIAL.replace("nl.zeros((nl.par_dim(128), 384)", "nl.full((nl.par_dim(128), 384), 1.0"),
        PARTIAL.replace("        nl.store(out", "            spare = nl.exp(total)\n        nl.store(out"),
        PARTIAL_SEQUENCE.replace("nl.add(total", "nl.maximum(total"),
        PARTIAL_REDUCE.replace("op=np.add", "op=np.max"),
        PARTIAL_REDUCE.replace("loop_indices=[step]", "loop_indices=[row]"),
        PARTIAL_UPDATE.replace("total[...] += product", "total[...] += nl.exp(product)"),
    ],
    "join-products": [
        # A difference; a scaled side; a product that is read twice, kept between rows, or transposed; another tile.
        SIDE.replace("nl.add(kept, added)", "nl.subtract(kept, added)"),
        SIDE.replace("nl.copy(side)", "nisa.tensor_scalar(side, op0=nl.multiply, operand0=0.5)"),
        SIDE.replace("nl.add(kept, added)", "nl.add(kept, nl.multiply(kept, added))"),
        SIDE.replace("value=total", "value=nl.add(total, added)"),
        SIDE.replace("nisa.nc_matmul(few, nl.load(b[0:64, 0:384]))", "nl.load(b[0:128, 0:384])"),
        SIDE.replace(
            "    for row", "    main = nl.zeros((nl.par_dim(128), 384), dtype=nl.float32, buffer=nl.psum)\n    for row"
        ).replace("        main = nl.zeros((nl.par_dim(128), 384), dtype=nl.float32, buffer=nl.psum)\n", ""),
        SIDE.replace("nl.zeros((nl.par_dim(128), 384)", "nl.full((nl.par_dim(128), 384), 1.0"),
        SIDE.replace("added = nl.copy(side)", "added = nl.copy(side, dtype=nl.bfloat16)"),
        SIDE.replace("nisa.nc_matmul(few, nl", "nisa.nc_matmul(few, mask=row < 1, moving=nl"),
    ],
    "gain-into-weight": [
        # The right side is loaded for every row, used elsewhere, or in another order; the scaled tile has another reader.
        GAIN.replace("right[step, 0:128, 0:512])", "nl.load(w[nl.ds(step * 128, 128), 0:512]))"),
        GAIN.replace("value=nl.copy(acc)", "value=nl.add(acc, right[0, 0:128, 0:512])"),
        GAIN.replace("right[step, 0:128", "right[k // 128 - 1 - step, 0:128"),
        GAIN.replace("value=nl.copy(acc)", "value=nl.add(acc, scaled[0:128, 0:512])"),
        # The gain is added; belongs to the rows; is a part of a longer one; differs from row tile to row tile.
        GAIN.replace("nl.multiply(lowered", "nl.add(lowered"),
        GAIN.replace("gain.broadcast_to((128, k))", "peak"),
        GAIN.replace("0:1, 0:k])", "0:1, 0 : k // 2])"),
        GAIN.replace("k))[0:1, 0:k]", "m))[0:1, nl.ds(row, 128)]"),
        GAIN_PIECES.replace("grown[0:128, nl.ds(half * 128, 128)]", "grown[0:128, nl.ds(128 - half * 128, 128)]"),
        GAIN_PIECES.replace("turned[2 * piece + half", "turned[piece + half"),
        GAIN_TWO.replace("nisa.nc_transpose(both)", "nl.exp(nisa.nc_transpose(both))"),
        GAIN_TWO.replace("nl.load(s[0:64, 0:256])", "nl.exp(nl.load(s[0:64, 0:256]))"),
    ],
    "share-group-tiles": [
        # Loops that are nested already; groups that may differ in size; every head has keys of its own; an index that is not the head alone.
        HEADS_NESTED,
        HEADS.replace("affine_range(8)", "affine_range(6)"),
        HEADS.replace("affine_range(8)", "affine_range(q.shape[0])"),
        HEADS.replace("k[h // 4", "k[h").replace("out[h,", "out[h // 4 * 4,"),
        HEADS.replace("h // 4", "(h + 1) // 4"),
        # Keys that depend on the member, that do not fit, or that are masked; a loop that carries something.
        HEADS.replace("nl.ds(block * 256, 256)])\n", "nl.ds((block + h % 4) * 256, 256)])\n"),
        HEADS.replace("n // 256", "128").replace("n // 128", "1"),
        HEADS.replace("256, 256)])\n", "256, 256)], mask=h < 7)\n"),
        HEADS.replace("for h in nl.affine_range", "for h in nl.sequential_range"),
        # Nothing says that there are as many keys as the group was computed from; the group changes.
        HEADS_TURNED.replace("kv_heads, length, _ = k.shape", "kv_heads = t.shape[0]\n    others, length, _ = k.shape"),
        HEADS_TURNED.replace("    key_head =", "    group = 2\n        key_head ="),
        HEADS_BY_SHAPE.replace("kv_width // 64", "kv_width // 32"),
    ],
    "exact-tiles": [
        # Rows are masked; a constant limit that is not the axis; too few tiles; a sum over the axis; another step.
        TAIL.replace("block * 1024 + at < n", "p + block < rows"),
        TAIL.replace("mask=block * 1024 + d < n)", "mask=block * 1024 + d < 700)"),
        TAIL.replace("(n + 1023) // 1024", "n // 1024"),
        TAIL.replace("nl.exp(part, mask=inside)", "nl.add(part, nl.max(part, axis=[1]), mask=inside)"),
        TAIL.replace("block * 1024 + d], value", "block * 512 + d], value"),
        TAIL_PRODUCT.replace("moving[lane, column])", "stationary[0:128, 0:256])"),
    ],
    "broadcast-in-psum": [
        # Wider than a bank; read twice; the other operand is a broadcast too; a column, not a row.
        ROWS.replace("384", "1024"),
        ROWS.replace("moved = nl.add(grown, shift.broadcast_to((128, 384)))", "moved = nl.exp(grown)").replace(
            "grown = nisa.tensor_tensor(big, gain.broadcast_to((128, 384)), op=nl.multiply)",
            "wide = gain.broadcast_to((128, 384))\n        grown = nl.multiply(nl.multiply(big, wide), wide)",
        ),
        NARROW_ROWS.replace("nl.subtract(spread, part)", "nl.exp(spread)"),
    ],
    "merge-pieces": [
        PIECES.replace(
            "nisa.tensor_tensor(grown, small, op=nl.add)",
            "nisa.tensor_scalar(data=grown, op0=nl.add, operand0=nl.max(small, axis=[1]))",
        ),
        PIECES.replace("data=small", "data=big[0:128, 0:256]"),
        # A mask on the columns, behind a name.
        TAIL,
    ],
    "widen-tiles": [
        STREAM.replace("value=nl.exp(big)", "value=nl.softmax(big)"),
        STREAM.replace("nl.ds(block * 256, 256)], value", "nl.ds(0, 256)], value"),
        STREAM.replace("nl.ds(block * 256, 256)])", "nl.ds(block * 128, 256)])"),
    ],
    "affine-loop": [
        STREAM_RANGE.replace("out[0:rows, at : at + 256]", "out[0:rows, 0:256]"),
        STREAM_RANGE.replace("for at in range(0, columns, 256):", "for at in range(0, columns, 128):"),
        STREAM_RANGE.replace(
            "    for at", "    carry = nl.zeros((nl.par_dim(96), 256), dtype=nl.float32, buffer=nl.sbuf)\n    for at"
        )
        .replace("value=nl.exp(big)", "value=carry")
        .replace("        nl.store", "        carry[0:96, 0:256] += big\n        nl.store"),
    ],
    "operand-in-psum": [
        BETWEEN.replace("256", "1024"),
        BETWEEN.replace("product, q, op=nl.add", "product, product, op=nl.add"),
        BETWEEN.replace("nisa.tensor_tensor(product, q, op=nl.add)", "nisa.activation(op=nl.exp, data=product)"),
    ],
}


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_fires_and_keeps_the_result(rule: str) -> None:
    for source, shapes in FIRES[rule]:
        sites = sites_of(source, rule)
        assert sites, f"{rule} does not fire on\n{source}"
        for site in sites:
            outcome = carry_out(source, [Step(rule, site.anchor, site.occurrence, site.parameters)])
            assert outcome.changed, outcome.skipped
            assert_equal_results(source, outcome.source, *shapes)


@pytest.mark.parametrize("rule", MISSES)
def test_a_rule_leaves_near_misses_alone(rule: str) -> None:
    originals = {source for source, _ in FIRES[rule]}
    for source in MISSES[rule]:
        assert source not in originals
        Kernel.parse(source)
        assert sites_of(source, rule) == (), f"{rule} fires on\n{source}"


def test_every_structural_rule_is_tested_both_ways() -> None:
    assert {rule.id for rule in (*STRUCTURAL, *CLEANUP)} == set(FIRES) == set(MISSES)
