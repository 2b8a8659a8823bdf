// What the copier consists of; copier.h tells what it does. What callers run is in the first half
// of copier.cpp, what the thread runs in the second one, the single copies in copies.cpp.

#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "copier.h"
#include "driver.h"
#include "sync.h"

namespace hetero::kv {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

struct Pair {
    int64_t slot, block;
};

struct Ticket {
    int64_t number = 0;
    bool loads = false;
    std::vector<Pair> pairs;
    int64_t place = 0, method = kPlain, group = 1, layers = 0, after_step = 0;
    uint32_t base = 0;
    int64_t begun_ns = 0;
    // Of the thread alone.
    int64_t layer = 0;     // first of the group that is being submitted
    size_t pair = 0;       // first of its pairs that is not submitted
    int64_t parts = 0, bytes = 0;  // submitted, not landed
    int64_t groups = 0;    // begun, not landed
    int64_t passed = 0;    // bytes of later loads that went while this one could have, since it went
    bool submitted = false;  // no more will be
    bool failed = false, aborted = false;
};

struct Command {
    std::unique_ptr<Ticket> begun;  // none: `abort` is to stop
    int64_t abort = 0;
};

// A part that was submitted. No event: it has landed when something behind it has.
struct Part {
    Ticket* ticket;
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

// What callers may know of a load.
struct Progress {
    int64_t ticket, layer_bytes, left, inflight;
};

struct Step {
    int64_t number;
    Handle event;  // none: over when a later one is
};

// Events of one owner; each is recorded anew only after it has happened.
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
    void begin(std::unique_ptr<Ticket> ticket);
    void abort(int64_t ticket);
    void step_launched(int64_t number, Handle stream);
    bool step_over(int64_t number);
    int64_t ahead(int64_t ticket);
    int64_t poll(Over* over, int64_t room);
    bool wait(int64_t ns);
    void set_rate(double rate);
    void totals(Totals* totals);
    int64_t trouble(char* text, int64_t size);
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
    void arrive(Lane& lane, const Part& part, int64_t now);
    void sweep();
    // What is submitted at once: so many layers of so many pairs.
    struct Piece {
        int64_t layers;
        size_t count;
        int64_t bytes;
    };
    Piece next_piece(const Ticket& ticket) const;
    bool is_ahead(const Ticket& ticket) const;
    Ticket* next_load();
    void note_overtaken(const Ticket& by, int64_t bytes);
    bool submit_load();
    bool submit_store();
    Result copy_in(const Ticket& ticket, size_t count, int64_t layers);
    Result copy_runs(const Ticket& ticket, size_t count, int64_t offset, size_t width);
    Result copy_batch(const Ticket& ticket, size_t count, int64_t offset, size_t width);
    Result copy_by_kernel(const Ticket& ticket, size_t count, int64_t offset, size_t width);
    Result copy_out(const Ticket& ticket, size_t count);
    size_t run_length(const Ticket& ticket, size_t first, size_t end) const;
    void fly(Lane& lane, Ticket& ticket, int64_t bytes, bool ends_group);
    void write_flag(Ticket& ticket, int64_t layers);
    void give_up(Ticket& ticket);
    bool check(Result result, const char* what);
    char* host(int64_t slot) const { return (char*)setup_.host + slot * setup_.block_bytes; }
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

    Mutex mutex_;  // for what follows, up to the steps
    Condition work_, over_;
    std::vector<Command> inbox_;
    bool closing_ = false, ended_ = false;
    std::vector<Over> done_;
    std::vector<Progress> progress_;
    Totals totals_{};
    int64_t loading_since_ns_ = 0;
    double rate_bytes_ = 0, rate_ns_ = 0;
    char trouble_[160] = "";

    Mutex steps_mutex_;  // for the steps; never held together with mutex_
    std::deque<Step> steps_;
    Events step_events_;
    std::atomic<int64_t> last_over_{0};

    // Of the thread alone.
    std::vector<std::unique_ptr<Ticket>> tickets_;
    Lane in_, out_;
    Events events_;
    std::vector<Address> targets_, sources_;
    std::vector<size_t> sizes_;
};

}  // namespace hetero::kv
