import numpy as np


def get_inputs(B, M, K, N):
    lhs = np.random.normal(0, 1, size=(B, M, K)).astype(np.float32)
    rhs = np.random.normal(0, 1, size=(B, K, N)).astype(np.float32)
    return [lhs, rhs]


def forward(lhs, rhs):
    return np.matmul(lhs, rhs)


def transform_to_nki_inputs(inputs):
    return inputs


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
