"""PyTorch and Triton for the demo's CUDA VMs: prints lines of a name and a number. Results are 1 if
they are right. Times are by the GPU's clock, in milliseconds, and measured after the file exists that
the command line names."""

import importlib.util
import os
import sys
import time

import torch
from torch import nn

PRODUCTS = 10
# Time for the CPU to submit what is measured, in cycles of the GPU: an emulated CPU is slow.
HEAD_START = 500_000_000


def product_is_right():
    """Returns whether a matrix product of cuBLAS is exact, as sums of small integers are."""
    a, b = (torch.randint(-6, 7, (512, 512)) for _ in range(2))
    product = a.cuda().float() @ b.cuda().float()
    return bool(torch.equal(product.cpu().double(), a.double() @ b.double()))


def loss_falls():
    """Returns whether a training's loss falls to a tenth."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    inputs = torch.randn(512, 256, device="cuda")
    labels = torch.randint(0, 10, (512,), device="cuda")
    losses = []
    for _ in range(80):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        losses.append(float(loss.detach()))
        # The import of PyTorch's optimizers takes an emulated CPU minutes.
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
    return losses[-1] < losses[0] / 10


def product_ms():
    """Returns the time of a large matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(PRODUCTS):
        a @ b
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / PRODUCTS


print("pytorch_cublas", int(product_is_right()), flush=True)
print("pytorch_training", int(loss_falls()), flush=True)
print("ready 1", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
print("pytorch_product_ms", product_ms(), flush=True)
if importlib.util.find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def add(a, b, to, n, BLOCK: tl.constexpr):
        """Adds two vectors."""
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(to + at, tl.load(a + at, mask=inside) + tl.load(b + at, mask=inside), mask=inside)

    a, b = torch.randn(100_000, device="cuda"), torch.randn(100_000, device="cuda")
    to = torch.empty_like(a)
    add[(triton.cdiv(100_000, 1024),)](a, b, to, 100_000, BLOCK=1024)
    print("triton", int(torch.equal(to, a + b)), flush=True)
