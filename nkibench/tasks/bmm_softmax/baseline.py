import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np

PARTITIONS = 128  # rows of a tile
ROW_TILES = 8  # row tiles per block
COLUMNS = 512  # columns per instruction
BLOCK_COLUMNS = 1024  # columns per block
LOWEST = -3.4028235e38  # most negative fp32


@nki.jit
def kernel(lhs, rhs):
    """Row softmax of lhs (batches, m, k) @ rhs (batches, k, n).

    m and n are multiples of 1024, k is at most 128. Three passes per batch element: product and row maximum,
    exponential and row sum, scaling. Scores and exponentials of the whole element are kept from pass to pass.
    """
    batches, m, k = lhs.shape
    _, _, n = rhs.shape
    blocks = n // BLOCK_COLUMNS
    pieces = BLOCK_COLUMNS // COLUMNS
    row_tiles = m // PARTITIONS
    out = nl.ndarray((batches, m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(PARTITIONS, dtype=np.float32)))

    for batch in nl.affine_range(batches):
        scores = nl.ndarray(
            (row_tiles, blocks, pieces, nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.sbuf
        )
        exponentials = nl.ndarray(
            (row_tiles, blocks, pieces, nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.sbuf
        )
        row_max = nl.ndarray((row_tiles, nl.par_dim(PARTITIONS), 1), dtype=nl.float32, buffer=nl.sbuf)

        # Pass 1: the product and its row maxima. The left side is transposed again for every column block.
        for block in nl.affine_range(blocks):
            rhs_block = nl.load(rhs[batch, 0:k, nl.ds(block * BLOCK_COLUMNS, BLOCK_COLUMNS)])
            for row_block in nl.affine_range(row_tiles // ROW_TILES):
                lhs_transposed = nl.ndarray((ROW_TILES, nl.par_dim(k), PARTITIONS), dtype=lhs.dtype, buffer=nl.sbuf)
                for tile in nl.affine_range(ROW_TILES):
                    lhs_tile = nl.load(lhs[batch, nl.ds((row_block * ROW_TILES + tile) * PARTITIONS, PARTITIONS), 0:k])
                    transposed = nisa.nc_matmul(lhs_tile, identity, is_moving_onezero=True, is_transpose=True)
                    lhs_transposed[tile, 0:k, 0:PARTITIONS] = nl.copy(transposed)
                for tile in nl.affine_range(ROW_TILES):
                    row_tile = row_block * ROW_TILES + tile
                    for piece in nl.affine_range(pieces):
                        product = nisa.nc_matmul(
                            lhs_transposed[tile, 0:k, 0:PARTITIONS],
                            rhs_block[0:k, nl.ds(piece * COLUMNS, COLUMNS)],
                        )
                        scores[row_tile, block, piece, 0:PARTITIONS, 0:COLUMNS] = nl.copy(product)
                        piece_max = nisa.tensor_reduce(
                            nl.max,
                            data=scores[row_tile, block, piece, 0:PARTITIONS, 0:COLUMNS],
                            axis=[1],
                            keepdims=True,
                        )
                        row_max[row_tile, 0:PARTITIONS, 0:1] = nl.loop_reduce(
                            piece_max, op=np.max, loop_indices=[block, piece]
                        )

        for row_tile in nl.affine_range(row_tiles):
            # Pass 2: exponentials of the shifted scores, and their row sums.
            negative_max = nisa.tensor_scalar(
                data=row_max[row_tile, 0:PARTITIONS, 0:1],
                op0=nl.maximum,
                operand0=LOWEST,
                op1=nl.multiply,
                operand1=-1.0,
            )
            row_sum = nl.ndarray((nl.par_dim(PARTITIONS), 1), dtype=nl.float32, buffer=nl.sbuf)
            for block in nl.affine_range(blocks):
                for piece in nl.affine_range(pieces):
                    exponentials[row_tile, block, piece, 0:PARTITIONS, 0:COLUMNS] = nisa.activation(
                        op=nl.exp,
                        data=scores[row_tile, block, piece, 0:PARTITIONS, 0:COLUMNS],
                        bias=negative_max,
                        scale=1.0,
                    )
                    piece_sum = nisa.tensor_reduce(
                        nl.add,
                        data=exponentials[row_tile, block, piece, 0:PARTITIONS, 0:COLUMNS],
                        axis=[1],
                        keepdims=True,
                    )
                    row_sum[0:PARTITIONS, 0:1] = nl.loop_reduce(piece_sum, op=np.add, loop_indices=[block, piece])
            reciprocal_sum = nisa.reciprocal(data=row_sum)

            # Pass 3: scaling.
            for block in nl.affine_range(blocks):
                out_tile = nl.ndarray((nl.par_dim(PARTITIONS), BLOCK_COLUMNS), dtype=lhs.dtype, buffer=nl.sbuf)
                for piece in nl.affine_range(pieces):
                    out_tile[0:PARTITIONS, nl.ds(piece * COLUMNS, COLUMNS)] = nisa.tensor_scalar(
                        data=exponentials[row_tile, block, piece, 0:PARTITIONS, 0:COLUMNS],
                        op0=nl.multiply,
                        operand0=reciprocal_sum,
                    )
                nl.store(
                    out[
                        batch,
                        nl.ds(row_tile * PARTITIONS, PARTITIONS),
                        nl.ds(block * BLOCK_COLUMNS, BLOCK_COLUMNS),
                    ],
                    value=out_tile,
                )

    return out
