"""Llama-3: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

A plain single-device model. Nothing here knows of tensor parallelism, except that attention takes
its number of heads from the width its projections return, so that the same code runs on the heads
one rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelArgs:
    """Sizes of the model. The defaults make a byte-level model of about 1.7 million parameters.

    Attributes:
        dim: width of the residual stream.
        n_layers: number of transformer blocks.
        n_heads: number of query heads.
        n_kv_heads: number of key and value heads; each serves `n_heads / n_kv_heads` query heads.
        ffn_dim: hidden width of the feed-forward.
        vocab_size: number of different tokens; 256 for bytes.
        max_seq_len: longest sequence, for which rotary angles are tabulated.
        norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
    """

    dim: int = 256
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4
    ffn_dim: int = 768
    vocab_size: int = 256
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    def __post_init__(self) -> None:
        if self.dim % self.n_heads or (self.dim // self.n_heads) % 2:
            raise ValueError(
                f"Expected dim to be n_heads times an even head size, got dim={self.dim}, "
                f"n_heads={self.n_heads} (ModelArgs). Change one of the two."
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"Expected n_heads to be a multiple of n_kv_heads, got n_heads={self.n_heads}, "
                f"n_kv_heads={self.n_kv_heads} (ModelArgs). Change one of the two."
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads


def rope_table(head_dim: int, max_seq_len: int, theta: float) -> Tensor:
    """Tabulates the rotary angles' cosines and sines.

    Args:
        head_dim: width of one attention head, even.
        max_seq_len: number of positions.
        theta: base of the frequencies; pair i turns by `theta ** (-2 i / head_dim)` per position.

    Returns:
        A tensor of shape (2, max_seq_len, head_dim / 2): cosines, then sines.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Turns each pair of neighbouring channels by its position's angle.

    Args:
        x: queries or keys, (B, S, heads, head_dim).
        rope: cosines and sines of the same S positions, (2, S, head_dim / 2).

    Returns:
        The turned `x`, in its own dtype.
    """
    cos, sin = rope.unsqueeze(2)  # (S, 1, head_dim / 2): one angle for all heads
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # times float32 angles: at least float32
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention, without bias."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Attends over `x` (B, S, dim) with `rope` (2, S, head_dim / 2); returns (B, S, dim)."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        batch, seq_len, _ = q.shape
        # -1 and not n_heads: under tensor parallelism the projections return this rank's heads.
        q = q.view(batch, seq_len, -1, self.head_dim)
        k = k.view(batch, seq_len, -1, self.head_dim)
        v = v.view(batch, seq_len, -1, self.head_dim)
        out = F.scaled_dot_product_attention(
            apply_rope(q, rope).transpose(1, 2),
            apply_rope(k, rope).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)`, without bias."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, S, dim) to (B, S, dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Maps the residual stream (B, S, dim) to itself; `rope` as in `apply_rope`."""
        h = x + self.attention(self.attention_norm(x), rope)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """Token embedding, a stack of blocks, a final norm and an output head."""

    rope: Tensor

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        table = rope_table(args.head_dim, args.max_seq_len, args.rope_theta)
        self.register_buffer("rope", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every weight from torch's default generator: same seed, same model."""
        std = 0.02
        # Each block adds twice to the residual stream; smaller last layers keep its variance flat.
        residual_std = std / (2 * self.args.n_layers) ** 0.5
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(param)
            elif name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(param, std=residual_std)
            else:
                nn.init.normal_(param, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids (B, S) to logits (B, S, vocab_size)."""
        seq_len = tokens.shape[1]
        if seq_len > self.args.max_seq_len:
            raise ValueError(
                f"Expected at most max_seq_len={self.args.max_seq_len} tokens, got {seq_len} "
                "(Transformer). Shorten the sequence or raise ModelArgs.max_seq_len."
            )
        # From the tokens, not from h: under sequence parallelism h holds this rank's positions.
        rope = self.rope[:, :seq_len]
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, rope)
        return self.output(self.norm(h))
