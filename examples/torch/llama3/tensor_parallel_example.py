"""Trains a small Llama-3 on real text with tensor and sequence parallelism.

Runs alone, starting its own ranks, or under torchrun:

    python examples/torch/llama3/tensor_parallel_example.py --tp 2
    torchrun --standalone --nproc-per-node 2 examples/torch/llama3/tensor_parallel_example.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # started as a file: make `examples` importable, and this folder not
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from tqdm import tqdm

from examples.torch.llama3.data import batches, load_text
from examples.torch.llama3.model import ModelArgs, Transformer
from examples.torch.llama3.parallelize import parallelize_llama3
from pending_dtensor import record_overlap, use_one_gloo_worker

MODEL_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    flag = argparse.BooleanOptionalAction
    plan = parser.add_argument_group("parallelism")
    plan.add_argument("--tp", type=int, help="ranks; default 2, or all ranks under torchrun")
    plan.add_argument(
        "--async-redistribute", action=flag, default=True, help="overlap the collectives"
    )
    plan.add_argument(
        "--sequence-parallel", action=flag, default=True, help="shard the residual stream"
    )
    plan.add_argument(
        "--loss-parallel", action=flag, default=False, help="keep the logits sharded in the loss"
    )
    plan.add_argument(
        "--mc2-kernel", help="fuse collectives and matmuls: pipelined, decomposed, ascend, or auto"
    )
    plan.add_argument("--device", default="cpu", help="device type: cpu, cuda, npu")
    train = parser.add_argument_group("training")
    train.add_argument("--text", type=Path, help="file to learn; default Python's own library")
    train.add_argument("--steps", type=int, default=50, help="optimizer steps")
    train.add_argument("--batch-size", type=int, default=4, help="sequences per step")
    train.add_argument("--seq-len", type=int, default=128, help="tokens per sequence")
    train.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    train.add_argument("--seed", type=int, default=0, help="decides weights and batches")
    train.add_argument("--json-out", type=Path, help="write losses and overlap there")
    train.add_argument(
        "--trace-out", type=Path, help="folder for each rank's trace of the last step"
    )
    size = parser.add_argument_group("model size")
    for name in MODEL_SIZES:
        default = getattr(ModelArgs, name)
        size.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=name)
    return parser.parse_args(argv)


def mode_name(args: argparse.Namespace) -> str:
    """Says in one word how the collectives run."""
    if args.mc2_kernel:
        return f"mc2 {args.mc2_kernel}"
    return "async" if args.async_redistribute else "sync"


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Trains on this rank, inside an initialized process group.

    Args:
        args: the command line, see `parse_args`.

    Returns:
        What `--json-out` writes: the mode and, of each step, the loss, the seconds it took and the
        overlap log's summary on this rank.
    """
    mesh = init_device_mesh(args.device, (args.tp,), mesh_dim_names=("tp",))
    if args.sequence_parallel and args.seq_len % args.tp:
        raise ValueError(
            f"Expected --seq-len to be a multiple of {args.tp} ranks, got {args.seq_len} "
            "(sequence parallelism). Change it or pass --no-sequence-parallel."
        )
    text = load_text(args.text)
    check_same_text(text)

    torch.manual_seed(args.seed)  # the same weights on every rank, before they are sharded
    sizes = {name: getattr(args, name) for name in MODEL_SIZES}
    model = Transformer(ModelArgs(max_seq_len=args.seq_len, **sizes)).to(args.device)
    parallelize_llama3(
        model,
        mesh,
        enable_sequence_parallel=args.sequence_parallel,
        enable_loss_parallel=args.loss_parallel,
        enable_mc2=args.mc2_kernel is not None,
        async_redistribute=args.async_redistribute,
        mc2_kernel=args.mc2_kernel or "auto",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = batches(text, batch_size=args.batch_size, seq_len=args.seq_len, seed=args.seed)

    losses: list[float] = []
    step_s: list[float] = []
    overlap: list[dict[str, Any]] = []
    progress = tqdm(
        range(args.steps), desc=mode_name(args), unit="step", disable=dist.get_rank() != 0
    )
    for _ in progress:
        started = time.perf_counter()
        with record_overlap(mode_name(args)) as log:
            inputs, targets = (tokens.to(args.device) for tokens in next(data))
            with loss_parallel() if args.loss_parallel else nullcontext():
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        step_s.append(time.perf_counter() - started)
        overlap.append(log.summary())
        progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    if args.trace_out is not None:
        args.trace_out.mkdir(parents=True, exist_ok=True)
        name = f"{mode_name(args).replace(' ', '-')}-rank{log.rank}.json"
        log.to_chrome_trace(args.trace_out / name)
    return {"mode": mode_name(args), "losses": losses, "step_s": step_s, "overlap": overlap}


def check_same_text(text: torch.Tensor) -> None:
    """Refuses to train if the ranks would read different tokens, which would go unnoticed."""
    checksums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, zlib.crc32(text.numpy()))
    if len(set(checksums)) > 1:
        raise ValueError(
            f"Expected the same text on every rank, got checksums {checksums} (check_same_text). "
            "Name one file with --text that all machines share."
        )


def run_rank(rank: int, runs: Sequence[argparse.Namespace], store: str | None = None) -> None:
    """Runs one rank from start to end.

    Args:
        rank: its number on this machine, which is also its device's.
        runs: command lines with one `tp` and `device`, trained one after the other.
        store: file through which the ranks find each other; None under torchrun, whose environment
            says how.
    """
    device, ranks = runs[0].device, runs[0].tp
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    use_one_gloo_worker()
    backend = dist.get_default_backend_for_device(device)
    if store is None:
        dist.init_process_group(backend)
    else:
        file_store = dist.FileStore(store, ranks)
        dist.init_process_group(backend, store=file_store, rank=rank, world_size=ranks)
    try:
        for args in runs:
            result = train(args)
            if dist.get_rank() == 0:
                report(result, args.json_out)
    finally:
        dist.destroy_process_group()


def launch(runs: Sequence[argparse.Namespace]) -> None:
    """Starts the ranks on this machine and waits for them; `runs` as in `run_rank`."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share this machine's cores
    if sys.platform == "linux":
        # All ranks are here. Otherwise gloo looks up the host's name, which may not be known.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run_rank, (runs, store), nprocs=runs[0].tp)


def report(result: dict[str, Any], json_out: Path | None) -> None:
    """Prints what the run gave, and writes it to a file if one is named."""
    losses, last = result["losses"], result["overlap"][-1]
    exposed_s = median(step["exposed_s"] for step in result["overlap"])
    print(
        f"{result['mode']}: loss {losses[0]:.4f} -> {losses[-1]:.4f}; a step takes "
        f"{median(result['step_s']):.3f} s, of which {exposed_s:.3f} s are waiting for "
        f"{last['collectives']} collectives: {last['by_kind']}"
    )
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))


def main() -> None:
    """Runs under torchrun as one of its ranks, or else starts `--tp` ranks on this machine."""
    args = parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
        if args.tp not in (None, ranks):
            raise SystemExit(
                f"Expected --tp to be torchrun's {ranks} ranks, got {args.tp}. Leave --tp out."
            )
        args.tp = ranks
        run_rank(int(os.environ["LOCAL_RANK"]), [args])
    else:
        args.tp = args.tp or 2
        launch([args])


if __name__ == "__main__":
    main()
