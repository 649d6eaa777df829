"""The launcher: what passes, what fails and how it is shown, and that the next test is unharmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.common import distributed_launcher
from tests.common.distributed_launcher import (
    IN_RANK_PROCESS,
    RankContext,
    RankFailure,
    RankPool,
    Task,
    on_ranks,
    pool,
)
from tests.common.script_on_ranks import run_script_on_ranks

if IN_RANK_PROCESS:
    import torch
    import torch.distributed as dist


# --- what passes


@on_ranks(2, 4)
def test_a_collective(ctx: RankContext) -> None:
    value = torch.tensor(ctx.rank)
    dist.all_reduce(value)
    assert value.item() == sum(range(ctx.world_size))


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@on_ranks(2)
@pytest.mark.parametrize("size", [1, 3])
def test_parametrized_with_a_fixture(
    ctx: RankContext, dtype: str, size: int, tmp_path: Path
) -> None:
    value = torch.full((size,), ctx.rank, dtype=getattr(torch, dtype))
    dist.all_reduce(value)
    assert value.tolist() == [1] * size
    assert tmp_path.is_dir()


@given(values=st.lists(st.integers(-9, 9), max_size=4))
@on_ranks(2)
def test_drawn_in_the_parent(ctx: RankContext, values: list[int]) -> None:
    value = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(value)
    assert value.tolist() == [2 * drawn for drawn in values]


@on_ranks(2)
def test_mesh_is_made_once(ctx: RankContext) -> None:
    mesh = ctx.mesh()
    assert mesh is ctx.mesh(2)
    assert (mesh.shape, mesh.mesh_dim_names) == ((2,), ("tp",))
    assert ctx.mesh(1, 2).mesh_dim_names == ("dp", "tp")
    assert ctx.mesh(2, names=("cp",)) is not mesh


@on_ranks(2)
def test_one_thread_and_the_same_seed(ctx: RankContext) -> None:
    drawn = torch.randint(2**40, (1,))
    of_rank_0 = drawn.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(drawn, of_rank_0)
    assert torch.get_num_threads() == 1


def rank_and_size(ctx: RankContext, factor: int, *, offset: int = 0) -> dict[str, Any]:
    return {"rank": ctx.rank * factor + offset, "of": [ctx.world_size, None, 0.5, "x"]}


def draw() -> float:
    return torch.rand(1).item()


def count_bytes(data: bytes) -> int:
    return len(data)


def test_results_come_back_by_rank() -> None:
    assert pool(2).run(rank_and_size, 10, offset=1) == [
        {"rank": 1, "of": [2, None, 0.5, "x"]},
        {"rank": 11, "of": [2, None, 0.5, "x"]},
    ]


def test_seed_is_set_before_each_task() -> None:
    assert pool(2).run(draw) == pool(2).run(draw)


def test_arguments_larger_than_a_pipe() -> None:
    assert pool(2).run(count_bytes, b"x" * 10_000_000) == [10_000_000] * 2


def test_a_function_the_ranks_cannot_find_is_refused() -> None:
    with pytest.raises(TypeError, match="module-level function"):
        pool(2).run(lambda: None)


def test_arguments_that_cannot_be_sent_leave_the_pool_alone() -> None:
    pids = pool(2).pids
    with pytest.raises(Exception, match="pickle"):
        pool(2).run(count_bytes, lambda: None)
    assert pool(2).run(rank_and_size, 0)
    assert pool(2).pids == pids


def test_processes_are_kept() -> None:
    pids = pool(2).pids
    pool(2).run(rank_and_size, 1)
    assert pool(2).pids == pids


def skip_on_every_rank() -> None:
    pytest.skip("not here")


def test_a_skip_on_every_rank_is_a_skip() -> None:
    pids = pool(2).pids
    with pytest.raises(pytest.skip.Exception, match="not here"):
        pool(2).run(skip_on_every_rank)
    assert pool(2).pids == pids


# --- what fails: `failing` also checks that the pool was replaced and works again


@pytest.fixture
def kept() -> Iterator[RankPool]:
    """The kept pool of two ranks; after the test it must be a new one, in working order."""
    before = pool(2)
    yield before
    assert before.closed
    assert all(not _exists(pid) for pid in before.pids)
    assert pool(2).run(rank_and_size, 1)[1]["rank"] == 1
    assert not set(pool(2).pids) & set(before.pids)


def _exists(pid: int) -> bool:
    """Whether a process runs: one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _failure(
    kept: RankPool, function: Any, *args: Any, timeout_s: float = 60.0, **kwargs: Any
) -> RankFailure:
    task = Task(function.__module__, function.__qualname__, args, kwargs)
    with pytest.raises(RankFailure) as caught:
        kept.run_task(task, timeout_s)
    return caught.value


def raise_on_rank_1(ctx: RankContext) -> None:
    os.write(1, f"seen before the error on rank {ctx.rank}".encode())
    if ctx.rank == 1:
        raise ValueError("only here")


def test_raise_on_one_rank(kept: RankPool) -> None:
    failure = _failure(kept, raise_on_rank_1)
    assert [outcome.status for outcome in failure.outcomes] == ["returned", "raised"]
    message = str(failure)
    assert "1 of 2 ranks failed" in message
    assert "ValueError: only here" in message
    assert "in raise_on_rank_1" in message
    assert "seen before the error on rank 1" in message


def assert_with_values(ctx: RankContext) -> None:
    assert ctx.rank + 40 == 7


def test_raise_on_every_rank_shows_each(kept: RankPool) -> None:
    failure = _failure(kept, assert_with_values)
    assert [outcome.status for outcome in failure.outcomes] == ["raised", "raised"]
    assert "assert (0 + 40) == 7" in failure.outcomes[0].details
    assert "assert (1 + 40) == 7" in failure.outcomes[1].details
    assert str(failure).count("Traceback (most recent call last)") == 2


def raise_the_same() -> None:
    raise KeyError("everywhere")


_left: list[Any] = []


def raise_with_a_collective_in_flight() -> None:
    _left.append(
        torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)
    )
    raise ValueError("and nobody waits")


def test_ranks_of_a_property_are_kept_if_all_raise_and_nothing_is_in_flight() -> None:
    for body, kept in [
        (raise_the_same, True),
        (raise_the_same, True),
        (raise_on_rank_1, False),
        (raise_with_a_collective_in_flight, False),
    ]:
        before = pool(2)
        with pytest.raises(RankFailure):
            before.run_task(
                Task(body.__module__, body.__qualname__, (), {}, keep_if_all_raise=True)
            )
        assert before.closed is not kept
        assert pool(2).run(rank_and_size, 1)[1]["rank"] == 1


def raise_while_others_communicate(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise ValueError("rank 0 waits for me")
    dist.all_reduce(torch.ones(1))


def test_raise_while_the_other_rank_is_in_a_collective(
    kept: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_launcher, "GRACE_AFTER_FAILURE_S", 0.5)
    started = time.monotonic()
    failure = _failure(kept, raise_while_others_communicate)
    assert time.monotonic() - started < 20  # not the collective's own time limit
    assert [outcome.status for outcome in failure.outcomes] == ["stuck", "raised"]
    assert "in raise_while_others_communicate" in failure.outcomes[0].details
    assert "all_reduce" in failure.outcomes[0].details


def loop_on_rank_0(ctx: RankContext) -> None:
    while ctx.rank == 0:
        pass


def test_hang(kept: RankPool) -> None:
    failure = _failure(kept, loop_on_rank_0, timeout_s=1.5)
    assert [outcome.status for outcome in failure.outcomes] == ["stuck", "returned"]
    assert "in loop_on_rank_0" in failure.outcomes[0].details


def die_on_rank_1(ctx: RankContext, how: str) -> None:
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if how == "SIGKILL" else os._exit(0)
    dist.barrier()


@pytest.mark.parametrize(("how", "shown"), [("SIGKILL", "SIGKILL"), ("exit", "exit code 0")])
def test_dead_rank(kept: RankPool, how: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_launcher, "GRACE_AFTER_FAILURE_S", 0.5)
    failure = _failure(kept, die_on_rank_1, how)
    assert failure.outcomes[0].failed
    assert failure.outcomes[1].status == "died"
    assert shown in failure.outcomes[1].summary


def test_a_rank_that_died_between_tests_is_replaced() -> None:
    before = pool(2)
    os.kill(before.pids[0], signal.SIGKILL)
    while before.alive:
        time.sleep(0.01)
    assert pool(2).run(draw)
    assert not set(pool(2).pids) & set(before.pids)
    assert all(not _exists(pid) for pid in before.pids)


def destroy_the_group() -> None:
    dist.destroy_process_group()


def test_a_destroyed_group_is_replaced(kept: RankPool) -> None:
    assert kept.run(destroy_the_group) == [None, None]


def skip_on_rank_0(ctx: RankContext) -> None:
    if ctx.rank == 0:
        pytest.skip("only here")


def leave_unwaited(ctx: RankContext) -> None:
    global _left
    _left = torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD.group_name)


def warn() -> None:
    warnings.warn("should not pass", UserWarning, stacklevel=1)


class _RaisesInDel:
    def __del__(self) -> None:
        raise ValueError("lost in __del__")


def raise_in_del_of_a_cycle() -> None:
    item = _RaisesInDel()
    item.cycle = item  # type: ignore[attr-defined]


def return_a_tensor() -> Any:
    return [{"x": torch.ones(1)}]


def exit_python() -> None:
    sys.exit(0)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (raise_the_same, "all 1 ranks raised KeyError: 'everywhere'"),
        (leave_unwaited, "1 left in torch's registry"),
        (warn, "UserWarning: should not pass"),
        (raise_in_del_of_a_cycle, "lost in __del__"),
        (return_a_tensor, "got Tensor"),
        (exit_python, "SystemExit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_fails_on_one_rank(body: Any, shown: str) -> None:
    with pytest.raises(RankFailure) as caught:
        pool(1).run(body)
    assert shown in str(caught.value)


def test_a_skip_on_one_rank_only_fails(kept: RankPool) -> None:
    with pytest.raises(RankFailure, match="only here"):
        kept.run(skip_on_rank_0)
    kept.kill()


@on_ranks(2, allow_unwaited=True)
def test_leaks_can_be_allowed(ctx: RankContext) -> None:
    leave_unwaited(ctx)


@on_ranks(2)
def test_after_an_allowed_leak_nothing_is_left(ctx: RankContext) -> None:
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:should not pass")
def test_a_warning_can_be_allowed(ctx: RankContext) -> None:
    warn()


# --- as pytest sees it


def test_a_hung_test_cannot_pass(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        textwrap.dedent(
            """
            import sys
            from tests.common.distributed_launcher import on_ranks

            @on_ranks(1, 2)
            def test_passes(ctx):
                pass

            @on_ranks(2, timeout_s=1.5)  # the ranks have imported everything
            def test_hangs_on_rank_1(ctx):
                while ctx.rank == 1:
                    pass

            @on_ranks(2)
            def test_passes_afterwards(ctx):
                assert ctx.world_size == 2

            def test_parent_has_no_torch():
                assert "torch" not in sys.modules
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, "-v"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    assert "test_passes[1ranks] PASSED" in run.stdout
    assert "test_passes[2ranks] PASSED" in run.stdout
    assert "test_hangs_on_rank_1[2ranks] FAILED" in run.stdout
    assert "rank 1: stuck" in run.stdout
    assert "test_sample.py" in run.stdout.partition("rank 1: stuck")[2]
    assert "test_passes_afterwards[2ranks] PASSED" in run.stdout
    assert "test_parent_has_no_torch PASSED" in run.stdout


def wait_and_loop(ctx: RankContext) -> None:
    loop_on_rank_0(ctx)
    dist.barrier()


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        from tests.common.distributed_launcher import pool
        from tests.distributed.test_launcher import wait_and_loop
        print(*pool(1).pids, *pool(2).pids, flush=True)
        pool(2).run(wait_and_loop)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed parent cannot tidy up
    )
    assert parent.stdout is not None
    with parent.stdout:
        idle, looping, waiting = (int(pid) for pid in parent.stdout.readline().split())
        time.sleep(1.0)
        assert all(_exists(pid) for pid in (idle, looping, waiting))
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while any(_exists(pid) for pid in (idle, looping, waiting)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- scripts


def test_script_on_ranks() -> None:
    ends = run_script_on_ranks(
        """
        import sys
        import torch
        import torch.distributed as dist
        from tests.common.script_on_ranks import join_default_group

        rank, world_size = join_default_group()
        total = torch.tensor(rank)
        dist.all_reduce(total)
        print(total.item(), world_size)
        print("to stderr", file=sys.stderr)
        dist.destroy_process_group()
        if rank == 1:
            raise ValueError("at the end")
        """,
        world_size=2,
    )
    assert [end.exit_code for end in ends] == [0, 1]
    assert [end.stdout for end in ends] == ["1 2\n", "1 2\n"]
    assert ends[0].stderr == "to stderr\n"
    assert "ValueError: at the end" in ends[1].stderr


def test_script_on_ranks_shows_the_stack_of_a_stuck_rank() -> None:
    with pytest.raises(TimeoutError) as caught:
        run_script_on_ranks(
            """
            import os
            def wait_for_ever():
                while True:
                    pass
            if os.environ["RANK"] == "1":
                wait_for_ever()
            print("rank 0 is done")
            """,
            world_size=2,
            timeout_s=1.5,
        )
    assert "in wait_for_ever" in str(caught.value)
    assert "rank 0 is done" in str(caught.value)
