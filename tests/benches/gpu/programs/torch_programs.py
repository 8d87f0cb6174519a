"""PyTorch for the benchmark `gpu`: prints lines of a name and a number."""

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


print("bf16_tflops", product(8192, torch.bfloat16))
print("fp32_tflops", product(4096, torch.float32))

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


first = float(step())
print("training_step_ms", duration(step, 300) * 1e3)
print("loss_falls", int(float(step()) < first / 10))
