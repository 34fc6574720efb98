#!/bin/sh
# Brings what boxes need and this machine lacks, and says so. With the argument
# "agents" also Node and the vendor CLIs, into .cache/agents of the checkout; with
# "sdk" also LangBot's Python SDK in its tested versions, into .cache/sdk; with
# "langbot" also LangBot itself, into .cache/langbot. Several arguments do several
# things. It installs Debian packages only when something is missing, and only as
# root.
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
agents='' sdk='' langbot=''
for arg in "$@"; do
	case "$arg" in
	agents) agents=1 ;;
	sdk) sdk=1 ;;
	langbot) langbot=1 ;;
	*) echo "setup: unknown argument $arg; there are agents, sdk and langbot" >&2; exit 2 ;;
	esac
done
if [ -n "$agents" ]; then
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
if [ -n "$agents" ] && { [ ! -e .cache/agents/.installed ] || ! cmp -s testdata/agents/package-lock.json .cache/agents/package-lock.json; }; then
	echo 'setup: installing the vendor CLIs of testdata/agents into .cache/agents (about 920 MB)'
	mkdir -p .cache/agents
	rm -f .cache/agents/.installed
	cp testdata/agents/package.json testdata/agents/package-lock.json testdata/agents/.npmrc .cache/agents/
	# No package's script runs by itself; the one that is needed is run by name.
	(cd .cache/agents && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && node node_modules/@anthropic-ai/claude-code/install.cjs)
	touch .cache/agents/.installed
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
		"$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$lock"
		cp "$lock" "$env/.installed"
	done
}
if [ -n "$sdk" ]; then environments "LangBot's Python SDK" sdk '125 MB'; fi
if [ -n "$langbot" ]; then environments LangBot langbot '1.3 GB'; fi
