from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist


@on_ranks(2, 4)
def test_sum_of_ranks(ctx: RankContext) -> None:
    value = torch.tensor(ctx.rank)
    dist.all_reduce(value)
    assert value.item() == sum(range(ctx.world_size))
