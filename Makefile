# Everything here is also what CI runs. `make demo` and `make test` are the two
# commands of the README.

GO      ?= go
AGENT   ?= testagent
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)
export CGO_ENABLED = 0

.PHONY: build demo test lint unit race setup setup-tests setup-agents setup-runtimes setup-sdk e2e-langbot bench clean

# The binaries, static: the host program is also bind-mounted into boxes, whose
# root file system may have no C library.
build:
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/stockade ./cmd/stockade-host ./cmd/testagent

# What the machine lacks for boxes; says what it installs.
setup:
	@sh scripts/setup.sh

# And for the tests.
setup-tests:
	@sh scripts/setup.sh tests

# Node and the vendor CLIs, on request.
setup-agents:
	@sh scripts/setup.sh agents

# crun and runsc, on request: the runtimes that tests run over beside runc.
setup-runtimes:
	@sh scripts/setup.sh runtimes

# LangBot's Python SDK in the tested versions, on request: what plugins are made with.
setup-sdk:
	@sh scripts/setup.sh sdk

demo: setup build
	@if [ "$(AGENT)" != testagent ]; then sh scripts/setup.sh agents; fi
	@bin/stockade demo --agent $(AGENT)

test: setup-tests lint race

lint:
	@test -z "$$(gofmt -l cmd client internal)" || { gofmt -l cmd client internal; echo 'not formatted: run gofmt -w on these'; exit 1; }
	$(GO) vet ./...
	$(GO) tool staticcheck ./...

# The genuine LangBot, in the tested versions, against `stockade runtime`.
e2e-langbot: build
	@sh scripts/setup.sh sdk langbot
	@for series in 4.10 4.11; do \
		echo "LangBot $$series"; \
		.cache/langbot/$$series/bin/python scripts/e2e_langbot.py --langbot $(CURDIR)/.cache/langbot/$$series/bin/langbot -- \
			$(CURDIR)/bin/stockade runtime --python $(CURDIR)/.cache/sdk/0.7/bin/python \
			--ws-control-port {control} --ws-debug-port {debug} || exit 1; \
	done

# The race detector needs cgo, and so a C compiler.
race: build
	CGO_ENABLED=1 $(GO) test -race -timeout 25m ./...

unit:
	$(GO) test ./...

bench: build
	bin/stockade bench

clean:
	rm -rf bin .cache
