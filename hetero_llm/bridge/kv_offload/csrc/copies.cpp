#include "copier_state.h"

namespace hetero::kv {
namespace {

// Who launches steps waits while a batch is taken over by the driver, 0.4 us a copy.
constexpr size_t kBatchCopies = 128;

// As in copy_rows.cu.
constexpr unsigned kThreads = 512, kPrograms = 8;
constexpr size_t kMaxPairs = 256;
struct Pairs {
    unsigned slot[kMaxPairs], block[kMaxPairs];
};

}  // namespace

Result Copier::copy_in(const Ticket& ticket, size_t count, int64_t layers) {
    const int64_t offset = ticket.layer * layer_bytes_;
    const size_t width = (size_t)(layers * layer_bytes_);
    switch (ticket.method) {
        case kBatch:
            return copy_batch(ticket, count, offset, width);
        case kRuns:
            return copy_runs(ticket, count, offset, width);
        case kKernel:
            return copy_by_kernel(ticket, count, offset, width);
        default:
            break;
    }
    for (size_t i = ticket.pair; i < ticket.pair + count; ++i) {
        const Pair& pair = ticket.pairs[i];
        const Result result = driver_.copy_to_device(
            device(pair.block) + (Address)offset, host(pair.slot) + offset, width, in_.stream);
        if (result != kSuccess) return result;
    }
    return kSuccess;
}

// How many pairs from `first` on have slots and blocks that both ascend by one.
size_t Copier::run_length(const Ticket& ticket, size_t first, size_t end) const {
    size_t next = first + 1;
    for (; next < end; ++next) {
        const Pair &last = ticket.pairs[next - 1], &pair = ticket.pairs[next];
        if (pair.slot != last.slot + 1 || pair.block != last.block + 1) break;
        if (pair.slot % setup_.chunk_rows == 0) break;
    }
    return next - first;
}

Result Copier::copy_runs(const Ticket& ticket, size_t count, int64_t offset, size_t width) {
    const size_t end = ticket.pair + count, pitch = (size_t)setup_.block_bytes;
    for (size_t i = ticket.pair; i < end;) {
        const size_t rows = run_length(ticket, i, end);
        const Address target = device(ticket.pairs[i].block) + (Address)offset;
        const char* source = host(ticket.pairs[i].slot) + offset;
        Result result;
        if (rows == 1 || width == pitch) {
            result = driver_.copy_to_device(target, source, rows * width, in_.stream);
        } else {
            Copy2D copy{};
            copy.source_type = kHostMemory;
            copy.source_host = source;
            copy.target_type = kDeviceMemory;
            copy.target_device = target;
            copy.source_pitch = copy.target_pitch = pitch;
            copy.width = width;
            copy.height = rows;
            result = driver_.copy_2d(&copy, in_.stream);
        }
        if (result != kSuccess) return result;
        i += rows;
    }
    return kSuccess;
}

Result Copier::copy_batch(const Ticket& ticket, size_t count, int64_t offset, size_t width) {
    BatchAttributes attributes{};
    attributes.order = kInStreamOrder;
    size_t start = 0, failed = 0;
    for (size_t done = 0; done < count;) {
        const size_t now = std::min(count - done, kBatchCopies);
        targets_.clear();
        sources_.clear();
        sizes_.assign(now, width);
        for (size_t i = 0; i < now; ++i) {
            const Pair& pair = ticket.pairs[ticket.pair + done + i];
            targets_.push_back(device(pair.block) + (Address)offset);
            sources_.push_back((Address)(host(pair.slot) + offset));
        }
        const Result result =
            driver_.copy_batch(targets_.data(), sources_.data(), sizes_.data(), now, &attributes,
                               &start, 1, &failed, in_.stream);
        if (result != kSuccess) return result;
        done += now;
    }
    return kSuccess;
}

Result Copier::copy_by_kernel(const Ticket& ticket, size_t count, int64_t offset, size_t width) {
    Pairs pairs;
    Address base = (Address)setup_.device, from = (Address)setup_.host;
    unsigned long long row_bytes = (unsigned long long)setup_.block_bytes;
    unsigned long long skipped = (unsigned long long)offset;
    unsigned quads = (unsigned)(width / 16), num_pairs = 0;
    void* arguments[] = {&base, &from, &row_bytes, &skipped, &quads, &num_pairs, &pairs};
    for (size_t done = 0; done < count; done += num_pairs) {
        num_pairs = (unsigned)std::min(count - done, kMaxPairs);
        for (unsigned i = 0; i < num_pairs; ++i) {
            const Pair& pair = ticket.pairs[ticket.pair + done + i];
            pairs.slot[i] = (unsigned)pair.slot;
            pairs.block[i] = (unsigned)pair.block;
        }
        const Result result = driver_.launch(kernel_.load(), kPrograms, 1, 1, kThreads, 1, 1, 0,
                                             in_.stream, arguments, nullptr);
        if (result != kSuccess) return result;
    }
    return kSuccess;
}

// Whole rows; those that lie side by side on both sides go as one.
Result Copier::copy_out(const Ticket& ticket, size_t count) {
    const size_t end = ticket.pair + count;
    for (size_t i = ticket.pair; i < end;) {
        const size_t rows = run_length(ticket, i, end);
        const Result result =
            driver_.copy_to_host(host(ticket.pairs[i].slot), device(ticket.pairs[i].block),
                                 rows * (size_t)setup_.block_bytes, out_.stream);
        if (result != kSuccess) return result;
        i += rows;
    }
    return kSuccess;
}

}  // namespace hetero::kv
