#include "binding.h"

XA_TARGET(flash_attn_varlen, xa::Op::FlashAttnVarlen,
          .Arg<xa::Any>()              // q
              .Arg<xa::Any>()          // k
              .Arg<xa::Any>()          // v
              .Arg<xa::Any>()          // cu_seqlens_q
              .Arg<xa::Any>()          // cu_seqlens_k
              .OptionalArg<xa::Any>()  // seqused_k
              .OptionalArg<xa::Any>()  // block_table
              .OptionalArg<xa::Any>()  // seqused_q
              .OptionalArg<xa::Any>()  // leftpad_k
              .OptionalArg<xa::Any>()  // alibi_slopes
              .OptionalArg<xa::Any>()  // sinks
              .OptionalArg<xa::Any>()  // q_scale
              .OptionalArg<xa::Any>()  // k_scale
              .OptionalArg<xa::Any>()  // v_scale
              .Ret<xa::Any>()          // out
              .Ret<xa::Any>()          // softmax_lse
              .OptionalRet<xa::Any>()  // workspace
              .RemainingArgs()
              .RemainingRets()
              .Attr<bool>("batch_invariant")
              .Attr<bool>("causal")
              .Attr<int64_t>("kv_layout")
              .Attr<int64_t>("max_seqlen_k")
              .Attr<int64_t>("max_seqlen_q")
              .Attr<float>("softcap")
              .Attr<float>("softmax_scale")
              .Attr<bool>("top_left")
              .Attr<int64_t>("window_left")
              .Attr<int64_t>("window_right"))
