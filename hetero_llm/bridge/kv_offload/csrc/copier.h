// Copies of KV blocks between page-locked host memory and the device, submitted by one native
// thread on two streams of its own: loads, layer by layer, on one, stores on the other.
//
// A row is one block: `num_layers` pieces of equal size. A load goes in groups of layers, a group
// in parts of at most `part_bytes`. Behind each group its stream writes how many layers have landed to
// the load's flag on the device, so the flag is never ahead of the bytes. All loads share one
// stream, so no two writes of one load are ever out of order.
//
// The streams never wait for compute. A load or store that must come after a step is held back here
// until the step's event has happened: were a stream to wait, a step that itself waits for a load
// further back in that stream would never end.
//
// Everything but hetero_copier_wait and hetero_copier_close returns at once; calls come from one
// thread at a time.

#pragma once

#include <cstdint>

namespace hetero::kv {

enum Method : int64_t { kBatch, kRuns, kPlain, kKernel, kMethods };

struct Setup {
    int64_t device, host, flags;  // addresses; flags: int32 each
    int64_t block_bytes, num_layers;
    int64_t chunk_rows;    // host rows that were registered together; no copy crosses their borders
    int64_t lookahead;     // groups of one load submitted ahead of what has landed
    int64_t ahead_bytes;   // of one load that may be, however many groups that is
    int64_t max_inflight;  // bytes submitted ahead of what has landed, in each direction
    int64_t part_bytes;
    int64_t lazy;          // 0: everything is submitted at once, the two limits above do not hold
    int64_t core;          // that the thread runs on; -1: any
};

struct Load {
    int64_t ticket, place, base;
    int64_t method, group;  // group: layers
    int64_t layers;         // the first so many are loaded
    int64_t after_step;
};

struct Over {
    int64_t ticket, ok;
    double seconds;
};

struct Totals {
    int64_t bytes_in, bytes_out;
    int64_t loads, failed_loads, aborted_loads;  // that are over; each in one of these
    int64_t stores, failed_stores;
    int64_t busy_in_ns, busy_out_ns;  // while anything was submitted and had not landed
    int64_t loading_ns;               // while any load was begun and not over
    int64_t cpu_ns;                   // of the thread
    int64_t errors;                   // calls of the driver that failed
    int64_t broken;                   // nothing works any more
    double rate;                      // bytes a second, host to device, 0: not known
};

}  // namespace hetero::kv

extern "C" {

// Opens the driver's library and starts the thread, for the context that is current here. Null with
// a message if that fails; a message beside a handle is a warning.
void* hetero_copier_open(const char* driver, const hetero::kv::Setup* setup, char* message,
                         int64_t size);

// Bit m: method m can be used.
int64_t hetero_copier_methods(void* copier);

// Adds kKernel: `image` is copy_rows.cu compiled. Not 0 with a message if that cannot be.
int64_t hetero_copier_add_kernel(void* copier, const void* image, char* message, int64_t size);

void hetero_copier_load(void* copier, const hetero::kv::Load* load, const int64_t* slots,
                        const int64_t* blocks, int64_t count);
void hetero_copier_store(void* copier, int64_t ticket, const int64_t* blocks, const int64_t* slots,
                         int64_t count, int64_t after_step);
void hetero_copier_abort(void* copier, int64_t ticket);

// Numbers ascend. `stream` is where the step's device work is.
void hetero_copier_step_launched(void* copier, int64_t number, void* stream);
int64_t hetero_copier_step_done(void* copier, int64_t number);

// Bytes that have to land before this load has, its own included, if nothing new begins; without
// the turns of loads that were overtaken for too long. 0 if it is over.
int64_t hetero_copier_ahead(void* copier, int64_t ticket);

// What is over and was not told yet, at most `room` of it; returns how many.
int64_t hetero_copier_poll(void* copier, hetero::kv::Over* over, int64_t room);
// Until there is something to poll, at most so long; returns whether there is.
int64_t hetero_copier_wait(void* copier, int64_t ns);

// Where the measured rate starts from; counters start anew.
void hetero_copier_set_rate(void* copier, double rate);
void hetero_copier_totals(void* copier, hetero::kv::Totals* totals);
// The first error that the driver told; returns its length, 0: none.
int64_t hetero_copier_trouble(void* copier, char* text, int64_t size);

// Waits for what is submitted, fails the rest, ends the thread. Only poll, totals and trouble may
// be called after it, and free at last.
void hetero_copier_close(void* copier);
void hetero_copier_free(void* copier);

}
