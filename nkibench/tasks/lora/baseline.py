import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = 128  # rows or columns of a tile
BLOCK_ROWS = 512  # rows of x per product: the outputs are computed transposed
BLOCK_COLUMNS = 1024  # columns of w and b per DMA
K_LOAD = 1024  # elements of a row of x per DMA in the low-rank part
ROW_HALVES = 2  # the low-rank part works on half the rows at a time
K_CHUNKS = 4  # k is accumulated in four chunks
CHUNK_GROUPS = 2  # loads of x per chunk


@nki.jit
def kernel(x, w, a, b):
    """x (m, k) @ w (k, n) + (x @ a (k, r)) @ b (r, n).

    m is a multiple of 1024, k and n of 1024, r is at most 128. Both products are formed with the columns on the
    partitions, added, and transposed back. x is loaded and transposed for each of them.
    """
    m, k = x.shape
    _, n = w.shape
    _, r = a.shape
    k_tiles = k // PARTITIONS
    row_blocks = m // BLOCK_ROWS
    half_blocks = row_blocks // ROW_HALVES
    row_parts = BLOCK_ROWS // PARTITIONS
    column_blocks = n // BLOCK_COLUMNS
    column_parts = BLOCK_COLUMNS // PARTITIONS
    out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(PARTITIONS, dtype=np.float32)))

    # Low-rank part: (x @ a) @ b, kept for the whole output.
    low_rank = nl.ndarray(
        (column_blocks, column_parts, row_blocks, nl.par_dim(PARTITIONS), BLOCK_ROWS),
        dtype=nl.float32,
        buffer=nl.sbuf,
    )
    a_tiles = nl.ndarray((k_tiles, nl.par_dim(PARTITIONS), r), dtype=a.dtype, buffer=nl.sbuf)
    for k_tile in nl.affine_range(k_tiles):
        a_tiles[k_tile, 0:PARTITIONS, 0:r] = nl.load(a[nl.ds(k_tile * PARTITIONS, PARTITIONS), 0:r])

    k_parts = K_LOAD // PARTITIONS
    for half in nl.affine_range(ROW_HALVES):
        xa = nl.ndarray((half_blocks, nl.par_dim(r), BLOCK_ROWS), dtype=nl.float32, buffer=nl.sbuf)
        for block in nl.affine_range(half_blocks):
            x_transposed = nl.ndarray(
                (k // K_LOAD, nl.par_dim(PARTITIONS), k_parts, BLOCK_ROWS), dtype=x.dtype, buffer=nl.sbuf
            )
            for k_block in nl.affine_range(k // K_LOAD):
                for row_part in nl.affine_range(row_parts):
                    first = ((half * half_blocks + block) * row_parts + row_part) * PARTITIONS
                    x_tile = nl.load(x[nl.ds(first, PARTITIONS), nl.ds(k_block * K_LOAD, K_LOAD)])
                    for k_part in nl.affine_range(k_parts):
                        transposed = nisa.nc_matmul(
                            x_tile[0:PARTITIONS, nl.ds(k_part * PARTITIONS, PARTITIONS)],
                            identity,
                            is_moving_onezero=True,
                            is_transpose=True,
                        )
                        x_transposed[k_block, 0:PARTITIONS, k_part, nl.ds(row_part * PARTITIONS, PARTITIONS)] = nl.copy(
                            transposed
                        )
            xa_product = nl.zeros((nl.par_dim(r), BLOCK_ROWS), dtype=nl.float32, buffer=nl.psum)
            for k_block in nl.affine_range(k // K_LOAD):
                for k_part in nl.affine_range(k_parts):
                    xa_product += nisa.nc_matmul(
                        a_tiles[k_block * k_parts + k_part, 0:PARTITIONS, 0:r],
                        x_transposed[k_block, 0:PARTITIONS, k_part, 0:BLOCK_ROWS],
                    )
            xa[block, 0:r, 0:BLOCK_ROWS] = nl.copy(xa_product)

        for column_block in nl.affine_range(column_blocks):
            b_tile = nl.load(b[0:r, nl.ds(column_block * BLOCK_COLUMNS, BLOCK_COLUMNS)])
            for block in nl.affine_range(half_blocks):
                for part in nl.affine_range(column_parts):
                    product = nisa.nc_matmul(
                        b_tile[0:r, nl.ds(part * PARTITIONS, PARTITIONS)], xa[block, 0:r, 0:BLOCK_ROWS]
                    )
                    low_rank[column_block, part, half * half_blocks + block, 0:PARTITIONS, 0:BLOCK_ROWS] = nl.copy(
                        product
                    )

    # Main part: x @ w by column blocks, k in sequential chunks whose sums pass through SBUF.
    group_tiles = k_tiles // K_CHUNKS // CHUNK_GROUPS
    group_width = group_tiles * PARTITIONS
    for column_block in nl.affine_range(column_blocks):
        columns = nl.ds(column_block * BLOCK_COLUMNS, BLOCK_COLUMNS)
        main = nl.zeros(
            (column_parts, row_blocks, nl.par_dim(PARTITIONS), BLOCK_ROWS), dtype=nl.float32, buffer=nl.sbuf
        )
        for chunk in nl.sequential_range(K_CHUNKS):
            w_tiles = nl.ndarray(
                (CHUNK_GROUPS, group_tiles, nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=w.dtype, buffer=nl.sbuf
            )
            for group in nl.affine_range(CHUNK_GROUPS):
                for k_part in nl.affine_range(group_tiles):
                    first = ((chunk * CHUNK_GROUPS + group) * group_tiles + k_part) * PARTITIONS
                    w_tiles[group, k_part, 0:PARTITIONS, 0:BLOCK_COLUMNS] = nl.load(
                        w[nl.ds(first, PARTITIONS), columns]
                    )

            for block in nl.affine_range(row_blocks):
                x_transposed = nl.ndarray(
                    (CHUNK_GROUPS, nl.par_dim(PARTITIONS), group_tiles, BLOCK_ROWS), dtype=x.dtype, buffer=nl.sbuf
                )
                for group in nl.affine_range(CHUNK_GROUPS):
                    for row_part in nl.affine_range(row_parts):
                        x_tile = nl.load(
                            x[
                                nl.ds((block * row_parts + row_part) * PARTITIONS, PARTITIONS),
                                nl.ds((chunk * CHUNK_GROUPS + group) * group_width, group_width),
                            ]
                        )
                        for k_part in nl.affine_range(group_tiles):
                            transposed = nisa.nc_matmul(
                                x_tile[0:PARTITIONS, nl.ds(k_part * PARTITIONS, PARTITIONS)],
                                identity,
                                is_moving_onezero=True,
                                is_transpose=True,
                            )
                            x_transposed[group, 0:PARTITIONS, k_part, nl.ds(row_part * PARTITIONS, PARTITIONS)] = (
                                nl.copy(transposed)
                            )
                for part in nl.affine_range(column_parts):
                    product = nl.zeros((nl.par_dim(PARTITIONS), BLOCK_ROWS), dtype=nl.float32, buffer=nl.psum)
                    for group in nl.affine_range(CHUNK_GROUPS):
                        for k_part in nl.affine_range(group_tiles):
                            product += nisa.nc_matmul(
                                w_tiles[group, k_part, 0:PARTITIONS, nl.ds(part * PARTITIONS, PARTITIONS)],
                                x_transposed[group, 0:PARTITIONS, k_part, 0:BLOCK_ROWS],
                            )
                    main[part, block, 0:PARTITIONS, 0:BLOCK_ROWS] = nl.loop_reduce(
                        product, op=np.add, loop_indices=[chunk]
                    )

        # Sum of both parts, transposed back to rows in tiles of 128 x 128.
        for block in nl.affine_range(row_blocks):
            for part in nl.affine_range(column_parts):
                total = nl.add(
                    main[part, block, 0:PARTITIONS, 0:BLOCK_ROWS],
                    low_rank[column_block, part, block, 0:PARTITIONS, 0:BLOCK_ROWS],
                )
                for row_part in nl.affine_range(row_parts):
                    transposed = nisa.nc_matmul(
                        total[0:PARTITIONS, nl.ds(row_part * PARTITIONS, PARTITIONS)],
                        identity,
                        is_moving_onezero=True,
                        is_transpose=True,
                    )
                    out_tile = nl.copy(transposed, dtype=out.dtype)
                    nl.store(
                        out[
                            nl.ds((block * row_parts + row_part) * PARTITIONS, PARTITIONS),
                            nl.ds((column_block * column_parts + part) * PARTITIONS, PARTITIONS),
                        ],
                        value=out_tile,
                    )

    return out
