// Detects once what the processor has and the system permits.

#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace hetero {
namespace {

struct Found {
    Isa isa;
    bool vnni, vbmi;
};

// Registers that the system saves at a context switch, bits of XCR0.
constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

uint64_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

// Linux hands out the tiles' 8 KiB of state per thread on request only; threads inherit the grant.
bool may_use_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has(uint32_t word, int bit) { return word >> bit & 1; }

Found detect() {
    Found found{kBase, false, false};
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool fma = has(c, 12), f16c = has(c, 29), osxsave = has(c, 27);
    uint32_t b7, c7, d7, last;
    if (!osxsave || !__get_cpuid_count(7, 0, &last, &b7, &c7, &d7)) return found;
    const uint64_t saved = saved_registers();

    if (!(fma && f16c && has(b7, 5) && (saved & kYmm) == kYmm)) return found;
    found.isa = kAvx2;
    const bool f = has(b7, 16), dq = has(b7, 17), bw = has(b7, 30), vl = has(b7, 31);
    if (!(f && dq && bw && vl && (saved & kZmm) == kZmm)) return found;
    found.isa = kAvx512;
    found.vnni = has(c7, 11);
    found.vbmi = has(c7, 1);
    uint32_t a71 = 0;
    if (last >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    if (!has(a71, 5)) return found;
    found.isa = kAvx512Bf16;
    const bool amx = has(d7, 22) && has(d7, 24) && has(d7, 25);  // BF16, TILE, INT8
    if (amx && found.vnni && (saved & kTiles) == kTiles && may_use_tiles()) found.isa = kAmx;
    return found;
}

const Found& found() {
    static const Found once = detect();
    return once;
}

}  // namespace

Isa best_isa() { return found().isa; }

bool has_vnni() { return found().vnni; }

bool has_vbmi() { return found().vbmi; }

}  // namespace hetero

extern "C" {

int64_t hetero_isa_best() { return hetero::best_isa(); }

int64_t hetero_isa_vnni() { return hetero::has_vnni(); }

int64_t hetero_isa_vbmi() { return hetero::has_vbmi(); }

}
