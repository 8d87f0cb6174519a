"""PyTorch for the benchmark `gpu`: prints lines of a name and a number. With `train SECONDS FILE`,
trains for some seconds after the file exists, and prints the steps of a second as work. With
`train-and-wait`, waits for each step before the next, as a loop that prints each loss does."""

import collections
import os
import sys
import time

import torch
from torch import nn


def duration(run, times):
    """Returns the seconds of one of several runs, after a few others."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def product(size, dtype):
    """Returns the TFLOP/s of a matrix product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * size**3 / duration(lambda: a @ b, 20) / 1e12


def train(seconds, file, ahead):
    """Trains for some seconds after the file exists, up to `ahead` steps ahead of the GPU, and
    returns the steps of a second."""
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    print("ready 1", flush=True)
    while not os.path.exists(file):
        time.sleep(0.0005)
    ends, steps, start = collections.deque(), 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        ends.append(torch.cuda.Event())
        ends[-1].record()
        if len(ends) > ahead:
            ends.popleft().synchronize()
            steps += 1
    return steps / elapsed


torch.manual_seed(1)
# A step of the small batch takes the CPU about as long as the GPU.
batch = 1024 if len(sys.argv) > 1 else 256
model = nn.Sequential(
    nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 28 * 28, 10),
).cuda()
optimizer = torch.optim.Adam(model.parameters())
images = torch.randn(batch, 3, 32, 32, device="cuda")
labels = torch.randint(0, 10, (batch,), device="cuda")


def step():
    """Trains once and returns the loss."""
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


if len(sys.argv) > 1:
    ahead = {"train": 8, "train-and-wait": 0}[sys.argv[1]]
    print("work", train(float(sys.argv[2]), sys.argv[3], ahead))
    sys.exit()
print("bf16_tflops", product(8192, torch.bfloat16))
print("fp32_tflops", product(4096, torch.float32))
first = float(step())
print("training_step_ms", duration(step, 300) * 1e3)
print("loss_falls", int(float(step()) < first / 10))
