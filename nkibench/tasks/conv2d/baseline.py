import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np


@nki.jit
def kernel(x, w, bias):
    """Convolution of x (images, c_in, height, width) by w (k_height, k_width, c_out, c_in), plus bias (c_out, 1).

    c_in and c_out are at most 128, an output row at most 512 columns wide. One output row at a time: the input row
    under each filter tap is loaded anew, and the filters are transposed again for every image.
    """
    images, c_in, height, width = x.shape
    k_height, k_width, c_out, _ = w.shape
    rows, columns = height - k_height + 1, width - k_width + 1
    out = nl.ndarray((images, c_out, rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    identity = nl.load(nl.shared_constant(np.identity(c_out, dtype=np.float32)))
    bias_column = nl.load(bias[0:c_out, 0:1])

    for image in nl.affine_range(images):
        # Filters with the input channels on the partitions.
        taps = nl.ndarray((k_height, k_width, nl.par_dim(c_in), c_out), dtype=w.dtype, buffer=nl.sbuf)
        for i in nl.affine_range(k_height):
            for j in nl.affine_range(k_width):
                tap = nl.load(w[i, j, 0:c_out, 0:c_in])
                transposed = nisa.nc_matmul(tap, identity, is_moving_onezero=True, is_transpose=True)
                taps[i, j, 0:c_in, 0:c_out] = nl.copy(transposed)

        for row in nl.affine_range(rows):
            product = nl.zeros((nl.par_dim(c_out), columns), dtype=nl.float32, buffer=nl.psum)
            for i in nl.affine_range(k_height):
                for j in nl.affine_range(k_width):
                    window = nl.load(x[image, 0:c_in, row + i, nl.ds(j, columns)])
                    product += nisa.nc_matmul(taps[i, j, 0:c_in, 0:c_out], window)
            copied = nl.copy(product)
            biased = nisa.tensor_scalar(copied, op0=nl.add, operand0=bias_column)
            nl.store(out[image, 0:c_out, row, 0:columns], value=biased)

    return out
