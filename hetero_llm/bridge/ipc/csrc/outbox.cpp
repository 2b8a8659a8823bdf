#include "outbox.h"

#include <algorithm>
#include <cstring>
#include <vector>

using namespace hetero::ring;

namespace {

constexpr size_t kWordBytes = sizeof(uint32_t);

// A column of integers of 4 or 8 bytes; operator[] returns the low 4.
struct Column {
    const char* data;
    size_t item_bytes;

    uint32_t operator[](size_t i) const {
        uint32_t value;
        memcpy(&value, data + i * item_bytes, sizeof value);
        return value;
    }
};

struct Outbox {
    std::vector<MessageHeader> headers;
    std::vector<uint32_t> words;
    // Index of the oldest waiting message and its first word; entries before them were sent and are
    // erased later.
    size_t first = 0, first_word = 0;

    int64_t waiting() const { return (int64_t)(headers.size() - first); }
    int64_t waiting_words() const { return (int64_t)(words.size() - first_word); }

    size_t put_run(const char* data, size_t bytes);
    bool put(const char* data, size_t bytes);
    void drop(int64_t count);
};

// Appends the first run in `data`. Returns its size in bytes, 0 if it is malformed.
size_t Outbox::put_run(const char* data, size_t bytes) {
    RunHeader run;
    if (bytes < sizeof run) return 0;
    memcpy(&run, data, sizeof run);
    for (uint32_t item_bytes :
         {run.slot_bytes, run.generation_bytes, run.base_length_bytes, run.items_bytes}) {
        if (item_bytes != 4 && item_bytes != 8) return 0;
    }
    size_t end = sizeof run;
    const auto column = [&](uint32_t item_bytes) {
        const Column column{data + end, item_bytes};
        end += (size_t)run.count * item_bytes;
        return column;
    };
    const Column slots = column(run.slot_bytes), generations = column(run.generation_bytes);
    const Column base_lengths = column(run.base_length_bytes), items = column(run.items_bytes);
    if (end > bytes) return 0;
    const char* body = data + end;
    for (uint32_t i = 0; i < run.count; ++i) {
        const uint64_t length = (uint64_t)items[i] * run.width;
        end += length * kWordBytes;
        if (length > kMaxWords || end > bytes) return 0;
        headers.push_back({run.kind, slots[i], generations[i], base_lengths[i], (uint32_t)length,
                           run.depth, run.value});
    }
    const size_t before = words.size();
    words.resize(before + (size_t)(data + end - body) / kWordBytes);
    if (data + end > body) memcpy(&words[before], body, (size_t)(data + end - body));
    return end;
}

bool Outbox::put(const char* data, size_t bytes) {
    const size_t messages = headers.size(), num_words = words.size();
    for (size_t at = 0; at < bytes;) {
        const size_t size = put_run(data + at, bytes - at);
        if (size == 0) {
            headers.resize(messages);
            words.resize(num_words);
            return false;
        }
        at += size;
    }
    return true;
}

void Outbox::drop(int64_t count) {
    for (; count > 0; --count) first_word += headers[first++].words;
    // Erase when at least half was sent: amortized, each message is moved at most once.
    if (first < headers.size() / 2) return;
    headers.erase(headers.begin(), headers.begin() + (ptrdiff_t)first);
    words.erase(words.begin(), words.begin() + (ptrdiff_t)first_word);
    first = first_word = 0;
}

}  // namespace

extern "C" {

void* hetero_outbox_make() { return new Outbox{}; }

void hetero_outbox_free(void* outbox) { delete static_cast<Outbox*>(outbox); }

int64_t hetero_outbox_push(void* outbox, void* end, const void* data, int32_t bytes) {
    Outbox& box = *static_cast<Outbox*>(outbox);
    if (bytes < 0 || !box.put(static_cast<const char*>(data), (size_t)bytes)) return -1;
    if (end != nullptr) {
        box.drop(hetero_ring_push(end, box.headers.data() + box.first,
                                  box.words.data() + box.first_word, box.waiting(),
                                  box.waiting_words()));
    }
    return box.waiting();
}

void hetero_outbox_drop(void* outbox, int64_t count) { static_cast<Outbox*>(outbox)->drop(count); }

int64_t hetero_outbox_words(const void* outbox) {
    return static_cast<const Outbox*>(outbox)->waiting_words();
}

void hetero_outbox_copy(const void* outbox, MessageHeader* headers, uint32_t* words) {
    const Outbox& box = *static_cast<const Outbox*>(outbox);
    std::copy(box.headers.begin() + (ptrdiff_t)box.first, box.headers.end(), headers);
    std::copy(box.words.begin() + (ptrdiff_t)box.first_word, box.words.end(), words);
}

}
