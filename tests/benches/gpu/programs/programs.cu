// CUDA programs for the benchmark `gpu` and the demo, one for each word of the command line. Each
// prints lines of a name and a number. Built by nvcc with -rdc=true, -lcudadevrt and -ldl.
#include <algorithm>
#include <assert.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

static double seconds() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

static void check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

#define CHECK(call) check((call), #call)

static double median(std::vector<double> &values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

__global__ void nothing() {}

__global__ void add(const float *a, const float *b, float *sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

__global__ void child(int *total, int value) { atomicAdd(total, value * (int)(threadIdx.x + 1)); }

__global__ void parent(int *total) { child<<<1, 32>>>(total, (int)threadIdx.x + 1); }

// Arithmetic of `n` steps. Each block counts itself when it is done.
__global__ void work(long n, unsigned long long *done, float *out) {
    float x = threadIdx.x;
    for (long i = 0; i < n; i++) x = x * 1.0001f + 0.5f;
    if (x == 12345.f) *out = x;
    if (threadIdx.x == 0) atomicAdd(done, 1);
}

__global__ void store(int *to) { *to = 1; }

__global__ void store_shared(int at) {
    extern __shared__ int numbers[];
    numbers[at] = 1;
}

__global__ void trap() { asm volatile("trap;"); }

__global__ void claim(int a) { assert(a == 0); }

// Returns the error of a kernel. After it, the process has no GPU.
static cudaError_t error_of(const char *what) {
    char *memory;
    CHECK(cudaMalloc(&memory, 4096));
    if (!strcmp(what, "address")) store<<<1, 1>>>((int *)0x1234567000);
    if (!strcmp(what, "alignment")) store<<<1, 1>>>((int *)(memory + 1));
    if (!strcmp(what, "instruction")) store_shared<<<1, 1, 16>>>(1 << 26);
    if (!strcmp(what, "trap")) trap<<<1, 1>>>();
    if (!strcmp(what, "assertion")) claim<<<1, 1>>>(1);
    return cudaDeviceSynchronize();
}

// Doubles 32 numbers. The driver compiles it.
static const char *const PTX = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 at) {
    .reg .u64 %p<4>;
    .reg .u32 %r<3>;
    ld.param.u64 %p1, [at];
    cvta.to.global.u64 %p1, %p1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %p2, %r1, 4;
    add.u64 %p3, %p1, %p2;
    ld.global.u32 %r2, [%p3];
    add.u32 %r2, %r2, %r2;
    st.global.u32 [%p3], %r2;
    ret;
}
)";

// Returns a function of libcuda.
template <typename Function> static Function driver(const char *name) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
    return (Function)found;
}

static bool ptx_is_right() {
    auto load = driver<CUresult (*)(CUmodule *, const void *)>("cuModuleLoadData");
    auto find = driver<CUresult (*)(CUfunction *, CUmodule, const char *)>("cuModuleGetFunction");
    auto launch = driver<CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                      unsigned, unsigned, CUstream, void **, void **)>("cuLaunchKernel");
    CUmodule module;
    CUfunction twice;
    if (load(&module, PTX) != CUDA_SUCCESS || find(&twice, module, "twice") != CUDA_SUCCESS) return false;
    int numbers[32], *device;
    for (int i = 0; i < 32; i++) numbers[i] = i;
    CHECK(cudaMalloc(&device, sizeof(numbers)));
    CHECK(cudaMemcpy(device, numbers, sizeof(numbers), cudaMemcpyHostToDevice));
    void *parameters[] = {&device};
    if (launch(twice, 1, 1, 1, 32, 1, 1, 0, nullptr, parameters, nullptr) != CUDA_SUCCESS) return false;
    CHECK(cudaMemcpy(numbers, device, sizeof(numbers), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int i = 0; i < 32; i++) right &= numbers[i] == 2 * i;
    return right;
}

// Prints whether a matrix product of cuBLAS is right, if the loader finds cuBLAS.
static void cublas() {
    void *library = nullptr;
    for (const char *name : {"libcublas.so.13", "libcublas.so.12"}) {
        if (!library) library = dlopen(name, RTLD_NOW);
    }
    if (!library) return;
    auto create = (int (*)(void **))dlsym(library, "cublasCreate_v2");
    auto multiply = (int (*)(void *, int, int, int, int, int, const float *, const float *, int,
                             const float *, int, const float *, float *, int))
        dlsym(library, "cublasSgemm_v2");
    const int n = 512;
    std::vector<float> a(n * n), b(n * n), c(n * n);
    for (int i = 0; i < n * n; i++) a[i] = i * 7 % 13 - 6, b[i] = i * 5 % 11 - 5;
    float *device, one = 1, zero = 0;
    const size_t bytes = n * n * sizeof(float);
    CHECK(cudaMalloc(&device, 3 * bytes));
    CHECK(cudaMemcpy(device, a.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device + n * n, b.data(), bytes, cudaMemcpyHostToDevice));
    void *handle;
    bool right = create(&handle) == 0 && multiply(handle, 0, 0, n, n, n, &one, device, n,
                                                  device + n * n, n, &zero, device + 2 * n * n, n) == 0;
    CHECK(cudaMemcpy(c.data(), device + 2 * n * n, bytes, cudaMemcpyDeviceToHost));
    // Columns are contiguous. The sums are exact in a float.
    for (int i = 0; i < n * n; i += 1001) {
        float sum = 0;
        for (int k = 0; k < n; k++) sum += a[k * n + i % n] * b[i / n * n + k];
        right &= c[i] == sum;
    }
    printf("cublas %d\n", right);
}

// Results that can be wrong: 1 if they are right.
static void results() {
    const int n = 1 << 20;
    std::vector<float> a(n), b(n), sum(n);
    for (int i = 0; i < n; i++) a[i] = i, b[i] = 2 * i;
    float *device;
    CHECK(cudaMalloc(&device, 3 * n * sizeof(float)));
    CHECK(cudaMemcpy(device, a.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device + n, b.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    add<<<n / 256, 256>>>(device, device + n, device + 2 * n, n);
    CHECK(cudaMemcpy(sum.data(), device + 2 * n, n * sizeof(float), cudaMemcpyDeviceToHost));
    bool right = true;
    for (int i = 0; i < n; i++) right &= sum[i] == a[i] + b[i];
    printf("vector_addition %d\n", right);
    int *total, host = 0;
    CHECK(cudaMalloc(&total, sizeof(int)));
    CHECK(cudaMemset(total, 0, sizeof(int)));
    parent<<<1, 8>>>(total);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&host, total, sizeof(int), cudaMemcpyDeviceToHost));
    printf("launches_by_kernels %d\n", host == 36 * 528);
    printf("ptx %d\n", ptx_is_right());
    cublas();
}

// Times by the GPU's own clock, which the speed of the CPU does not change.
static void device_times() {
    float *out;
    unsigned long long *done;
    int processors;
    CHECK(cudaMalloc(&out, sizeof(float)));
    CHECK(cudaMalloc(&done, sizeof(*done)));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    const size_t bytes = 64 << 20;
    char *device, *pinned;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    auto milliseconds = [&](auto submit) {
        std::vector<double> values;
        for (int i = 0; i < 12; i++) {
            float ms;
            CHECK(cudaEventRecord(from));
            submit();
            CHECK(cudaEventRecord(to));
            CHECK(cudaEventSynchronize(to));
            CHECK(cudaEventElapsedTime(&ms, from, to));
            if (i > 1) values.push_back(ms);
        }
        return median(values);
    };
    printf("kernel_ms %.4f\n",
           milliseconds([&] { work<<<2 * processors, 1024>>>(4000000, done, out); }));
    auto rate = [&](const char *name, char *to, char *from) {
        double ms = milliseconds([&] {
            for (int i = 0; i < 8; i++) CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, 0));
        });
        printf("%s %.3f\n", name, 8 * bytes / ms / 1e6);
    };
    rate("pinned_up_gbs", device, pinned);
    rate("pinned_down_gbs", pinned, device);
}

static void times(double started) {
    CHECK(cudaSetDeviceFlags(cudaDeviceScheduleSpin));
    CHECK(cudaFree(0));
    printf("start_ms %.2f\n", (seconds() - started) * 1e3);
    std::vector<double> values;
    for (int i = 0; i < 5000; i++) {
        double from = seconds();
        nothing<<<1, 32>>>();
        CHECK(cudaStreamSynchronize(0));
        values.push_back((seconds() - from) * 1e6);
    }
    printf("launch_and_wait_us %.3f\n", median(values));
    const int queued = 100000;
    double from = seconds();
    for (int i = 0; i < queued; i++) nothing<<<1, 32>>>();
    CHECK(cudaDeviceSynchronize());
    printf("queued_launch_us %.3f\n", (seconds() - from) * 1e6 / queued);

    const size_t bytes = 256 << 20;
    char *device, *pinned;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&pinned, bytes));
    values.clear();
    for (int i = 0; i < 2000; i++) {
        from = seconds();
        CHECK(cudaMemcpyAsync(device, pinned, 64, cudaMemcpyHostToDevice, 0));
        CHECK(cudaStreamSynchronize(0));
        values.push_back((seconds() - from) * 1e6);
    }
    printf("small_copy_us %.3f\n", median(values));
    std::vector<char> pageable(bytes);
    auto rate = [&](const char *name, char *host, bool up) {
        for (int pass = 0; pass < 2; pass++) {
            from = seconds();
            for (int i = 0; i < 10; i++) {
                CHECK(up ? cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, 0)
                         : cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, 0));
            }
            CHECK(cudaDeviceSynchronize());
        }
        printf("%s %.3f\n", name, 10 * bytes / (seconds() - from) / 1e9);
    };
    rate("pinned_up_gbs", pinned, true);
    rate("pinned_down_gbs", pinned, false);
    rate("pageable_up_gbs", pageable.data(), true);
    rate("pageable_down_gbs", pageable.data(), false);

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 20; i++) nothing<<<1, 32, 0, stream>>>();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    for (int pass = 0; pass < 2; pass++) {
        from = seconds();
        for (int i = 0; i < 5000; i++) CHECK(cudaGraphLaunch(replay, stream));
        CHECK(cudaStreamSynchronize(stream));
    }
    printf("graph_us %.3f\n", (seconds() - from) * 1e6 / 5000);
}

// Kernels of some microseconds, up to four queued, for some seconds after a file exists. Work is in
// seconds of kernels.
static void load(double microseconds, double time, const char *start) {
    // The count is in video memory: a count in system memory would take a microsecond for each block.
    unsigned long long *done, *read;
    float *out;
    int processors;
    cudaStream_t reading;
    CHECK(cudaStreamCreateWithFlags(&reading, cudaStreamNonBlocking));
    CHECK(cudaMallocHost(&read, sizeof(*read)));
    CHECK(cudaMalloc(&done, sizeof(*done)));
    CHECK(cudaMemset(done, 0, sizeof(*done)));
    CHECK(cudaMalloc(&out, sizeof(float)));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    auto count = [&] {
        CHECK(cudaMemcpyAsync(read, done, sizeof(*read), cudaMemcpyDeviceToHost, reading));
        CHECK(cudaStreamSynchronize(reading));
        return *read;
    };
    cudaEvent_t events[4];
    for (cudaEvent_t &event : events) CHECK(cudaEventCreate(&event));
    const long steps = microseconds * 440;
    const int blocks = 2 * processors;
    for (int i = 0; i < 3; i++) work<<<blocks, 1024>>>(steps, done, out);
    CHECK(cudaDeviceSynchronize());
    unsigned long long before = count();
    printf("ready 1\n");
    fflush(stdout);
    while (access(start, F_OK)) usleep(500);
    double from = seconds(), last = from, longest = 0;
    for (long i = 0; seconds() - from < time; i++) {
        work<<<blocks, 1024>>>(steps, done, out);
        CHECK(cudaEventRecord(events[i % 4]));
        if (i < 3) continue;
        CHECK(cudaEventSynchronize(events[(i + 1) % 4]));
        double now = seconds();
        longest = std::max(longest, now - last);
        last = now;
    }
    unsigned long long blocks_done = count() - before;
    double elapsed = seconds() - from;
    printf("work %.6f\n", blocks_done / (double)blocks * microseconds / 1e6 / elapsed);
    printf("longest_wait_ms %.3f\n", longest * 1e3);
    CHECK(cudaDeviceSynchronize());
}

// Kernels of some microseconds, eight of them queued, from the time in a file on. After `settle`
// seconds a window of `length` seconds begins, whose edges are ramps: a kernel that ends in a ramp
// counts in part. Work is in seconds of kernels. Waits for a kernel block the thread.
static void queued(double microseconds, double settle, double length, double ramp, const char *start) {
    const int depth = 8;
    unsigned long long *done;
    float *out;
    int processors;
    CHECK(cudaMalloc(&done, sizeof(*done)));
    CHECK(cudaMemset(done, 0, sizeof(*done)));
    CHECK(cudaMalloc(&out, sizeof(float)));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    cudaEvent_t events[depth];
    for (cudaEvent_t &event : events) {
        CHECK(cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming));
    }
    const long steps = microseconds * 440;
    const int blocks = 2 * processors;
    for (int i = 0; i < 3; i++) work<<<blocks, 1024>>>(steps, done, out);
    CHECK(cudaDeviceSynchronize());
    printf("ready 1\n");
    fflush(stdout);
    while (access(start, F_OK)) usleep(500);
    double from = 0, kernels = 0;
    FILE *file = fopen(start, "r");
    if (!file || fscanf(file, "%lf", &from) != 1) {
        fprintf(stderr, "%s: no time\n", start);
        exit(1);
    }
    fclose(file);
    if (from > seconds()) usleep((from - seconds()) * 1e6);
    from += settle;
    for (long i = 0;; i++) {
        work<<<blocks, 1024>>>(steps, done, out);
        CHECK(cudaEventRecord(events[i % depth]));
        if (i < depth - 1) continue;
        // The oldest of the queued kernels.
        CHECK(cudaEventSynchronize(events[(i + 1) % depth]));
        double at = seconds() - from;
        if (at > length + ramp) break;
        kernels += std::max(0.0, std::min({at / ramp, 1.0, (length + ramp - at) / ramp}));
    }
    printf("work %.6f\n", kernels * microseconds / 1e6 / length);
    CHECK(cudaDeviceSynchronize());
}

__global__ void count_up(int *numbers, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) numbers[i]++;
}

// Memory of which each number counts the rounds, checked part by part until a file exists. A round is a
// line.
static void rounds(const char *stop) {
    const int all = 16 << 20, part = 64 << 10;
    int *numbers, *pinned;
    cudaStream_t stream;
    cudaEvent_t counted;
    CHECK(cudaMalloc(&numbers, all * sizeof(int)));
    CHECK(cudaMemset(numbers, 0, all * sizeof(int)));
    CHECK(cudaMallocHost(&pinned, part * sizeof(int)));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&counted));
    CHECK(cudaDeviceSynchronize());
    for (long round = 1; access(stop, F_OK); round++) {
        count_up<<<256, 256, 0, stream>>>(numbers, all);
        CHECK(cudaEventRecord(counted, stream));
        const int *from = numbers + round * 7 * part % all;
        CHECK(cudaMemcpyAsync(pinned, from, part * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaEventSynchronize(counted));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < part; i++) {
            if (pinned[i] != round) {
                fprintf(stderr, "round %ld: number %d is %d\n", round, i, pinned[i]);
                exit(1);
            }
        }
        printf("round %ld\n", round);
        fflush(stdout);
        usleep(20000);
    }
}

// Requests to the driver, as fast as they are answered, from some threads without an end. Tells
// the rate of calls after some seconds.
static void flood(double time) {
    CHECK(cudaFree(0));
    std::atomic<long> calls = 0;
    auto request = [&] {
        for (;; calls += 8) {
            void *device, *pinned;
            cudaStream_t stream;
            cudaEvent_t event;
            CHECK(cudaMalloc(&device, 4 << 20));
            CHECK(cudaMallocHost(&pinned, 4 << 20));
            CHECK(cudaStreamCreate(&stream));
            CHECK(cudaEventCreateWithFlags(&event, cudaEventInterprocess | cudaEventDisableTiming));
            CHECK(cudaEventDestroy(event));
            CHECK(cudaStreamDestroy(stream));
            CHECK(cudaFreeHost(pinned));
            CHECK(cudaFree(device));
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) threads.emplace_back(request);
    printf("ready 1\n");
    fflush(stdout);
    usleep(time * 1e6);
    printf("calls_per_second %.0f\n", calls / time);
    fflush(stdout);
    for (std::thread &thread : threads) thread.join();
}

int main(int count, char **words) {
    double started = seconds();
    if (count == 2 && !strcmp(words[1], "results")) {
        results();
    } else if (count == 2 && !strcmp(words[1], "times")) {
        times(started);
    } else if (count == 2 && !strcmp(words[1], "device-times")) {
        device_times();
    } else if (count == 5 && !strcmp(words[1], "load")) {
        load(atof(words[2]), atof(words[3]), words[4]);
    } else if (count == 7 && !strcmp(words[1], "queued")) {
        queued(atof(words[2]), atof(words[3]), atof(words[4]), atof(words[5]), words[6]);
    } else if (count == 3 && !strcmp(words[1], "rounds")) {
        rounds(words[2]);
    } else if (count == 2 && !strcmp(words[1], "endless")) {
        unsigned long long *done;
        CHECK(cudaMallocManaged(&done, sizeof(*done)));
        work<<<1024, 1024>>>(1L << 60, done, nullptr);
        printf("ready 1\n");
        fflush(stdout);
        CHECK(cudaDeviceSynchronize());
    } else if (count == 3 && !strcmp(words[1], "flood")) {
        flood(atof(words[2]));
    } else if (count == 3 && !strcmp(words[1], "error")) {
        printf("%s %d\n", words[2], (int)error_of(words[2]));
    } else {
        fprintf(stderr, "usage: programs results|times|device-times|load US SECONDS FILE|queued US SETTLE LENGTH RAMP FILE|rounds FILE|endless|flood SECONDS|error address|alignment|instruction|trap|assertion\n");
        return 2;
    }
    return 0;
}
