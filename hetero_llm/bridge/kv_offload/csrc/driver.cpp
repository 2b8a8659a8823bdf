#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>

namespace hetero::kv {
namespace {

constexpr int kBatchVersion = 12080;

template <typename Function>
bool find(Handle library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

// The plain symbol's signature depends on the library's version, so a version is requested.
void find_batch(Driver& driver) {
    Result (*by_version)(const char*, void**, int, uint64_t, int*) = nullptr;
    void* found = nullptr;
    int status = 0;
    driver.copy_batch = nullptr;
    if (!find(driver.library, "cuGetProcAddress_v2", by_version)) return;
    if (by_version("cuMemcpyBatchAsync", &found, kBatchVersion, 0, &status) != kSuccess) return;
    driver.copy_batch = reinterpret_cast<decltype(driver.copy_batch)>(found);
}

}  // namespace

bool open_driver(const char* path, Driver& driver, char* message, size_t size) {
    driver.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (driver.library == nullptr) {
        const char* why = dlerror();
        snprintf(message, size, "%s", why ? why : "it cannot be opened");
        return false;
    }
    const char* missing = nullptr;
    const auto need = [&](const char* name, auto& function) {
        if (!find(driver.library, name, function) && missing == nullptr) missing = name;
    };
    need("cuCtxGetCurrent", driver.ctx_get_current);
    need("cuCtxSetCurrent", driver.ctx_set_current);
    need("cuStreamCreateWithPriority", driver.stream_create);
    need("cuStreamDestroy_v2", driver.stream_destroy);
    need("cuStreamQuery", driver.stream_query);
    need("cuEventCreate", driver.event_create);
    need("cuEventRecord", driver.event_record);
    need("cuEventQuery", driver.event_query);
    need("cuEventDestroy_v2", driver.event_destroy);
    need("cuMemcpyHtoDAsync_v2", driver.copy_to_device);
    need("cuMemcpyDtoHAsync_v2", driver.copy_to_host);
    need("cuStreamWriteValue32_v2", driver.write_value);
    if (missing != nullptr) {
        snprintf(message, size, "%s has no %s", path, missing);
        return false;
    }
    find(driver.library, "cuGetErrorName", driver.error_name);
    find(driver.library, "cuCtxGetStreamPriorityRange", driver.priority_range);
    find(driver.library, "cuMemcpy2DAsync_v2", driver.copy_2d);
    find_batch(driver);
    find(driver.library, "cuModuleLoadData", driver.module_load);
    find(driver.library, "cuModuleUnload", driver.module_unload);
    find(driver.library, "cuModuleGetFunction", driver.module_function);
    find(driver.library, "cuLaunchKernel", driver.launch);
    find(driver.library, "cuMemHostGetDevicePointer_v2", driver.host_address);
    return true;
}

void Driver::describe(Result error, char* text, size_t size) const {
    const char* name = nullptr;
    if (error_name != nullptr && error_name(error, &name) == kSuccess && name != nullptr) {
        snprintf(text, size, "%s", name);
    } else {
        snprintf(text, size, "error %d", error);
    }
}

bool is_sticky(Result error) {
    switch (error) {
        case 3:    // not initialized
        case 4:    // being shut down
        case 201:  // no such context
        case 214:  // uncorrectable memory error
        case 220:  // uncorrectable NVLink error
        case 226:  // contained memory error
        case 700:  // illegal address
        case 702:  // launch timeout
        case 709:  // the context is destroyed
        case 710:  // assertion on the device
        case 714:  // hardware stack
        case 715:  // illegal instruction
        case 716:  // misaligned address
        case 717:  // address space
        case 718:  // program counter
        case 719:  // launch failed
        case 999:  // unknown
            return true;
        default:
            return false;
    }
}

}  // namespace hetero::kv
