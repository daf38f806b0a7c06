"""Bench ``epoch``: whole training epochs against the peers', in CPU-seconds on one thread, and peak memory."""
