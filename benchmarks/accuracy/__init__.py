"""Bench ``accuracy``: our models against PyG's same models on real graphs, paired by seed."""
