import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = 128  # rows of a tile
ROW_TILES = 8  # row tiles per block
COLUMNS = 512  # columns per instruction
BLOCK_COLUMNS = 1024  # columns per block and per store


@nki.jit
def kernel(lhs, rhs):
    """lhs (batches, m, k) @ rhs (batches, k, n).

    m and n are multiples of 1024, k is at most 128. The left side is loaded and transposed again for every column
    block.
    """
    batches, m, k = lhs.shape
    _, _, n = rhs.shape
    out = nl.ndarray((batches, m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(PARTITIONS, dtype=np.float32)))

    for batch in nl.affine_range(batches):
        for block in nl.affine_range(n // BLOCK_COLUMNS):
            columns = nl.ds(block * BLOCK_COLUMNS, BLOCK_COLUMNS)
            rhs_block = nl.load(rhs[batch, 0:k, columns])
            for row_block in nl.affine_range(m // (ROW_TILES * PARTITIONS)):
                lhs_transposed = nl.ndarray((nl.par_dim(k), ROW_TILES * PARTITIONS), dtype=lhs.dtype, buffer=nl.sbuf)
                for tile in nl.affine_range(ROW_TILES):
                    rows = nl.ds((row_block * ROW_TILES + tile) * PARTITIONS, PARTITIONS)
                    lhs_tile = nl.load(lhs[batch, rows, 0:k])
                    transposed = nisa.nc_matmul(lhs_tile, identity, is_moving_onezero=True, is_transpose=True)
                    lhs_transposed[0:k, nl.ds(tile * PARTITIONS, PARTITIONS)] = nl.copy(transposed)
                for tile in nl.affine_range(ROW_TILES):
                    rows = nl.ds((row_block * ROW_TILES + tile) * PARTITIONS, PARTITIONS)
                    out_tile = nl.ndarray((nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=lhs.dtype, buffer=nl.sbuf)
                    for piece in nl.affine_range(BLOCK_COLUMNS // COLUMNS):
                        product = nisa.nc_matmul(
                            lhs_transposed[0:k, nl.ds(tile * PARTITIONS, PARTITIONS)],
                            rhs_block[0:k, nl.ds(piece * COLUMNS, COLUMNS)],
                        )
                        out_tile[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)] = nl.copy(product)
                    nl.store(out[batch, rows, columns], value=out_tile)

    return out
