#include "binding.h"

XA_TARGET(rope_kv_cache_update, xa::Op::RopeKvCacheUpdate,
          .Arg<xa::Any>()              // kv_cache
              .Arg<xa::Any>()          // query
              .Arg<xa::Any>()          // key
              .Arg<xa::Any>()          // value
              .Arg<xa::Any>()          // slot_mapping
              .Arg<xa::Any>()          // positions
              .Arg<xa::Any>()          // cos_sin
              .OptionalArg<xa::Any>()  // k_scale
              .OptionalArg<xa::Any>()  // v_scale
              .Ret<xa::Any>()          // kv_cache
              .Ret<xa::Any>()          // query_out
              .RemainingArgs()
              .RemainingRets()
              .Attr<bool>("interleaved")
              .Attr<int64_t>("kv_layout"))
