"""The Llama-3 example on one device: its parts against their definitions, and its data."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.torch.llama3.data import MAX_BYTES, batches, load_text
from examples.torch.llama3.model import (
    Attention,
    FeedForward,
    ModelArgs,
    Transformer,
    apply_rope,
    rope_table,
)

ARGS = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def random_tokens(batch: int, seq_len: int) -> torch.Tensor:
    return torch.randint(ARGS.vocab_size, (batch, seq_len))


def test_logits_have_one_row_per_token() -> None:
    logits = Transformer(ARGS)(random_tokens(3, 7))
    assert logits.shape == (3, 7, ARGS.vocab_size)
    assert logits.dtype == torch.float32


def test_every_parameter_gets_a_gradient() -> None:
    model = Transformer(ARGS)
    model(random_tokens(2, 8)).square().mean().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_same_seed_gives_the_same_weights() -> None:
    first = Transformer(ARGS)
    torch.manual_seed(0)
    second = Transformer(ARGS)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_first_loss_is_that_of_guessing() -> None:
    tokens = random_tokens(4, 16)
    loss = F.cross_entropy(Transformer(ARGS)(tokens).flatten(0, 1), tokens.flatten())
    # The weights start small, so the logits are near zero: log(256) = 5.545.
    assert loss.item() == pytest.approx(5.545, abs=0.1)


def test_future_tokens_do_not_change_past_logits() -> None:
    model = Transformer(ARGS)
    tokens = random_tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % ARGS.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])  # the change does reach its own rows


def reference_attention(attention: Attention, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Softmax attention written out, key and value heads repeated for their query heads."""
    head_dim = attention.head_dim

    def heads(projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    q = heads(attention.wq(x))
    k, v = heads(attention.wk(x)), heads(attention.wv(x))
    q, k = (apply_rope(t.transpose(1, 2), rope).transpose(1, 2) for t in (q, k))
    repeats = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / head_dim**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return attention.wo((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_grouped_query_attention_repeats_key_and_value_heads(n_kv_heads: int) -> None:
    args = ModelArgs(dim=32, n_heads=4, n_kv_heads=n_kv_heads)
    attention = Attention(args)
    x = torch.randn(2, 9, args.dim)
    rope = rope_table(args.head_dim, 9, args.rope_theta)
    torch.testing.assert_close(attention(x, rope), reference_attention(attention, x, rope))


def test_attention_runs_on_a_share_of_the_heads() -> None:
    # What one of two tensor-parallel ranks holds: half of the rows of wq, wk, wv, of wo's columns.
    attention = Attention(ARGS)
    x = torch.randn(2, 9, ARGS.dim)
    rope = rope_table(ARGS.head_dim, 9, ARGS.rope_theta)
    partial_sums = []
    for rank in range(2):
        share = copy.deepcopy(attention)
        for projection in (share.wq, share.wk, share.wv):
            projection.weight = torch.nn.Parameter(projection.weight.chunk(2, dim=0)[rank])
        share.wo.weight = torch.nn.Parameter(share.wo.weight.chunk(2, dim=1)[rank])
        partial_sums.append(share(x, rope))
    torch.testing.assert_close(sum(partial_sums), attention(x, rope))


def test_feed_forward_is_swiglu() -> None:
    feed_forward = FeedForward(ARGS)
    x = torch.randn(2, 5, ARGS.dim)
    gate, up = x @ feed_forward.w1.weight.T, x @ feed_forward.w3.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ feed_forward.w2.weight.T
    torch.testing.assert_close(feed_forward(x), expected)


def test_rope_keeps_lengths_and_leaves_position_zero() -> None:
    x = torch.randn(2, 6, 3, 8)
    turned = apply_rope(x, rope_table(8, 6, theta=100.0))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1:], x[:, 1:])


def test_rope_scores_depend_on_the_distance_only() -> None:
    rope = rope_table(8, 32, theta=100.0)
    query, key = torch.randn(2, 8)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        q = apply_rope(query.expand(1, 32, 1, 8), rope)[0, query_position, 0]
        k = apply_rope(key.expand(1, 32, 1, 8), rope)[0, key_position, 0]
        return q @ k

    torch.testing.assert_close(score(5, 2), score(25, 22))
    assert not torch.allclose(score(5, 2), score(5, 3))


def test_rope_turns_a_pair_by_position_times_frequency() -> None:
    x = torch.tensor([1.0, 0.0]).expand(1, 4, 1, 2)  # one pair: frequency theta**0 = 1
    turned = apply_rope(x, rope_table(2, 4, theta=7.0))
    angles = torch.arange(4.0)
    torch.testing.assert_close(turned[0, :, 0], torch.stack((angles.cos(), angles.sin()), dim=-1))


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len=16 tokens, got 17"):
        Transformer(ARGS)(random_tokens(1, 17))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 30, "n_heads": 4}, "got dim=30, n_heads=4"),
        ({"dim": 12, "n_heads": 4}, "even head size"),
        ({"n_heads": 8, "n_kv_heads": 3}, "got n_heads=8, n_kv_heads=3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelArgs(**sizes)


def test_default_text_is_the_standard_library() -> None:
    text = load_text()
    assert text.dtype == torch.uint8
    assert 100_000 < len(text) <= MAX_BYTES
    assert b"def " in text.numpy().tobytes()
    assert torch.equal(text, load_text())


def test_a_file_is_read_byte_by_byte(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    assert load_text(file).tolist() == list(range(256))


def test_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.touch()
    with pytest.raises(ValueError, match=r"got none .*empty"):
        load_text(file)


def take(n: int, text: torch.Tensor, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(batches(text, batch_size=3, seq_len=8, seed=seed), n))


def test_targets_are_the_next_tokens() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    for inputs, targets in take(5, text, seed=1):
        assert inputs.shape == targets.shape == (3, 8)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)


def test_batches_depend_on_nothing_but_the_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first = take(4, text, seed=1)
    torch.rand(17)  # another rank may have drawn from the default generator
    torch.testing.assert_close(take(4, text, seed=1), first)
    assert not torch.equal(take(1, text, seed=2)[0][0], first[0][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_the_shortest_text_gives_one_window() -> None:
    text = torch.arange(9, dtype=torch.uint8)
    inputs, targets = take(1, text, seed=0)[0]
    assert inputs.tolist() == [list(range(8))] * 3
    assert targets.tolist() == [list(range(1, 9))] * 3
    with pytest.raises(ValueError, match="longer than seq_len=8 bytes, got 8"):
        take(1, text[:8], seed=0)
