#!/bin/sh
# Makes a Python environment with the websockets library in the directory given, if
# it is not there yet, and prints its interpreter. Several may run at once: one makes
# it, the others wait.
set -eu
dir=$1
mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9
if ! "$dir/bin/python" -c "import websockets" 2>/dev/null; then
	rm -rf "$dir"
	python3 -m venv "$dir" >&2
	"$dir/bin/pip" install --quiet --disable-pip-version-check websockets==15.0.1 >&2
fi
echo "$dir/bin/python"
