// A fake libcuda whose device is the host. Device allocations end at a guard page. A function of a module is the
// kernel's source, compiled for the host when it is first looked up (compile.py). Threads run grids of different
// kernels at the same time.
//
// It implements only the functions that the backend and its tests call. XLA_ATTENTION_EMULATOR is this folder,
// XLA_ATTENTION_EMULATOR_CACHE that of the compiled kernels.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tensor_map.h"

#define DRIVER_CALL extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500;
constexpr size_t kPage = 4096, kAlignment = 16;
constexpr size_t kParameterAlignment = 64;

/// A compiled kernel (compile.py): its entry point, which takes the grid, the blocks of a cluster along y, the threads
/// and the parameter; and the parameter's size.
struct Function {
  void (*emulate)(unsigned, unsigned, unsigned, unsigned, unsigned, const void*);
  size_t parameter_bytes;
  std::mutex running;  // the library's state is that of one grid
};
using Kernel = Function*;
using Work = std::function<void()>;

struct Stream {
  bool captures = false;
  std::vector<Work> captured;
};
struct Graph {
  std::vector<Work> nodes;
};
struct Mapping {
  void* start;
  size_t bytes;
};

std::mutex mutex;  // of these two
std::map<uint64_t, Mapping> allocations;
std::map<std::string, Function> functions;  // by the path of the library
thread_local void* context = nullptr;

using Guard = std::lock_guard<std::mutex>;

int enqueue(Stream* stream, Work work) {
  if (stream != nullptr && stream->captures) {
    stream->captured.push_back(std::move(work));
  } else {
    work();
  }
  return kSuccess;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

DRIVER_CALL cuInit(unsigned) { return kSuccess; }
DRIVER_CALL cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
DRIVER_CALL cuDeviceGet(int* device, int) { return *device = 0, kSuccess; }
DRIVER_CALL cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "the host"), kSuccess; }
DRIVER_CALL cuDevicePrimaryCtxRetain(void** primary, int) { return *primary = &allocations, kSuccess; }
DRIVER_CALL cuCtxSetCurrent(void* given) { return context = given, kSuccess; }
DRIVER_CALL cuCtxGetCurrent(void** current) { return *current = context, kSuccess; }
DRIVER_CALL cuCtxGetDevice(int* device) { return *device = 0, kSuccess; }

static int number_in(const char* environment_variable, int default_number) {
  const char* const given = std::getenv(environment_variable);
  return given == nullptr ? default_number : std::atoi(given);
}

/// The compute capability times ten.
static int capability() { return number_in("XLA_ATTENTION_EMULATOR_CAPABILITY", 90); }

/// Kilobytes of shared memory of a CTA.
static int shared_kilobytes() { return number_in("XLA_ATTENTION_EMULATOR_SHARED_KILOBYTES", 227); }

DRIVER_CALL cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 16:  // multiprocessors: few by default, so that small cases have more work than the grid has blocks
      *value = number_in("XLA_ATTENTION_EMULATOR_SMS", 4);
      return kSuccess;
    case 75:  // compute capability, major
      *value = capability() / 10;
      return kSuccess;
    case 76:  // minor
      *value = capability() % 10;
      return kSuccess;
    case 81:  // shared memory of a multiprocessor
      *value = (shared_kilobytes() + 1) * 1024;
      return kSuccess;
    case 97:  // largest shared memory of a CTA
      *value = shared_kilobytes() * 1024;
      return kSuccess;
    case 111:  // shared memory that the driver reserves per CTA
      *value = 1024;
      return kSuccess;
    default:
      std::fprintf(stderr, "libcuda on the host: no device attribute %d\n", attribute);
      return kInvalidValue;
  }
}

DRIVER_CALL cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
DRIVER_CALL cuGetErrorString(int, const char** text) { return *text = "an error of the fake libcuda", kSuccess; }
DRIVER_CALL cuThreadExchangeStreamCaptureMode(int*) { return kSuccess; }

DRIVER_CALL cuStreamCreate(Stream** stream, unsigned) { return *stream = new Stream, kSuccess; }
DRIVER_CALL cuStreamSynchronize(Stream*) { return kSuccess; }
DRIVER_CALL cuStreamBeginCapture_v2(Stream* stream, int) {
  *stream = Stream{true, {}};
  return kSuccess;
}
DRIVER_CALL cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = new Graph{std::move(stream->captured)};
  *stream = Stream{};
  return kSuccess;
}
DRIVER_CALL cuGraphInstantiateWithFlags(Graph** executable, const Graph* graph, unsigned long long) {
  return *executable = new Graph(*graph), kSuccess;
}
DRIVER_CALL cuGraphLaunch(const Graph* executable, Stream*) {
  for (const Work& node : executable->nodes) node();
  return kSuccess;
}
DRIVER_CALL cuGraphExecDestroy(Graph* executable) { return delete executable, kSuccess; }
DRIVER_CALL cuGraphDestroy(Graph* graph) { return delete graph, kSuccess; }

DRIVER_CALL cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  const size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t inside = (padded + kPage - 1) / kPage * kPage;
  const Mapping mapping{mmap(nullptr, inside + 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
                        inside + 2 * kPage};
  if (mapping.start == MAP_FAILED) return kOutOfMemory;
  uint8_t* const first = static_cast<uint8_t*>(mapping.start) + kPage;
  mprotect(mapping.start, kPage, PROT_NONE);
  mprotect(first + inside, kPage, PROT_NONE);
  std::memset(first, 0xff, inside);
  *address = reinterpret_cast<uint64_t>(first + inside - padded);
  const Guard guard(mutex);
  allocations[*address] = mapping;
  return kSuccess;
}
DRIVER_CALL cuMemFree_v2(uint64_t address) {
  const Guard guard(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) return kInvalidValue;
  munmap(found->second.start, found->second.bytes);
  allocations.erase(found);
  return kSuccess;
}
DRIVER_CALL cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream*) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), kSuccess;
}
DRIVER_CALL cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream*) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), kSuccess;
}
DRIVER_CALL cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, Stream*) {
  return std::memset(reinterpret_cast<void*>(to), byte, bytes), kSuccess;
}
DRIVER_CALL cuStreamIsCapturing(const Stream* stream, int* status) {
  return *status = stream != nullptr && stream->captures, kSuccess;
}
DRIVER_CALL cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), kSuccess;
}
DRIVER_CALL cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
  return enqueue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
}

DRIVER_CALL cuModuleLoadDataEx(void** module, const void* image, unsigned, void*, void*) {
  return *module = const_cast<void*>(image), kSuccess;
}
DRIVER_CALL cuModuleGetFunction(Kernel* function, void*, const char* name) {
  const std::string folder = variable("XLA_ATTENTION_EMULATOR"), cache = variable("XLA_ATTENTION_EMULATOR_CACHE");
  const std::string command = "python3 " + folder + "/compile.py " + name + " " + cache;
  FILE* const output = popen(command.c_str(), "r");
  char path[4096] = {};
  const bool said = output != nullptr && std::fgets(path, sizeof(path), output) != nullptr;
  if (output == nullptr || pclose(output) != 0 || !said) return kNotFound;
  path[std::strcspn(path, "\n")] = 0;
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), kNotFound;
  const auto emulate = reinterpret_cast<decltype(Function::emulate)>(dlsym(library, "xa_emulate"));
  const auto* const bytes = static_cast<const size_t*>(dlsym(library, "xa_parameter_bytes"));
  if (emulate == nullptr || bytes == nullptr) return kNotFound;
  const Guard guard(mutex);
  *function = &functions[path];
  (*function)->emulate = emulate;
  (*function)->parameter_bytes = *bytes;
  return kSuccess;
}
DRIVER_CALL cuFuncGetAttribute(int* value, int, Kernel) { return *value = 0, kSuccess; }
DRIVER_CALL cuFuncSetAttribute(Kernel, int, int) { return kSuccess; }

/// Supports elements of one and two bytes and the swizzles of 64 and 128 bytes. It checks what the driver checks of
/// addresses, strides and box sizes.
DRIVER_CALL cuTensorMapEncodeTiled(void* to, int type, unsigned axes, void* data, const uint64_t* lens,
                                   const uint64_t* strides, const uint32_t* in_box, const uint32_t*, int, int swizzle,
                                   int, int) {
  constexpr int kU8 = 0, kF16 = 6, kF32 = 7, kBf16 = 9, kSwizzle64 = 2, kSwizzle128 = 3;
  emulator::TensorMap map = {};
  if (type != kU8 && type != kF16 && type != kF32 && type != kBf16) return kInvalidValue;
  if (axes < 1 || axes > emulator::kMaxAxes || reinterpret_cast<uintptr_t>(data) % 16 != 0) return kInvalidValue;
  map.data = static_cast<uint8_t*>(data);
  map.axes = static_cast<uint8_t>(axes);
  map.element_bytes = type == kU8 ? 1 : type == kF32 ? 4 : 2;
  map.row_bytes = swizzle == kSwizzle64 ? 64 : swizzle == kSwizzle128 ? 128 : 0;
  for (unsigned i = 0; i < axes; ++i) {
    if (lens[i] < 1 || lens[i] > 1ull << 32 || in_box[i] < 1 || in_box[i] > 256) return kInvalidValue;
    map.lens[i] = static_cast<uint32_t>(lens[i] - 1);
    map.in_box[i] = static_cast<uint16_t>(in_box[i]);
    map.strides[i] = i == 0 ? map.element_bytes : strides[i - 1];
    if (i > 0 && (map.strides[i] % 16 != 0 || map.strides[i] >= 1ull << 40)) return kInvalidValue;
  }
  if (map.in_box[0] * map.element_bytes != map.row_bytes) return kInvalidValue;
  std::memcpy(to, &map, sizeof(map));
  return kSuccess;
}

namespace {

/// Blocks along x, y and z.
struct Dims {
  unsigned x, y, z;
};

int launch(Kernel kernel, const Dims& grid, const Dims& cluster, const Dims& threads, Stream* stream,
           void** parameters) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads.x == 0 || threads.y != 1 || threads.z != 1) {
    return kInvalidValue;
  }
  if (cluster.x != 1 || cluster.y == 0 || cluster.y > 8 || cluster.z != 1 || grid.y % cluster.y != 0) {
    return kInvalidValue;
  }
  const size_t bytes = kernel->parameter_bytes, room = (bytes + kParameterAlignment - 1) & -kParameterAlignment;
  const std::shared_ptr<void> parameter(std::aligned_alloc(kParameterAlignment, room), std::free);
  std::memcpy(parameter.get(), parameters[0], bytes);
  return enqueue(stream, [=] {
    const Guard guard(kernel->running);
    kernel->emulate(grid.x, grid.y, grid.z, cluster.y, threads.x, parameter.get());
  });
}

/// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  int padding;
  union {
    Dims cluster;
    char bytes[64];
  };
};
struct LaunchConfig {
  Dims grid, threads;
  unsigned shared_bytes;
  Stream* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

}  // namespace

DRIVER_CALL cuLaunchKernel(Kernel kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x,
                           unsigned threads_y, unsigned threads_z, unsigned, Stream* stream, void** parameters,
                           void**) {
  return launch(kernel, {grid_x, grid_y, grid_z}, {1, 1, 1}, {threads_x, threads_y, threads_z}, stream, parameters);
}

/// The attributes are the dimensions of clusters and programmatic stream serialization, which changes nothing here, as
/// a stream's kernels run one after another.
DRIVER_CALL cuLaunchKernelEx(const LaunchConfig* config, Kernel kernel, void** parameters, void**) {
  constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;
  Dims cluster = {1, 1, 1};
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == kClusterDimension) {
      cluster = attribute.cluster;
    } else if (attribute.id != kProgrammaticStreamSerialization) {
      return kInvalidValue;
    }
  }
  return launch(kernel, config->grid, cluster, config->threads, config->stream, parameters);
}
