#include <stdio.h>

#include "copier_state.h"

namespace hetero::kv {
namespace {

std::unique_ptr<Ticket> ticket_of(int64_t number, const int64_t* slots, const int64_t* blocks,
                                  int64_t count, int64_t after_step) {
    auto ticket = std::make_unique<Ticket>();
    ticket->number = number;
    ticket->after_step = after_step;
    ticket->pairs.reserve((size_t)count);
    for (int64_t i = 0; i < count; ++i) ticket->pairs.push_back({slots[i], blocks[i]});
    return ticket;
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

void hetero_copier_load(void* copier, const Load* load, const int64_t* slots,
                        const int64_t* blocks, int64_t count) {
    auto ticket = ticket_of(load->ticket, slots, blocks, count, load->after_step);
    ticket->loads = true;
    ticket->place = load->place;
    ticket->base = (uint32_t)load->base;
    ticket->method = load->method;
    ticket->group = load->group;
    ticket->layers = load->layers;
    of(copier).begin(std::move(ticket));
}

void hetero_copier_store(void* copier, int64_t ticket, const int64_t* blocks, const int64_t* slots,
                         int64_t count, int64_t after_step) {
    of(copier).begin(ticket_of(ticket, slots, blocks, count, after_step));
}

void hetero_copier_abort(void* copier, int64_t ticket) { of(copier).abort(ticket); }

void hetero_copier_step_launched(void* copier, int64_t number, void* stream) {
    of(copier).step_launched(number, stream);
}

int64_t hetero_copier_step_done(void* copier, int64_t number) {
    return of(copier).step_over(number);
}

int64_t hetero_copier_ahead(void* copier, int64_t ticket) { return of(copier).ahead(ticket); }

int64_t hetero_copier_poll(void* copier, Over* over, int64_t room) {
    return of(copier).poll(over, room);
}

int64_t hetero_copier_wait(void* copier, int64_t ns) { return of(copier).wait(ns); }

void hetero_copier_set_rate(void* copier, double rate) { of(copier).set_rate(rate); }

void hetero_copier_totals(void* copier, Totals* totals) { of(copier).totals(totals); }

int64_t hetero_copier_trouble(void* copier, char* text, int64_t size) {
    return of(copier).trouble(text, size);
}

void hetero_copier_close(void* copier) {
    of(copier).close();
}

void hetero_copier_free(void* copier) { delete static_cast<Copier*>(copier); }

}
