// XLA's FFI headers, in the version that this set of handlers is compiled against.
//
// The library contains two sets of handlers, each compiled against another version of these headers. Both versions
// define the same names differently, and the linker would keep one definition of each inline function and template for
// both sets. In an unnamed namespace they have internal linkage, so each object keeps its own
// (tests/it/handler_sets.rs).
#pragma once

// Headers that XLA's headers include must be included outside of that namespace.
#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace {
#include "xla/ffi/api/ffi.h"
}  // namespace
