// The version of the XLA FFI that this set of handlers was compiled against.
#include "binding.h"

extern "C" void XA_SYMBOL(header, version)(int32_t* major, int32_t* minor) noexcept {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}
