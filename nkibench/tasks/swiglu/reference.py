import numpy as np


def get_inputs(M, N, K):
    x = np.random.normal(0, 1, size=(M, K)).astype(np.float32)
    w_up = np.random.normal(0, 1, size=(K, N)).astype(np.float32)
    w_down = np.random.normal(0, 1, size=(N, K)).astype(np.float32)
    w_gate = np.random.normal(0, 1, size=(K, N)).astype(np.float32)
    return [x, w_up, w_down, w_gate]


def forward(x, w_up, w_down, w_gate):
    gate = np.matmul(x, w_gate)
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite: the quotient is then 0
        gate = gate / (1 + np.exp(-gate))
    return np.matmul(gate * np.matmul(x, w_up), w_down)


def transform_to_nki_inputs(inputs):
    return inputs


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
