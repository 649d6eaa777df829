"""Examples that run on PyTorch.

A package, with one above it, so that this folder is only ever `examples.torch` and never shadows
`torch`.
"""
