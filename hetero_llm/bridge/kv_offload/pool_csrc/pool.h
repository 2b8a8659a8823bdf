// Anonymous memory that is touched by many threads and registered with the driver chunk by chunk,
// in threads of its own: whoever wants the memory can use what is ready, and wait for the rest or
// not.

#pragma once

#include <cstdint>

namespace hetero::pool {

struct Options {
    int64_t row_bytes, num_rows;
    int64_t chunk_rows;   // rows registered at a time; rows of a chunk end where a page ends
    int64_t node;         // NUMA node to prefer, -1: whichever
    int64_t threads;      // that touch the memory
    int64_t pause;        // not 0: between two chunks, as long as the last one took
    const char* libcuda;  // path of the driver library, null: the memory is only touched
};

struct State {
    int64_t address;
    int64_t ready_rows;   // touched and registered, from the first row on
    int64_t finished;     // 1: no more will become ready
    int64_t chunks;       // registered
    int64_t mbind_error;  // errno of preferring the node, 0: it is preferred, or none was given
    int64_t cuda_error;   // CUresult of the chunk that was refused, 0: none was
    double touch_seconds, register_seconds;  // spent by the slowest of the threads that touch, and
                                             // in the driver
};

}  // namespace hetero::pool

extern "C" {

// Maps the memory and starts to fill it. The CUDA context that is current on the calling thread is
// the one that memory is registered with. Null and an errno in `error` if there is no such memory.
void* hetero_pool_open(const hetero::pool::Options* options, int64_t* error);

// How far it is.
void hetero_pool_state(void* pool, hetero::pool::State* state);

// The rows that are ready; takes nanoseconds. Negative, ~rows, if no more will be, since something
// failed.
int64_t hetero_pool_ready(void* pool);

// Waits until nothing more will become ready, at most so long; 1 if so.
int64_t hetero_pool_wait(void* pool, double seconds);

// What went wrong, as text that ends with a zero; empty if nothing did.
void hetero_pool_failure(void* pool, char* text, int64_t bytes);

// Stops filling after the chunk at hand, unregisters all chunks and unmaps the memory. No copy may
// be under way.
void hetero_pool_close(void* pool);

}
