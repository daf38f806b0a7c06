"""Bench ``kernels``: each kernel against the peers' on the same input."""
