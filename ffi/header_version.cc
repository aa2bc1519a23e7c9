// The version of the XLA FFI that the shims were compiled against.
#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" void xa_header_version(int32_t* major, int32_t* minor) noexcept {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}
