import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

LOAD_COLUMNS = 1024  # columns per DMA
COLUMNS = 512  # columns per instruction


@nki.jit
def kernel(x):
    """SiLU of x, (128 partitions, rows, columns) in HBM; columns is a multiple of 1024.

    Follows the formula literally: exponential, plus one, reciprocal, times x.
    """
    partitions, rows, columns = x.shape
    out = nl.ndarray((partitions, rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)

    for row in nl.affine_range(rows):
        for block in nl.affine_range(columns // LOAD_COLUMNS):
            x_tile = nl.load(x[0:partitions, row, nl.ds(block * LOAD_COLUMNS, LOAD_COLUMNS)])
            y_tile = nl.ndarray((nl.par_dim(partitions), LOAD_COLUMNS), dtype=x.dtype, buffer=nl.sbuf)

            for piece in nl.affine_range(LOAD_COLUMNS // COLUMNS):
                x_piece = x_tile[0:partitions, nl.ds(piece * COLUMNS, COLUMNS)]
                exponential = nisa.activation(op=nl.exp, data=x_piece, scale=-1.0)
                denominator = nisa.tensor_scalar(data=exponential, op0=nl.add, operand0=1.0)
                sigmoid = nisa.reciprocal(data=denominator)
                y_tile[0:partitions, nl.ds(piece * COLUMNS, COLUMNS)] = nl.multiply(x_piece, sigmoid)

            nl.store(out[0:partitions, row, nl.ds(block * LOAD_COLUMNS, LOAD_COLUMNS)], value=y_tile)

    return out
