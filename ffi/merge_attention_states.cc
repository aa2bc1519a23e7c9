#include "binding.h"

XA_TARGET(merge_attention_states, xa::Op::MergeAttentionStates,
          .Arg<xa::Any>()      // out_a
              .Arg<xa::Any>()  // lse_a
              .Arg<xa::Any>()  // out_b
              .Arg<xa::Any>()  // lse_b
              .Ret<xa::Any>()  // out
              .Ret<xa::Any>()  // lse
              .RemainingArgs()
              .RemainingRets()
              .Attrs())
