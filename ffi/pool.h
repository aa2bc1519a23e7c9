// XLA's intra-op thread pool as the bridge sees it, whatever version of XLA's headers stands behind it.
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
