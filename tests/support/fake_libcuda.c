// A fake CUDA driver. The environment variable FAKE_LIBCUDA says which call fails. It implements the functions that the
// library calls, and computes nothing.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  INVALID_CONTEXT = 201,
  NO_BINARY_FOR_GPU = 209,
  INVALID_PTX = 218,
  UNSUPPORTED_PTX = 222,
  INVALID_HANDLE = 400,
  ILLEGAL_ADDRESS = 700,
  OUT_OF_RESOURCES = 701
};
enum { MAJOR = 75, MINOR = 76, RESERVED_SHARED_MEM = 111, ERROR_LOG = 5 };

static int is(const char* behaviour) {
  const char* given = getenv("FAKE_LIBCUDA");
  return given && strcmp(given, behaviour) == 0;
}

// "context ADDRESS ID" sets the current context and its id. A function records the id of the context in which it was
// loaded, and launches in no other context.
static uintptr_t current_address(void) {
  unsigned address = 0x1000;
  const char* given = getenv("FAKE_LIBCUDA");
  if (given) sscanf(given, "context %x", &address);
  return address;
}
static uintptr_t current_id(void) {
  unsigned address, id = 0;
  const char* given = getenv("FAKE_LIBCUDA");
  if (given) sscanf(given, "context %x %u", &address, &id);
  return id;
}

int cuCtxGetCurrent(void** context) {
  *context = is("no context") ? NULL : (void*)current_address();
  return SUCCESS;
}
#ifdef HAS_CONTEXT_IDS
int cuCtxGetId(void* context, uint64_t* id) {
  if ((uintptr_t)context != current_address()) return INVALID_CONTEXT;
  *id = current_id();
  return SUCCESS;
}
#endif
static int loads = 0;
int loads_so_far(void) { return loads; }
int cuCtxGetDevice(int* device) {
  *device = 0;
  return SUCCESS;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == MAJOR                 ? (is("old GPU") ? 7 : 9)
           : attribute == MINOR               ? (is("old GPU") ? 5 : 0)
           : attribute == RESERVED_SHARED_MEM ? 1024
                                              : 200000;
  return SUCCESS;
}
int cuDriverGetVersion(int* version) {
  *version = 11040;
  return SUCCESS;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == UNSUPPORTED_PTX    ? "the provided PTX was compiled with an unsupported toolchain."
          : error == OUT_OF_RESOURCES ? "too many resources requested for launch"
                                      : NULL;
  return *text ? SUCCESS : INVALID_VALUE;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  (void)mode;
  return SUCCESS;
}
int cuModuleLoadDataEx(void** module, const void* image, unsigned count, const int* options, void** values) {
  // The image is PTX text, or an ELF file; strstr stops at the first zero byte of an ELF header.
  const int corrupt = strstr(image, "corrupt") != NULL;
  if (is("older driver") && strncmp(image, "\177ELF", 4) == 0) return NO_BINARY_FOR_GPU;
  if (corrupt || is("refused module")) {
    for (unsigned i = 0; i < count; ++i) {
      if (options[i] == ERROR_LOG) strcpy(values[i], "ptxas: line 1; the log of the driver\n");
    }
    return corrupt ? INVALID_PTX : UNSUPPORTED_PTX;
  }
  *module = (void*)0x2000;
  ++loads;
  return SUCCESS;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module, (void)name;
  *function = (void*)(0x3000 + 16 * current_id());
  return SUCCESS;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)attribute, (void)function;
  *value = 0;
  return SUCCESS;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return SUCCESS;
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  (void)to, (void)from, (void)bytes, (void)stream;
  return SUCCESS;
}
static int launch_result(void* function) {
  if ((uintptr_t)function != 0x3000 + 16 * current_id()) return INVALID_HANDLE;
  return is("failed launch") ? OUT_OF_RESOURCES : is("earlier error") ? ILLEGAL_ADDRESS : SUCCESS;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  (void)x, (void)y, (void)z, (void)bx, (void)by, (void)bz, (void)shared, (void)stream;
  (void)parameters, (void)extra;
  return launch_result(function);
}
int cuLaunchKernelEx(const void* config, void* function, void** parameters, void** extra) {
  (void)config, (void)parameters, (void)extra;
  return launch_result(function);
}
