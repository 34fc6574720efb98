#!/bin/sh
# Brings what boxes need and this machine lacks, and says so. Arguments bring more:
#
#   tests     the compiler and the tools that tests use
#   agents    Node and the vendor CLIs, into .cache/agents of the checkout
#   runtimes  crun, and runsc into .cache/runsc: what tests run over beside runc
#   sdk       LangBot's Python SDK in its tested versions, into .cache/sdk
#   langbot   LangBot itself, into .cache/langbot
#
# It installs Debian packages only when something is missing, and only as root.
set -eu
cd "$(dirname "$0")/.."

# A package index may be slow to answer for a moment; once more is enough.
again() {
	"$@" && return
	echo "setup: failed, trying once more: $*" >&2
	sleep 10
	"$@"
}

need=''
want() { # program package
	command -v "$1" >/dev/null 2>&1 || need="$need $2"
}
tests='' agents='' runtimes='' sdk='' langbot=''
for arg in "$@"; do
	case "$arg" in
	tests) tests=1 ;;
	agents) agents=1 ;;
	runtimes) runtimes=1 ;;
	sdk) sdk=1 ;;
	langbot) langbot=1 ;;
	*) echo "setup: unknown argument $arg; there are tests, agents, runtimes, sdk and langbot" >&2; exit 2 ;;
	esac
done
want runc runc
[ -e /etc/ssl/certs/ca-certificates.crt ] || need="$need ca-certificates"
if [ -n "$tests" ]; then
	want gcc gcc # the race detector, which needs the C library's headers too
	[ -e /usr/include/stdlib.h ] || need="$need libc6-dev"
	want busybox busybox-static
	want sqlite3 sqlite3
	want git git
	want curl curl
	want pgrep procps
	want spin spin # checks the model of the relay's fences
fi
if [ -n "$tests$sdk$langbot" ]; then # the Python relay peers, plugins
	# The published plugin runtimes look at what they installed with packaging of the
	# machine's Python.
	python3 -c 'import ensurepip, venv, pip, packaging' 2>/dev/null || need="$need python3 python3-venv python3-pip python3-packaging"
fi
if [ -n "$agents" ]; then
	want node nodejs
	want npm npm
fi
if [ -n "$runtimes" ]; then want crun crun; fi

if [ -n "$need" ]; then
	if [ "$(id -u)" != 0 ]; then
		echo "missing:$need. Install them: sudo apt-get install$need" >&2
		exit 1
	fi
	echo "setup: installing Debian packages:$need"
	export DEBIAN_FRONTEND=noninteractive
	again apt-get update -qq
	# shellcheck disable=SC2086
	again apt-get install -y -qq --no-install-recommends $need >/dev/null
fi

if [ -n "$tests" ]; then again go mod download; fi

# internal/demo/agents.go does the same for who runs the demo without make.
if [ -n "$agents" ] && { [ ! -e .cache/agents/.installed ] || ! cmp -s testdata/agents/package-lock.json .cache/agents/package-lock.json; }; then
	echo 'setup: installing the vendor CLIs of testdata/agents into .cache/agents (about 920 MB)'
	mkdir -p .cache/agents
	rm -f .cache/agents/.installed
	cp testdata/agents/package.json testdata/agents/package-lock.json testdata/agents/.npmrc .cache/agents/
	# No package's script runs by itself; the one that is needed is run by name.
	(cd .cache/agents && again npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && node node_modules/@anthropic-ai/claude-code/install.cjs)
	touch .cache/agents/.installed
fi

# The version of Debian 12 is older than this project can use.
if [ -n "$runtimes" ] && { [ ! -e .cache/runsc/runsc ] || ! cmp -s testdata/runsc/go.sum .cache/runsc/.built; }; then
	echo 'setup: building runsc of testdata/runsc into .cache/runsc (about 2 minutes)'
	mkdir -p .cache/runsc
	version=$(sed -n 's/.*gvisor.dev\/gvisor v0\.0\.0-\([0-9]\{8\}\).*/\1.0/p' testdata/runsc/go.mod)
	(cd testdata/runsc && again env CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=$version" \
		-o ../../.cache/runsc/runsc gvisor.dev/gvisor/runsc)
	cp testdata/runsc/go.sum .cache/runsc/.built
fi

# One Python environment for each tested version: they exclude one another.
environments() { # what, directory, size
	for lock in testdata/"$2"/*.txt; do
		series=$(basename "$lock" .txt)
		env=.cache/$2/$series
		if [ -e "$env/.installed" ] && cmp -s "$lock" "$env/.installed"; then
			continue
		fi
		echo "setup: installing $1 $series into $env (about $3)"
		rm -rf "$env"
		python3 -m venv "$env"
		again "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$lock"
		cp "$lock" "$env/.installed"
	done
}
if [ -n "$sdk" ]; then environments "LangBot's Python SDK" sdk '125 MB'; fi
if [ -n "$langbot" ]; then environments LangBot langbot '1.3 GB'; fi
