// The C interface of libxla_attention.so: handlers for XLA's typed FFI, and xa_call for programs without XLA.
//
// Generated from src/c_api.rs, src/handlers.rs and src/layouts.rs. docs/ffi.md says what holds for every operator.

#ifndef XLA_ATTENTION_H
#define XLA_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// An XLA FFI handler: takes an `XLA_FFI_CallFrame*`, returns an `XLA_FFI_Error*` or null.
typedef void *(*XaHandler)(void *frame);

// A target to register: handlers of typed-FFI API version 4. A stage that is null does not exist.
typedef struct {
  // The custom call's target name, terminated.
  const char *name;
  // `cpu` or `CUDA`, as JAX spells them, terminated.
  const char *platform;
  // Runs before every execution, also when a graph is replayed: loads modules. Null on the CPU.
  XaHandler initialize;
  // Computes (CPU) or enqueues (CUDA); works without `initialize` too.
  XaHandler execute;
} XaTarget;

// A table of targets, as `xa_targets` and `xa_handler_set` give it out.
typedef struct {
  // `sizeof` of this struct, which only grows at its end.
  size_t struct_size;
  // XLA FFI API version of the handlers, to be compared with the runtime's before registering.
  int32_t api_major;
  // See `api_major`.
  int32_t api_minor;
  // Number of rows.
  size_t count;
  // The rows.
  const XaTarget *rows;
} XaTargets;

// A tensor in the C interface.
typedef struct {
  // First element. In a call with `XaCall::addresses`, its index among these, as a number.
  void *data;
  // `rank` sizes.
  const int64_t *dims;
  // `rank` distances in elements, or null for a dense tensor.
  const int64_t *strides;
  // Number of dimensions.
  int32_t rank;
  // XLA's number of the element type; 0 for a tensor that is left out.
  int32_t dtype;
} XaTensor;

// An attribute in the C interface.
typedef struct {
  // 0 is i1, 1 is i64, 2 is f32.
  int32_t kind;
  // The value of an f32.
  float real;
  // The value of the others.
  int64_t integer;
} XaAttribute;

// A call in the C interface. A program sets all of it to 0 first, since later versions have more fields.
typedef struct {
  // `sizeof` of this struct, which only grows at its end.
  size_t struct_size;
  // The operator's number, from `xa_op`.
  int32_t op;
  // 0: validate only; 1: run on the CPU; 2: load CUDA modules; 3: launch on `stream`.
  int32_t action;
  // In the order of the operator's declaration.
  const XaTensor *operands;
  // Their number.
  size_t num_operands;
  // In the order of the operator's declaration, the workspace included.
  const XaTensor *results;
  // Their number.
  size_t num_results;
  // In alphabetical order of their names.
  const XaAttribute *attributes;
  // Their number.
  size_t num_attributes;
  // A `CUstream` of the current context.
  void *stream;
  // Null, or addresses, to which `XaTensor::data` is then an index, so that a program that repeats a call changes nothing
  // else. The first version of this struct ends before this field.
  void *const *addresses;
  // Their number.
  size_t num_addresses;
} XaCall;

// DLPack's `DLTensor`: the view of a tensor that its framework owns.
typedef struct {
  // First element, without `byte_offset`.
  void *data;
  // DLPack's number of the kind of device.
  int32_t device_type;
  // Which device of that kind.
  int32_t device_id;
  // Number of dimensions.
  int32_t rank;
  // DLPack's `DLDataType`.
  uint32_t dtype;
  // `rank` sizes.
  const int64_t *dims;
  // `rank` distances in elements, or null for a dense tensor.
  const int64_t *strides;
  // Distance of the first element from `data`.
  uint64_t byte_offset;
} XaView;

// Tensors to be described by `xa_layouts`. A program sets all of it to 0 first, since later versions have more fields.
typedef struct {
  // `sizeof` of this struct, which only grows at its end.
  size_t struct_size;
  // The list of tensors, for `item`.
  void *list;
  // Their number.
  size_t count;
  // The element of a list at an index, or null, such as `PyList_GetItem` of Python.
  void *(*item)(void *list, ptrdiff_t index);
  // Describes a tensor and returns 0, such as `dltensor_from_py_object_no_sync` of DLPack's `DLPackExchangeAPI`.
  int32_t (*describe)(void *tensor, XaView *view);
  // Here the addresses of the tensors are written.
  void **addresses;
  // Here their layouts are written.
  uint8_t *key;
  // Room at `key`.
  size_t capacity;
} XaLayouts;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The table of targets with handlers of the oldest API, valid for the life of the process; null if it cannot be made.
const XaTargets *xa_targets(void);

// The same targets with handlers of another version of the API: 0 is the oldest, higher numbers are newer. Null past the
// last, or if it cannot be made.
//
// Register one set with a runtime: the newest one with the runtime's major version and no later minor version. A handler
// of a later version answers a metadata query with a struct that is longer than the runtime's.
const XaTargets *xa_handler_set(size_t number);

// The number of the operator with this target name, or -1.
//
// # Safety
// `target` is a terminated string.
int32_t xa_op(const char *target);

// Validate, run or launch an operator. Returns 0 or XLA's error code, with the text in `message` (terminated, truncated to
// `capacity` bytes).
//
// A request of an earlier version may be shorter than `XaCall`, but not shorter than that of the first version, which
// ended with `stream`; the fields that it lacks count as 0. A request of a later version may be longer. Its additional
// fields must be 0, otherwise the request is refused, because this version does not support them.
//
// # Safety
// The struct, all of its `struct_size` bytes, and everything it points to is valid; memory as `call()` asks;
// `message` has room for `capacity` bytes.
int32_t xa_call(const XaCall *request,
                char *message,
                size_t capacity);

// Wrap the PJRT plugin at `path`: from now on `GetPjrtApi` returns that plugin's function table, changed so that
// `torch_xla` 2.9 can use it. Returns 0 or XLA's error code, with the text in `message` as `xa_call` does.
//
// # Safety
// `path` is a terminated string, `message` has room for `capacity` bytes.
int32_t xa_stand_before_pjrt_plugin(const char *path, char *message, size_t capacity);

// The entry point of a PJRT plugin, see `xa_stand_before_pjrt_plugin`; null until a plugin is wrapped.
const void *GetPjrtApi(void);

// Write the addresses of a framework's tensors, and a key: two lists of tensors have equal keys exactly if they have equal
// dtypes, devices, sizes and strides, and if the same of their tensors begin at one address.
//
// Returns the number of bytes of the key; -1 if `describe` fails, which may have set an error of its own, or if this version
// does not know the request (see `xa_call`); -2 if there is no room for the key.
//
// # Safety
// The struct, all of its `struct_size` bytes, and everything that it points to is valid; `addresses` has room for `count`
// addresses, `key` for `capacity` bytes. The caller has what both functions ask for, such as Python's lock.
int32_t xa_layouts(const XaLayouts *request);

// The recommended size of an operator's workspace in bytes, `c[0] + c[1] * T + c[2] * B` for T query rows and B sequences,
// which is the same on every machine. All three are 0 for an operator without a workspace and for sizes that no call can
// have. A call accepts a workspace of any size, and none.
//
// `dtype` is XLA's number of q's element type; `batch_invariant` has no meaning for the gradients.
//
// # Safety
// `c` has room for three numbers.
void xa_workspace(int32_t op,
                  int64_t num_q_heads,
                  int64_t num_kv_heads,
                  int64_t head_dim,
                  int64_t value_dim,
                  int32_t dtype,
                  bool batch_invariant,
                  int64_t (*c)[3]);

// What a bias of `num_keys` keys per row (Sk) adds to that size in a call without a soft cap and ALiBi: `c[0] + c[1] * R` bytes for R
// rows of the bias, Sq for each of its sequences and heads. Both are 0 where no kernel copies the bias or stores dS.
//
// `bias_dtype` is XLA's number of its element type, q's or f32; `is_shared` is whether sequences or heads share it, `is_masked` whether the
// call has a causal mask or a window, `has_gradient` whether it has the gradient of the bias, and `num_rows` are its query rows (Tq) and
// `num_bias_rows` those R rows, each 0 if it is not known; the other parameters are those of `xa_workspace`.
//
// # Safety
// `c` has room for two numbers.
void xa_bias_workspace(int32_t op,
                       int64_t num_q_heads,
                       int64_t head_dim,
                       int64_t value_dim,
                       int32_t dtype,
                       bool batch_invariant,
                       int64_t num_keys,
                       int32_t bias_dtype,
                       bool is_shared,
                       bool is_masked,
                       bool has_gradient,
                       int64_t num_rows,
                       int64_t num_bias_rows,
                       int64_t (*c)[2]);

// The contents of this build as JSON: `version`, `xla_ffi` (the version of `xa_targets`), `handler_sets` (all versions,
// the oldest first), `cuda`, `cuda_archs` (the architectures of its kernels), `failpoints` (whether tests can make calls
// fail; never in a library for users), `check` (debug check mode), `targets`, `operators` (the declarations of
// `ffi/operators.toml`), `variants` with their resources. Valid for the life of the process; null if it cannot be made.
const char *xa_info(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* XLA_ATTENTION_H */
