#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "copier_state.h"

namespace hetero::kv {
namespace {

constexpr unsigned kNonBlocking = 1;       // CU_STREAM_NON_BLOCKING
constexpr int64_t kPauseNs = 8'000;        // between looks at copies under way
constexpr int64_t kStepPauseNs = 50'000;   // between looks at steps that copies are held back for
constexpr int kBadQueries = 8;             // of one event in a row: it will never tell
constexpr double kRateBytes = 256 << 20;   // that the measured rate looks back
constexpr int64_t kRatedBytes = 1 << 20;   // less than this in one part tells of latency, not rate
// A load that later, smaller ones overtake gets a part of its own for so many times its bytes. Of
// 55 GB/s that leaves it 6, which is still faster than computing the shortest prefixes anew, and
// costs those others an eighth.
constexpr int64_t kPatience = 8;

}  // namespace

// Notes what failed; true if it did not.
bool Copier::check(Result result, const char* what) {
    if (result == kSuccess) return true;
    errors_.fetch_add(1);
    if (is_sticky(result)) broken_.store(true);
    Held held(mutex_);
    if (trouble_[0] == '\0') {
        char name[64];
        driver_.describe(result, name, sizeof name);
        snprintf(trouble_, sizeof trouble_, "%s: %s", what, name);
    }
    return false;
}

// ---- calls -------------------------------------------------------------------------------------

bool Copier::start(char* message, size_t size) {
    int least = 0, greatest = 0;
    if (driver_.priority_range != nullptr) driver_.priority_range(&least, &greatest);
    Result result = driver_.stream_create(&in_.stream, kNonBlocking, greatest);
    if (result == kSuccess) result = driver_.stream_create(&out_.stream, kNonBlocking, least);
    if (result != kSuccess) {
        char name[64];
        driver_.describe(result, name, sizeof name);
        snprintf(message, size, "no stream can be made: %s", name);
        if (in_.stream != nullptr) driver_.stream_destroy(in_.stream);
        return false;
    }
    sigset_t all, before;  // signals are for the threads that know of them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&thread_, nullptr, main, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error != 0) {
        snprintf(message, size, "no thread can be started: %s", strerror(error));
        driver_.stream_destroy(in_.stream);
        driver_.stream_destroy(out_.stream);
        return false;
    }
    pthread_setname_np(thread_, "hetero-kv-copy");
    if (setup_.core >= 0) {
        cpu_set_t core;
        CPU_ZERO(&core);
        const bool fits = setup_.core < CPU_SETSIZE;
        if (fits) CPU_SET((int)setup_.core, &core);
        const int refused = fits ? pthread_setaffinity_np(thread_, sizeof core, &core) : 1;
        if (refused != 0) {
            snprintf(message, size, "core %lld cannot be had for the copy thread",
                     (long long)setup_.core);
        }
    }
    return true;
}

int64_t Copier::methods() const {
    int64_t found = 1 << kPlain;
    if (driver_.copy_batch != nullptr) found |= 1 << kBatch;
    if (driver_.copy_2d != nullptr) found |= 1 << kRuns;
    if (kernel_.load() != nullptr) found |= 1 << kKernel;
    return found;
}

Result Copier::add_kernel(const void* image) {
    Address there = 0;
    Handle function = nullptr;
    // The kernel reads host memory at its own address, 16 bytes at a time.
    Result result = driver_.host_address(&there, (void*)setup_.host, 0);
    if (result == kSuccess && (there != (Address)setup_.host ||
                               (setup_.host | setup_.device | layer_bytes_) % 16 != 0)) {
        result = kInvalidValue;
    }
    if (result == kSuccess && module_ == nullptr) result = driver_.module_load(&module_, image);
    if (result == kSuccess) result = driver_.module_function(&function, module_, "copy_rows");
    if (result == kSuccess) kernel_.store(function);
    return result;
}

void Copier::begin(std::unique_ptr<Ticket> ticket) {
    ticket->begun_ns = now_ns();
    Held held(mutex_);
    if (ticket->loads) {
        const int64_t bytes = (int64_t)ticket->pairs.size() * layer_bytes_;
        if (progress_.empty()) loading_since_ns_ = ticket->begun_ns;
        progress_.push_back({ticket->number, bytes, bytes * ticket->layers, 0});
    }
    inbox_.push_back({std::move(ticket), 0});
    work_.signal();
}

void Copier::abort(int64_t ticket) {
    Held held(mutex_);
    inbox_.push_back({nullptr, ticket});
    work_.signal();
}

void Copier::step_launched(int64_t number, Handle stream) {
    step_over(number);  // so that events come back
    Handle event = nullptr;
    if (!broken_.load()) {
        Held held(steps_mutex_);
        event = step_events_.take(driver_);
    }
    // Without an event the step counts as over when the next one that has one is.
    if (event != nullptr && !check(driver_.event_record(event, stream), "cuEventRecord")) {
        Held held(steps_mutex_);
        step_events_.give(event);
        event = nullptr;
    }
    {
        Held held(steps_mutex_);
        steps_.push_back({number, event});
    }
    Held held(mutex_);
    work_.signal();
}

bool Copier::step_over(int64_t number) {
    if (number <= last_over_.load() || broken_.load()) return true;
    Result result = kNotReady;
    {
        Held held(steps_mutex_);
        size_t over = 0;
        for (size_t i = 0; i < steps_.size(); ++i) {
            if (steps_[i].event == nullptr) continue;
            result = driver_.event_query(steps_[i].event);
            if (result != kSuccess) break;
            over = i + 1;
        }
        for (; over > 0; --over) {
            last_over_.store(steps_.front().number);
            step_events_.give(steps_.front().event);
            steps_.pop_front();
        }
    }
    if (result != kNotReady) check(result, "cuEventQuery of a step");
    return number <= last_over_.load() || broken_.load();
}

int64_t Copier::ahead(int64_t ticket) {
    Held held(mutex_);
    const auto own = std::find_if(progress_.begin(), progress_.end(),
                                  [&](const Progress& p) { return p.ticket == ticket; });
    if (own == progress_.end()) return 0;
    int64_t bytes = own->left;
    for (const Progress& other : progress_) {
        if (other.ticket == ticket) continue;
        const bool first = other.layer_bytes < own->layer_bytes ||
                           (other.layer_bytes == own->layer_bytes && other.ticket < ticket);
        bytes += first ? other.left : other.inflight;
    }
    return bytes;
}

int64_t Copier::poll(Over* over, int64_t room) {
    Held held(mutex_);
    const int64_t count = std::min(room, (int64_t)done_.size());
    std::copy_n(done_.begin(), count, over);
    done_.erase(done_.begin(), done_.begin() + count);
    return count;
}

bool Copier::wait(int64_t ns) {
    const int64_t deadline = now_ns() + ns;
    Held held(mutex_);
    while (done_.empty() && over_.wait_until(mutex_, deadline)) {
    }
    return !done_.empty();
}

void Copier::set_rate(double rate) {
    Held held(mutex_);
    rate_bytes_ = kRateBytes;
    rate_ns_ = kRateBytes / rate * 1e9;
    totals_ = {};
}

void Copier::totals(Totals* totals) {
    clockid_t clock;
    Held held(mutex_);
    *totals = totals_;
    if (!progress_.empty()) totals->loading_ns += now_ns() - loading_since_ns_;
    if (!ended_ && pthread_getcpuclockid(thread_, &clock) == 0) totals->cpu_ns = clock_ns(clock);
    totals->errors = errors_.load();
    totals->broken = broken_.load();
    totals->rate = rate_ns_ > 0 ? rate_bytes_ / rate_ns_ * 1e9 : 0;
}

int64_t Copier::trouble(char* text, int64_t size) {
    Held held(mutex_);
    return snprintf(text, (size_t)size, "%s", trouble_);
}

void Copier::close() {
    {
        Held held(mutex_);
        closing_ = true;
        work_.signal();
    }
    pthread_join(thread_, nullptr);
}

// ---- the thread --------------------------------------------------------------------------------

void* Copier::main(void* self) {
    static_cast<Copier*>(self)->run();
    return nullptr;
}

void Copier::run() {
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // pauses as short as they are meant
    check(driver_.ctx_set_current(context_), "cuCtxSetCurrent");
    std::vector<Command> commands;
    for (bool closing = false;;) {
        const bool moved_in = land(in_), moved_out = land(out_);
        sweep();
        const bool moved = submit_load() | submit_store() | moved_in | moved_out;
        {
            Held held(mutex_);
            if (inbox_.empty() && !moved && closing == closing_) {
                if (closing && tickets_.empty()) break;
                if (tickets_.empty()) {
                    work_.wait(mutex_);
                } else {
                    const bool flying = !in_.parts.empty() || !out_.parts.empty();
                    work_.wait_until(mutex_, now_ns() + (flying ? kPauseNs : kStepPauseNs));
                }
            }
            commands.swap(inbox_);
            closing = closing_;
        }
        take(commands);
        if (closing) cancel_all();
    }
    for (const Step& step : steps_) step_events_.give(step.event);
    step_events_.destroy(driver_);
    events_.destroy(driver_);
    driver_.stream_destroy(in_.stream);
    driver_.stream_destroy(out_.stream);
    if (module_ != nullptr) driver_.module_unload(module_);
    Held held(mutex_);
    totals_.cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    ended_ = true;
}

void Copier::take(std::vector<Command>& commands) {
    for (Command& command : commands) {
        if (command.begun != nullptr) {
            tickets_.push_back(std::move(command.begun));
            continue;
        }
        for (const auto& ticket : tickets_) {
            if (ticket->number != command.abort || ticket->submitted) continue;
            ticket->aborted = true;
            give_up(*ticket);
        }
    }
    commands.clear();
}

void Copier::cancel_all() {
    for (const auto& ticket : tickets_) {
        if (ticket->submitted) continue;
        ticket->failed = true;
        give_up(*ticket);
    }
}

// Whether the part has landed; `known` is false if only those behind it can tell.
bool Copier::has_landed(Lane& lane, size_t index, bool& known) {
    Part& part = lane.parts[index];
    known = true;
    if (broken_.load()) {
        part.ticket->failed = true;
        return true;
    }
    Result result;
    if (part.event != nullptr) {
        result = driver_.event_query(part.event);
    } else if (index + 1 == lane.parts.size()) {
        result = driver_.stream_query(lane.stream);
    } else {
        return known = false;
    }
    if (result == kSuccess || result == kNotReady) {
        part.bad_queries = 0;
        return result == kSuccess;
    }
    check(result, "cuEventQuery");
    part.ticket->failed = true;
    if (++part.bad_queries == kBadQueries) broken_.store(true);
    return broken_.load();
}

bool Copier::land(Lane& lane) {
    size_t landed = 0;
    for (size_t i = 0; i < lane.parts.size(); ++i) {
        bool known;
        if (has_landed(lane, i, known)) landed = i + 1;
        else if (known) break;
    }
    if (landed == 0) return false;
    const int64_t now = now_ns();
    Held held(mutex_);
    for (; landed > 0; --landed) {
        arrive(lane, lane.parts.front(), now);
        lane.parts.pop_front();
    }
    if (lane.parts.empty()) {
        (&lane == &in_ ? totals_.busy_in_ns : totals_.busy_out_ns) += now - lane.busy_since_ns;
    }
    return true;
}

// Under mutex_.
void Copier::arrive(Lane& lane, const Part& part, int64_t now) {
    Ticket& ticket = *part.ticket;
    events_.give(part.event);
    lane.bytes -= part.bytes;
    --ticket.parts;
    ticket.bytes -= part.bytes;
    ticket.groups -= part.ends_group;
    (ticket.loads ? totals_.bytes_in : totals_.bytes_out) += part.bytes;
    const int64_t took = now - std::max(lane.landed_ns, part.submitted_ns);
    lane.landed_ns = now;
    if (!ticket.loads) return;
    for (Progress& progress : progress_) {
        if (progress.ticket != ticket.number) continue;
        progress.left -= part.bytes;
        progress.inflight -= part.bytes;
    }
    if (part.bytes < kRatedBytes || ticket.failed) return;
    const double kept = kRateBytes / (kRateBytes + (double)part.bytes);
    rate_bytes_ = (rate_bytes_ + (double)part.bytes) * kept;
    rate_ns_ = (rate_ns_ + (double)took) * kept;
}

// Stops what failed, and tells what is over.
void Copier::sweep() {
    bool any = false;
    for (const auto& ticket : tickets_) {
        if (broken_.load()) ticket->failed = true;
        if (ticket->failed && !ticket->submitted) give_up(*ticket);
        any |= ticket->submitted && ticket->parts == 0;
    }
    if (!any) return;
    const int64_t now = now_ns();
    Held held(mutex_);
    const bool loading = !progress_.empty();
    for (const auto& ticket : tickets_) {
        if (!ticket->submitted || ticket->parts > 0) continue;
        const bool ok = !ticket->failed && !ticket->aborted;
        done_.push_back({ticket->number, ok, (double)(now - ticket->begun_ns) * 1e-9});
        if (ticket->loads) {
            ++(ok ? totals_.loads : ticket->failed ? totals_.failed_loads : totals_.aborted_loads);
        } else {
            ++(ok ? totals_.stores : totals_.failed_stores);
        }
        progress_.erase(
            std::remove_if(progress_.begin(), progress_.end(),
                           [&](const Progress& p) { return p.ticket == ticket->number; }),
            progress_.end());
    }
    if (loading && progress_.empty()) totals_.loading_ns += now - loading_since_ns_;
    tickets_.erase(std::remove_if(tickets_.begin(), tickets_.end(),
                                  [](const auto& t) { return t->submitted && t->parts == 0; }),
                   tickets_.end());
    over_.signal();
}

// No more is submitted; the gates let through, in order behind what was. The ticket is over when
// that has drained.
void Copier::give_up(Ticket& ticket) {
    ticket.submitted = true;
    if (broken_.load()) return;
    if (ticket.loads) write_flag(ticket, setup_.num_layers);
    fly(ticket.loads ? in_ : out_, ticket, 0, false);
}

void Copier::write_flag(Ticket& ticket, int64_t layers) {
    const Address flag = (Address)(setup_.flags + 4 * ticket.place);
    const uint32_t value = ticket.base + (uint32_t)layers;
    if (!check(driver_.write_value(in_.stream, flag, value, 0), "cuStreamWriteValue32")) {
        ticket.failed = true;  // the gates' own bound remains
    }
}

void Copier::fly(Lane& lane, Ticket& ticket, int64_t bytes, bool ends_group) {
    Handle event = events_.take(driver_);
    if (event != nullptr && !check(driver_.event_record(event, lane.stream), "cuEventRecord")) {
        events_.give(event);
        event = nullptr;
        ticket.failed = true;
    }
    const int64_t now = now_ns();
    if (lane.parts.empty()) lane.busy_since_ns = now;
    lane.parts.push_back({&ticket, bytes, event, ends_group, now, 0});
    lane.bytes += bytes;
    ++ticket.parts;
    ticket.bytes += bytes;
    if (bytes == 0 || !ticket.loads) return;
    Held held(mutex_);
    for (Progress& progress : progress_) {
        if (progress.ticket == ticket.number) progress.inflight += bytes;
    }
}

// Whether as much of a load is submitted ahead of what has landed as may be.
bool Copier::is_ahead(const Ticket& ticket) const {
    return setup_.lazy && ticket.pair == 0 && ticket.groups >= setup_.lookahead &&
           ticket.bytes >= setup_.ahead_bytes;
}

// The load that goes next, if any may: the one whose layers are the smallest, or one that was
// overtaken for too long. As long as the smallest has more to come, others get no more of the link
// than keeps it busy.
Ticket* Copier::next_load() {
    Ticket *first = nullptr, *chosen = nullptr;
    const auto goes_before = [](const Ticket* one, const Ticket* other) {
        return other == nullptr || one->pairs.size() < other->pairs.size();
    };
    for (const auto& held : tickets_) {
        Ticket* ticket = held.get();
        if (!ticket->loads || ticket->submitted) continue;
        const bool starves =
            ticket->passed > 0 && ticket->passed >= kPatience * next_piece(*ticket).bytes;
        if (!starves && !goes_before(ticket, chosen)) continue;
        if (!step_over(ticket->after_step)) continue;
        const bool waits = is_ahead(*ticket);
        if (starves && !waits) return ticket;
        if (goes_before(ticket, first)) first = ticket;
        if (!waits && goes_before(ticket, chosen)) chosen = ticket;
    }
    const bool busy = in_.bytes >= setup_.max_inflight / 4;
    return chosen != first && busy ? nullptr : chosen;
}

// Notes that so much of a load was submitted while the oldest one that could have gone waits. Only
// that one's patience counts: many that are overtaken must not add up.
void Copier::note_overtaken(const Ticket& by, int64_t bytes) {
    for (const auto& held : tickets_) {
        Ticket& ticket = *held;
        if (&ticket == &by) return;
        if (!ticket.loads || ticket.submitted || is_ahead(ticket)) continue;
        if (!step_over(ticket.after_step)) continue;
        ticket.passed += bytes;
        return;
    }
}

Copier::Piece Copier::next_piece(const Ticket& ticket) const {
    const int64_t layers = std::min(ticket.group, ticket.layers - ticket.layer);
    const int64_t width = layers * layer_bytes_;
    const size_t most = (size_t)std::max<int64_t>(1, setup_.part_bytes / width);
    const size_t count = std::min(most, ticket.pairs.size() - ticket.pair);
    return {layers, count, (int64_t)count * width};
}

// One part of a load.
bool Copier::submit_load() {
    Ticket* chosen = next_load();
    if (chosen == nullptr) return false;
    Ticket& ticket = *chosen;
    const auto [layers, count, bytes] = next_piece(ticket);
    if (setup_.lazy && in_.bytes > 0 && in_.bytes + bytes > setup_.max_inflight) return false;
    note_overtaken(ticket, bytes);
    ticket.passed = 0;
    ticket.groups += ticket.pair == 0;
    if (!check(copy_in(ticket, count, layers), "a copy to the device")) {
        ticket.failed = true;
        return true;
    }
    ticket.pair += count;
    const bool ends_group = ticket.pair == ticket.pairs.size();
    if (ends_group) {
        ticket.pair = 0;
        ticket.layer += layers;
        write_flag(ticket, ticket.layer);
        if (ticket.layer == ticket.layers) ticket.submitted = true;
    }
    fly(in_, ticket, bytes, ends_group);
    return true;
}

// One part of the first store that may begin.
bool Copier::submit_store() {
    for (const auto& held : tickets_) {
        Ticket& ticket = *held;
        if (ticket.loads || ticket.submitted || !step_over(ticket.after_step)) continue;
        const size_t most = (size_t)std::max<int64_t>(1, setup_.part_bytes / setup_.block_bytes);
        const size_t count = std::min(most, ticket.pairs.size() - ticket.pair);
        const int64_t bytes = (int64_t)count * setup_.block_bytes;
        if (setup_.lazy && out_.bytes > 0 && out_.bytes + bytes > setup_.max_inflight) return false;
        if (!check(copy_out(ticket, count), "a copy from the device")) {
            ticket.failed = true;
            return true;
        }
        ticket.pair += count;
        ticket.submitted = ticket.pair == ticket.pairs.size();
        fly(out_, ticket, bytes, false);
        return true;
    }
    return false;
}

}  // namespace hetero::kv
