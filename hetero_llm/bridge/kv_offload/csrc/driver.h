// The part of the CUDA driver interface that copies need, looked up in a library opened at run
// time: building this needs no CUDA. Types and layouts are those of cuda.h.

#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero::kv {

using Result = int;                  // CUresult
using Address = unsigned long long;  // CUdeviceptr; with unified addressing also of host memory
using Handle = void*;                // CUcontext, CUstream, CUevent, CUmodule, CUfunction

constexpr Result kSuccess = 0, kInvalidValue = 1, kNotReady = 600;

enum MemoryType : int { kHostMemory = 1, kDeviceMemory = 2 };

// CUDA_MEMCPY2D_v2
struct Copy2D {
    size_t source_x, source_y;
    int source_type;
    const void* source_host;
    Address source_device;
    Handle source_array;
    size_t source_pitch;
    size_t target_x, target_y;
    int target_type;
    void* target_host;
    Address target_device;
    Handle target_array;
    size_t target_pitch;
    size_t width, height;
};

// CUmemcpyAttributes_v1: access order, the two hints (type, id) and flags.
struct BatchAttributes {
    int order;
    int source_hint[2], target_hint[2];
    unsigned flags;
};
constexpr int kInStreamOrder = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

// Functions of cuda.h, in the versions that this code is written for. The optional ones are null if
// the library lacks them.
struct Driver {
    Handle library = nullptr;

    Result (*ctx_get_current)(Handle* context);
    Result (*ctx_set_current)(Handle context);
    Result (*stream_create)(Handle* stream, unsigned flags, int priority);
    Result (*stream_destroy)(Handle stream);
    Result (*stream_query)(Handle stream);
    Result (*event_create)(Handle* event, unsigned flags);
    Result (*event_record)(Handle event, Handle stream);
    Result (*event_query)(Handle event);
    Result (*event_destroy)(Handle event);
    Result (*copy_to_device)(Address target, const void* source, size_t bytes, Handle stream);
    Result (*copy_to_host)(void* target, Address source, size_t bytes, Handle stream);
    Result (*write_value)(Handle stream, Address target, uint32_t value, unsigned flags);

    // Optional.
    Result (*error_name)(Result error, const char** name);
    Result (*priority_range)(int* least, int* greatest);
    Result (*copy_2d)(const Copy2D* copy, Handle stream);
    // As in 12.8; drivers of 13 still provide that version on request.
    Result (*copy_batch)(Address* targets, Address* sources, size_t* sizes, size_t count,
                         BatchAttributes* attributes, size_t* attribute_starts,
                         size_t num_attributes, size_t* failed, Handle stream);
    Result (*module_load)(Handle* module, const void* image);
    Result (*module_unload)(Handle module);
    Result (*module_function)(Handle* function, Handle module, const char* name);
    Result (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                     Handle stream, void** arguments, void** extra);
    Result (*host_address)(Address* device, void* host, unsigned flags);

    bool can_launch() const {
        return module_load && module_unload && module_function && launch && host_address;
    }
    // A name, or "error N".
    void describe(Result error, char* text, size_t size) const;
};

// Opens the library and looks up all functions. False with a message if it is missing or lacks a
// required function. It stays open: a driver cannot be unloaded.
bool open_driver(const char* path, Driver& driver, char* message, size_t size);

// Whether the context is unusable after this error.
bool is_sticky(Result error);

}  // namespace hetero::kv
