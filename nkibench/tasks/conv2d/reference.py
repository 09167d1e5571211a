import numpy as np


def get_inputs(B, CI, CO, H, W, KH, KW):
    x = np.random.normal(0, 1, size=(B, CI, H, W)).astype(np.float32)
    w = np.random.normal(0, 1, size=(CO, CI, KH, KW)).astype(np.float32)
    bias = np.random.normal(0, 1, size=(CO,)).astype(np.float32)
    return [x, w, bias]


def forward(x, w, bias):
    (_, _, height, width), (c_out, c_in, k_height, k_width) = x.shape, w.shape
    rows, columns = height - k_height + 1, width - k_width + 1
    out = np.empty((len(x), c_out, rows, columns), dtype=np.float32)
    for image, result in zip(x, out.reshape(len(x), c_out, -1), strict=True):
        result[...] = bias[:, None]
        for i in range(k_height):
            for j in range(k_width):
                window = image[:, i : i + rows, j : j + columns].reshape(c_in, -1)
                np.add(result, np.matmul(w[:, :, i, j], window), out=result)
    return out


def transform_to_nki_inputs(inputs):
    x, w, bias = inputs
    return [x, np.ascontiguousarray(w.transpose(2, 3, 0, 1)), bias.reshape(-1, 1)]  # w becomes (KH, KW, CO, CI)


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
