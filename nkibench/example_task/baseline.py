import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

PARTITIONS = nl.tile_size.pmax  # 128 rows of a tile
COLUMNS = 512  # columns of a tile


@nki.jit
def kernel(x, y, alpha):
    """alpha * x + y; x and y are (rows, columns), multiples of 128 and 512."""
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)

    for tile in nl.affine_range(rows // PARTITIONS):
        for block in nl.affine_range(columns // COLUMNS):
            row, column = tile * PARTITIONS, block * COLUMNS
            x_tile = nl.load(x[row : row + PARTITIONS, column : column + COLUMNS])
            y_tile = nl.load(y[row : row + PARTITIONS, column : column + COLUMNS])
            scaled = nisa.tensor_scalar(data=x_tile, op0=nl.multiply, operand0=alpha)
            total = nisa.tensor_tensor(scaled, y_tile, op=nl.add)
            nl.store(out[row : row + PARTITIONS, column : column + COLUMNS], value=total)

    return out
