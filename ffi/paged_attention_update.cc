#include "binding.h"

XA_TARGET(paged_attention_update, xa::Op::PagedAttentionUpdate,
          .Arg<xa::Any>()              // query
              .Arg<xa::Any>()          // kv_cache
              .Arg<xa::Any>()          // context_lens
              .Arg<xa::Any>()          // block_tables
              .Arg<xa::Any>()          // query_start_loc
              .Arg<xa::Any>()          // num_seqs
              .Arg<xa::Any>()          // key
              .Arg<xa::Any>()          // value
              .Arg<xa::Any>()          // slot_mapping
              .OptionalArg<xa::Any>()  // alibi_slopes
              .OptionalArg<xa::Any>()  // sinks
              .OptionalArg<xa::Any>()  // q_scale
              .OptionalArg<xa::Any>()  // k_scale
              .OptionalArg<xa::Any>()  // v_scale
              .Ret<xa::Any>()          // out
              .Ret<xa::Any>()          // kv_cache
              .OptionalRet<xa::Any>()  // softmax_lse
              .OptionalRet<xa::Any>()  // workspace
              .RemainingArgs()
              .RemainingRets()
              .Attr<bool>("batch_invariant")
              .Attr<float>("scale")
              .Attr<int64_t>("sliding_window")
              .Attr<float>("soft_cap"))
