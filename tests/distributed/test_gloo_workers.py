"""One worker for each gloo group, wherever it is made; the ranks of these tests have that."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.common.distributed_launcher import IN_RANK_PROCESS, RankContext, on_ranks
from tests.common.script_on_ranks import run_script_on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist
    from torch.distributed import init_device_mesh

    from pending_dtensor import use_one_gloo_worker

    def gloo_options(group: dist.ProcessGroup) -> dist.ProcessGroupGloo.Options:
        return group._get_backend(torch.device("cpu")).options


@on_ranks(2)
def test_every_group_has_one_worker(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (ctx.world_size, 1), mesh_dim_names=("dp", "tp"))
    timeout = timedelta(seconds=7)
    new_group = dist.new_group(timeout=timeout)
    groups = [dist.group.WORLD, new_group, mesh.get_group("dp"), mesh.get_group("tp")]
    assert [gloo_options(group)._threads for group in groups] == [1] * 4
    # The rest is as torch makes it.
    assert gloo_options(new_group)._timeout == timeout
    assert gloo_options(new_group).global_ranks_in_group == [0, 1]
    values = torch.full((3,), 1.0 + ctx.rank)
    started = [(value := values.clone(), dist.all_reduce(value, async_op=True)) for _ in range(8)]
    for value, work in started:
        work.wait()
        assert value.tolist() == [3.0] * 3
    dist.destroy_process_group(new_group)


@on_ranks(2)
def test_a_group_made_by_hand_has_one_worker_too(ctx: RankContext) -> None:
    """In each of the ways that torch's constructor can be called."""
    timeout = timedelta(seconds=7)
    options = dist.ProcessGroupGloo._Options()
    options._threads = 3
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    default = dist.constants.default_pg_timeout
    ways: list[tuple[tuple[Any, ...], dict[str, Any], timedelta]] = [
        ((), {}, default),
        ((timeout,), {}, timeout),
        ((), {"timeout": timeout}, timeout),
        ((options,), {}, timeout),
        ((), {"options": options}, timeout),
    ]
    for args, kwargs, expected in ways:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, *args, **kwargs)
        assert (group.options._threads, group.options._timeout) == (1, expected)
        value = torch.ones(3)
        group.allreduce(value).wait()
        assert value.tolist() == [1.0] * 3
    with pytest.raises(TypeError):
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, "a minute")


@on_ranks(2)
def test_again_is_no_error(ctx: RankContext) -> None:
    use_one_gloo_worker()
    assert gloo_options(dist.group.WORLD)._threads == 1


def test_torch_gives_two_and_a_group_made_before_is_an_error() -> None:
    (end,) = run_script_on_ranks(
        """
        import torch, torch.distributed as dist
        from pending_dtensor import use_one_gloo_worker

        def workers():
            options = dist.group.WORLD._get_backend(torch.device("cpu")).options
            return options._threads, len(options._devices)

        def join():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        join()
        assert workers() == (2, 1), workers()
        try:
            use_one_gloo_worker()
        except RuntimeError as error:
            assert "before init_process_group" in str(error), error
        else:
            raise AssertionError("accepted")
        assert workers() == (2, 1), workers()
        dist.destroy_process_group()
        use_one_gloo_worker()
        join()
        assert workers() == (1, 1), workers()
        """,
        world_size=1,
    )
    assert (end.exit_code, end.stderr) == (0, "")
