import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

PARTITIONS = 128  # rows of a tile
LOAD_COLUMNS = 1024  # columns per DMA
COLUMNS = 512  # columns per instruction

WEIGHT_DECAY_STEP = 1e-5  # learning rate times weight decay
BETA1, BETA2 = 0.9, 0.999
EPSILON = 1e-8
STEP_SIZE = 0.01  # learning rate over 1 - beta1, the bias correction of the first step
VARIANCE_CORRECTION = 1000.0  # 1 over 1 - beta2


@nki.jit
def kernel(theta, g, m, v):
    """One AdamW step on theta, (rows, columns); columns is a multiple of 1024, the last row tile may be partial.

    Every operation of the formula is an instruction of its own.
    """
    rows, columns = theta.shape
    row_tiles = (rows + PARTITIONS - 1) // PARTITIONS
    out = nl.ndarray((rows, columns), dtype=theta.dtype, buffer=nl.shared_hbm)
    partition = nl.arange(PARTITIONS)[:, None]
    load_column = nl.arange(LOAD_COLUMNS)[None, :]
    column = nl.arange(COLUMNS)[None, :]

    for tile in nl.affine_range(row_tiles):
        row = tile * PARTITIONS + partition
        inside = row < rows
        for block in nl.affine_range(columns // LOAD_COLUMNS):
            block_column = block * LOAD_COLUMNS + load_column
            theta_tile = nl.load(theta[row, block_column], mask=inside)
            g_tile = nl.load(g[row, block_column], mask=inside)
            m_tile = nl.load(m[row, block_column], mask=inside)
            v_tile = nl.load(v[row, block_column], mask=inside)
            out_tile = nl.ndarray((nl.par_dim(PARTITIONS), LOAD_COLUMNS), dtype=theta.dtype, buffer=nl.sbuf)

            for piece in nl.affine_range(LOAD_COLUMNS // COLUMNS):
                piece_column = piece * COLUMNS + column
                theta_piece = theta_tile[partition, piece_column]
                g_piece = g_tile[partition, piece_column]

                # Weight decay: theta - 1e-5 * theta.
                decay = nisa.tensor_scalar(theta_piece, op0=nl.multiply, operand0=WEIGHT_DECAY_STEP, mask=inside)
                decayed = nl.subtract(theta_piece, decay, mask=inside)

                # First moment, times the step size.
                m_old = nisa.tensor_scalar(
                    m_tile[partition, piece_column], op0=nl.multiply, operand0=BETA1, mask=inside
                )
                m_new = nisa.tensor_scalar(g_piece, op0=nl.multiply, operand0=1 - BETA1, mask=inside)
                m_t = nl.add(m_old, m_new, mask=inside)
                numerator = nisa.tensor_scalar(m_t, op0=nl.multiply, operand0=STEP_SIZE, mask=inside)

                # Second moment.
                v_old = nisa.tensor_scalar(
                    v_tile[partition, piece_column], op0=nl.multiply, operand0=BETA2, mask=inside
                )
                g_scaled = nisa.tensor_scalar(g_piece, op0=nl.multiply, operand0=1 - BETA2, mask=inside)
                v_new = nl.multiply(g_scaled, g_piece, mask=inside)
                v_t = nl.add(v_old, v_new, mask=inside)

                # Quotient and difference.
                root = nisa.activation(op=nl.sqrt, data=v_t, scale=VARIANCE_CORRECTION, mask=inside)
                denominator = nisa.tensor_scalar(root, op0=nl.add, operand0=EPSILON, mask=inside)
                reciprocal = nisa.reciprocal(denominator, mask=inside)
                update = nl.multiply(numerator, reciprocal, mask=inside)
                out_tile[partition, piece_column] = nl.subtract(decayed, update, mask=inside)

            nl.store(out[row, block_column], value=out_tile, mask=inside)

    return out
