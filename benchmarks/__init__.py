"""Benchmarks: commands that compare polyhop with its peers in the same run, never timed tests. See README.md."""
