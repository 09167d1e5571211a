import numpy as np


def get_inputs(M, N, K, R):
    x = np.random.normal(0, 1, size=(M, K)).astype(np.float32)
    w = np.random.normal(0, 1, size=(K, N)).astype(np.float32)
    a = np.random.normal(0, 1, size=(K, R)).astype(np.float32)
    b = np.random.normal(0, 1, size=(R, N)).astype(np.float32)
    return [x, w, a, b]


def forward(x, w, a, b):
    out = np.matmul(x, w)
    out += np.matmul(np.matmul(x, a), b)
    return out


def transform_to_nki_inputs(inputs):
    return inputs


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
