// Copies of KV blocks between page-locked host memory and the device, submitted by one native
// thread on two streams of its own: loads, layer by layer, on one, stores on the other.
//
// A row is one block: `num_layers` pieces of equal size. A load is submitted in groups of layers, a
// group in parts of at most `part_bytes`. Behind each group the stream writes the number of landed
// layers to the load's layer-ready flag on the device, so the flag is never ahead of the bytes. All
// loads share one stream, so no two writes of one load are ever out of order.
//
// The streams never wait for compute. A load or store that must come after a step is held back here
// until the step's event has happened: if the stream waited instead, a step that itself waits for a
// load further back in that stream would never end.
//
// All functions but hetero_copier_wait and hetero_copier_close return at once. They are called by
// one thread at a time.

#pragma once

#include <cstdint>

namespace hetero::kv {

enum Method : int64_t { kBatch, kRuns, kPlain, kKernel, kMethods };

struct Setup {
    int64_t device, host, flags;  // addresses; flags: int32 each
    int64_t block_bytes, num_layers;
    int64_t chunk_rows;    // host rows registered together; no copy may span two such chunks
    int64_t lookahead;     // groups of a load that may be submitted and not yet landed
    int64_t ahead_bytes;   // bytes of a load that may be, even if these are more groups
    int64_t max_inflight;  // bytes submitted and not yet landed, in each direction
    int64_t part_bytes;
    int64_t lazy;          // 0: everything is submitted at once, without the limits above
    int64_t core;          // CPU core of the thread; -1: any
    int64_t board, rank;   // where ends are reported, too (reports.h), and as whose; 0: nowhere
};

struct Load {
    int64_t transfer_id, place, base;
    int64_t method, group;  // group: layers
    int64_t layers;         // number of leading layers to load
    int64_t after_step;
};

struct Done {
    int64_t transfer_id, ok;
    double seconds;
};

struct Totals {
    int64_t bytes_in, bytes_out;
    int64_t loads, failed_loads, aborted_loads;  // ended loads, each in one of these
    int64_t stores, failed_stores;
    int64_t busy_in_ns, busy_out_ns;  // time with submitted copies that had not landed
    int64_t loading_ns;               // time with at least one load under way
    int64_t cpu_ns;                   // CPU time of the thread
    int64_t errors;                   // failed driver calls
    int64_t broken;                   // 1: a lasting driver error; nothing is copied any more
    double rate;                      // bytes a second, host to device; 0: unknown
};

}  // namespace hetero::kv

extern "C" {

// Opens the driver's library and starts the thread, for the CUDA context current in the calling
// thread. Returns null with a message if that fails; a message beside a handle is a warning.
void* hetero_copier_open(const char* driver, const hetero::kv::Setup* setup, char* message,
                         int64_t size);

// Bit m is set if method m can be used.
int64_t hetero_copier_methods(void* copier);

// Adds kKernel; `image` is copy_rows.cu compiled. Returns 0, or an error with a message.
int64_t hetero_copier_add_kernel(void* copier, const void* image, char* message, int64_t size);

void hetero_copier_load(void* copier, const hetero::kv::Load* load, const int64_t* host_blocks,
                        const int64_t* blocks, int64_t count);
void hetero_copier_store(void* copier, int64_t transfer_id, const int64_t* blocks,
                         const int64_t* host_blocks, int64_t count, int64_t after_step);
void hetero_copier_abort(void* copier, int64_t transfer_id);

// Marks the end of step `number`, whose device work is on `stream`. Numbers ascend.
void hetero_copier_step_launched(void* copier, int64_t number, void* stream);
int64_t hetero_copier_step_done(void* copier, int64_t number);

// Bytes that have to land until this load has, its own included, if no other transfer starts; parts
// submitted out of turn for overtaken loads are ignored. 0 if the load has ended.
int64_t hetero_copier_ahead(void* copier, int64_t transfer_id);

// Writes up to `room` transfers that ended since the previous call; returns their number.
int64_t hetero_copier_poll(void* copier, hetero::kv::Done* done, int64_t room);
// Sleeps until there is something to poll, for at most `ns`; returns whether there is.
int64_t hetero_copier_wait(void* copier, int64_t ns);

// Reports to the board, under transfer id 0, that a step has ended that waited for loads. `ok`: it
// has given up none of them.
void hetero_copier_report_step(void* copier, int64_t ok);

// Sets the initial value of the measured rate, and all counters to 0.
void hetero_copier_set_rate(void* copier, double rate);
void hetero_copier_totals(void* copier, hetero::kv::Totals* totals);
// Copies the text of the first driver error; returns its length, 0: none.
int64_t hetero_copier_first_error(void* copier, char* text, int64_t size);

// Waits for submitted copies, fails the rest and ends the thread. Afterwards only poll, totals,
// first_error and finally free may be called.
void hetero_copier_close(void* copier);
void hetero_copier_free(void* copier);

}
