/* Calls simple_add through the C interface and prints metadata of the interface; valid C and C++. */
#include <stdio.h>
#include <string.h>

#include "xla_attention.h"

enum { kF32 = 11, kCheck = 0, kRunOnCpu = 1 };

static XaTensor tensor(float* data, const int64_t* dims) {
  XaTensor made;
  made.data = data;
  made.dims = dims;
  made.strides = NULL;
  made.rank = 1;
  made.dtype = kF32;
  return made;
}

static int add(XaTensor a, XaTensor b, XaTensor out, int32_t action, char* message, size_t capacity) {
  const XaTensor operands[2] = {a, b};
  XaCall call;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.op = xa_op("xla_gpu_simple_add");
  call.action = action;
  call.operands = operands;
  call.num_operands = 2;
  call.results = &out;
  call.num_results = 1;
  return xa_call(&call, message, capacity);
}

int main(void) {
  float a[3] = {1, 2, 3}, b[3] = {10, 20, 30}, out[3] = {0, 0, 0};
  const int64_t three[1] = {3}, two[1] = {2};
  int64_t workspace[3] = {-1, -1, -1};
  char message[256] = "";
  const XaTargets* targets = xa_targets();
  if (add(tensor(a, three), tensor(b, three), tensor(out, three), kRunOnCpu, message, sizeof(message)) != 0) return 1;
  printf("%g %g %g\n", (double)out[0], (double)out[1], (double)out[2]);
  printf("%d ", add(tensor(a, three), tensor(b, two), tensor(out, three), kCheck, message, sizeof(message)));
  printf("%s\n", message);
  xa_workspace(xa_op("xla_gpu_simple_add"), 8, 2, 128, 128, kF32, false, &workspace);
  printf("%d %d %d\n", (int)workspace[0], (int)workspace[1], (int)workspace[2]);
  printf("%s on %s\n", targets->rows[0].name, targets->rows[0].platform);
  return targets->rows[0].execute == NULL;
}
