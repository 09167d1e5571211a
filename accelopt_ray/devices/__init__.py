"""Whatever executes kernels: one protocol, several devices."""
