#!/bin/sh
# Brings what boxes need and this machine lacks, and says so. With the argument
# "agents" also Node and the vendor CLIs, into .cache/agents of the checkout.
# It installs Debian packages only when something is missing, and only as root.
set -eu
cd "$(dirname "$0")/.."

need=''
want() { # program package
	command -v "$1" >/dev/null 2>&1 || need="$need $2"
}
want runc runc
want gcc gcc # the race detector
want busybox busybox-static
want sqlite3 sqlite3
want git git
want pgrep procps
want spin spin # checks the model of the relay's fences
python3 -c 'import ensurepip, venv' 2>/dev/null || need="$need python3 python3-venv" # the Python relay peers
[ -e /etc/ssl/certs/ca-certificates.crt ] || need="$need ca-certificates"
if [ "${1:-}" = agents ]; then
	want node nodejs
	want npm npm
fi

if [ -n "$need" ]; then
	if [ "$(id -u)" != 0 ]; then
		echo "missing:$need. Install them: sudo apt-get install$need" >&2
		exit 1
	fi
	echo "setup: installing Debian packages:$need"
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	# shellcheck disable=SC2086
	apt-get install -y -qq --no-install-recommends $need >/dev/null
fi

# internal/demo/agents.go does the same for who runs the demo without make.
if [ "${1:-}" = agents ] && { [ ! -e .cache/agents/.installed ] || ! cmp -s testdata/agents/package-lock.json .cache/agents/package-lock.json; }; then
	echo 'setup: installing the vendor CLIs of testdata/agents into .cache/agents (about 920 MB)'
	mkdir -p .cache/agents
	rm -f .cache/agents/.installed
	cp testdata/agents/package.json testdata/agents/package-lock.json testdata/agents/.npmrc .cache/agents/
	# No package's script runs by itself; the one that is needed is run by name.
	(cd .cache/agents && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && node node_modules/@anthropic-ai/claude-code/install.cjs)
	touch .cache/agents/.installed
fi
