import numpy as np


def get_inputs(M, K, N):
    lhs = np.random.normal(0, 1, size=(K, M)).astype(np.float32)
    rhs = np.random.normal(0, 1, size=(K, N)).astype(np.float32)
    return [lhs, rhs]


def forward(lhs, rhs):
    return np.matmul(lhs.T, rhs)


def transform_to_nki_inputs(inputs):
    # Partition p holds K/128 consecutive rows: the order of the contraction does not matter.
    return [operand.reshape(128, -1, operand.shape[1]) for operand in inputs]


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
