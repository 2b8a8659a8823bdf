// Plays the part of CUDA's driver interface that copies need, on host memory: streams are queues
// with a worker thread each, which runs what was enqueued in order, late and in small pieces, at
// random. As in CUDA an event that was never recorded counts as happened, and one that is recorded
// anew stands for its last record. What tests steer begins with fake_.

#include <sched.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// Numbers without order, from a seed.
struct Random {
    uint64_t state = 1;
    unsigned operator()() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (unsigned)(state >> 33);
    }
};

using Address = unsigned long long;
using OnWrite = void (*)(Address target, uint32_t value);
constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidHandle = 400, kNotReady = 600;

struct Copy2D {  // CUDA_MEMCPY2D_v2
    size_t source_x, source_y;
    int source_type;
    const char* source_host;
    Address source_device;
    void* source_array;
    size_t source_pitch;
    size_t target_x, target_y;
    int target_type;
    char* target_host;
    Address target_device;
    void* target_array;
    size_t target_pitch;
    size_t width, height;
};

struct Op {
    size_t bytes;
    std::function<void()> run;
};

struct Stream {
    std::deque<Op> ops;
    std::condition_variable work;
    std::thread worker;
    Random random;
    bool stop = false, held = false, blind = false;
    int64_t allowed = 0;  // to run although the stream is held
    size_t bytes = 0, peak = 0;
    int64_t run = 0, added = 0;
};

struct Event {
    uint64_t recorded = 0, happened = 0;
    bool blind = false;
};

struct Fault {
    int64_t after, times;
    int code;
};

struct State {
    std::mutex mutex;
    std::vector<std::shared_ptr<Stream>> streams;  // in the order of their creation
    std::map<Event*, std::shared_ptr<Event>> events;
    std::map<std::string, Fault> faults;
    std::map<std::string, int64_t> calls;
    int64_t recorded_early = 0;
    unsigned seed = 0;
    int longest_delay_us = 0;
    int sticky = 0;
    bool has_context = true;
    OnWrite on_write = nullptr;
};

State& state() {
    static State* made = new State;  // never destroyed: workers may outlive the statics
    return *made;
}

// Counts a call; not 0 if it is to fail. Under the mutex.
int called(const char* name) {
    State& s = state();
    ++s.calls[name];
    if (s.sticky != 0) return s.sticky;
    const auto found = s.faults.find(name);
    if (found == s.faults.end()) return kSuccess;
    Fault& fault = found->second;
    if (fault.after-- > 0 || fault.times <= 0) return kSuccess;
    --fault.times;
    if (fault.code >= 700 && fault.code < 720) s.sticky = fault.code;
    return fault.code;
}

std::shared_ptr<Stream> find(void* handle) {
    for (const auto& stream : state().streams) {
        if (stream.get() == handle) return stream;
    }
    return nullptr;
}

void work(std::shared_ptr<Stream> stream) {
    State& s = state();
    std::unique_lock<std::mutex> lock(s.mutex);
    for (;;) {
        stream->work.wait(lock, [&] {
            const bool may = !stream->held || stream->allowed > 0;
            return stream->stop || (!stream->ops.empty() && may);
        });
        if (stream->stop && stream->ops.empty()) return;
        if (s.sticky != 0) {  // nothing of it ever happens
            stream->ops.clear();
            continue;
        }
        Op op = std::move(stream->ops.front());
        stream->ops.pop_front();
        if (stream->held && !stream->stop) --stream->allowed;
        const int longest = s.longest_delay_us;
        const unsigned dice = stream->random();
        lock.unlock();
        if (longest > 0 && dice % 8 == 0) {
            const timespec nap{0, (long)(dice / 8 % (unsigned)longest) * 1000};
            nanosleep(&nap, nullptr);
        }
        op.run();
        lock.lock();
        stream->bytes -= op.bytes;
        ++stream->run;
    }
}

// Under the mutex.
int enqueue(void* handle, size_t bytes, std::function<void()> run) {
    const auto stream = find(handle);
    if (stream == nullptr) return kInvalidHandle;
    stream->ops.push_back({bytes, std::move(run)});
    stream->bytes += bytes;
    stream->peak = std::max(stream->peak, stream->bytes);
    ++stream->added;
    stream->work.notify_one();
    return kSuccess;
}

void copy_slowly(char* target, const char* source, size_t bytes) {
    static thread_local unsigned turn = 0;
    const size_t piece = std::max<size_t>(1, bytes / 3);
    for (size_t at = 0; at < bytes; at += piece) {
        memcpy(target + at, source + at, std::min(piece, bytes - at));
        if (++turn % 16 == 0) sched_yield();
    }
}

int enqueue_copy(void* stream, char* target, const char* source, size_t bytes) {
    return enqueue(stream, bytes, [=] { copy_slowly(target, source, bytes); });
}

using Lock = std::lock_guard<std::mutex>;

int batch(Address* targets, Address* sources, size_t* sizes, size_t count, void*, size_t* starts,
          size_t num_attributes, size_t*, void* stream) {
    Lock lock(state().mutex);
    if (const int code = called("cuMemcpyBatchAsync")) return code;
    if (count == 0 || num_attributes != 1 || starts[0] != 0) return kInvalidValue;
    struct One {
        char* target;
        const char* source;
        size_t bytes;
    };
    std::vector<One> all;
    size_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
        all.push_back({(char*)targets[i], (const char*)sources[i], sizes[i]});
        bytes += sizes[i];
    }
    // In any order, as the driver says.
    Random random{state().seed + count};
    for (size_t i = count; i > 1; --i) std::swap(all[i - 1], all[random() % i]);
    return enqueue(stream, bytes, [all] {
        for (const One& one : all) copy_slowly(one.target, one.source, one.bytes);
    });
}

}  // namespace

extern "C" {

// ---- the driver ---------------------------------------------------------------------------------

int cuCtxGetCurrent(void** context) {
    Lock lock(state().mutex);
    *context = state().has_context ? (void*)&state() : nullptr;
    return called("cuCtxGetCurrent");
}

int cuCtxSetCurrent(void*) {
    Lock lock(state().mutex);
    return called("cuCtxSetCurrent");
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return kSuccess;
}

int cuGetErrorName(int error, const char** name) {
    *name = error == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
    return kSuccess;
}

int cuStreamCreateWithPriority(void** handle, unsigned, int) {
    State& s = state();
    Lock lock(s.mutex);
    if (const int code = called("cuStreamCreateWithPriority")) return code;
    auto stream = std::make_shared<Stream>();
    stream->random.state = s.seed * 31 + s.streams.size();
    s.streams.push_back(stream);
    stream->worker = std::thread(work, stream);
    *handle = stream.get();
    return kSuccess;
}

int cuStreamDestroy_v2(void* handle) {
    std::shared_ptr<Stream> stream;
    {
        State& s = state();
        Lock lock(s.mutex);
        called("cuStreamDestroy");
        stream = find(handle);
        if (stream == nullptr) return kInvalidHandle;
        stream->stop = true;
        stream->work.notify_one();
        s.streams.erase(std::find(s.streams.begin(), s.streams.end(), stream));
    }
    stream->worker.join();
    return kSuccess;
}

int cuStreamQuery(void* handle) {
    Lock lock(state().mutex);
    if (const int code = called("cuStreamQuery")) return code;
    const auto stream = find(handle);
    if (stream == nullptr) return kInvalidHandle;
    return stream->run == stream->added ? kSuccess : kNotReady;
}

int cuEventCreate(void** handle, unsigned) {
    Lock lock(state().mutex);
    if (const int code = called("cuEventCreate")) return code;
    auto event = std::make_shared<Event>();
    state().events[event.get()] = event;
    *handle = event.get();
    return kSuccess;
}

int cuEventRecord(void* handle, void* stream) {
    Lock lock(state().mutex);
    if (const int code = called("cuEventRecord")) return code;
    const auto found = state().events.find((Event*)handle);
    if (found == state().events.end()) return kInvalidHandle;
    const auto event = found->second;
    state().recorded_early += event->happened != event->recorded;
    const uint64_t record = ++event->recorded;
    if (stream == nullptr) {  // the default stream: nothing is ever on it
        event->happened = record;
        return kSuccess;
    }
    if (const auto on = find(stream)) event->blind = on->blind;
    return enqueue(stream, 0, [=] {
        Lock inner(state().mutex);
        event->happened = std::max(event->happened, record);
    });
}

int cuEventQuery(void* handle) {
    Lock lock(state().mutex);
    if (const int code = called("cuEventQuery")) return code;
    const auto found = state().events.find((Event*)handle);
    if (found == state().events.end()) return kInvalidHandle;
    const Event& event = *found->second;
    return event.blind || event.happened == event.recorded ? kSuccess : kNotReady;
}

int cuEventDestroy_v2(void* handle) {
    Lock lock(state().mutex);
    return state().events.erase((Event*)handle) == 1 ? kSuccess : kInvalidHandle;
}

int cuMemcpyHtoDAsync_v2(Address target, const void* source, size_t bytes, void* stream) {
    Lock lock(state().mutex);
    if (const int code = called("cuMemcpyHtoDAsync")) return code;
    return enqueue_copy(stream, (char*)target, (const char*)source, bytes);
}

int cuMemcpyDtoHAsync_v2(void* target, Address source, size_t bytes, void* stream) {
    Lock lock(state().mutex);
    if (const int code = called("cuMemcpyDtoHAsync")) return code;
    return enqueue_copy(stream, (char*)target, (const char*)source, bytes);
}

int cuMemcpy2DAsync_v2(const Copy2D* copy, void* stream) {
    Lock lock(state().mutex);
    if (const int code = called("cuMemcpy2DAsync")) return code;
    const Copy2D c = *copy;
    if (c.source_type != 1 || c.target_type != 2 || c.source_pitch < c.width) return kInvalidValue;
    return enqueue(stream, c.width * c.height, [c] {
        for (size_t row = 0; row < c.height; ++row) {
            copy_slowly((char*)c.target_device + row * c.target_pitch,
                        c.source_host + row * c.source_pitch, c.width);
        }
    });
}

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, int*) {
    Lock lock(state().mutex);
    if (const int code = called("cuGetProcAddress")) return code;
    if (strcmp(name, "cuMemcpyBatchAsync") != 0 || version != 12080) return kInvalidValue;
    *function = (void*)batch;
    return kSuccess;
}

int cuStreamWriteValue32_v2(void* stream, Address target, uint32_t value, unsigned) {
    Lock lock(state().mutex);
    if (const int code = called("cuStreamWriteValue32")) return code;
    const OnWrite on_write = state().on_write;
    return enqueue(stream, 0, [=] {
        if (on_write != nullptr) on_write(target, value);
        __atomic_store_n((uint32_t*)target, value, __ATOMIC_RELEASE);
    });
}

int cuModuleLoadData(void** module, const void* image) {
    Lock lock(state().mutex);
    if (const int code = called("cuModuleLoadData")) return code;
    *module = (void*)image;
    return kSuccess;
}

int cuModuleUnload(void*) { return kSuccess; }

int cuModuleGetFunction(void** function, void*, const char* name) {
    *function = (void*)cuModuleLoadData;
    return strcmp(name, "copy_rows") == 0 ? kSuccess : 500;
}

int cuMemHostGetDevicePointer_v2(Address* device, void* host, unsigned) {
    Lock lock(state().mutex);
    if (const int code = called("cuMemHostGetDevicePointer")) return code;
    *device = (Address)host;
    return kSuccess;
}

// The one kernel that there is: copy_rows.cu.
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
    Lock lock(state().mutex);
    if (const int code = called("cuLaunchKernel")) return code;
    struct Pairs {
        unsigned slot[256], block[256];
    };
    char* device = *(char**)arguments[0];
    const char* host = *(const char**)arguments[1];
    const auto row_bytes = *(unsigned long long*)arguments[2];
    const auto offset = *(unsigned long long*)arguments[3];
    const size_t width = 16 * (size_t) * (unsigned*)arguments[4];
    const unsigned count = *(unsigned*)arguments[5];
    const Pairs pairs = *(const Pairs*)arguments[6];
    return enqueue(stream, width * count, [=] {
        for (unsigned i = 0; i < count; ++i) {
            copy_slowly(device + pairs.block[i] * row_bytes + offset,
                        host + pairs.slot[i] * row_bytes + offset, width);
        }
    });
}

int cuInit(unsigned) { return kSuccess; }

int cuCtxGetDevice(int* device) {
    *device = 0;
    return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : 0;
    return kSuccess;
}

int cuMemHostRegister_v2(void*, size_t, unsigned) {
    Lock lock(state().mutex);
    return called("cuMemHostRegister");
}

int cuMemHostUnregister(void*) {
    Lock lock(state().mutex);
    return called("cuMemHostUnregister");
}

// ---- for tests ----------------------------------------------------------------------------------

// Forgets faults and counts. Streams made from now on are delayed by at most so much an operation.
void fake_reset(unsigned seed, int longest_delay_us) {
    State& s = state();
    Lock lock(s.mutex);
    s.faults.clear();
    s.calls.clear();
    s.seed = seed;
    s.longest_delay_us = longest_delay_us;
    s.sticky = 0;
    s.has_context = true;
    s.on_write = nullptr;
}

// From the call after `after` more on, `times` calls of the function return `code`. 700 to 719:
// everything does, for ever.
void fake_fail(const char* name, int64_t after, int64_t times, int code) {
    Lock lock(state().mutex);
    state().faults[name] = {after, times, code};
}

int64_t fake_calls(const char* name) {
    Lock lock(state().mutex);
    return state().calls[name];
}

void fake_set_context(int there) {
    Lock lock(state().mutex);
    state().has_context = there != 0;
}

// Called by a stream's worker before it writes a value.
void fake_on_write(OnWrite on_write) {
    Lock lock(state().mutex);
    state().on_write = on_write;
}

int64_t fake_num_streams() {
    Lock lock(state().mutex);
    return (int64_t)state().streams.size();
}

int64_t fake_num_events() {
    Lock lock(state().mutex);
    return (int64_t)state().events.size();
}

// The stream that was made as the index-th of those that there are.
void* fake_stream(int64_t index) {
    Lock lock(state().mutex);
    return state().streams[(size_t)index].get();
}

// Stops a stream, if it is still there, but for `allowed` operations more, or lets it go on.
void fake_hold(void* handle, int held, int64_t allowed) {
    Lock lock(state().mutex);
    const auto stream = find(handle);
    if (stream == nullptr) return;
    stream->held = held != 0;
    stream->allowed = allowed;
    stream->work.notify_one();
}

// Events recorded on this stream from now on lie: they are said to have happened at once.
void fake_blind(void* handle) {
    Lock lock(state().mutex);
    find(handle)->blind = true;
}

// How many events were recorded anew before they had happened, since this was asked last.
int64_t fake_recorded_early() {
    Lock lock(state().mutex);
    return std::exchange(state().recorded_early, 0);
}

// Operations that were enqueued on a stream, or that it has run; bytes that wait, at most.
int64_t fake_added(void* handle) {
    Lock lock(state().mutex);
    return find(handle)->added;
}

int64_t fake_run(void* handle) {
    Lock lock(state().mutex);
    return find(handle)->run;
}

// Bytes of the operation that is next on a stream; -1: there is none.
int64_t fake_next_bytes(void* handle) {
    Lock lock(state().mutex);
    const auto stream = find(handle);
    return stream->ops.empty() ? -1 : (int64_t)stream->ops.front().bytes;
}

int64_t fake_peak(void* handle) {
    Lock lock(state().mutex);
    return (int64_t)find(handle)->peak;
}

// What stands for a step behind a gate: it goes no further before the flag is there.
int fake_gate(void* stream, const int32_t* flag, int32_t wanted) {
    Lock lock(state().mutex);
    return enqueue(stream, 0, [=] {
        while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) - wanted < 0) sched_yield();
    });
}

// What stands for a step's work: a copy within the device.
int fake_copy(void* stream, void* target, const void* source, size_t bytes) {
    Lock lock(state().mutex);
    return enqueue_copy(stream, (char*)target, (const char*)source, bytes);
}

}
