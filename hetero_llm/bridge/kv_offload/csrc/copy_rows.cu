// Blocks from page-locked host memory to the device by reading it from a kernel, without the copy
// engines. Compiled at run time; copier.cpp launches it with these constants and parameters.

#define THREADS 512
#define QUADS_EACH 4  // 16-byte loads that a thread has under way
#define MAX_PAIRS 256

struct Pairs {
    unsigned slot[MAX_PAIRS], block[MAX_PAIRS];
};

// `quads` 16-byte words from `offset` on of every pair's row. Each of a few programs takes every
// n-th stretch: what bounds it is the link, so more of them would only keep others waiting.
extern "C" __global__ void __launch_bounds__(THREADS)
    copy_rows(char* device, const char* host, unsigned long long row_bytes,
              unsigned long long offset, unsigned quads, unsigned count,
              const __grid_constant__ Pairs pairs) {
    const unsigned stretch = THREADS * QUADS_EACH;
    const unsigned stretches = (quads + stretch - 1) / stretch;
    for (unsigned at = blockIdx.x; at < stretches * count; at += gridDim.x) {
        const unsigned pair = at / stretches;
        const unsigned first = at % stretches * stretch + threadIdx.x;
        const uint4* from = (const uint4*)(host + pairs.slot[pair] * row_bytes + offset);
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
