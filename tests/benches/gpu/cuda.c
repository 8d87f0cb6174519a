// What CUDA itself gets of a GPU: the kernels of a cubin, launched one after the other, as the benchmark says on standard
// input. A program of its own, made where the GPU is, since libcuda.so.1 cannot be opened by one that is linked statically.
//
//     nvcc -O2 -o cuda cuda.c -ldl && ./cuda kernels.cubin
//
// A line "NAME GRID_X GRID_Y BLOCK_X BLOCK_Y VALUE BYTES COUNT" launches NAME so often and waits once; the answer is one
// line with the microseconds of one launch. NAME takes its buffers of BYTES each, one for spin and three for sgemm, and
// then VALUE.
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef unsigned long long address;
typedef void *handle;

static void *library;

static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuDevicePrimaryCtxRetain)(handle *, int);
static int (*cuCtxSetCurrent)(handle);
static int (*cuCtxSynchronize)(void);
static int (*cuModuleLoad)(handle *, const char *);
static int (*cuModuleGetFunction)(handle *, handle, const char *);
static int (*cuMemAlloc)(address *, size_t);
static int (*cuMemFree)(address);
static int (*cuMemsetD8)(address, unsigned char, size_t);
static int (*cuLaunchKernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **);

static int find(void *function, const char *name) {
    *(void **)function = dlsym(library, name);
    if (!*(void **)function) printf("absent: libcuda.so.1 has no %s\n", name);
    return *(void **)function != NULL;
}

static int fail(const char *what, int status) {
    if (status) printf("error: %s: CUDA status %d\n", what, status);
    return status;
}

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

static void measure(handle module, const char *line) {
    char name[32];
    unsigned grid[2], block[2], value, bytes, count;
    if (sscanf(line, "%31s %u %u %u %u %u %u %u", name, grid, grid + 1, block, block + 1, &value, &bytes, &count) != 8) {
        printf("error: not understood\n");
        return;
    }
    unsigned buffers = strcmp(name, "sgemm") ? 1 : 3;
    address memory[3] = {0};
    void *arguments[4];
    handle function;
    int status = fail(name, cuModuleGetFunction(&function, module, name));
    for (unsigned i = 0; i < buffers && !status; i++) {
        status = fail("memory", cuMemAlloc(&memory[i], bytes));
        if (!status) status = fail("memory", cuMemsetD8(memory[i], 0, bytes));
        arguments[i] = &memory[i];
    }
    arguments[buffers] = &value;
    double begun = 0;
    // The first launches load the code and bring the clocks up.
    for (unsigned round = 0; round < 2 && !status; round++) {
        begun = now_us();
        for (unsigned i = 0; i < count && !status; i++)
            status = fail("launch", cuLaunchKernel(function, grid[0], grid[1], 1, block[0], block[1], 1, 0, NULL, arguments, NULL));
        if (!status) status = fail("end", cuCtxSynchronize());
    }
    if (!status) printf("%.4f\n", (now_us() - begun) / count);
    for (unsigned i = 0; i < buffers; i++)
        if (memory[i]) cuMemFree(memory[i]);
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    handle context, module;
    int device;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("absent: %s\n", dlerror());
        return 0;
    }
    if (!find(&cuInit, "cuInit") || !find(&cuDeviceGet, "cuDeviceGet") || !find(&cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") ||
        !find(&cuCtxSetCurrent, "cuCtxSetCurrent") || !find(&cuCtxSynchronize, "cuCtxSynchronize") || !find(&cuModuleLoad, "cuModuleLoad") ||
        !find(&cuModuleGetFunction, "cuModuleGetFunction") || !find(&cuMemAlloc, "cuMemAlloc_v2") || !find(&cuMemFree, "cuMemFree_v2") ||
        !find(&cuMemsetD8, "cuMemsetD8_v2") || !find(&cuLaunchKernel, "cuLaunchKernel"))
        return 0;
    if (fail("cuInit", cuInit(0)) || fail("device", cuDeviceGet(&device, 0)) || fail("context", cuDevicePrimaryCtxRetain(&context, device)) ||
        fail("context", cuCtxSetCurrent(context)) || fail("cubin", cuModuleLoad(&module, count > 1 ? arguments[1] : "kernels.cubin")))
        return 1;
    printf("ready\n");
    char line[256];
    while (fgets(line, sizeof line, stdin)) measure(module, line);
    return 0;
}
