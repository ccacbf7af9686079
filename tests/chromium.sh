#!/bin/sh
# Chromium as `make` has unpacked it, with the libraries and fonts of its package, which a bare machine lacks.
unpacked=$(cd "$(dirname "$0")/../page/node_modules/.chromium" && pwd) || exit
export LD_LIBRARY_PATH="$unpacked/lib" XDG_DATA_HOME="$unpacked"
exec "$unpacked/chromium" "$@"
