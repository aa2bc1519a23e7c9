#!/usr/bin/env bash
# run.sh [OPTIONS OF LIBFUZZER]: fuzz for ten minutes on one core, guided by coverage. Needs stable Rust and a C++ compiler;
# the flags are those of cargo-fuzz. ASAN=1 adds the address sanitizer, which checks the library's memory too and is five
# times slower. Corpus and findings are kept in target/coverage_fuzz; run the program with a finding as its argument to
# reproduce it.
set -euo pipefail
cd "$(dirname "$0")"
folder=$PWD/../../target/coverage_fuzz
builds=$folder/build${ASAN:+_asan}
triple=$(rustc -vV | sed -n 's/^host: //p')
flags=(--cfg fuzzing -Cpasses=sancov-module)
for option in coverage-level=4 coverage-inline-8bit-counters coverage-pc-table coverage-trace-compares; do
  flags+=("-Cllvm-args=-sanitizer-$option")
done
if [ -n "${ASAN:-}" ]; then
  # Allows a flag of nightly in stable Rust.
  export RUSTC_BOOTSTRAP=1
  flags+=(-Zsanitizer=address)
fi
# With --target the flags do not apply to build scripts. C++ is compiled as usual: coverage is measured in Rust only.
RUSTFLAGS="${flags[*]}" cargo build --release --target "$triple" --target-dir "$builds"
mkdir -p "$folder/corpus" "$folder/findings"
# The case tables are never freed.
ASAN_OPTIONS=detect_leaks=0 exec "$builds/$triple/release/coverage_fuzz" -max_total_time=600 -timeout=30 -max_len=512 \
  -print_final_stats=1 -artifact_prefix="$folder/findings/" "$@" "$folder/corpus"
