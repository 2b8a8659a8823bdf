// State of the copier; copier.h documents its interface. The first half of copier.cpp is run by
// callers, the second half by the copy thread; copies.cpp submits the copies themselves.

#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "copier.h"
#include "driver.h"
#include "reports.h"
#include "sync.h"

namespace hetero::kv {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

struct Pair {
    int64_t host_block, block;
};

struct Transfer {
    int64_t id = 0;
    bool loads = false;
    std::vector<Pair> pairs;
    int64_t place = 0, method = kPlain, group = 1, layers = 0, after_step = 0;
    uint32_t base = 0;
    int64_t begun_ns = 0;
    // Used by the copy thread only.
    int64_t layer = 0;     // first layer of the group being submitted
    size_t pair = 0;       // first pair of the group not yet submitted
    int64_t parts = 0, bytes = 0;  // submitted and not yet landed
    int64_t groups = 0;    // likewise, groups begun
    // Bytes of later loads submitted since this one's last part, while it could have been.
    int64_t overtaken = 0;
    bool submitted = false;  // completely, or stopped
    bool failed = false, aborted = false;
};

struct Command {
    std::unique_ptr<Transfer> begun;  // null: stop the transfer `abort`
    int64_t abort = 0;
};

// A submitted part. Without an event it has landed when a part behind it has.
struct Part {
    Transfer* transfer;
    int64_t bytes;
    Handle event;
    bool ends_group;
    int64_t submitted_ns;
    int bad_queries;
};

struct Lane {
    Handle stream = nullptr;
    std::deque<Part> parts;
    int64_t bytes = 0;
    int64_t busy_since_ns = 0, landed_ns = 0;
};

// What callers read of a load, guarded by mutex_.
struct Progress {
    int64_t transfer_id, layer_bytes, left, inflight;
};

struct Step {
    int64_t number;
    Handle event;  // null: done when a later step is
};

// Reuses events: each is recorded again only after it has happened.
class Events {
   public:
    Handle take(const Driver& driver) {
        Handle event = nullptr;
        if (!free_.empty()) {
            event = free_.back();
            free_.pop_back();
        } else if (driver.event_create(&event, kNoTiming) != kSuccess) {
            event = nullptr;
        }
        return event;
    }
    void give(Handle event) {
        if (event != nullptr) free_.push_back(event);
    }
    void destroy(const Driver& driver) {
        for (Handle event : free_) driver.event_destroy(event);
        free_.clear();
    }

   private:
    std::vector<Handle> free_;
};

class Copier {
   public:
    Copier(const Setup& setup, const Driver& driver, Handle context)
        : setup_(setup), driver_(driver), context_(context) {
        layer_bytes_ = setup.block_bytes / setup.num_layers;
    }
    bool start(char* message, size_t size);
    int64_t methods() const;
    Result add_kernel(const void* image);
    void begin(std::unique_ptr<Transfer> transfer);
    void abort(int64_t transfer_id);
    void step_launched(int64_t number, Handle stream);
    bool step_done(int64_t number);
    int64_t ahead(int64_t transfer_id);
    int64_t poll(Done* done, int64_t room);
    bool wait(int64_t ns);
    void report_step(bool ok);
    void set_rate(double rate);
    void totals(Totals* totals);
    int64_t first_error(char* text, int64_t size);
    void close();
    const Driver& driver() const { return driver_; }
    int64_t layer_bytes() const { return layer_bytes_; }

   private:
    static void* main(void* self);
    void run();
    void take(std::vector<Command>& commands);
    void cancel_all();
    bool land(Lane& lane);
    bool has_landed(Lane& lane, size_t index, bool& known);
    void note_landed(Lane& lane, const Part& part, int64_t now);
    void report_done();
    void report(const Done& done);
    void flush_reports();
    // One submission: `layers` layers of `count` pairs.
    struct Piece {
        int64_t layers;
        size_t count;
        int64_t bytes;
    };
    Piece next_piece(const Transfer& transfer) const;
    bool is_ahead(const Transfer& transfer) const;
    Transfer* next_load();
    void note_overtaken(const Transfer& by, int64_t bytes);
    bool submit_load();
    bool submit_store();
    Result copy_in(const Transfer& transfer, size_t count, int64_t layers);
    Result copy_runs(const Transfer& transfer, size_t count, int64_t offset, size_t width);
    Result copy_batch(const Transfer& transfer, size_t count, int64_t offset, size_t width);
    Result copy_by_kernel(const Transfer& transfer, size_t count, int64_t offset, size_t width);
    Result copy_out(const Transfer& transfer, size_t count);
    size_t run_length(const Transfer& transfer, size_t first, size_t end) const;
    void add_part(Lane& lane, Transfer& transfer, int64_t bytes, bool ends_group);
    void write_flag(Transfer& transfer, int64_t layers);
    void stop(Transfer& transfer);
    bool check(Result result, const char* what);
    char* host(int64_t block) const { return (char*)setup_.host + block * setup_.block_bytes; }
    Address device(int64_t block) const {
        return (Address)(setup_.device + block * setup_.block_bytes);
    }

    const Setup setup_;
    const Driver driver_;
    const Handle context_;
    int64_t layer_bytes_;
    pthread_t thread_{};
    std::atomic<bool> broken_{false};
    std::atomic<int64_t> errors_{0};
    Handle module_ = nullptr;
    std::atomic<Handle> kernel_{nullptr};

    Mutex mutex_;  // guards what follows, up to steps_mutex_
    Condition work_, done_signal_;
    std::vector<Command> inbox_;
    bool closing_ = false, ended_ = false;
    std::vector<Done> done_;
    std::deque<Done> unreported_;  // the board had no room for them
    std::vector<Progress> progress_;
    Totals totals_{};
    int64_t loading_since_ns_ = 0;
    double rate_bytes_ = 0, rate_ns_ = 0;
    char first_error_[160] = "";

    Mutex steps_mutex_;  // guards steps_; never held together with mutex_
    std::deque<Step> steps_;
    Events step_events_;
    std::atomic<int64_t> last_done_{0};

    // Used by the copy thread only.
    std::vector<std::unique_ptr<Transfer>> transfers_;
    Lane in_, out_;
    Events events_;
    std::vector<Address> targets_, sources_;
    std::vector<size_t> sizes_;
};

}  // namespace hetero::kv
