// The FFI API version that this set of handlers is compiled against.
#include "binding.h"

extern "C" void XA_SYMBOL(header, version)(int32_t* major, int32_t* minor) noexcept {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}
