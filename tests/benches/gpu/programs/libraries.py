"""CUDA's libraries for the benchmark `gpu`, by PyTorch and others: prints lines of a name and 1, if the
result is right. Omits what is not installed."""

import importlib.util
import os
import sys
import traceback

# PyTorch then reserves addresses and maps memory behind each other.
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from torch import nn

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False


def near(a, b, tolerance=1e-3):
    """Returns whether tensors of any device differ by little."""
    return bool(torch.allclose(a.detach().cpu().float(), b.detach().cpu().float(), tolerance, tolerance))


def cudnn():
    """A convolution and its gradients."""
    convolution, images = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 32, 32)
    on_gpu = nn.Conv2d(3, 8, 3).cuda()
    on_gpu.load_state_dict(convolution.state_dict())
    convolution(images).square().sum().backward()
    on_gpu(images.cuda()).square().sum().backward()
    return near(convolution(images), on_gpu(images.cuda())) and near(
        convolution.weight.grad, on_gpu.weight.grad, 1e-2
    )


def flash_attention():
    """Attention by the fused kernel."""
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        fused = nn.functional.scaled_dot_product_attention(q, k, v)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return near(fused, nn.functional.scaled_dot_product_attention(q, k, v), 3e-2)


def compiled():
    """A function that torch.compile makes kernels of."""

    def function(x):
        return (x.sin() * x.cos() + x.square().mean(0)).relu()

    x = torch.randn(500, 300, device="cuda")
    return near(torch.compile(function)(x), function(x))


def cusolver():
    """A system of linear equations, and eigenvalues."""
    a, b = torch.randn(200, 200, dtype=torch.float64, device="cuda"), torch.ones(200, 1).double().cuda()
    symmetric = a @ a.T
    values = torch.linalg.eigvalsh(symmetric)
    return near(a @ torch.linalg.solve(a, b), b) and near(values.sum(), symmetric.trace())


def cusparse():
    """A product of a sparse matrix and a dense one."""
    dense, other = torch.randn(300, 300), torch.randn(300, 40)
    dense[dense.abs() < 1] = 0
    return near(torch.sparse.mm(dense.to_sparse_csr().cuda(), other.cuda()), dense @ other)


def cufft():
    """A transform and back."""
    x = torch.randn(64, 1000, device="cuda")
    return near(torch.fft.irfft(torch.fft.rfft(x), 1000), x)


def curand():
    """Mean and deviation of random numbers."""
    x = torch.randn(1_000_000, device="cuda")
    return abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 1) < 0.01


def nccl():
    """Collective operations of a group with one member."""
    torch.distributed.init_process_group(
        "nccl", init_method=f"file:///tmp/nccl-{os.getpid()}", rank=0, world_size=1
    )
    x = torch.arange(1000.0, device="cuda")
    gathered = [torch.empty_like(x)]
    torch.distributed.all_reduce(x)
    torch.distributed.all_gather(gathered, x)
    torch.distributed.destroy_process_group()
    return near(gathered[0], torch.arange(1000.0))


def expandable_segments():
    """Allocations that grow and shrink."""
    parts = [torch.full((size << 20,), size, dtype=torch.uint8, device="cuda") for size in range(1, 40)]
    del parts[::2]
    torch.cuda.empty_cache()
    parts.append(torch.full((500 << 20,), 7, dtype=torch.uint8, device="cuda"))
    return all(int(part[-1]) == int(part[0]) for part in parts)


def transformers():
    """A small language model with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=100)).eval()
    tokens = torch.randint(0, 100, (1, 16))
    with torch.no_grad():
        on_cpu = model(tokens).logits
        return near(on_cpu, model.cuda()(tokens.cuda()).logits)


def numba():
    """A kernel that Numba compiles."""
    import numpy
    from numba import cuda

    @cuda.jit
    def double(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= 2

    x = cuda.to_device(numpy.arange(1000))
    double[4, 256](x)
    return bool((x.copy_to_host() == 2 * numpy.arange(1000)).all())


for check, module in [
    (cudnn, "torch"), (flash_attention, "torch"), (compiled, "triton"), (cusolver, "torch"),
    (cusparse, "torch"), (cufft, "torch"), (curand, "torch"), (nccl, "torch"),
    (expandable_segments, "torch"), (transformers, "transformers"), (numba, "numba"),
]:
    if importlib.util.find_spec(module):
        try:
            right = check()
        except Exception:
            traceback.print_exc(file=sys.stderr)
            right = False
        print(check.__name__, int(right), flush=True)
