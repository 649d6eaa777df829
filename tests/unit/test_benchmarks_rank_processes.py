"""Calls on rank processes: results by rank, and failures with their traceback."""

from __future__ import annotations

import os

import pytest

from benchmarks.rank_processes import RankFailedError, rank_processes
from benchmarks.slow_link import Loopback

LINK = Loopback("a test")


def rank_and_threads(number: int) -> tuple[int, int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(number)
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads()


def fail_on_rank_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ArithmeticError("no such number")


def end_on_rank_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)


def test_results_come_by_rank_from_kept_ranks_and_one_that_raises_is_shown() -> None:
    with rank_processes(LINK, 2) as ranks:
        for number in (3, 4):
            assert ranks.call(rank_and_threads, number=number) == [
                (0, 2 * number, 1),
                (1, 2 * number, 1),
            ]
        with pytest.raises(RankFailedError, match=r"rank 1: Traceback(.|\n)*no such number"):
            ranks.call(fail_on_rank_one)


def test_a_rank_that_ends_is_noticed() -> None:
    with (
        pytest.raises(RankFailedError, match="rank 1: its process ended"),
        rank_processes(LINK, 2) as ranks,
    ):
        ranks.call(end_on_rank_one)
