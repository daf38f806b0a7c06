"""Sections of bench ``split``: one mini-batch over all ranks against a mini-batch for each."""
