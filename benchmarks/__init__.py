"""Benchmarks against torch's own styles: ``make bench``, or one: ``python -m benchmarks.NAME``."""
