"""Sections of bench ``plan``: what was foreseen against what was measured, and whether the choice was right."""
