import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = nl.tile_size.pmax  # 128 channels per tile


@nki.jit
def kernel(delta, u, a, b, c):
    """Selective scan; delta and u are (channels, steps), a is (channels, states), b and c are (states, steps).

    channels is a multiple of 128. One state at a time: its recurrence runs over whole rows, and its contribution is
    added to a sum that stays on chip.
    """
    channels, steps = delta.shape
    _, states = a.shape
    channel_tiles = channels // PARTITIONS
    out = nl.ndarray((channels, steps), dtype=delta.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((channel_tiles, nl.par_dim(PARTITIONS), steps), dtype=delta.dtype, buffer=nl.sbuf)

    for state in nl.affine_range(states):
        for tile in nl.affine_range(channel_tiles):
            first = tile * PARTITIONS
            delta_tile = nl.load(delta[first : first + PARTITIONS, 0:steps])
            u_tile = nl.load(u[first : first + PARTITIONS, 0:steps])
            a_column = nl.load(a[first : first + PARTITIONS, state])
            b_row = nl.load(b[state : state + 1, 0:steps])
            c_row = nl.load(c[state : state + 1, 0:steps])

            decay = nisa.activation(op=nl.exp, data=delta_tile, scale=a_column)
            delta_u = nisa.tensor_tensor(delta_tile, u_tile, op=nl.multiply)
            drive = nisa.tensor_tensor(delta_u, b_row.broadcast_to((PARTITIONS, steps)), op=nl.multiply)
            h = nisa.tensor_tensor_scan(decay, drive, initial=0, op0=np.multiply, op1=np.add)
            weighted = nisa.tensor_tensor(h, c_row.broadcast_to((PARTITIONS, steps)), op=nl.multiply)
            total[tile, 0:PARTITIONS, 0:steps] += weighted

    for tile in nl.affine_range(channel_tiles):
        first = tile * PARTITIONS
        nl.store(out[first : first + PARTITIONS, 0:steps], value=total[tile, 0:PARTITIONS, 0:steps])

    return out
