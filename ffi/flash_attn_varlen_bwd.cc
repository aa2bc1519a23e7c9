#include "binding.h"

XA_TARGET(flash_attn_varlen_bwd, xa::Op::FlashAttnVarlenBwd,
          .Arg<xa::Any>()              // dout
              .Arg<xa::Any>()          // q
              .Arg<xa::Any>()          // k
              .Arg<xa::Any>()          // v
              .Arg<xa::Any>()          // out
              .Arg<xa::Any>()          // softmax_lse
              .Arg<xa::Any>()          // cu_seqlens_q
              .Arg<xa::Any>()          // cu_seqlens_k
              .OptionalArg<xa::Any>()  // seqused_k
              .OptionalArg<xa::Any>()  // seqused_q
              .OptionalArg<xa::Any>()  // leftpad_k
              .OptionalArg<xa::Any>()  // alibi_slopes
              .OptionalArg<xa::Any>()  // sinks
              .OptionalArg<xa::Any>()  // dlse
              .Ret<xa::Any>()          // dq
              .Ret<xa::Any>()          // dk
              .Ret<xa::Any>()          // dv
              .OptionalRet<xa::Any>()  // dsinks
              .OptionalRet<xa::Any>()  // workspace
              .RemainingArgs()
              .RemainingRets()
              .Attr<bool>("causal")
              .Attr<bool>("deterministic")
              .Attr<int64_t>("max_seqlen_k")
              .Attr<int64_t>("max_seqlen_q")
              .Attr<float>("softcap")
              .Attr<float>("softmax_scale")
              .Attr<bool>("top_left")
              .Attr<int64_t>("window_left")
              .Attr<int64_t>("window_right"))
