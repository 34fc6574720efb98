// Package archtest holds the shape of the code as a table and the tests that
// hold the code to it: ranks (a package imports only lower ones), pure rooms,
// what a binary may link, one package comment each, file sizes, and that the
// drawing in ARCHITECTURE.md is the one this table makes.
package archtest

// Room is one package of the table.
type Room struct {
	Path string // below the module
	Pure bool   // no goroutine, select, I/O, clock or randomness
	Does string // its one idea, for the drawing
}

// testRooms hold code for tests; only tests and other test rooms import them.
var testRooms = []string{"internal/need", "internal/store/storetest", "internal/driver/drivertest", "internal/host/hosttest",
	"internal/plugintest"}

// Floor is a rank: its rooms may import only rooms of lower floors, or a room
// nested below themselves by path (a seam imports nothing of its drivers).
type Floor struct {
	Name  string
	Rooms []Room
}

// Floors is the whole building, lowest first. Every package of the module
// stands in it exactly once.
var Floors = []Floor{
	{"codes", []Room{
		{"internal/errdefs", true, "the closed set of error codes"},
	}},
	{"words", []Room{
		{"internal/ident", true, "identifiers and the rules for names"},
		{"internal/jsonscan", true, "checks JSON and finds its parts, building nothing"},
		{"internal/turns", false, "one caller at a time for what has a name"},
		{"internal/need", false, "what a test needs from the machine"},
	}},
	{"shapes", []Room{
		{"internal/plugintest", false, "packs the plugins of testdata for tests"},
		{"internal/api", true, "JSON shapes of the public API"},
		{"internal/agent", true, "a coding agent's run: launch, lines in, events out"},
	}},
	{"rules", []Room{
		{"internal/wire", true, "host API shapes, log frames"},
		{"internal/authz", true, "who may do what"},
		{"internal/agent/acp", true, "codec of the Agent Client Protocol"},
		{"internal/agent/claude", true, "codec of Claude Code's command line"},
		{"internal/agent/codex", true, "codec of the Codex CLI's app server"},
		{"internal/relaywire", true, "coding-relay-v1: frames, limits, codes"},
		{"internal/pluginwire", true, "the plugin action RPC: envelopes, contexts, actions, framing"},
		{"internal/restart", true, "when a plugin worker may be launched again"},
	}},
	{"life", []Room{
		{"internal/process", true, "the life of one process: Step and KeepStep"},
		{"internal/desired", true, "which binding of an installation is current; what is fenced"},
	}},
	{"seams", []Room{
		{"internal/store", false, "the ledger, as an interface"},
		{"internal/durable", false, "small files that survive a power cut"},
		{"internal/lockdir", false, "a directory that one program has at a time"},
		{"internal/driver", false, "a way to a host program, as an interface"},
		{"internal/cgroup", false, "one control group, v1, v2 or hybrid"},
		{"internal/netns", false, "one network namespace; listening inside it"},
		{"internal/secret", false, "keys, hashes, private files, signatures"},
		{"internal/spool", false, "the log of a process on disk"},
		{"internal/python", false, "what a Python interpreter is, and which plugin SDK it has"},
		{"internal/tartree", false, "tar archives in and out of a directory that is never left"},
		{"internal/shelf", false, "directories that appear whole, by digest, and are read-only"},
	}},
	{"mechanism", []Room{
		{"internal/store/sqlite", false, "the ledger in SQLite"},
		{"internal/store/storetest", false, "conformance suite of the ledger"},
		{"internal/pluginlog", false, "the newest log lines of one plugin"},
		{"internal/registration", false, "credentials of plugin workers"},
		{"internal/restart/gate", false, "waiting for leave to launch"},
		{"internal/osproc", false, "a tree of processes, ended with a proof or without one"},
		{"internal/oci", false, "finding a runtime; the container's specification"},
		{"internal/image", false, "OCI layouts and docker-save tars, unpacked by digest"},
		{"internal/rpc", false, "one connection of the plugin protocol: calls, streams, lanes"},
		{"internal/artifact", false, "plugin packages, unpacked by digest"},
		{"internal/deptree", false, "dependency trees of plugins, installed once and read-only"},
	}},
	{"machine", []Room{
		{"internal/boxhost", false, "boxes on this machine: volumes, namespaces, limits"},
		{"internal/shim", false, "the keeper of one process, and PID 1 in its container"},
		{"internal/preflight", false, "what this machine has and lacks"},
	}},
	{"links", []Room{
		{"internal/host", false, "the host program and its client"},
		{"internal/gateway", false, "what a run may reach"},
		{"internal/worker", false, "plugin workers and installers: plain processes, or boxes"},
		{"internal/relayclient", false, "the machine's side of coding-relay-v1: agents as jobs"},
		{"internal/relay", false, "the hub of coding-relay-v1 and its fences"},
		{"internal/metrics", false, "counters and histograms"},
		{"internal/transfer", false, "files pushed over connections of the plugin protocol"},
	}},
	{"drivers", []Room{
		{"internal/driver/box", false, "the host program of this machine"},
		{"internal/driver/drivertest", false, "conformance suite of drivers"},
		{"internal/host/hosttest", false, "whole host programs for tests"},
	}},
	{"owners", []Room{
		{"internal/tenant", false, "workspaces, keys, who is calling"},
		{"internal/dispatch", false, "owner of the use of the relay"},
		{"internal/box", false, "owner of box records"},
		{"internal/broker", false, "owner of runs, processes, fences"},
		{"internal/pluginhost", false, "owner of plugin installations: supervisors, pools, what workers may ask"},
		{"internal/pluginlegacy", false, "owner of data/plugins: installing, upgrading, removing what LangBot installs by itself"},
		{"internal/runprocess", false, "owner of the runs that plugins' runners have at the broker"},
	}},
	{"edges", []Room{
		{"internal/httpapi", false, "the public HTTP API"},
		{"internal/config", false, "flags, environment and file"},
		{"internal/plugincontrol", false, "LangBot's control connection: every action over the plugins that run"},
		{"client", false, "the public Go client"},
		{"client/relay", false, "the relay hub, for Go programs that embed it"},
	}},
	{"wiring", []Room{
		{"internal/testmodel", false, "a scripted model server"},
		{"internal/testagent", false, "a scripted ACP agent"},
		{"internal/server", false, "stockade serve, put together"},
		{"internal/pluginruntime", false, "stockade runtime, put together"},
		{"internal/lbhost", false, "a LangBot that tests and the bench play"},
		{"internal/serverproc", false, "stockade serve as a child, to kill and start again"},
	}},
	{"shows", []Room{
		{"internal/demo", false, "stockade demo"},
		{"internal/bench", false, "stockade bench"},
	}},
	{"commands", []Room{
		{"internal/cli", false, "every command a person types"},
	}},
	{"programs", []Room{
		{"cmd/stockade", false, "the server and the command line"},
		{"cmd/testagent", false, "the scripted agent, for the demo and tests"},
		{"cmd/stockade-host", false, "what goes onto a machine where agents run"},
		{"sdk/python", false, "the Python package for runner authors: its tests"},
		{"internal/archtest", false, "this table"},
	}},
}

// Pure lists what a pure room may not import: anything that does I/O, tells the
// time by itself, or draws random numbers. The type time.Time is allowed, the
// function time.Now is not.
var pureDenied = []string{"os", "net", "net/http", "io/fs", "math/rand", "math/rand/v2",
	"crypto/rand", "sync", "sync/atomic", "syscall", "log", "log/slog", "context", "os/exec"}

// pureCalls are functions a pure room may not call.
var pureCalls = map[string][]string{"time": {"Now", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick", "Since", "Until"}}

// hostDenied says what stockade-host must not link, and why.
var hostDenied = map[string]string{
	"internal/store":                   "the ledger never leaves the server",
	"internal/store/sqlite":            "the ledger never leaves the server",
	"internal/authz":                   "authority is decided by the server; a host only checks generations",
	"internal/tenant":                  "credentials of tenants never reach a host",
	"internal/broker":                  "a host starts what it is told and decides nothing",
	"internal/httpapi":                 "the public API is the server's",
	"internal/gateway":                 "real model keys stay with the server",
	"database/sql":                     "no SQL on a host",
	"modernc.org/sqlite":               "no SQL on a host",
	"github.com/danielgtaylor/huma/v2": "the public API is the server's",
	"github.com/prometheus/client_golang/prometheus": "metrics are the server's; its package memory is too much for a shim",
	"github.com/spf13/cobra":                         "a shim pays for every linked package; flags are enough",
}
