"""Kernels behind one interface. They never import each other."""
