"""Examples; a package so that tests can import them as `examples.torch.llama3`."""
