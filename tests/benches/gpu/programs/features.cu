// Features of CUDA for the benchmark `gpu`: prints lines of a name and 1, if the result is right. Built
// by nvcc with -rdc=true, -lcudadevrt and -ldl. One that is not printed made the program end.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda_runtime.h>

namespace groups = cooperative_groups;

// A feature whose call fails is wrong. The next one is tried.
#define OK(call)                                                                         \
    do {                                                                                 \
        auto error = (call);                                                             \
        if ((int)error != 0) {                                                           \
            fprintf(stderr, "%s: error %d\n", #call, (int)error);                        \
            return false;                                                                \
        }                                                                                \
    } while (0)

static const int N = 1 << 16;

__global__ void fill(int *to, int n, int first) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = first + i;
}

// Video memory.
struct Numbers {
    int *at = nullptr;
    explicit Numbers(size_t count) { cudaMalloc(&at, count * sizeof(int)); }
    ~Numbers() { cudaFree(at); }
    operator int *() const { return at; }
};

// Returns whether memory that the CPU can read begins with the numbers from `first` on.
static bool is_filled(const int *numbers, int n, int first) {
    for (int i = 0; i < n; i++) {
        if (numbers[i] != first + i) return false;
    }
    return true;
}

// Returns whether video memory has the numbers from `first` on.
static bool has(const int *device, int n, int first) {
    std::vector<int> numbers(n);
    OK(cudaMemcpy(numbers.data(), device, n * sizeof(int), cudaMemcpyDeviceToHost));
    return is_filled(numbers.data(), n, first);
}

// Returns a function of libcuda.
static void *driver(const char *name) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
    return found;
}

#define DRIVER(name) ((decltype(&name))driver(#name))

static bool stream_priorities() {
    int least, greatest;
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    Numbers device(2 * N);
    cudaStream_t streams[2];
    OK(cudaStreamCreateWithPriority(&streams[0], cudaStreamNonBlocking, least));
    OK(cudaStreamCreateWithPriority(&streams[1], cudaStreamNonBlocking, greatest));
    for (int i = 0; i < 2; i++) fill<<<N / 256, 256, 0, streams[i]>>>(device + i * N, N, i * N);
    for (cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
    return least > greatest && has(device, 2 * N, 0);
}

static bool host_callbacks() {
    static std::atomic<int> calls;
    calls = 0;
    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    for (int i = 0; i < 100; i++) {
        OK(cudaLaunchHostFunc(stream, [](void *number) { calls += calls == (int)(long)number; }, (void *)(long)i));
    }
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamDestroy(stream));
    return calls == 100;
}

static bool memory_pools() {
    cudaStream_t stream;
    cudaMemPool_t pool;
    int *first, *second;
    OK(cudaStreamCreate(&stream));
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaMallocAsync(&first, N * sizeof(int), stream));
    fill<<<N / 256, 256, 0, stream>>>(first, N, 3);
    OK(cudaMallocAsync(&second, N * sizeof(int), stream));
    OK(cudaMemcpyAsync(second, first, N * sizeof(int), cudaMemcpyDeviceToDevice, stream));
    OK(cudaFreeAsync(first, stream));
    OK(cudaStreamSynchronize(stream));
    bool right = has(second, N, 3);
    OK(cudaFreeAsync(second, stream));
    OK(cudaStreamSynchronize(stream));
    OK(cudaMemPoolTrimTo(pool, 0));
    return right;
}

// Two allocations, one behind the other in one range of addresses.
static bool virtual_memory() {
    auto granularity = DRIVER(cuMemGetAllocationGranularity);
    auto create = DRIVER(cuMemCreate);
    auto reserve = DRIVER(cuMemAddressReserve);
    auto map = DRIVER(cuMemMap);
    auto allow = DRIVER(cuMemSetAccess);
    auto unmap = DRIVER(cuMemUnmap);
    auto release = DRIVER(cuMemRelease);
    auto give_back = DRIVER(cuMemAddressFree);
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = 0;
    size_t size;
    OK(granularity(&size, &kind, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUdeviceptr range;
    OK(reserve(&range, 2 * size, 0, 0, 0));
    CUmemGenericAllocationHandle handles[2];
    for (int i = 0; i < 2; i++) {
        OK(create(&handles[i], size, &kind, 0));
        OK(map(range + i * size, size, 0, handles[i], 0));
    }
    CUmemAccessDesc access = {kind.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(allow(range, 2 * size, &access, 1));
    int n = 2 * size / sizeof(int);
    fill<<<n / 256, 256>>>((int *)range, n, 5);
    OK(cudaDeviceSynchronize());
    bool right = has((int *)range, n, 5);
    OK(unmap(range, 2 * size));
    for (CUmemGenericAllocationHandle handle : handles) OK(release(handle));
    OK(give_back(range, 2 * size));
    return right;
}

// A graph whose kernel gets another parameter before it is launched again.
static bool graphs() {
    Numbers device(N);
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    cudaGraphNode_t node;
    OK(cudaGraphCreate(&graph, 0));
    int n = N, first = 1;
    void *parameters[] = {&device.at, &n, &first};
    cudaKernelNodeParams kernel = {};
    kernel.func = (void *)fill;
    kernel.gridDim = dim3(N / 256);
    kernel.blockDim = dim3(256);
    kernel.kernelParams = parameters;
    OK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &kernel));
    OK(cudaGraphInstantiate(&instance, graph, 0));
    OK(cudaGraphLaunch(instance, 0));
    OK(cudaDeviceSynchronize());
    bool right = has(device, N, 1);
    first = 9;
    OK(cudaGraphExecKernelNodeSetParams(instance, node, &kernel));
    OK(cudaGraphLaunch(instance, 0));
    OK(cudaDeviceSynchronize());
    right &= has(device, N, 9);
    OK(cudaGraphExecDestroy(instance));
    OK(cudaGraphDestroy(graph));
    return right;
}

// Each block stores its number, then all blocks wait for each other, then block 0 adds them.
__global__ void sum_of_blocks(int *numbers, int *sum) {
    if (threadIdx.x == 0) numbers[blockIdx.x] = blockIdx.x + 1;
    groups::this_grid().sync();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        for (int i = 0; i < gridDim.x; i++) *sum += numbers[i];
    }
}

static bool cooperative_launch() {
    int *sum, blocks = 64;
    OK(cudaMallocManaged(&sum, sizeof(int)));
    Numbers numbers(blocks);
    *sum = 0;
    void *parameters[] = {&numbers.at, &sum};
    OK(cudaLaunchCooperativeKernel((void *)sum_of_blocks, dim3(blocks), dim3(128), parameters, 0, 0));
    OK(cudaDeviceSynchronize());
    bool right = *sum == blocks * (blocks + 1) / 2;
    OK(cudaFree(sum));
    return right;
}

// Each block of a cluster reads the shared memory of the next one.
__global__ void neighbours(int *to) {
    __shared__ int own;
    groups::cluster_group cluster = groups::this_cluster();
    unsigned rank = cluster.block_rank();
    if (threadIdx.x == 0) own = blockIdx.x * 10;
    cluster.sync();
    if (threadIdx.x == 0) to[blockIdx.x] = *cluster.map_shared_rank(&own, (rank + 1) % cluster.num_blocks());
    cluster.sync();
}

static bool clusters() {
    int numbers[8];
    Numbers device(8);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(8);
    config.blockDim = dim3(64);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 4;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    OK(cudaLaunchKernelEx(&config, neighbours, device));
    OK(cudaMemcpy(numbers, device, sizeof(numbers), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int i = 0; i < 8; i++) right &= numbers[i] == (i / 4 * 4 + (i + 1) % 4) * 10;
    return right;
}

__global__ void sample(cudaTextureObject_t texture, float *to) {
    to[threadIdx.x] = tex2D<float>(texture, threadIdx.x + 1.0f, 1.0f);
}

// The middle of four texels is their mean.
static bool textures() {
    const int side = 16;
    std::vector<float> texels(side * side);
    for (int i = 0; i < side * side; i++) texels[i] = i;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t array;
    OK(cudaMallocArray(&array, &format, side, side));
    OK(cudaMemcpy2DToArray(array, 0, 0, texels.data(), side * 4, side * 4, side, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc how = {};
    how.filterMode = cudaFilterModeLinear;
    cudaTextureObject_t texture;
    OK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    float *device, numbers[8];
    OK(cudaMalloc(&device, sizeof(numbers)));
    sample<<<1, 8>>>(texture, device);
    OK(cudaMemcpy(numbers, device, sizeof(numbers), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int x = 0; x < 8; x++) {
        float mean = (texels[x] + texels[x + 1] + texels[side + x] + texels[side + x + 1]) / 4;
        right &= fabsf(numbers[x] - mean) < 0.1f;
    }
    OK(cudaDestroyTextureObject(texture));
    OK(cudaFreeArray(array));
    OK(cudaFree(device));
    return right;
}

__global__ void list(int *sum) {
    int *numbers = (int *)malloc(100 * sizeof(int));
    if (!numbers) return;
    for (int i = 0; i < 100; i++) numbers[i] = i;
    int total = 0;
    for (int i = 0; i < 100; i++) total += numbers[i];
    free(numbers);
    atomicAdd(sum, total);
}

static bool malloc_in_kernels() {
    int *sum;
    OK(cudaMallocManaged(&sum, sizeof(int)));
    *sum = 0;
    list<<<8, 32>>>(sum);
    OK(cudaDeviceSynchronize());
    bool right = *sum == 8 * 32 * 4950;
    OK(cudaFree(sum));
    return right;
}

static bool registered_memory() {
    std::vector<int> numbers(N + 4096);
    int *inside = numbers.data() + 1000, *device;
    OK(cudaHostRegister(inside, N * sizeof(int), cudaHostRegisterMapped));
    OK(cudaHostGetDevicePointer(&device, inside, 0));
    fill<<<N / 256, 256>>>(device, N, 7);
    OK(cudaDeviceSynchronize());
    bool right = is_filled(inside, N, 7);
    OK(cudaHostUnregister(inside));
    return right && is_filled(inside, N, 7);
}

static bool zero_copy() {
    int *numbers;
    OK(cudaHostAlloc(&numbers, N * sizeof(int), cudaHostAllocMapped | cudaHostAllocWriteCombined));
    fill<<<N / 256, 256>>>(numbers, N, 11);
    OK(cudaDeviceSynchronize());
    bool right = is_filled(numbers, N, 11);
    OK(cudaFreeHost(numbers));
    return right;
}

static bool managed_memory() {
    int *numbers;
    OK(cudaMallocManaged(&numbers, N * sizeof(int)));
    fill<<<N / 256, 256>>>(numbers, N, 13);
    OK(cudaDeviceSynchronize());
    bool right = is_filled(numbers, N, 13);
    numbers[5] = 1000;
    OK(cudaMemcpy(numbers, numbers + 5, sizeof(int), cudaMemcpyDefault));
    right &= numbers[0] == 1000;
    OK(cudaFree(numbers));
    return right;
}

static bool one_thread(int number) {
    int *device;
    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    for (int round = 0; round < 50; round++) {
        OK(cudaMalloc(&device, N * sizeof(int)));
        fill<<<N / 256, 256, 0, stream>>>(device, N, number * round);
        OK(cudaStreamSynchronize(stream));
        if (!has(device, N, number * round)) return false;
        OK(cudaFree(device));
    }
    OK(cudaStreamDestroy(stream));
    return true;
}

static bool threads() {
    std::atomic<int> right = 0;
    std::vector<std::thread> all;
    for (int i = 0; i < 8; i++) all.emplace_back([&right, i] { right += one_thread(i); });
    for (std::thread &thread : all) thread.join();
    return right == 8;
}

__global__ void reverse(int *numbers, int n) {
    extern __shared__ int copy[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) copy[i] = numbers[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) numbers[i] = copy[n - 1 - i];
}

static bool large_shared_memory() {
    int bytes;
    OK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    int n = bytes / sizeof(int);
    Numbers device(n);
    fill<<<(n + 255) / 256, 256>>>(device, n, 0);
    OK(cudaFuncSetAttribute(reverse, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    reverse<<<1, 256, bytes>>>(device, n);
    reverse<<<1, 256, bytes>>>(device, n);
    OK(cudaDeviceSynchronize());
    return bytes > 48 << 10 && has(device, n, 0);
}

__device__ __noinline__ int depth(volatile int *at, int n) {
    volatile int frame[64];
    for (int i = 0; i < 64; i++) frame[i] = n + i;
    return n ? depth(at, n - 1) + frame[n % 64] - n - n % 64 + 1 : *at;
}

__global__ void recurse(int *to, int n) { to[threadIdx.x] = depth(to + 32, n); }

static bool large_stacks() {
    int *numbers;
    OK(cudaDeviceSetLimit(cudaLimitStackSize, 16 << 10));
    OK(cudaMallocManaged(&numbers, 33 * sizeof(int)));
    numbers[32] = 5;
    recurse<<<1, 32>>>(numbers, 40);
    OK(cudaDeviceSynchronize());
    bool right = true;
    for (int i = 0; i < 32; i++) right &= numbers[i] == 45;
    OK(cudaFree(numbers));
    return right;
}

static bool out_of_memory() {
    void *device;
    size_t free, total;
    OK(cudaMemGetInfo(&free, &total));
    bool right = cudaMalloc(&device, total + 1) == cudaErrorMemoryAllocation;
    cudaGetLastError();
    if (!right) fprintf(stderr, "free %zu of %zu\n", free, total);
    OK(cudaMalloc(&device, free / 2));
    OK(cudaFree(device));
    return right;
}

__global__ void last(long long ns, int *to) {
    long long now, from;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(from));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - from < ns);
    *to = 17;
}

static bool kernel_of_a_second() {
    float ms;
    cudaEvent_t from, to;
    Numbers device(1);
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    OK(cudaEventRecord(from));
    last<<<1, 1>>>(1000000000, device);
    OK(cudaEventRecord(to));
    OK(cudaEventSynchronize(to));
    OK(cudaEventElapsedTime(&ms, from, to));
    return has(device, 1, 17) && ms > 990;
}

static bool copies_of_rectangles() {
    const int width = 100, height = 50, value = 0x5a;
    size_t pitch;
    char *device;
    std::vector<char> from(width * height), to(width * height);
    for (int i = 0; i < width * height; i++) from[i] = i * 7;
    OK(cudaMallocPitch(&device, &pitch, width, height));
    OK(cudaMemcpy2D(device, pitch, from.data(), width, width, height, cudaMemcpyHostToDevice));
    OK(cudaMemset2D(device + pitch, pitch, value, width, 1));
    OK(cudaMemcpy2D(to.data(), width, device, pitch, width, height, cudaMemcpyDeviceToHost));
    memset(from.data() + width, value, width);
    OK(cudaFree(device));
    return from == to;
}

__constant__ int constants[64];
__device__ int variable;

__global__ void read_constants() { atomicAdd(&variable, constants[threadIdx.x]); }

static bool symbols() {
    int numbers[64], zero = 0, sum = 0;
    for (int i = 0; i < 64; i++) numbers[i] = i;
    OK(cudaMemcpyToSymbol(constants, numbers, sizeof(numbers)));
    OK(cudaMemcpyToSymbol(variable, &zero, sizeof(zero)));
    read_constants<<<1, 64>>>();
    OK(cudaMemcpyFromSymbol(&sum, variable, sizeof(sum)));
    return sum == 2016;
}

// One stream waits for a word that another one writes.
static bool waits_for_words() {
    auto wait = DRIVER(cuStreamWaitValue32);
    auto write = DRIVER(cuStreamWriteValue32);
    cudaStream_t streams[2];
    for (cudaStream_t &stream : streams) OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Numbers device(N + 1);
    OK(cudaMemset(device, 0, (N + 1) * sizeof(int)));
    OK(cudaDeviceSynchronize());
    CUdeviceptr word = (CUdeviceptr)(device + N);
    OK(wait(streams[0], word, 1, CU_STREAM_WAIT_VALUE_EQ));
    fill<<<N / 256, 256, 0, streams[0]>>>(device, N, 19);
    bool early = cudaStreamQuery(streams[0]) != cudaErrorNotReady;
    OK(write(streams[1], word, 1, 0));
    for (cudaStream_t stream : streams) OK(cudaStreamSynchronize(stream));
    return !early && has(device, N, 19);
}

__global__ void print() {
    if (threadIdx.x == 3) printf("printf_in_kernels %d\n", threadIdx.x - 2);
}

#define FEATURE(name) {#name, name}

int main() {
    struct {
        const char *name;
        bool (*is_right)();
    } features[] = {
        FEATURE(stream_priorities), FEATURE(host_callbacks), FEATURE(memory_pools),
        FEATURE(virtual_memory), FEATURE(graphs), FEATURE(cooperative_launch), FEATURE(clusters),
        FEATURE(textures), FEATURE(malloc_in_kernels), FEATURE(registered_memory),
        FEATURE(zero_copy), FEATURE(managed_memory), FEATURE(threads),
        FEATURE(large_shared_memory), FEATURE(large_stacks), FEATURE(out_of_memory),
        FEATURE(kernel_of_a_second), FEATURE(copies_of_rectangles), FEATURE(symbols),
        FEATURE(waits_for_words),
    };
    for (auto &feature : features) {
        printf("%s %d\n", feature.name, feature.is_right());
        fflush(stdout);
    }
    print<<<1, 32>>>();
    cudaDeviceSynchronize();
    return 0;
}
