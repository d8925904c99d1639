"""A script of your own, with nothing of the kit in it: it needs only what torchrun's environment gives every rank.

trainer run configs/own_script.yaml          or, the same:    torchrun --nproc-per-node 2 configs/own_script.py --steps 50
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Fit a line on every rank, with averaged gradients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    arguments = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", arguments.local_rank) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 1).to(device), device_ids=[device] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    secret = torch.arange(10, dtype=torch.float32, device=device)

    torch.manual_seed(dist.get_rank())  # each rank sees data of its own
    for step in range(arguments.steps):
        inputs = torch.randn(32, 10, device=device)
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ secret)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
