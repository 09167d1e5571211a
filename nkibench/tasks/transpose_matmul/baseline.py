import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

PARTITIONS = 128  # rows of an output tile
ROW_TILES = 8  # output row tiles per block
COLUMNS = 512  # columns per instruction
BLOCK_COLUMNS = 1024  # columns of rhs per DMA and per store


@nki.jit
def kernel(lhs, rhs):
    """Transpose of lhs times rhs, given as (128 partitions, k/128, m) and (128 partitions, k/128, n).

    m is a multiple of 1024; the last column block of n may be partial. lhs already has the contraction on its
    partitions; rhs is read again for every block of 1024 rows.
    """
    _, k_tiles, m = lhs.shape
    _, _, n = rhs.shape
    block_rows = ROW_TILES * PARTITIONS
    out = nl.ndarray((m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    partition = nl.arange(PARTITIONS)[:, None]
    row = nl.arange(PARTITIONS)[None, :]
    block_row = nl.arange(block_rows)[None, :]
    block_column = nl.arange(BLOCK_COLUMNS)[None, :]
    column = nl.arange(COLUMNS)[None, :]

    for row_block in nl.affine_range(m // block_rows):
        lhs_tiles = nl.ndarray((k_tiles, nl.par_dim(PARTITIONS), block_rows), dtype=lhs.dtype, buffer=nl.sbuf)
        for k_tile in nl.affine_range(k_tiles):
            lhs_tiles[k_tile, partition, block_row] = nl.load(
                lhs[partition, k_tile, row_block * block_rows + block_row]
            )

        for block in nl.affine_range((n + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS):
            first = block * BLOCK_COLUMNS
            rhs_tiles = nl.ndarray((k_tiles, nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=rhs.dtype, buffer=nl.sbuf)
            for k_tile in nl.affine_range(k_tiles):
                rhs_tiles[k_tile, partition, block_column] = nl.load(
                    rhs[partition, k_tile, first + block_column], mask=first + block_column < n
                )

            for tile in nl.affine_range(ROW_TILES):
                out_tile = nl.ndarray((nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=lhs.dtype, buffer=nl.sbuf)
                for piece in nl.affine_range(BLOCK_COLUMNS // COLUMNS):
                    piece_column = piece * COLUMNS + column
                    inside = first + piece_column < n
                    product = nl.zeros((nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for k_tile in nl.affine_range(k_tiles):
                        product[partition, column] += nisa.nc_matmul(
                            lhs_tiles[k_tile, partition, tile * PARTITIONS + row],
                            rhs_tiles[k_tile, partition, piece_column],
                            mask=inside,
                        )
                    out_tile[partition, piece_column] = nl.copy(product[partition, column], mask=inside)
                nl.store(
                    out[(row_block * ROW_TILES + tile) * PARTITIONS + partition, first + block_column],
                    value=out_tile[partition, block_column],
                    mask=first + block_column < n,
                )

    return out
