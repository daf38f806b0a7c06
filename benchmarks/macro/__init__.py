"""Bench ``macro``: rows, messages and epochs of windows of mini-batches, against one at a time and plain calls."""
