import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = 128  # rows of a tile
COLUMNS = 512  # columns per instruction
BLOCK_COLUMNS = 1024  # columns of rhs kept on chip at a time
K_LOAD = 1024  # elements of a row of lhs per DMA


@nki.jit
def kernel(lhs, rhs):
    """lhs (m, k) @ rhs (k, n); m is a multiple of 128, k and n of 1024.

    Per column block, every row tile of lhs is loaded and transposed anew.
    """
    m, k = lhs.shape
    _, n = rhs.shape
    k_blocks = k // K_LOAD
    k_parts = K_LOAD // PARTITIONS
    out = nl.ndarray((m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(PARTITIONS, dtype=np.float32)))

    for block in nl.affine_range(n // BLOCK_COLUMNS):
        columns = nl.ds(block * BLOCK_COLUMNS, BLOCK_COLUMNS)
        rhs_tiles = nl.ndarray(
            (k_blocks, k_parts, nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=rhs.dtype, buffer=nl.sbuf
        )
        for k_block in nl.affine_range(k_blocks):
            for part in nl.affine_range(k_parts):
                inner = nl.ds((k_block * k_parts + part) * PARTITIONS, PARTITIONS)
                rhs_tiles[k_block, part, 0:PARTITIONS, 0:BLOCK_COLUMNS] = nl.load(rhs[inner, columns])

        for tile in nl.affine_range(m // PARTITIONS):
            rows = nl.ds(tile * PARTITIONS, PARTITIONS)
            lhs_transposed = nl.ndarray(
                (k_blocks, nl.par_dim(PARTITIONS), k_parts, PARTITIONS), dtype=lhs.dtype, buffer=nl.sbuf
            )
            for k_block in nl.affine_range(k_blocks):
                lhs_tile = nl.load(lhs[rows, nl.ds(k_block * K_LOAD, K_LOAD)])
                for part in nl.affine_range(k_parts):
                    transposed = nisa.nc_matmul(
                        lhs_tile[0:PARTITIONS, nl.ds(part * PARTITIONS, PARTITIONS)],
                        identity,
                        is_moving_onezero=True,
                        is_transpose=True,
                    )
                    lhs_transposed[k_block, 0:PARTITIONS, part, 0:PARTITIONS] = nl.copy(transposed)

            out_tile = nl.ndarray((nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=lhs.dtype, buffer=nl.sbuf)
            for piece in nl.affine_range(BLOCK_COLUMNS // COLUMNS):
                product = nl.zeros((nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.psum)
                for k_block in nl.affine_range(k_blocks):
                    for part in nl.affine_range(k_parts):
                        product += nisa.nc_matmul(
                            lhs_transposed[k_block, 0:PARTITIONS, part, 0:PARTITIONS],
                            rhs_tiles[k_block, part, 0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)],
                        )
                out_tile[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)] = nl.copy(product)
            nl.store(out[rows, columns], value=out_tile)

    return out
