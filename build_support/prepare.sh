#!/bin/sh
# prepare.sh VENV: makes the virtual environment unless it is complete. If this machine lacks something, one line says what.
set -eu
venv=$1
stop() {
  echo "make: $1" >&2
  exit 1
}

# Read by the shell itself, because PATH may lack any program.
while IFS='"' read -r key value _; do
  case $key in 'rust-version = ') oldest=$value ;; esac
done <"${0%/*}/../Cargo.toml"
rust=$(cargo --version 2>/dev/null) || stop "cargo is missing: install Rust $oldest or newer (https://rustup.rs)"
minor=${rust#cargo 1.}
[ "${minor%%.*}" -ge "${oldest#1.}" ] || stop "$rust is too old: install Rust $oldest or newer (rustup update)"
command -v cc >/dev/null || stop 'cc is missing: install gcc (Debian, Ubuntu: apt install build-essential)'
echo '#include <string>' | ${CXX:-c++} -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
  stop "${CXX:-c++} is missing or cannot compile C++17: install g++ (Debian, Ubuntu: apt install build-essential), or set CXX"

# pip writes the list of its files last, so that an interrupted installation has none.
complete='import importlib.metadata, sys; sys.exit(sys.version_info < (3, 11) or not importlib.metadata.distribution("pip").files)'
if ! "$venv/bin/python3" -c "$complete" 2>/dev/null; then
  command -v python3 >/dev/null || stop 'python3 is missing: install Python 3.11 or newer'
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "$(python3 --version 2>&1) is too old: put the python3 of Python 3.11 or newer on PATH"
  python3 -c 'import ensurepip, venv' 2>/dev/null ||
    stop 'python3 has no venv module: install it (Debian, Ubuntu: apt install python3-venv)'
  error=$(python3 -m venv --clear "$venv" 2>&1) || {
    rm -rf "$venv"
    stop "python3 -m venv failed: $(echo "$error" | tail -n 1)"
  }
fi
