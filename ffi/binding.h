// Turns an operator's binding into three handlers that pass the decoded call to Rust. Bindings are generated from
// operators.toml; README.md shows one.
//
// XA_TARGET(paged_attention, 1, .Arg<Any>()...) defines, for operator 1 and the set of handlers called `oldest`,
//   xa_paged_attention_cpu_oldest              execute on the platform cpu
//   xa_paged_attention_cuda_initialize_oldest  load modules, before each execution, never under capture
//   xa_paged_attention_cuda_execute_oldest     launch on XLA's stream, possibly under capture
// A binding lists operands, results and attributes in the declared order, then RemainingArgs and RemainingRets, whose
// sizes Rust gets as the surplus. Without them XLA would accept surplus operands. A binding without attributes ends in
// Attrs for the same reason: newer headers do not check the number of attributes if none is bound.
//
// Each binding is compiled once per set of handlers (build_support/shims.rs), whose name is XA_SET. Everything here is
// in an unnamed namespace for the reason given in xla_headers.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pool.h"
#include "rust/cxx.h"
#include "xla-attention/src/bridge.rs.h"
#include "xla_headers.h"

#ifdef XA_FAILPOINTS
// src/failpoint.rs
extern "C" bool xa_take_failpoint(int32_t number);
#endif

namespace xa {
namespace {

namespace ffi = ::xla::ffi;
using Any = ffi::AnyBuffer;

// The decoded operands, results and attributes of a call, in arrays.
class CallBuffers {
 public:
  // The largest number of operands, results or attributes of a target, with some room to grow; `MAX_VALUES` in
  // src/bridge.rs.
  static constexpr std::size_t kMaxValues = 24;

  void add(const Any& buffer) { operands_[num_operands_++] = view(buffer); }
  void add(const std::optional<Any>& buffer) { operands_[num_operands_++] = buffer ? view(*buffer) : absent(); }
  void add(ffi::Result<Any> buffer) { results_[num_results_++] = view(*buffer); }
  void add(std::optional<ffi::Result<Any>> buffer) { results_[num_results_++] = buffer ? view(**buffer) : absent(); }
  void add(const ffi::RemainingArgs& rest) { surplus_.operands = rest.size(); }
  void add(const ffi::RemainingRets& rest) { surplus_.results = rest.size(); }
  void add(const ffi::Dictionary& none) { surplus_.attributes = none.size(); }
  void add(bool value) { attributes_[num_attributes_++] = {AttributeType::Bool, value, 0.0f}; }
  void add(int64_t value) { attributes_[num_attributes_++] = {AttributeType::I64, value, 0.0f}; }
  void add(float value) { attributes_[num_attributes_++] = {AttributeType::F32, 0, value}; }

  Arguments arguments() const {
    return {{operands_, num_operands_}, {results_, num_results_}, {attributes_, num_attributes_}, surplus_};
  }

 private:
  static BufferView view(const Any& buffer) {
    const auto dims = buffer.dimensions();
    return {static_cast<int32_t>(buffer.element_type()),
            static_cast<uint8_t*>(buffer.untyped_data()),
            {dims.begin(), dims.size()}};
  }
  static BufferView absent() { return {0, nullptr, {}}; }

  BufferView operands_[kMaxValues];
  BufferView results_[kMaxValues];
  AttributeView attributes_[kMaxValues];
  std::size_t num_operands_ = 0;
  std::size_t num_results_ = 0;
  std::size_t num_attributes_ = 0;
  Surplus surplus_{0, 0, 0};
};

#ifdef XA_FAILPOINTS
inline void trigger_failpoints() {
  if (xa_take_failpoint(0)) throw std::runtime_error("failpoint: ShimException");
  if (xa_take_failpoint(1)) throw "failpoint: ShimThrow";
}
#else
inline void trigger_failpoints() {}
#endif

template <typename T>
inline constexpr bool kIsOperand = std::is_same_v<T, Any> || std::is_same_v<T, std::optional<Any>>;
template <typename T>
inline constexpr bool kIsResult =
    std::is_same_v<T, ffi::Result<Any>> || std::is_same_v<T, std::optional<ffi::Result<Any>>>;

template <typename... Values>
CallBuffers collect(const Values&... values) {
  static_assert((std::size_t{0} + ... + kIsOperand<Values>) <= CallBuffers::kMaxValues);
  static_assert((std::size_t{0} + ... + kIsResult<Values>) <= CallBuffers::kMaxValues);
  static_assert((std::size_t{0} + ... + std::is_arithmetic_v<Values>) <= CallBuffers::kMaxValues);
  trigger_failpoints();
  CallBuffers call;
  (call.add(values), ...);
  return call;
}

inline ffi::Error error(const Status& status) {
  if (status.code == 0) return ffi::Error::Success();
  return ffi::Error(static_cast<XLA_FFI_Error_Code>(status.code), std::string(status.message));
}

class Pool final : public XlaPool {
 public:
  explicit Pool(ffi::ThreadPool pool) : pool_(pool) {}
  int64_t num_threads() const noexcept override { return pool_.num_threads(); }
  void schedule(rust::Fn<void(std::size_t)> task, std::size_t argument) const override {
    // Schedule is not declared const, but it does not change the pool that the handler borrows.
    const_cast<ffi::ThreadPool&>(pool_).Schedule([task, argument] { task(argument); });
  }

 private:
  ffi::ThreadPool pool_;
};

template <int32_t kOp>
struct RunOnCpu {
  template <typename... Values>
  ffi::Error operator()(ffi::ThreadPool pool, const Values&... values) const {
    const CallBuffers call = collect(values...);
    return error(run_on_cpu(kOp, Pool(pool), call.arguments()));
  }
};

template <int32_t kOp>
struct PrepareCuda {
  template <typename... Values>
  ffi::Error operator()(const Values&... values) const {
    const CallBuffers call = collect(values...);
    return error(prepare_cuda(kOp, call.arguments()));
  }
};

template <int32_t kOp>
struct LaunchCuda {
  template <typename... Values>
  ffi::Error operator()(void* stream, const Values&... values) const {
    const CallBuffers call = collect(values...);
    return error(launch_cuda(kOp, reinterpret_cast<std::size_t>(stream), call.arguments()));
  }
};

// With XLA_ATTENTION_CHECK=1 a call waits for the GPU, which a command buffer cannot record. So when XLA asks for the
// handler's metadata, the trait that the handlers below declare is removed from it.
inline void clear_traits(const XLA_FFI_CallFrame* frame) {
  for (const auto* extension = frame->extension_start; extension != nullptr; extension = extension->next) {
    if (extension->type != XLA_FFI_Extension_Metadata) continue;
    reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata->traits = 0;
  }
}

// Catches every C++ exception: XLA could catch one only if both were linked with the same C++ runtime.
inline XLA_FFI_Error* in_exception_boundary(const char* target, XLA_FFI_Handler* handler,
                                            XLA_FFI_CallFrame* frame) noexcept {
  const auto failure = [target, frame](const char* what) {
    char text[512];  // no allocation: the exception may be std::bad_alloc
    std::snprintf(text, sizeof(text), "%s: C++ exception: %s", target, what);
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text, XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&args);
  };
  try {
    XLA_FFI_Error* const error = handler(frame);
    if (frame->extension_start != nullptr && debug_check_is_enabled()) clear_traits(frame);
    return error;
  } catch (const std::exception& e) {
    return failure(e.what());
  } catch (...) {
    return failure("without a text");
  }
}

}  // namespace
}  // namespace xa

#define XA_JOIN(name, stage, set) xa_##name##_##stage##_##set
#define XA_EXPAND(name, stage, set) XA_JOIN(name, stage, set)
#define XA_SYMBOL(name, stage) XA_EXPAND(name, stage, XA_SET)

#define XA_HANDLER(name, stage, function, ...)                                                           \
  extern "C" void* XA_SYMBOL(name, stage)(void* frame) noexcept {                                        \
    XLA_FFI_DEFINE_HANDLER(handler, function, __VA_ARGS__);                                              \
    return xa::in_exception_boundary("xla_gpu_" #name, handler, static_cast<XLA_FFI_CallFrame*>(frame)); \
  }

#define XA_TARGET(name, op, ...)                                                                         \
  XA_HANDLER(name, cpu, xa::RunOnCpu<op>{}, xa::ffi::Ffi::Bind().Ctx<xa::ffi::ThreadPool>() __VA_ARGS__) \
  XA_HANDLER(name, cuda_initialize, xa::PrepareCuda<op>{},                                               \
             xa::ffi::Ffi::Bind<xa::ffi::ExecutionStage::kInitialize>() __VA_ARGS__,                     \
             {xa::ffi::Traits::kCmdBufferCompatible})                                                    \
  XA_HANDLER(name, cuda_execute, xa::LaunchCuda<op>{},                                                   \
             xa::ffi::Ffi::Bind().Ctx<xa::ffi::PlatformStream<void*>>() __VA_ARGS__,                     \
             {xa::ffi::Traits::kCmdBufferCompatible})
