// How a CTA's work is cut up, by work shape, element type and head dimension; and its shared memory.
//
// prefill: the warps have rows of their own and share each block of keys.
// decode:  the warps share 16 rows and have keys of their own, every kKeyWarps-th block of 16; their results are
// merged.
//
// Shared memory: the query rows, then per ring (one of the CTA, or one a warp) kStages blocks of K and as many of V. A
// row of D elements is followed by 16 unused bytes, so that eight rows at one column lie in different banks. Last, the
// CTA's Plan.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "tile_plan.cuh"

namespace xa {

struct shape_prefill;
struct shape_decode;

/// The choices; `bytes` is the element's size.
template <typename Shape, int kBytes, int kHeadDim>
struct TileChoice;

// One row for each supported combination:
//         shape    bytes D    row warps, key warps, 16-row tiles a warp, keys a block, stages, CTAs an SM, shared bytes
#define XA_TILE_TABLE(ROW)                       \
  ROW(prefill, 2, 64, 4, 1, 2, 64, 1, 2, 36984)  \
  ROW(prefill, 2, 128, 4, 1, 2, 64, 1, 2, 69752) \
  ROW(prefill, 2, 256, 4, 1, 1, 32, 1, 2, 67704) \
  ROW(prefill, 4, 64, 4, 1, 1, 32, 1, 2, 34936)  \
  ROW(prefill, 4, 128, 4, 1, 1, 32, 1, 2, 67704) \
  ROW(prefill, 4, 256, 4, 1, 1, 16, 1, 2, 99960) \
  ROW(decode, 2, 64, 1, 4, 1, 16, 4, 2, 76152)   \
  ROW(decode, 2, 128, 1, 4, 1, 16, 2, 2, 74104)  \
  ROW(decode, 2, 256, 1, 4, 1, 16, 1, 2, 76152)  \
  ROW(decode, 4, 64, 1, 4, 1, 16, 2, 2, 74104)   \
  ROW(decode, 4, 128, 1, 4, 1, 16, 1, 2, 76152)  \
  ROW(decode, 4, 256, 1, 2, 1, 16, 1, 2, 83320)

#define XA_TILE_CHOICE(shape, bytes, head_dim, row_warps, key_warps, row_tiles, keys, stages, ctas, shared_bytes) \
  template <>                                                                                                     \
  struct TileChoice<shape_##shape, bytes, head_dim> {                                                             \
    static constexpr int kRowWarps = row_warps, kKeyWarps = key_warps, kRowTiles = row_tiles, kKeys = keys,       \
                         kStages = stages, kCtasPerSm = ctas, kSharedBytes = shared_bytes;                        \
  };
XA_TILE_TABLE(XA_TILE_CHOICE)
#undef XA_TILE_CHOICE

template <typename Shape, typename T, int kHeadDim_>
struct TileShape : TileChoice<Shape, sizeof(T), kHeadDim_> {
  using Choice = TileChoice<Shape, sizeof(T), kHeadDim_>;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarps = Choice::kRowWarps * Choice::kKeyWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * Choice::kRowTiles * Choice::kRowWarps;
  static constexpr bool kSplitsKeys = Choice::kKeyWarps > 1;
  static constexpr int kRings = kSplitsKeys ? kWarps : 1;
  /// Keys of a block that one warp fetches.
  static constexpr int kKeysPerLoad = kSplitsKeys ? Choice::kKeys : Choice::kKeys / kWarps;

  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kPitch = kRowBytes + 16;
  static constexpr int kBlockBytes = Choice::kKeys * kPitch;
  static constexpr int kRingBytes = 2 * Choice::kStages * kBlockBytes;
  static constexpr int kQueryBytes = kRows * kPitch;
  static constexpr int kStreamBytes = kQueryBytes + kRings * kRingBytes;

  /// Merging key warps: f32 rows with 4 spare columns, then (max, sum) of each row and warp. Takes the place of the
  /// above.
  static constexpr int kMergePitch = kHeadDim + 4;
  static constexpr int kMergeBytes = kSplitsKeys ? Choice::kKeyWarps * kRows * (kMergePitch + 2) * 4 : 0;

  /// Where the CTA's Plan lies.
  static constexpr int kPlanOffset = kStreamBytes > kMergeBytes ? kStreamBytes : kMergeBytes;

  static_assert(Choice::kRowWarps == 1 || Choice::kKeyWarps == 1, "warps share either rows or keys");
  static_assert(Choice::kSharedBytes == kPlanOffset + static_cast<int>(sizeof(Plan)),
                "the table's last column is what the launch asks for");
  static_assert(Choice::kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a CTA no more");
};

}  // namespace xa
