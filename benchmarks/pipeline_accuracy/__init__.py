"""Bench ``pipeline-accuracy``: what history costs in points, against exact training."""
