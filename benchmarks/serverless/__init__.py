"""Sections of bench ``serverless``: what training on functions costs."""
