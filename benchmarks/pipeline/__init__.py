"""Strategy ``pipeline``: what its authors measured, replayed."""
