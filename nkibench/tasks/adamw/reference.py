import numpy as np


def get_inputs(M, N):
    theta = np.random.normal(0, 1, size=(M, N)).astype(np.float32)
    g = np.random.normal(0, 1, size=(M, N)).astype(np.float32)
    m = np.random.normal(0, 1, size=(M, N)).astype(np.float32)
    v = np.abs(np.random.normal(0, 1, size=(M, N))).astype(np.float32)
    return [theta, g, m, v]


def forward(theta, g, m, v):
    m_t = 0.9 * m + 0.1 * g
    v_t = 0.999 * v + 0.001 * g * g
    update = 0.01 * m_t / (np.sqrt(1000 * v_t) + 1e-8)
    return (theta - 1e-5 * theta) - update


def transform_to_nki_inputs(inputs):
    return inputs


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
