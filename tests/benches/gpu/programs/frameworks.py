"""CuPy, Triton and JAX for the benchmark `gpu`: prints 1 for each that is right, and omits those
that are not installed."""

import importlib.util
import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def is_installed(name):
    """Returns whether a module can be imported."""
    return importlib.util.find_spec(name) is not None


if is_installed("cupy"):
    import cupy

    square = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x", "square")
    x = cupy.arange(1 << 16, dtype=cupy.float32)
    spectrum = cupy.fft.fft(cupy.ones(1024, dtype=cupy.complex64))
    right = bool((square(x) == x * x).all()) and abs(complex(spectrum[0]) - 1024) < 1e-2
    print("cupy", int(right))

if is_installed("triton"):
    import torch
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
    print("triton", int(torch.equal(to, a + b)))

if is_installed("jax"):
    import jax
    import jax.numpy as jnp

    whole = jnp.arange(256.0).reshape(16, 16)
    product = jax.jit(lambda m: m @ m.T)(whole)
    right = bool(jnp.allclose(product, jnp.einsum("ij,kj->ik", whole, whole), rtol=1e-2))
    print("jax", int(right and jax.devices()[0].platform in ("gpu", "cuda")))
