"""Byte-level tokens from real text, in batches that are the same on every rank."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4 * 2**20
"""Upper limit on the text read; enough for a demonstration, quick to load."""


def load_text(path: Path | None = None) -> Tensor:
    """Reads text as byte tokens.

    Args:
        path: a file of any kind. By default the top-level modules of this Python's standard
            library: real text that every machine running this has.

    Returns:
        A uint8 tensor of at most `MAX_BYTES` tokens. Files are read in order of their names, so
        that all ranks that run the same Python get the same text.

    Raises:
        ValueError: there is nothing to read.
    """
    if path is not None:
        content = path.read_bytes()[:MAX_BYTES]
        origin = str(path)
    else:
        stdlib = Path(sysconfig.get_path("stdlib"))
        origin = f"{stdlib}/*.py"
        content = b"".join(file.read_bytes() for file in sorted(stdlib.glob("*.py")))[:MAX_BYTES]
    if not content:
        raise ValueError(f"Expected some text, got none ({origin}). Name another file with --text.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batches(
    text: Tensor, *, batch_size: int, seq_len: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws windows of the text at random, without end.

    Args:
        text: byte tokens, 1-D uint8.
        batch_size: windows in a batch.
        seq_len: tokens in a window.
        seed: decides every draw; the generator is private, so nothing else shifts the sequence.

    Yields:
        (inputs, targets), both int64 of shape (batch_size, seq_len); targets are the inputs one
        token later.

    Raises:
        ValueError: the text is too short for one window.
    """
    n_starts = len(text) - seq_len
    if n_starts < 1:
        raise ValueError(
            f"Expected a text longer than seq_len={seq_len} bytes, got {len(text)} (batches). "
            "Use a longer text or a smaller --seq-len."
        )
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(seq_len + 1)
    while True:
        starts = torch.randint(n_starts, (batch_size, 1), generator=generator)
        tokens = text[starts + window].long()
        yield tokens[:, :-1], tokens[:, 1:]
