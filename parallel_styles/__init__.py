"""Parallel styles: what a user applies to the modules of a model."""
