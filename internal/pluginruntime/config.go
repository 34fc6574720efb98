package pluginruntime

import (
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/worker"
)

// Ports and environment of the published Python runtime.
const (
	DefaultControlPort = 5400
	DefaultPluginPort  = 5401

	EnvControlToken = "LANGBOT_PLUGIN_RUNTIME_CONTROL_TOKEN"
	EnvIndexURL     = "LANGBOT_PLUGIN_PYPI_INDEX_URL"
	EnvTrustedHosts = "LANGBOT_PLUGIN_PYPI_TRUSTED_HOST"

	headerControlToken = "X-LangBot-Plugin-Runtime-Token"
	headerDebugKey     = "X-LangBot-Plugin-Debug-Key"
	headerCapability   = "X-LangBot-Plugin-Registration-Capability"
)

// How a package's pin of the SDK is held against the SDK of the interpreter.
const (
	PinStrict  = "strict"  // it must be satisfied
	PinRelaxed = "relaxed" // "==X" of series 0.6 is also satisfied by a newer 0.6
)

// Config is what an operator chooses. Identity, policy and profile are not among
// it: LangBot says them when it connects.
type Config struct {
	DataDir string // default "data"
	// Listen is the address of both listeners; "" is every address of the machine, as
	// the published runtime does it.
	Listen      string
	ControlPort int // 0 chooses a free one
	PluginPort  int // debug plugins, and workers that connect by themselves; 0 chooses a free one
	// Stdio takes LangBot's connection from standard input and output, in the place of
	// the control port.
	Stdio bool
	// ControlToken, if not empty, must stand in a header of each control connection.
	ControlToken string

	Python       string   // interpreter of the workers; "" is the first on the PATH
	Uv           string   // path of uv; "" looks for it, "none" installs with pip
	IndexURL     string   // package index; may hold a credential
	TrustedHosts []string // hosts of the index whose certificate is not checked
	IndexHosts   []string // hosts that boxed installers reach besides the index's own; nil: those of the public index
	SDKPin       string   // PinStrict (default) or PinRelaxed

	WorkerNetwork string // of boxed workers: host (default) or none
	OCIRuntime    string // of boxed workers: runc or crun; "" looks for one
	HostProgram   string // stockade-host, PID 1 of boxes; "" is beside this program

	// RunnerProcess are the plugins, as AUTHOR/NAME, whose runners may run processes;
	// "all" is every plugin, none is nobody. They run where the broker runs them.
	RunnerProcess []string
	BrokerURL     string // base address of stockade serve
	BrokerKeyFile string // holds a key of the workspace that the processes belong to
	BrokerTarget  string // where their boxes are; "" is the broker's default

	DebugOnly     bool // no plugin of data/plugins is started
	SkipDepsCheck bool // dependencies of data/plugins are not looked at

	// PingInterval is how often a connection is asked for a sign of life, and how long
	// it may take to give one. 0 is the published runtime's 20 s.
	PingInterval time.Duration
}

// Default returns the configuration of "lbp rt" without flags.
func Default() Config {
	return Config{DataDir: "data", ControlPort: DefaultControlPort, PluginPort: DefaultPluginPort,
		SDKPin: PinStrict, WorkerNetwork: worker.NetworkHost, PingInterval: 20 * time.Second}
}

// Options is what a runtime runs with.
type Options struct {
	Config  Config
	Version string
	// Stdin and Stdout carry LangBot's connection when Config.Stdio is set. Closing
	// Stdin must end a read from it.
	Stdin  io.ReadCloser
	Stdout io.WriteCloser
	Logger *slog.Logger // nil discards
	// Ready, if not nil, is called once when LangBot can connect.
	Ready func(Addresses)
}

// Addresses is where a runtime listens.
type Addresses struct {
	Control string `json:"control"` // ws://…/control/ws; "" with Config.Stdio
	Plugin  string `json:"plugin"`  // ws://…/plugin/debug/ws
}

// minSecret is the shortest token, in characters, as in the published runtime.
const minSecret = 32

// Validate says what is wrong with the configuration. No message holds a secret.
func (c Config) Validate() error {
	if c.ControlToken != "" && (len([]rune(c.ControlToken)) < minSecret || strings.ContainsFunc(c.ControlToken, unicode.IsSpace)) {
		return errdefs.New(errdefs.Invalid, "the control token is shorter than %d characters or has white space in it", minSecret).
			WithNext("set %s to the output of: openssl rand -hex 32", EnvControlToken)
	}
	for name, port := range map[string]int{"--ws-control-port": c.ControlPort, "--ws-debug-port": c.PluginPort} {
		if port < 0 || port > 65535 {
			return errdefs.New(errdefs.Invalid, "%s %d is not a port", name, port)
		}
	}
	if !c.Stdio && c.ControlPort != 0 && c.ControlPort == c.PluginPort {
		return errdefs.New(errdefs.Invalid, "the control port and the plugin port are both %d", c.ControlPort).
			WithNext("choose another with --ws-debug-port")
	}
	if c.SDKPin != PinStrict && c.SDKPin != PinRelaxed {
		return errdefs.New(errdefs.Invalid, "--sdk-pin %q is neither %s nor %s", c.SDKPin, PinStrict, PinRelaxed)
	}
	if c.WorkerNetwork != worker.NetworkHost && c.WorkerNetwork != worker.NetworkNone {
		return errdefs.New(errdefs.Invalid, "--worker-network %q is neither %s nor %s", c.WorkerNetwork, worker.NetworkHost, worker.NetworkNone)
	}
	if c.DataDir == "" {
		return errdefs.New(errdefs.Invalid, "there is no data directory").WithNext("name one with --data-dir")
	}
	return c.validateBroker()
}

func (c Config) address(port int) string { return net.JoinHostPort(c.Listen, strconv.Itoa(port)) }

func (c Config) dir(elem ...string) string {
	return filepath.Join(append([]string{c.DataDir}, elem...)...)
}
