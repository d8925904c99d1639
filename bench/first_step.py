"""A script of a user's as `bench.start` starts it by each launcher: imports, process group, DDP, one optimizer step.

python bench/first_step.py FOLDER [fail]      fail: a first attempt ends with an error after its step
"""

import os
import sys
import time
from pathlib import Path

import torch
import torchvision  # noqa: F401 (what most scripts load)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder, fails = Path(sys.argv[1]), sys.argv[2:] == ["fail"]
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
(folder / f"{attempt}-{rank}").write_text(repr(time.time()))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
if fails and attempt == 0:
    (folder / f"failed-{rank}").write_text(repr(time.time()))
    raise SystemExit(3)
os._exit(0)  # taken apart, an interpreter with gloo's threads aborts at times
