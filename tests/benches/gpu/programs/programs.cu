// CUDA programs for the benchmark `gpu`, one for each word of the command line. Each prints lines of
// a name and a number. Built by nvcc with -rdc=true and -lcudadevrt.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

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

// Kernels of some microseconds, up to four queued, for some seconds. Work is in seconds of kernels.
static void load(double microseconds, double time) {
    unsigned long long *done;
    float *out;
    int processors;
    CHECK(cudaHostAlloc((void **)&done, sizeof(*done), cudaHostAllocMapped));
    CHECK(cudaMalloc(&out, sizeof(float)));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    *done = 0;
    cudaEvent_t events[4];
    for (cudaEvent_t &event : events) CHECK(cudaEventCreate(&event));
    const long steps = microseconds * 440;
    const int blocks = 2 * processors;
    for (int i = 0; i < 3; i++) work<<<blocks, 1024>>>(steps, done, out);
    CHECK(cudaDeviceSynchronize());
    volatile unsigned long long *count = done;
    printf("ready 1\n");
    fflush(stdout);
    unsigned long long before = *count;
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
    double elapsed = seconds() - from;
    printf("work %.6f\n", (*count - before) / (double)blocks * microseconds / 1e6 / elapsed);
    printf("longest_wait_ms %.3f\n", longest * 1e3);
    CHECK(cudaDeviceSynchronize());
}

int main(int count, char **words) {
    double started = seconds();
    if (count == 2 && !strcmp(words[1], "results")) {
        results();
    } else if (count == 2 && !strcmp(words[1], "times")) {
        times(started);
    } else if (count == 4 && !strcmp(words[1], "load")) {
        load(atof(words[2]), atof(words[3]));
    } else if (count == 2 && !strcmp(words[1], "endless")) {
        unsigned long long *done;
        CHECK(cudaMallocManaged(&done, sizeof(*done)));
        work<<<1024, 1024>>>(1L << 60, done, nullptr);
        printf("ready 1\n");
        fflush(stdout);
        CHECK(cudaDeviceSynchronize());
    } else if (count == 2 && !strcmp(words[1], "fault")) {
        store<<<1, 1>>>((int *)0x1234567000);
        printf("error %d\n", (int)cudaDeviceSynchronize());
    } else {
        fprintf(stderr, "usage: programs results|times|load US SECONDS|endless|fault\n");
        return 2;
    }
    return 0;
}
