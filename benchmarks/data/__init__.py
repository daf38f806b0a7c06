"""Bench ``data``: what data-parallel training sends and how long its epochs take, by option and against plain calls."""
