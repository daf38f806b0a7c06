"""Bench ``partition``: what every method costs and cuts, and how fast edges on disk become a folder of parts."""
