// Register tiles of float and bf16 for one instruction set. matmul_vector.cpp includes this once
// for each, inside a namespace that has kWidth, Vector, Bits, and TILE, the functions' target.
// multiply_add(x, w, sum) there multiplies floats or, with kHasDot, pairs of bf16. No include guard
// for that reason.
//
// Every output is one chain of sums in the order of k, whatever the tile, so results do not depend
// on how rows and strips are divided.

constexpr int kParts = kStrip / kWidth;  // vectors of a strip
// Steps to unroll together. With 16 registers, GCC would interleave several so that sums spill.
constexpr int kTogether = kWidth == 16 ? 4 : 1;

// What is multiplied of the 4 bytes of a step.
enum Part { kWhole, kFirstHalf, kSecondHalf };

// A half of each pair of bf16 becomes a float.
template <Part kPart>
TILE inline Vector operand(Vector v) {
    if (kPart == kWhole) return v;
    return (Vector)(kPart == kSecondHalf ? (Bits)v & 0xffff0000u : (Bits)v << 16);
}

// A step of an input in all places.
TILE inline Vector spread(const char* x) {
    return (Vector)(Bits{} + read_one<uint32_t>(x));
}

template <bool kStrips>
TILE inline float* row_of(const TileCall& c, int r) {
    return c.out + (kStrips ? c.rows[r] : r * c.out_stride);
}

template <Part kPart, bool kStrips, int R, int N>
TILE inline void add_step(const TileCall& c, const char* w, const char* x, Vector (&sums)[R][N]) {
    Vector b[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) b[n] = operand<kPart>(read_one<Vector>(w + n * sizeof(Vector)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        Vector a{};
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            if (n % (kStrips ? kParts : N) == 0)
                a = operand<kPart>(
                    spread(x + r * c.x_stride + (kStrips ? c.offsets[n / kParts] : 0)));
            sums[r][n] = multiply_add(a, b[n], sums[r][n]);
        }
    }
}

// kStrips: an input of its own for each strip, see multiply_strips.
template <Format kFormat, bool kStrips, int R, int S>
TILE void tile(const TileCall& c) {
    constexpr int N = S * kParts;
    constexpr int64_t kSteps = kStrips ? 1 : kUnroll;
    Vector sums[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            sums[r][n] = c.add ? read_one<Vector>(row_of<kStrips>(c, r) + n * kWidth) : Vector{};
    const char *w = c.weights, *x = c.x, *ahead = c.ahead;
    for (int64_t step = 0; step < c.steps; step += kSteps) {
        for (int64_t i = 0; i < c.lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll kTogether
        for (int64_t j = 0; j < kSteps; ++j, w += kStepBytes, x += 4) {
            if constexpr (kFormat == Format::kFloat || kHasDot) {
                add_step<kWhole, kStrips>(c, w, x, sums);
            } else {  // both halves together would need more registers than there are
                add_step<kFirstHalf, kStrips>(c, w, x, sums);
                add_step<kSecondHalf, kStrips>(c, w, x, sums);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            std::memcpy(row_of<kStrips>(c, r) + n * kWidth, &sums[r][n], sizeof(Vector));
}
