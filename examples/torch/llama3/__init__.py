"""A small Llama-3 trained with tensor and sequence parallelism."""
