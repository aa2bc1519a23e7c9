#include "binding.h"

XA_TARGET(kv_cache_update, xa::Op::KvCacheUpdate,
          .Arg<xa::Any>()              // kv_cache
              .Arg<xa::Any>()          // key
              .Arg<xa::Any>()          // value
              .Arg<xa::Any>()          // slot_mapping
              .OptionalArg<xa::Any>()  // k_scale
              .OptionalArg<xa::Any>()  // v_scale
              .Ret<xa::Any>()          // kv_cache
              .RemainingArgs()
              .RemainingRets()
              .Attr<int64_t>("kv_layout"))

XA_TARGET(kv_cache_update_split, xa::Op::KvCacheUpdateSplit,
          .Arg<xa::Any>()              // k_cache
              .Arg<xa::Any>()          // v_cache
              .Arg<xa::Any>()          // key
              .Arg<xa::Any>()          // value
              .Arg<xa::Any>()          // slot_mapping
              .OptionalArg<xa::Any>()  // k_scale
              .OptionalArg<xa::Any>()  // v_scale
              .Ret<xa::Any>()          // k_cache
              .Ret<xa::Any>()          // v_cache
              .RemainingArgs()
              .RemainingRets()
              .Attrs())
