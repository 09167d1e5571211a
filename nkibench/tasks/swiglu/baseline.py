import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = 128  # rows or columns of a tile
BLOCK_ROWS = 512  # rows of x per product: hidden features are computed transposed
BLOCK_COLUMNS = 1024  # columns of w_gate and w_up kept on chip at a time
COLUMNS = 512  # output columns per instruction


@nki.jit
def kernel(x, w_up, w_down, w_gate):
    """(silu(x @ w_gate) * (x @ w_up)) @ w_down; x is (m, k), w_up and w_gate (k, n), w_down (n, k).

    m is a multiple of 512, n of 1024, k of 512. Gate features stay on chip, the hidden features go through HBM; x is
    loaded and transposed for the gate and again for the up projection, in every column block.
    """
    m, k = x.shape
    _, n = w_up.shape
    k_tiles = k // PARTITIONS
    row_blocks = m // BLOCK_ROWS
    row_parts = BLOCK_ROWS // PARTITIONS
    column_blocks = n // BLOCK_COLUMNS
    column_parts = BLOCK_COLUMNS // PARTITIONS
    out = nl.ndarray((m, k), dtype=x.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(PARTITIONS, dtype=np.float32)))
    gate = nl.ndarray(
        (column_blocks, column_parts, row_blocks, nl.par_dim(PARTITIONS), BLOCK_ROWS),
        dtype=nl.float32,
        buffer=nl.sbuf,
    )
    hidden = nl.ndarray(
        (column_blocks, column_parts, row_blocks, PARTITIONS, BLOCK_ROWS), dtype=nl.float32, buffer=nl.hbm
    )

    # Gate projection.
    for column_block in nl.affine_range(column_blocks):
        columns = nl.ds(column_block * BLOCK_COLUMNS, BLOCK_COLUMNS)
        gate_weights = nl.ndarray((k_tiles, nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=w_gate.dtype, buffer=nl.sbuf)
        for k_tile in nl.affine_range(k_tiles):
            gate_weights[k_tile, 0:PARTITIONS, 0:BLOCK_COLUMNS] = nl.load(
                w_gate[nl.ds(k_tile * PARTITIONS, PARTITIONS), columns]
            )
        for block in nl.affine_range(row_blocks):
            x_transposed = nl.ndarray((nl.par_dim(PARTITIONS), k_tiles, BLOCK_ROWS), dtype=x.dtype, buffer=nl.sbuf)
            for row_part in nl.affine_range(row_parts):
                x_tile = nl.load(x[nl.ds((block * row_parts + row_part) * PARTITIONS, PARTITIONS), 0:k])
                for k_tile in nl.affine_range(k_tiles):
                    transposed = nisa.nc_matmul(
                        x_tile[0:PARTITIONS, nl.ds(k_tile * PARTITIONS, PARTITIONS)],
                        identity,
                        is_moving_onezero=True,
                        is_transpose=True,
                    )
                    x_transposed[0:PARTITIONS, k_tile, nl.ds(row_part * PARTITIONS, PARTITIONS)] = nl.copy(transposed)
            for part in nl.affine_range(column_parts):
                product = nl.zeros((nl.par_dim(PARTITIONS), BLOCK_ROWS), dtype=nl.float32, buffer=nl.psum)
                for k_tile in nl.affine_range(k_tiles):
                    product += nisa.nc_matmul(
                        gate_weights[k_tile, 0:PARTITIONS, nl.ds(part * PARTITIONS, PARTITIONS)],
                        x_transposed[0:PARTITIONS, k_tile, 0:BLOCK_ROWS],
                    )
                gate[column_block, part, block, 0:PARTITIONS, 0:BLOCK_ROWS] = nl.copy(product)

    # Up projection, activation of the gate, and their product.
    for column_block in nl.affine_range(column_blocks):
        columns = nl.ds(column_block * BLOCK_COLUMNS, BLOCK_COLUMNS)
        up_weights = nl.ndarray((k_tiles, nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=w_up.dtype, buffer=nl.sbuf)
        for k_tile in nl.affine_range(k_tiles):
            up_weights[k_tile, 0:PARTITIONS, 0:BLOCK_COLUMNS] = nl.load(
                w_up[nl.ds(k_tile * PARTITIONS, PARTITIONS), columns]
            )
        for block in nl.affine_range(row_blocks):
            x_transposed = nl.ndarray((nl.par_dim(PARTITIONS), k_tiles, BLOCK_ROWS), dtype=x.dtype, buffer=nl.sbuf)
            for row_part in nl.affine_range(row_parts):
                x_tile = nl.load(x[nl.ds((block * row_parts + row_part) * PARTITIONS, PARTITIONS), 0:k])
                for k_tile in nl.affine_range(k_tiles):
                    transposed = nisa.nc_matmul(
                        x_tile[0:PARTITIONS, nl.ds(k_tile * PARTITIONS, PARTITIONS)],
                        identity,
                        is_moving_onezero=True,
                        is_transpose=True,
                    )
                    x_transposed[0:PARTITIONS, k_tile, nl.ds(row_part * PARTITIONS, PARTITIONS)] = nl.copy(transposed)
            for part in nl.affine_range(column_parts):
                product = nl.zeros((nl.par_dim(PARTITIONS), BLOCK_ROWS), dtype=nl.float32, buffer=nl.psum)
                for k_tile in nl.affine_range(k_tiles):
                    product += nisa.nc_matmul(
                        up_weights[k_tile, 0:PARTITIONS, nl.ds(part * PARTITIONS, PARTITIONS)],
                        x_transposed[0:PARTITIONS, k_tile, 0:BLOCK_ROWS],
                    )
                gate_tile = gate[column_block, part, block, 0:PARTITIONS, 0:BLOCK_ROWS]
                exponential = nisa.activation(op=nl.exp, data=gate_tile, scale=-1.0)
                denominator = nisa.tensor_scalar(exponential, op0=nl.add, operand0=1.0)
                sigmoid = nisa.reciprocal(denominator)
                activated = nl.multiply(gate_tile, sigmoid)
                hidden_tile = nl.multiply(activated, product)
                nl.store(hidden[column_block, part, block, 0:PARTITIONS, 0:BLOCK_ROWS], value=hidden_tile)

    # Down projection.
    down_weights = nl.ndarray(
        (column_blocks, column_parts, nl.par_dim(PARTITIONS), k), dtype=w_down.dtype, buffer=nl.sbuf
    )
    for column_block in nl.affine_range(column_blocks):
        for part in nl.affine_range(column_parts):
            first = (column_block * column_parts + part) * PARTITIONS
            down_weights[column_block, part, 0:PARTITIONS, 0:k] = nl.load(w_down[nl.ds(first, PARTITIONS), 0:k])
    for block in nl.affine_range(row_blocks):
        hidden_tiles = nl.ndarray(
            (column_blocks, column_parts, nl.par_dim(PARTITIONS), BLOCK_ROWS), dtype=nl.float32, buffer=nl.sbuf
        )
        for column_block in nl.affine_range(column_blocks):
            for part in nl.affine_range(column_parts):
                hidden_tiles[column_block, part, 0:PARTITIONS, 0:BLOCK_ROWS] = nl.load(
                    hidden[column_block, part, block, 0:PARTITIONS, 0:BLOCK_ROWS]
                )
        for row_part in nl.affine_range(row_parts):
            out_tile = nl.ndarray((nl.par_dim(PARTITIONS), k), dtype=x.dtype, buffer=nl.sbuf)
            for piece in nl.affine_range(k // COLUMNS):
                product = nl.zeros((nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.psum)
                for column_block in nl.affine_range(column_blocks):
                    for part in nl.affine_range(column_parts):
                        product += nisa.nc_matmul(
                            hidden_tiles[column_block, part, 0:PARTITIONS, nl.ds(row_part * PARTITIONS, PARTITIONS)],
                            down_weights[column_block, part, 0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)],
                        )
                out_tile[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)] = nl.copy(product)
            nl.store(out[nl.ds((block * row_parts + row_part) * PARTITIONS, PARTITIONS), 0:k], value=out_tile)

    return out
