// Anonymous memory that own threads touch in parallel and register with the driver chunk by chunk.
// The rows that are ready can be used at once, before the rest is.

#pragma once

#include <cstdint>

namespace hetero::pool {

struct Options {
    int64_t row_bytes, num_rows;
    int64_t chunk_rows;   // rows registered at a time; rows of a chunk end where a page ends
    int64_t node;         // preferred NUMA node, -1: any
    int64_t threads;      // number of threads that touch the memory
    int64_t pause;        // not 0: pause after each chunk for as long as it took
    const char* libcuda;  // path of the driver library; null: only touch the memory
};

struct State {
    int64_t address;
    int64_t ready_rows;   // number of leading rows touched and registered
    int64_t mbind_error;  // errno of preferring the node; 0: none, or no node was given
    double touch_seconds, register_seconds;  // of the slowest touching thread; in the driver
};

}  // namespace hetero::pool

extern "C" {

// Maps the memory and starts to touch and register it, with the CUDA context current in the calling
// thread. Returns null and sets `error` to an errno if the memory cannot be mapped.
void* hetero_pool_open(const hetero::pool::Options* options, int64_t* error);

// Reads the progress.
void hetero_pool_state(void* pool, hetero::pool::State* state);

// Number of ready rows; takes nanoseconds. Negative, ~rows, if something failed and no more will
// become ready.
int64_t hetero_pool_ready(void* pool);

// Waits until no more rows will become ready, for at most `seconds`; returns 1 then, else 0.
int64_t hetero_pool_wait(void* pool, double seconds);

// Copies the zero-terminated text of the failure; empty if there was none.
void hetero_pool_failure(void* pool, char* text, int64_t bytes);

// Stops after the current chunk, unregisters all chunks and unmaps the memory. No copy may be under
// way.
void hetero_pool_close(void* pool);

}
