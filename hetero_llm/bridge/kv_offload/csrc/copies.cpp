#include "copier_state.h"

namespace hetero::kv {
namespace {

// The driver takes 0.4 us a copy to accept a batch; launches of steps wait for that long.
constexpr size_t kBatchCopies = 128;

// As in copy_rows.cu.
constexpr unsigned kThreads = 512, kPrograms = 8;
constexpr size_t kMaxPairs = 256;
struct Pairs {
    unsigned host_block[kMaxPairs], block[kMaxPairs];
};

}  // namespace

Result Copier::copy_in(const Transfer& transfer, size_t count, int64_t layers) {
    const int64_t offset = transfer.layer * layer_bytes_;
    const size_t width = (size_t)(layers * layer_bytes_);
    switch (transfer.method) {
        case kBatch:
            return copy_batch(transfer, count, offset, width);
        case kRuns:
            return copy_runs(transfer, count, offset, width);
        case kKernel:
            return copy_by_kernel(transfer, count, offset, width);
        default:
            break;
    }
    for (size_t i = transfer.pair; i < transfer.pair + count; ++i) {
        const Pair& pair = transfer.pairs[i];
        const Result result =
            driver_.copy_to_device(device(pair.block) + (Address)offset,
                                   host(pair.host_block) + offset, width, in_.stream);
        if (result != kSuccess) return result;
    }
    return kSuccess;
}

// Number of pairs from `first` on whose host blocks and device blocks both ascend by one.
size_t Copier::run_length(const Transfer& transfer, size_t first, size_t end) const {
    size_t next = first + 1;
    for (; next < end; ++next) {
        const Pair &last = transfer.pairs[next - 1], &pair = transfer.pairs[next];
        if (pair.host_block != last.host_block + 1 || pair.block != last.block + 1) break;
        if (pair.host_block % setup_.chunk_rows == 0) break;
    }
    return next - first;
}

Result Copier::copy_runs(const Transfer& transfer, size_t count, int64_t offset, size_t width) {
    const size_t end = transfer.pair + count, pitch = (size_t)setup_.block_bytes;
    for (size_t i = transfer.pair; i < end;) {
        const size_t rows = run_length(transfer, i, end);
        const Address target = device(transfer.pairs[i].block) + (Address)offset;
        const char* source = host(transfer.pairs[i].host_block) + offset;
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

Result Copier::copy_batch(const Transfer& transfer, size_t count, int64_t offset, size_t width) {
    BatchAttributes attributes{};
    attributes.order = kInStreamOrder;
    size_t start = 0, failed = 0;
    for (size_t done = 0; done < count;) {
        const size_t now = std::min(count - done, kBatchCopies);
        targets_.clear();
        sources_.clear();
        sizes_.assign(now, width);
        for (size_t i = 0; i < now; ++i) {
            const Pair& pair = transfer.pairs[transfer.pair + done + i];
            targets_.push_back(device(pair.block) + (Address)offset);
            sources_.push_back((Address)(host(pair.host_block) + offset));
        }
        const Result result =
            driver_.copy_batch(targets_.data(), sources_.data(), sizes_.data(), now, &attributes,
                               &start, 1, &failed, in_.stream);
        if (result != kSuccess) return result;
        done += now;
    }
    return kSuccess;
}

Result Copier::copy_by_kernel(const Transfer& transfer, size_t count, int64_t offset,
                              size_t width) {
    Pairs pairs;
    Address base = (Address)setup_.device, from = (Address)setup_.host;
    unsigned long long row_bytes = (unsigned long long)setup_.block_bytes;
    unsigned long long skipped = (unsigned long long)offset;
    unsigned quads = (unsigned)(width / 16), num_pairs = 0;
    void* arguments[] = {&base, &from, &row_bytes, &skipped, &quads, &num_pairs, &pairs};
    for (size_t done = 0; done < count; done += num_pairs) {
        num_pairs = (unsigned)std::min(count - done, kMaxPairs);
        for (unsigned i = 0; i < num_pairs; ++i) {
            const Pair& pair = transfer.pairs[transfer.pair + done + i];
            pairs.host_block[i] = (unsigned)pair.host_block;
            pairs.block[i] = (unsigned)pair.block;
        }
        const Result result = driver_.launch(kernel_.load(), kPrograms, 1, 1, kThreads, 1, 1, 0,
                                             in_.stream, arguments, nullptr);
        if (result != kSuccess) return result;
    }
    return kSuccess;
}

// Copies whole rows; rows adjacent on both sides as one.
Result Copier::copy_out(const Transfer& transfer, size_t count) {
    const size_t end = transfer.pair + count;
    for (size_t i = transfer.pair; i < end;) {
        const size_t rows = run_length(transfer, i, end);
        const Pair& first = transfer.pairs[i];
        const Result result =
            driver_.copy_to_host(host(first.host_block), device(first.block),
                                 rows * (size_t)setup_.block_bytes, out_.stream);
        if (result != kSuccess) return result;
        i += rows;
    }
    return kSuccess;
}

}  // namespace hetero::kv
