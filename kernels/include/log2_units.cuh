// Natural and binary logarithms. Kernels compute exponentials in base 2.
#pragma once

namespace xa {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

}  // namespace xa
