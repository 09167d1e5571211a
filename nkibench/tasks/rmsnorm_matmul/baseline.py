import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = 128  # rows of a tile
ROW_TILES = 8  # row tiles per outer block
COLUMNS = 512  # columns per instruction
WEIGHT_COLUMNS = 1024  # columns per weight block


@nki.jit
def kernel(x, w):
    """Rows of x (m, k) over their root mean square, times w (k, n).

    m is a multiple of 1024, n of 1024 and k of 512.
    """
    m, k = x.shape
    _, n = w.shape
    k_tiles = k // PARTITIONS
    k_pieces = k // COLUMNS
    tiles_per_piece = COLUMNS // PARTITIONS
    out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(PARTITIONS, dtype=np.float32)))

    for block in nl.affine_range(m // (ROW_TILES * PARTITIONS)):
        # Normalised rows with k on the partitions, as the product needs them.
        x_transposed = nl.ndarray(
            (ROW_TILES, k_tiles, nl.par_dim(PARTITIONS), PARTITIONS), dtype=x.dtype, buffer=nl.sbuf
        )
        for tile in nl.affine_range(ROW_TILES):
            first_row = (block * ROW_TILES + tile) * PARTITIONS

            # Statistics: mean of the squares, each square scaled before the sum.
            x_tile = nl.load(x[nl.ds(first_row, PARTITIONS), 0:k])
            mean_square = nl.ndarray((nl.par_dim(PARTITIONS), 1), dtype=x.dtype, buffer=nl.sbuf)
            for piece in nl.affine_range(k_pieces):
                square = nisa.activation(op=nl.square, data=x_tile[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)])
                scaled_square = nisa.tensor_scalar(data=square, op0=nl.multiply, operand0=1.0 / k)
                piece_sum = nisa.tensor_reduce(nl.add, data=scaled_square, axis=[1], keepdims=True)
                mean_square[0:PARTITIONS, 0:1] = nl.loop_reduce(piece_sum, op=np.add, loop_indices=[piece])
            reciprocal_rms = nisa.activation(op=nl.rsqrt, data=mean_square)

            # Scaling: x again, then 128 x 128 transposes on the tensor engine.
            x_again = nl.load(x[nl.ds(first_row, PARTITIONS), 0:k])
            for piece in nl.affine_range(k_pieces):
                normalised = nisa.tensor_scalar(
                    data=x_again[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)],
                    op0=nl.multiply,
                    operand0=reciprocal_rms,
                )
                for part in nl.affine_range(tiles_per_piece):
                    transposed = nisa.nc_matmul(
                        normalised[0:PARTITIONS, nl.ds(part * PARTITIONS, PARTITIONS)],
                        identity,
                        is_moving_onezero=True,
                        is_transpose=True,
                    )
                    x_transposed[tile, piece * tiles_per_piece + part, 0:PARTITIONS, 0:PARTITIONS] = nl.copy(transposed)

        for w_block in nl.affine_range(n // WEIGHT_COLUMNS):
            w_tiles = nl.ndarray((k_tiles, nl.par_dim(PARTITIONS), WEIGHT_COLUMNS), dtype=w.dtype, buffer=nl.sbuf)
            for k_tile in nl.affine_range(k_tiles):
                w_tiles[k_tile, 0:PARTITIONS, 0:WEIGHT_COLUMNS] = nl.load(
                    w[nl.ds(k_tile * PARTITIONS, PARTITIONS), nl.ds(w_block * WEIGHT_COLUMNS, WEIGHT_COLUMNS)]
                )
            for tile in nl.affine_range(ROW_TILES):
                out_tile = nl.ndarray((nl.par_dim(PARTITIONS), WEIGHT_COLUMNS), dtype=x.dtype, buffer=nl.sbuf)
                for piece in nl.affine_range(WEIGHT_COLUMNS // COLUMNS):
                    product = nl.zeros((nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for k_tile in nl.affine_range(k_tiles):
                        product += nisa.nc_matmul(
                            x_transposed[tile, k_tile, 0:PARTITIONS, 0:PARTITIONS],
                            w_tiles[k_tile, 0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)],
                        )
                    out_tile[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)] = nl.copy(product)
                nl.store(
                    out[
                        nl.ds((block * ROW_TILES + tile) * PARTITIONS, PARTITIONS),
                        nl.ds(w_block * WEIGHT_COLUMNS, WEIGHT_COLUMNS),
                    ],
                    value=out_tile,
                )

    return out
