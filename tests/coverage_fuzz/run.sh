#!/usr/bin/env bash
# run.sh [OPTIONS OF LIBFUZZER]: fuzz for ten minutes on one core, guided by coverage. Stable Rust and a C++ compiler do; the
# flags are those that cargo-fuzz gives. ASAN=1 adds the address sanitizer, which takes five times as long and looks at the
# library's own memory too. Corpus and findings stay in target/coverage_fuzz; the program with a finding as its argument
# repeats it.
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
  # What lets stable Rust take a flag of nightly's.
  export RUSTC_BOOTSTRAP=1
  flags+=(-Zsanitizer=address)
fi
# With a target the flags are not those of build scripts. C++ is compiled as always: the coverage is that of Rust.
RUSTFLAGS="${flags[*]}" cargo build --release --target "$triple" --target-dir "$builds"
mkdir -p "$folder/corpus" "$folder/findings"
# The tables of cases are never freed.
ASAN_OPTIONS=detect_leaks=0 exec "$builds/$triple/release/coverage_fuzz" -max_total_time=600 -timeout=30 -max_len=512 \
  -print_final_stats=1 -artifact_prefix="$folder/findings/" "$@" "$folder/corpus"
