"""Partitioning out of core: edge files larger than memory, stage by stage, into the folder ``save_parts`` would write."""

from polyhop.partition.external.write import write_parts

__all__ = ["write_parts"]
