"""Kernels for CUDA devices, written in Triton: one op per file, the same names as in ``csrc/ops``. Imported only to run."""

__all__: list[str] = []
