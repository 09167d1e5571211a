import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

COLUMNS = 512  # positions per tile


@nki.jit
def kernel(x, cos, sin):
    """Rotary embedding of x, (depth, positions), with cos and sin, (depth/2, positions).

    depth is at most 128 and lies on the partitions; positions is a multiple of 512.
    """
    depth, positions = x.shape
    half = depth // 2
    out = nl.ndarray((depth, positions), dtype=x.dtype, buffer=nl.shared_hbm)

    for start in range(0, positions, COLUMNS):
        x_tile = nl.load(x[0:depth, start : start + COLUMNS])
        cos_tile = nl.load(cos[0:half, start : start + COLUMNS])
        sin_tile = nl.load(sin[0:half, start : start + COLUMNS])

        # Both inputs of an instruction must start on the same partition: copy the lower half up.
        x0 = x_tile[0:half, 0:COLUMNS]
        x1 = nl.copy(x_tile[half:depth, 0:COLUMNS])

        x0_cos = nisa.tensor_tensor(x0, cos_tile, op=nl.multiply)
        x1_cos = nisa.tensor_tensor(x1, cos_tile, op=nl.multiply)
        x0_sin = nisa.tensor_tensor(x0, sin_tile, op=nl.multiply)
        x1_sin = nisa.tensor_tensor(x1, sin_tile, op=nl.multiply)

        out_tile = nl.ndarray((nl.par_dim(depth), COLUMNS), dtype=x.dtype, buffer=nl.sbuf)
        out_tile[0:half, 0:COLUMNS] = nisa.tensor_tensor(x0_cos, x1_sin, op=nl.subtract)
        out_tile[half:depth, 0:COLUMNS] = nisa.tensor_tensor(x1_cos, x0_sin, op=nl.add)
        nl.store(out[0:depth, start : start + COLUMNS], value=out_tile)

    return out
