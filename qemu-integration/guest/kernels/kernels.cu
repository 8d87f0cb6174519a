// Kernels of the guest runtime for GPUs that execute machine code. The software GPU has built-in
// kernels with the same names, parameters and results: see mdev-core/src/abi/program.rs.
//
//     nvcc -arch=sm_90 --cubin -o kernels.cubin kernels.cu

// y = a * x + y
extern "C" __global__ void saxpy(const float *x, float *y, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}

// c = a + b
extern "C" __global__ void vadd(const float *a, const float *b, float *c, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// c = a * b of row-major squares, in blocks of 16 by 16 threads.
extern "C" __global__ void sgemm(const float *a, const float *b, float *c, unsigned n) {
    __shared__ float left[16][16], right[16][16];
    unsigned x = threadIdx.x, y = threadIdx.y;
    unsigned column = blockIdx.x * 16 + x, row = blockIdx.y * 16 + y;
    float sum = 0;
    for (unsigned depth = 0; depth < n; depth += 16) {
        left[y][x] = row < n && depth + x < n ? a[(size_t)row * n + depth + x] : 0;
        right[y][x] = depth + y < n && column < n ? b[(size_t)(depth + y) * n + column] : 0;
        __syncthreads();
#pragma unroll
        for (unsigned k = 0; k < 16; k++) sum += left[y][k] * right[k][x];
        __syncthreads();
    }
    if (row < n && column < n) c[(size_t)row * n + column] = sum;
}

// XRGB8888 pixels of the Mandelbrot set. Operations round to single precision, in the order of the
// CPU's check.
extern "C" __global__ void mandelbrot(unsigned *pixels, unsigned pitch, unsigned width, unsigned height,
                                      unsigned max_iterations, float left, float top, float step) {
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    float re = __fadd_rn(left, __fmul_rn((float)x, step)), im = __fadd_rn(top, __fmul_rn((float)y, step));
    float zr = 0, zi = 0;
    unsigned colour = 0;
    for (unsigned n = 0; n < max_iterations; n++) {
        float zr2 = __fmul_rn(zr, zr), zi2 = __fmul_rn(zi, zi);
        if (__fadd_rn(zr2, zi2) > 4) {
            unsigned t = 255 - 255 * 16 / (min(n, 0xffffu) + 16);
            colour = (t * t / 255) << 16 | t << 8 | (64 + t * 191 / 255);
            break;
        }
        zi = __fadd_rn(__fmul_rn(__fadd_rn(zr, zr), zi), im);
        zr = __fadd_rn(__fsub_rn(zr2, zi2), re);
    }
    pixels[(size_t)y * (pitch / 4) + x] = colour;
}

// Each thread iterates; thread 0 of each block then counts. 0xffffffff iterations never end.
extern "C" __global__ void spin(unsigned *out, unsigned iterations) {
    unsigned state = threadIdx.x + 1, step = iterations != 0xffffffffu;
#pragma unroll 1
    for (unsigned i = 0; i < iterations; i += step) state = state * 1664525u + 1013904223u;
    // Never true, which the compiler cannot know; otherwise the compiler would remove the loop.
    if (threadIdx.x == 0) atomicAdd(out + (state == 0), 1u);
}
