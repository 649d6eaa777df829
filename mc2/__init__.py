"""Fused communication and matmul kernels, and the rules that pick them."""
