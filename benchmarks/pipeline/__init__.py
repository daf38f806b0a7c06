"""Sections of bench ``pipeline``: layers over ranks against the graph over ranks; bytes, epochs, memory, a picture."""
