// XLA's intra-op thread pool as an interface for the bridge, which is independent of the version of XLA's headers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "rust/cxx.h"

namespace xa {

class XlaPool {
 public:
  virtual int64_t num_threads() const noexcept = 0;
  virtual void schedule(rust::Fn<void(std::size_t)> task, std::size_t argument) const = 0;

 protected:
  ~XlaPool() = default;
};

}  // namespace xa
