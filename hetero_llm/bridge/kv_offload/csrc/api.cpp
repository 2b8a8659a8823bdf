#include <stdio.h>

#include "copier_state.h"

namespace hetero::kv {
namespace {

std::unique_ptr<Transfer> new_transfer(int64_t id, const int64_t* host_blocks,
                                       const int64_t* blocks, int64_t count, int64_t after_step) {
    auto transfer = std::make_unique<Transfer>();
    transfer->id = id;
    transfer->after_step = after_step;
    transfer->pairs.reserve((size_t)count);
    for (int64_t i = 0; i < count; ++i) transfer->pairs.push_back({host_blocks[i], blocks[i]});
    return transfer;
}

Copier& of(void* handle) { return *static_cast<Copier*>(handle); }

}  // namespace
}  // namespace hetero::kv

using namespace hetero::kv;

extern "C" {

void* hetero_copier_open(const char* path, const Setup* setup, char* message, int64_t size) {
    message[0] = '\0';
    Driver driver{};
    Handle context = nullptr;
    if (!open_driver(path, driver, message, (size_t)size)) return nullptr;
    if (driver.ctx_get_current(&context) != kSuccess || context == nullptr) {
        snprintf(message, (size_t)size, "no device's context is current in this thread");
        return nullptr;
    }
    auto copier = std::make_unique<Copier>(*setup, driver, context);
    return copier->start(message, (size_t)size) ? copier.release() : nullptr;
}

int64_t hetero_copier_methods(void* copier) { return of(copier).methods(); }

int64_t hetero_copier_add_kernel(void* copier, const void* image, char* message, int64_t size) {
    const Driver& driver = of(copier).driver();
    if (!driver.can_launch()) {
        snprintf(message, (size_t)size, "the driver's library cannot launch kernels");
        return -1;
    }
    const Result result = of(copier).add_kernel(image);
    if (result != kSuccess) driver.describe(result, message, (size_t)size);
    return result;
}

void hetero_copier_load(void* copier, const Load* load, const int64_t* host_blocks,
                        const int64_t* blocks, int64_t count) {
    auto transfer = new_transfer(load->transfer_id, host_blocks, blocks, count, load->after_step);
    transfer->loads = true;
    transfer->place = load->place;
    transfer->base = (uint32_t)load->base;
    transfer->method = load->method;
    transfer->group = load->group;
    transfer->layers = load->layers;
    of(copier).begin(std::move(transfer));
}

void hetero_copier_store(void* copier, int64_t transfer_id, const int64_t* blocks,
                         const int64_t* host_blocks, int64_t count, int64_t after_step) {
    of(copier).begin(new_transfer(transfer_id, host_blocks, blocks, count, after_step));
}

void hetero_copier_abort(void* copier, int64_t transfer_id) { of(copier).abort(transfer_id); }

void hetero_copier_step_launched(void* copier, int64_t number, void* stream) {
    of(copier).step_launched(number, stream);
}

int64_t hetero_copier_step_done(void* copier, int64_t number) {
    return of(copier).step_done(number);
}

int64_t hetero_copier_ahead(void* copier, int64_t transfer_id) {
    return of(copier).ahead(transfer_id);
}

int64_t hetero_copier_poll(void* copier, Done* done, int64_t room) {
    return of(copier).poll(done, room);
}

void hetero_copier_report_step(void* copier, int64_t ok) { of(copier).report_step(ok != 0); }

int64_t hetero_copier_wait(void* copier, int64_t ns) { return of(copier).wait(ns); }

void hetero_copier_set_rate(void* copier, double rate) { of(copier).set_rate(rate); }

void hetero_copier_totals(void* copier, Totals* totals) { of(copier).totals(totals); }

int64_t hetero_copier_first_error(void* copier, char* text, int64_t size) {
    return of(copier).first_error(text, size);
}

void hetero_copier_close(void* copier) {
    of(copier).close();
}

void hetero_copier_free(void* copier) { delete static_cast<Copier*>(copier); }

}
