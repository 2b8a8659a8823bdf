#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "copier_state.h"

namespace hetero::kv {
namespace {

constexpr unsigned kNonBlocking = 1;       // CU_STREAM_NON_BLOCKING
constexpr int64_t kPauseNs = 8'000;        // between queries of copies under way
constexpr int64_t kStepPauseNs = 50'000;   // between queries of steps that copies wait for
constexpr int kBadQueries = 8;             // consecutive failures to query one event: give it up
constexpr double kRateBytes = 256 << 20;   // window of the measured rate
constexpr int64_t kRatedBytes = 1 << 20;   // smaller parts measure latency, not rate
// A load that smaller ones overtake may submit a part after `kPatience` times the part's bytes. Of
// 55 GB/s that leaves it 6, which is still faster than recomputing the shortest prefixes, and costs
// the others an eighth.
constexpr int64_t kPatience = 8;

}  // namespace

// Records a failed driver call; returns whether it succeeded.
bool Copier::check(Result result, const char* what) {
    if (result == kSuccess) return true;
    errors_.fetch_add(1);
    if (is_sticky(result)) broken_.store(true);
    Held held(mutex_);
    if (first_error_[0] == '\0') {
        char name[64];
        driver_.describe(result, name, sizeof name);
        snprintf(first_error_, sizeof first_error_, "%s: %s", what, name);
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
    sigset_t all, before;  // signals are handled by the caller's threads
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

void Copier::begin(std::unique_ptr<Transfer> transfer) {
    transfer->begun_ns = now_ns();
    Held held(mutex_);
    if (transfer->loads) {
        const int64_t bytes = (int64_t)transfer->pairs.size() * layer_bytes_;
        if (progress_.empty()) loading_since_ns_ = transfer->begun_ns;
        progress_.push_back({transfer->id, bytes, bytes * transfer->layers, 0});
    }
    inbox_.push_back({std::move(transfer), 0});
    work_.signal();
}

void Copier::abort(int64_t transfer_id) {
    Held held(mutex_);
    inbox_.push_back({nullptr, transfer_id});
    work_.signal();
}

void Copier::step_launched(int64_t number, Handle stream) {
    step_done(number);  // reuses events of finished steps
    Handle event = nullptr;
    if (!broken_.load()) {
        Held held(steps_mutex_);
        event = step_events_.take(driver_);
    }
    // Without an event the step counts as done when the next one with an event is.
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

bool Copier::step_done(int64_t number) {
    if (number <= last_done_.load() || broken_.load()) return true;
    Result result = kNotReady;
    {
        Held held(steps_mutex_);
        size_t done = 0;
        for (size_t i = 0; i < steps_.size(); ++i) {
            if (steps_[i].event == nullptr) continue;
            result = driver_.event_query(steps_[i].event);
            if (result != kSuccess) break;
            done = i + 1;
        }
        for (; done > 0; --done) {
            last_done_.store(steps_.front().number);
            step_events_.give(steps_.front().event);
            steps_.pop_front();
        }
    }
    if (result != kNotReady) check(result, "cuEventQuery of a step");
    return number <= last_done_.load() || broken_.load();
}

int64_t Copier::ahead(int64_t transfer_id) {
    Held held(mutex_);
    const auto own = std::find_if(progress_.begin(), progress_.end(),
                                  [&](const Progress& p) { return p.transfer_id == transfer_id; });
    if (own == progress_.end()) return 0;
    int64_t bytes = own->left;
    for (const Progress& other : progress_) {
        if (other.transfer_id == transfer_id) continue;
        const bool is_older = other.transfer_id < transfer_id;
        const bool first = other.layer_bytes < own->layer_bytes ||
                           (other.layer_bytes == own->layer_bytes && is_older);
        bytes += first ? other.left : other.inflight;
    }
    return bytes;
}

int64_t Copier::poll(Done* done, int64_t room) {
    Held held(mutex_);
    const int64_t count = std::min(room, (int64_t)done_.size());
    std::copy_n(done_.begin(), count, done);
    done_.erase(done_.begin(), done_.begin() + count);
    return count;
}

bool Copier::wait(int64_t ns) {
    const int64_t deadline = now_ns() + ns;
    Held held(mutex_);
    while (done_.empty() && done_signal_.wait_until(mutex_, deadline)) {
    }
    return !done_.empty();
}

void Copier::report_step(bool ok) {
    Held held(mutex_);
    report({0, ok, 0.0});
    if (!unreported_.empty()) work_.signal();
}

// Reports an end to the board, if there is one. Called with mutex_ held.
void Copier::report(const Done& done) {
    if (setup_.board == 0) return;
    unreported_.push_back(done);
    flush_reports();
}

// Called with mutex_ held.
void Copier::flush_reports() {
    if (unreported_.empty()) return;
    Board& board = *(Board*)setup_.board;
    if (broken_.load()) board.ring(setup_.rank).broken.store(1, std::memory_order_relaxed);
    while (!unreported_.empty() && board.put(setup_.rank, unreported_.front())) {
        unreported_.pop_front();
    }
    board.ring_bell();
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

int64_t Copier::first_error(char* text, int64_t size) {
    Held held(mutex_);
    return snprintf(text, (size_t)size, "%s", first_error_);
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
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // or pauses last 50 us longer
    check(driver_.ctx_set_current(context_), "cuCtxSetCurrent");
    std::vector<Command> commands;
    for (bool closing = false;;) {
        const bool moved_in = land(in_), moved_out = land(out_);
        report_done();
        const bool moved = submit_load() | submit_store() | moved_in | moved_out;
        {
            Held held(mutex_);
            flush_reports();
            if (inbox_.empty() && !moved && closing == closing_) {
                if (closing && transfers_.empty()) break;
                if (transfers_.empty() && unreported_.empty()) {
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
            transfers_.push_back(std::move(command.begun));
            continue;
        }
        for (const auto& transfer : transfers_) {
            if (transfer->id != command.abort || transfer->submitted) continue;
            transfer->aborted = true;
            stop(*transfer);
        }
    }
    commands.clear();
}

void Copier::cancel_all() {
    for (const auto& transfer : transfers_) {
        if (transfer->submitted) continue;
        transfer->failed = true;
        stop(*transfer);
    }
}

// Whether the part has landed. `known` is false if that can only be seen from a part behind it.
bool Copier::has_landed(Lane& lane, size_t index, bool& known) {
    Part& part = lane.parts[index];
    known = true;
    if (broken_.load()) {
        part.transfer->failed = true;
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
    part.transfer->failed = true;
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
        note_landed(lane, lane.parts.front(), now);
        lane.parts.pop_front();
    }
    if (lane.parts.empty()) {
        (&lane == &in_ ? totals_.busy_in_ns : totals_.busy_out_ns) += now - lane.busy_since_ns;
    }
    return true;
}

// Called with mutex_ held.
void Copier::note_landed(Lane& lane, const Part& part, int64_t now) {
    Transfer& transfer = *part.transfer;
    events_.give(part.event);
    lane.bytes -= part.bytes;
    --transfer.parts;
    transfer.bytes -= part.bytes;
    transfer.groups -= part.ends_group;
    (transfer.loads ? totals_.bytes_in : totals_.bytes_out) += part.bytes;
    const int64_t took = now - std::max(lane.landed_ns, part.submitted_ns);
    lane.landed_ns = now;
    if (!transfer.loads) return;
    for (Progress& progress : progress_) {
        if (progress.transfer_id != transfer.id) continue;
        progress.left -= part.bytes;
        progress.inflight -= part.bytes;
    }
    if (part.bytes < kRatedBytes || transfer.failed) return;
    const double kept = kRateBytes / (kRateBytes + (double)part.bytes);
    rate_bytes_ = (rate_bytes_ + (double)part.bytes) * kept;
    rate_ns_ = (rate_ns_ + (double)took) * kept;
}

// Stops failed transfers and moves ended ones to done_.
void Copier::report_done() {
    bool any = false;
    for (const auto& transfer : transfers_) {
        if (broken_.load()) transfer->failed = true;
        if (transfer->failed && !transfer->submitted) stop(*transfer);
        any |= transfer->submitted && transfer->parts == 0;
    }
    if (!any) return;
    const int64_t now = now_ns();
    Held held(mutex_);
    const bool loading = !progress_.empty();
    for (const auto& transfer : transfers_) {
        if (!transfer->submitted || transfer->parts > 0) continue;
        const bool ok = !transfer->failed && !transfer->aborted;
        done_.push_back({transfer->id, ok, (double)(now - transfer->begun_ns) * 1e-9});
        if (transfer->id > 0) report(done_.back());  // others are measurements
        if (transfer->loads) {
            ++(ok                 ? totals_.loads
               : transfer->failed ? totals_.failed_loads
                                  : totals_.aborted_loads);
        } else {
            ++(ok ? totals_.stores : totals_.failed_stores);
        }
        progress_.erase(
            std::remove_if(progress_.begin(), progress_.end(),
                           [&](const Progress& p) { return p.transfer_id == transfer->id; }),
            progress_.end());
    }
    if (loading && progress_.empty()) totals_.loading_ns += now - loading_since_ns_;
    transfers_.erase(std::remove_if(transfers_.begin(), transfers_.end(),
                                  [](const auto& t) { return t->submitted && t->parts == 0; }),
                   transfers_.end());
    done_signal_.signal();
}

// Submits no more of a transfer. Its flag is set behind what was submitted, so that waiting steps
// continue; the transfer ends when that has landed.
void Copier::stop(Transfer& transfer) {
    transfer.submitted = true;
    if (broken_.load()) return;
    if (transfer.loads) write_flag(transfer, setup_.num_layers);
    add_part(transfer.loads ? in_ : out_, transfer, 0, false);
}

void Copier::write_flag(Transfer& transfer, int64_t layers) {
    const Address flag = (Address)(setup_.flags + 4 * transfer.place);
    const uint32_t value = transfer.base + (uint32_t)layers;
    if (!check(driver_.write_value(in_.stream, flag, value, 0), "cuStreamWriteValue32")) {
        transfer.failed = true;  // waiting steps then time out
    }
}

void Copier::add_part(Lane& lane, Transfer& transfer, int64_t bytes, bool ends_group) {
    Handle event = events_.take(driver_);
    if (event != nullptr && !check(driver_.event_record(event, lane.stream), "cuEventRecord")) {
        events_.give(event);
        event = nullptr;
        transfer.failed = true;
    }
    const int64_t now = now_ns();
    if (lane.parts.empty()) lane.busy_since_ns = now;
    lane.parts.push_back({&transfer, bytes, event, ends_group, now, 0});
    lane.bytes += bytes;
    ++transfer.parts;
    transfer.bytes += bytes;
    if (bytes == 0 || !transfer.loads) return;
    Held held(mutex_);
    for (Progress& progress : progress_) {
        if (progress.transfer_id == transfer.id) progress.inflight += bytes;
    }
}

// Whether as much of a load as allowed is submitted and not yet landed.
bool Copier::is_ahead(const Transfer& transfer) const {
    return setup_.lazy && transfer.pair == 0 && transfer.groups >= setup_.lookahead &&
           transfer.bytes >= setup_.ahead_bytes;
}

// The load to submit a part of, or null: the one with the smallest layers, or one that was
// overtaken for too long. While the smallest has more to submit, others only keep the link busy.
Transfer* Copier::next_load() {
    Transfer *first = nullptr, *chosen = nullptr;
    const auto goes_before = [](const Transfer* one, const Transfer* other) {
        return other == nullptr || one->pairs.size() < other->pairs.size();
    };
    for (const auto& held : transfers_) {
        Transfer* transfer = held.get();
        if (!transfer->loads || transfer->submitted) continue;
        const bool starves =
            transfer->overtaken > 0 &&
            transfer->overtaken >= kPatience * next_piece(*transfer).bytes;
        if (!starves && !goes_before(transfer, chosen)) continue;
        if (!step_done(transfer->after_step)) continue;
        const bool waits = is_ahead(*transfer);
        if (starves && !waits) return transfer;
        if (goes_before(transfer, first)) first = transfer;
        if (!waits && goes_before(transfer, chosen)) chosen = transfer;
    }
    const bool busy = in_.bytes >= setup_.max_inflight / 4;
    return chosen != first && busy ? nullptr : chosen;
}

// Adds `bytes` submitted of a load to those by which the oldest ready load was overtaken. Only that
// one is counted: overtaken loads must not add up.
void Copier::note_overtaken(const Transfer& by, int64_t bytes) {
    for (const auto& held : transfers_) {
        Transfer& transfer = *held;
        if (&transfer == &by) return;
        if (!transfer.loads || transfer.submitted || is_ahead(transfer)) continue;
        if (!step_done(transfer.after_step)) continue;
        transfer.overtaken += bytes;
        return;
    }
}

Copier::Piece Copier::next_piece(const Transfer& transfer) const {
    const int64_t layers = std::min(transfer.group, transfer.layers - transfer.layer);
    const int64_t width = layers * layer_bytes_;
    const size_t most = (size_t)std::max<int64_t>(1, setup_.part_bytes / width);
    const size_t count = std::min(most, transfer.pairs.size() - transfer.pair);
    return {layers, count, (int64_t)count * width};
}

// Submits one part of a load.
bool Copier::submit_load() {
    Transfer* chosen = next_load();
    if (chosen == nullptr) return false;
    Transfer& transfer = *chosen;
    const auto [layers, count, bytes] = next_piece(transfer);
    if (setup_.lazy && in_.bytes > 0 && in_.bytes + bytes > setup_.max_inflight) return false;
    note_overtaken(transfer, bytes);
    transfer.overtaken = 0;
    transfer.groups += transfer.pair == 0;
    if (!check(copy_in(transfer, count, layers), "a copy to the device")) {
        transfer.failed = true;
        return true;
    }
    transfer.pair += count;
    const bool ends_group = transfer.pair == transfer.pairs.size();
    if (ends_group) {
        transfer.pair = 0;
        transfer.layer += layers;
        write_flag(transfer, transfer.layer);
        if (transfer.layer == transfer.layers) transfer.submitted = true;
    }
    add_part(in_, transfer, bytes, ends_group);
    return true;
}

// Submits one part of the first store whose step is done.
bool Copier::submit_store() {
    for (const auto& held : transfers_) {
        Transfer& transfer = *held;
        if (transfer.loads || transfer.submitted || !step_done(transfer.after_step)) continue;
        const size_t most = (size_t)std::max<int64_t>(1, setup_.part_bytes / setup_.block_bytes);
        const size_t count = std::min(most, transfer.pairs.size() - transfer.pair);
        const int64_t bytes = (int64_t)count * setup_.block_bytes;
        if (setup_.lazy && out_.bytes > 0 && out_.bytes + bytes > setup_.max_inflight) return false;
        if (!check(copy_out(transfer, count), "a copy from the device")) {
            transfer.failed = true;
            return true;
        }
        transfer.pair += count;
        transfer.submitted = transfer.pair == transfer.pairs.size();
        add_part(out_, transfer, bytes, false);
        return true;
    }
    return false;
}

}  // namespace hetero::kv
