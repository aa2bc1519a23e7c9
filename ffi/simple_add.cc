#include "binding.h"

XA_TARGET(simple_add, xa::Op::SimpleAdd,
          .Arg<xa::Any>()      // a
              .Arg<xa::Any>()  // b
              .Ret<xa::Any>()  // out
              .RemainingArgs()
              .RemainingRets()
              .Attrs())
