"""PyTorch for the benchmark `gpu`: prints lines of a name and a number. With `train SECONDS FILE`,
trains for some seconds after the file exists, and prints the steps of a second as work."""

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


def train(seconds, file):
    """Trains for some seconds after the file exists, and returns the steps of a second."""
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    print("ready 1", flush=True)
    while not os.path.exists(file):
        time.sleep(0.0005)
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        steps += 4
    return steps / elapsed


torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 28 * 28, 10),
).cuda()
optimizer = torch.optim.Adam(model.parameters())
images = torch.randn(256, 3, 32, 32, device="cuda")
labels = torch.randint(0, 10, (256,), device="cuda")


def step():
    """Trains once and returns the loss."""
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


if sys.argv[1:2] == ["train"]:
    print("work", train(float(sys.argv[2]), sys.argv[3]))
    sys.exit()
print("bf16_tflops", product(8192, torch.bfloat16))
print("fp32_tflops", product(4096, torch.float32))
first = float(step())
print("training_step_ms", duration(step, 300) * 1e3)
print("loss_falls", int(float(step()) < first / 10))
