import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

PARTITIONS = nl.tile_size.pmax  # 128 rows of a tile
COLUMNS = nl.tile_size.gemm_moving_fmax  # 512 columns per product


@nki.jit
def kernel(x, w, eps, z, g):
    """RMSNorm of x + z, both (m, k), with weight g (k,), times w (k, n).

    m and k are multiples of 128, n of 512. One row tile at a time; nl.matmul transposes its left side implicitly.
    """
    m, k = x.shape
    _, n = w.shape
    out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    weight = nl.load(g.reshape((1, k))[0:1, 0:k])

    for tile in nl.affine_range(m // PARTITIONS):
        rows = nl.ds(tile * PARTITIONS, PARTITIONS)
        x_tile = nl.load(x[rows, 0:k])
        z_tile = nl.load(z[rows, 0:k])
        y_tile = nl.add(x_tile, z_tile)

        square = nl.square(y_tile)
        square_sum = nl.sum(square, axis=[1], keepdims=True)
        mean_square = square_sum / k
        reciprocal_rms = nl.rsqrt(nl.add(mean_square, eps))
        normalised = nl.multiply(y_tile, reciprocal_rms)
        weighted = nl.multiply(normalised, weight.broadcast_to((PARTITIONS, k)))

        for block in nl.affine_range(n // COLUMNS):
            columns = nl.ds(block * COLUMNS, COLUMNS)
            product = nl.zeros((nl.par_dim(PARTITIONS), COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for k_tile in nl.affine_range(k // PARTITIONS):
                inner = nl.ds(k_tile * PARTITIONS, PARTITIONS)
                w_tile = nl.load(w[inner, columns])
                product += nl.matmul(weighted[0:PARTITIONS, inner], w_tile)
            out_tile = nl.copy(product, dtype=out.dtype)
            nl.store(out[rows, columns], value=out_tile)

    return out
