// Copies blocks to the device with a kernel that reads page-locked host memory, without the copy
// engines. Compiled at run time; copies.cpp launches it with these constants and parameters.

#define THREADS 512
#define QUADS_EACH 4  // 16-byte loads in flight per thread
#define MAX_PAIRS 256

struct Pairs {
    unsigned host_block[MAX_PAIRS], block[MAX_PAIRS];
};

// Copies `quads` 16-byte words from `offset` on of every pair's row. Few thread blocks, each taking
// every n-th stretch, saturate the link; more would only delay other kernels.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_rows(char* device, const char* host, unsigned long long row_bytes,
              unsigned long long offset, unsigned quads, unsigned count,
              const __grid_constant__ Pairs pairs) {
    const unsigned stretch = THREADS * QUADS_EACH;
    const unsigned stretches = (quads + stretch - 1) / stretch;
    for (unsigned at = blockIdx.x; at < stretches * count; at += gridDim.x) {
        const unsigned pair = at / stretches;
        const unsigned first = at % stretches * stretch + threadIdx.x;
        const uint4* from = (const uint4*)(host + pairs.host_block[pair] * row_bytes + offset);
        uint4* to = (uint4*)(device + pairs.block[pair] * row_bytes + offset);
        uint4 words[QUADS_EACH];
#pragma unroll
        for (unsigned i = 0; i < QUADS_EACH; ++i) {
            if (first + i * THREADS < quads) words[i] = __ldcs(from + first + i * THREADS);
        }
#pragma unroll
        for (unsigned i = 0; i < QUADS_EACH; ++i) {
            if (first + i * THREADS < quads) to[first + i * THREADS] = words[i];
        }
    }
}
