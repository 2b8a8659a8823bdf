// A channel in memory that several processes share: one writer, up to 63 readers, each of which
// sees every message in order.
//
// A message is one frame of contiguous bytes, or several that the reader joins. Head and tails count
// bytes since the start and never wrap; the writer waits for no reader, it returns kNoRoom where the
// slowest one has not read enough yet. All processes run the same program, so there are no
// checksums: a frame that does not carry its own position is refused, and that is all. If a process
// is killed or stopped at any instruction, the others see a channel that does not move.

#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero::broadcast {

constexpr int64_t kMaxReaders = 63;
constexpr int64_t kMinBytes = 1 << 12, kMaxBytes = 1 << 30;  // of the frames; a power of two

// Results of reads; those of 0 and more are numbers of bytes.
enum Result : int64_t { kNoRoom = -1, kTimeout = -2, kInterrupted = -3, kDamaged = -4, kClosed = -5 };

struct End;  // the writer's side, or one reader's

}  // namespace hetero::broadcast

extern "C" {

// Bytes of memory for a channel whose frames take `bytes`; 0 if that number is invalid.
int64_t hetero_broadcast_bytes(int64_t bytes);

// Initializes a channel in fresh memory. `start`: the first position, a multiple of 64.
void hetero_broadcast_format(void* base, int64_t bytes, int64_t readers, uint64_t start);

// Opens the writer's side (`reader` -1) or that of a reader; null if the memory, of `size` bytes,
// holds no channel with such a reader. The memory must stay mapped until hetero_broadcast_free.
void* hetero_broadcast_open(void* base, int64_t size, int64_t reader);
void hetero_broadcast_free(void* end);  // and end its thread

// Most bytes of a frame.
int64_t hetero_broadcast_frame_bytes(const void* end);

// Writes one frame and wakes the readers that sleep. `more`: the next frame belongs to
// the same message. Returns `count`, or kNoRoom: nothing was written.
int64_t hetero_broadcast_write(void* end, const void* bytes, int64_t count, int64_t more);

// Readers get kClosed once they have read everything.
void hetero_broadcast_close(void* end);

// Returns the number of bytes of the next frame, which stays; waits for it until `deadline_ns` of
// CLOCK_MONOTONIC: spins for `spin_ns`, then sleeps. kInterrupted: a signal came, call again.
int64_t hetero_broadcast_wait(void* end, int64_t deadline_ns, int64_t spin_ns);

// Copies the next frame, after hetero_broadcast_wait, and moves behind it. Returns 1 if the
// next frame belongs to the same message, else 0.
int64_t hetero_broadcast_take(void* end, void* bytes);

// Starts a thread that gives the reader's sign of life ten times a second, without Python's lock, and
// ends this process by SIGKILL once its parent is another one than `parent`. Returns 0, or the errno.
int64_t hetero_broadcast_live(void* end, int64_t parent);

// Signs of life of each reader so far, and bytes that it has not read yet.
void hetero_broadcast_beats(const void* end, uint64_t* beats, uint64_t* unread);

}
