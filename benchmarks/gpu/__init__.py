"""Bench ``gpu``: kernels and full-graph epochs on a CUDA device, against torch and PyG on the same device."""
