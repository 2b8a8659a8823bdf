// Register tiles of float and of bf16 without bf16 dot products, for one width of vectors. Included
// by matmul_vector.cpp once for each instruction set, inside a namespace that has kWidth, Vector,
// Bits and fma, with TILE the functions' target. No include guard for that reason.
//
// Every output is one chain of sums in the order of k, whatever the tile, so results do not depend
// on how rows and strips are divided.

constexpr int kParts = kStrip / kWidth;  // vectors of a strip
// Steps to unroll together. With 16 registers, GCC would interleave several so that sums spill.
constexpr int kTogether = kWidth == 16 ? 4 : 1;

TILE inline Vector load_vector(const void* p) {
    Vector v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

TILE inline Bits load_bits(const void* p) {
    Bits v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// The half of each pair of bf16, the first or the second, as floats.
template <bool kSecond>
TILE inline Vector half(Bits pairs) {
    return kSecond ? (Vector)(pairs & 0xffff0000u) : (Vector)(pairs << 16);
}

template <int R, int N>
TILE inline void begin(const TileCall& c, Vector (&sums)[R][N]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            sums[r][n] = c.add ? load_vector(c.out + r * c.out_stride + n * kWidth) : Vector{};
}

template <int R, int N>
TILE inline void finish(const TileCall& c, const Vector (&sums)[R][N]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            std::memcpy(c.out + r * c.out_stride + n * kWidth, &sums[r][n], sizeof(Vector));
}

template <int R, int S>
TILE void float_tile(const TileCall& c) {
    constexpr int N = S * kParts;
    Vector sums[R][N];
    begin<R, N>(c, sums);
    const char *w = c.weights, *x = c.x, *ahead = c.ahead;
    for (int64_t step = 0; step < c.steps; step += kUnroll) {
        for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll kTogether
        for (int64_t j = 0; j < kUnroll; ++j, w += kStepBytes, x += 4) {
            Vector b[N];
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) b[n] = load_vector(w + n * sizeof(Vector));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                float value;
                std::memcpy(&value, x + r * c.x_stride, sizeof value);
                const Vector a = Vector{} + value;
#pragma GCC unroll 16
                for (int n = 0; n < N; ++n) sums[r][n] = fma(a, b[n], sums[r][n]);
            }
        }
    }
    finish<R, N>(c, sums);
}

// One half of the pairs at a time: both together would need more registers than there are.
template <int R, int N, bool kSecond>
TILE inline void add_half(const TileCall& c, const char* w, const char* x, Vector (&sums)[R][N]) {
    Vector b[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) b[n] = half<kSecond>(load_bits(w + n * sizeof(Vector)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        uint32_t pair;
        std::memcpy(&pair, x + r * c.x_stride, sizeof pair);
        const Vector a = half<kSecond>(Bits{} + pair);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[r][n] = fma(a, b[n], sums[r][n]);
    }
}

template <int R, int S>
TILE void bf16_tile(const TileCall& c) {
    constexpr int N = S * kParts;
    Vector sums[R][N];
    begin<R, N>(c, sums);
    const char *w = c.weights, *x = c.x, *ahead = c.ahead;
    for (int64_t step = 0; step < c.steps; step += kUnroll) {
        for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll kTogether
        for (int64_t j = 0; j < kUnroll; ++j, w += kStepBytes, x += 4) {
            add_half<R, N, false>(c, w, x, sums);
            add_half<R, N, true>(c, w, x, sums);
        }
    }
    finish<R, N>(c, sums);
}

// The same with an input of its own for each strip, see multiply_strips.
template <int R, int N>
TILE inline void begin_rows(const TileCall& c, Vector (&sums)[R][N]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            sums[r][n] = c.add ? load_vector(c.out + c.rows[r] + n * kWidth) : Vector{};
}

template <int R, int N>
TILE inline void finish_rows(const TileCall& c, const Vector (&sums)[R][N]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            std::memcpy(c.out + c.rows[r] + n * kWidth, &sums[r][n], sizeof(Vector));
}

template <int R, int S>
TILE void float_strips(const TileCall& c) {
    constexpr int N = S * kParts;
    Vector sums[R][N];
    begin_rows<R, N>(c, sums);
    const char *w = c.weights, *x = c.x;
    for (int64_t step = 0; step < c.steps; ++step, w += kStepBytes, x += 4) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            const Vector b = load_vector(w + n * sizeof(Vector));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                float value;
                std::memcpy(&value, x + r * c.x_stride + c.offsets[n / kParts], sizeof value);
                sums[r][n] = fma(Vector{} + value, b, sums[r][n]);
            }
        }
    }
    finish_rows<R, N>(c, sums);
}

template <int R, int N, bool kSecond>
TILE inline void add_half_strips(const TileCall& c, const char* w, const char* x,
                                 Vector (&sums)[R][N]) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
        const Vector b = half<kSecond>(load_bits(w + n * sizeof(Vector)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            uint32_t pair;
            std::memcpy(&pair, x + r * c.x_stride + c.offsets[n / kParts], sizeof pair);
            sums[r][n] = fma(half<kSecond>(Bits{} + pair), b, sums[r][n]);
        }
    }
}

template <int R, int S>
TILE void bf16_strips(const TileCall& c) {
    constexpr int N = S * kParts;
    Vector sums[R][N];
    begin_rows<R, N>(c, sums);
    const char *w = c.weights, *x = c.x;
    for (int64_t step = 0; step < c.steps; ++step, w += kStepBytes, x += 4) {
        add_half_strips<R, N, false>(c, w, x, sums);
        add_half_strips<R, N, true>(c, w, x, sums);
    }
    finish_rows<R, N>(c, sums);
}
