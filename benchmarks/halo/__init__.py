"""Sections of bench ``halo``: full-graph training over ranks, its messages in few bits, its waiting hidden."""
