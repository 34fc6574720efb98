package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginruntime"
)

func (a *app) runtimeCommand() *cobra.Command {
	cfg := pluginruntime.Default()
	cfg.ControlToken = os.Getenv(pluginruntime.EnvControlToken)
	cfg.IndexURL = os.Getenv(pluginruntime.EnvIndexURL)
	trusted := os.Getenv(pluginruntime.EnvTrustedHosts)
	level, format := "info", "text"
	c := &cobra.Command{
		Use: "runtime", Short: "Run LangBot's plugins, in the place of its Plugin Runtime", Args: cobra.NoArgs,
		Long: `Takes the place of LangBot's Plugin Runtime ("lbp rt"), with the same ports, flags, environment
and data directory: stop the one, start the other in the same working directory, and go back the
same way. LangBot connects to the control port, says what shall run, and calls it; developers
connect to the plugin port with "lbp run". Plugins run with the Python SDK of the interpreter
that --python names: pip install langbot-plugin.

LANGBOT_PLUGIN_RUNTIME_CONTROL_TOKEN, if set, must be LangBot's as well. Without it everyone who
reaches the control port commands the runtime: listen on 127.0.0.1 then.

In the profile shared, which LangBot chooses, every worker runs in a box, for which root and an
OCI runtime are needed; in oss_dev workers are plain processes. SIGTERM or Ctrl-C stops all
workers in order, a second one at once.`,
		Example: "  stockade runtime\n  stockade runtime --listen 127.0.0.1 --python ./venv/bin/python\n  stockade runtime --data-dir ./data --ws-control-port 5400 --ws-debug-port 5401",
		RunE: func(cmd *cobra.Command, _ []string) error {
			for host := range strings.SplitSeq(trusted, ",") {
				if host = strings.TrimSpace(host); host != "" {
					cfg.TrustedHosts = append(cfg.TrustedHosts, host)
				}
			}
			if err := cfg.Validate(); err != nil {
				return err
			}
			if !slices.Contains([]string{"debug", "info", "warn", "error"}, level) || !slices.Contains([]string{"text", "json"}, format) {
				return errdefs.New(errdefs.Invalid, "--log-level %q with --log-format %q is not possible", level, format).
					WithNext("choose debug, info, warn or error, and text or json")
			}
			if cfg.Uv != "" && cfg.Uv != "none" {
				if _, err := exec.LookPath(cfg.Uv); err != nil { // now, and not when the first plugin is installed
					return errdefs.Wrap(err, errdefs.Invalid, "uv cannot be run as %q: %v", cfg.Uv, errors.Unwrap(err)).
						WithNext("give its path with --uv or STOCKADE_UV, or none for pip")
				}
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends the process as it would any other
			o := pluginruntime.Options{Config: cfg, Version: a.Version, Logger: a.logger(level, format)}
			if cfg.Stdio {
				o.Stdin, o.Stdout = pipeOf(a.Stdin), pipeOf(a.Stdout)
			}
			o.Ready = func(at pluginruntime.Addresses) {
				if at.Control == "" {
					a.say("plugin runtime: LangBot on standard input and output, plugins at %s", at.Plugin)
					return
				}
				a.say("plugin runtime: LangBot at %s, plugins at %s", at.Control, at.Plugin)
			}
			return pluginruntime.Run(ctx, o)
		},
	}
	f := c.Flags()
	f.BoolVarP(&cfg.Stdio, "stdio-control", "s", false, "LangBot speaks over standard input and output, in the place of the control port")
	f.IntVar(&cfg.ControlPort, "ws-control-port", cfg.ControlPort, "port for LangBot; 0 chooses one")
	f.IntVar(&cfg.PluginPort, "ws-debug-port", cfg.PluginPort, "port for plugins under development; 0 chooses one")
	f.StringVar(&cfg.Listen, "listen", cfg.Listen, "address of both ports (default: every address of this machine, as lbp rt)")
	f.StringVar(&cfg.DataDir, "data-dir", cfg.DataDir, "data directory; that of lbp rt is data")
	f.StringVar(&cfg.Python, "python", os.Getenv("STOCKADE_PYTHON"), "Python with the plugin SDK (STOCKADE_PYTHON; default: the first of python3 and python)")
	f.BoolVar(&cfg.DebugOnly, "debug-only", false, "start no plugin of data/plugins")
	f.BoolVar(&cfg.SkipDepsCheck, "skip-deps-check", false, "do not look at the dependencies of data/plugins")
	f.StringVar(&cfg.IndexURL, "pypi-index-url", cfg.IndexURL, "package index for the plugins' dependencies ("+pluginruntime.EnvIndexURL+")")
	f.StringVar(&trusted, "pypi-trusted-host", trusted, "hosts of the index whose certificate is not checked, separated by commas ("+pluginruntime.EnvTrustedHosts+")")
	f.StringVar(&cfg.Uv, "uv", os.Getenv("STOCKADE_UV"), "uv, which installs faster than pip; none uses pip (STOCKADE_UV; default: uv if it is on the PATH)")
	f.StringVar(&cfg.SDKPin, "sdk-pin", cfg.SDKPin, "strict: a package's pin of the SDK must be satisfied; relaxed: ==X of 0.6 is also satisfied by a newer 0.6")
	f.StringSliceVar(&cfg.IndexHosts, "index-host", nil, "HOST or HOST:PORT that boxed installers reach besides the index's own; may be repeated (default: those of the public index)")
	f.StringVar(&cfg.WorkerNetwork, "worker-network", cfg.WorkerNetwork, "network of boxed workers: host or none")
	f.StringVar(&cfg.OCIRuntime, "oci-runtime", "", "OCI runtime for boxed workers (default: the first of runc and crun)")
	f.StringVar(&cfg.HostProgram, "host-program", "", "stockade-host, which boxed workers need (default: beside this program)")
	f.StringArrayVar(&cfg.RunnerProcess, "runner-process", nil, "plugin, as AUTHOR/NAME, whose runners may run processes in the broker's boxes; may be repeated; all is every plugin (default: none)")
	f.StringVar(&cfg.BrokerURL, "broker-url", os.Getenv("STOCKADE_BROKER_URL"), "stockade serve, which runs them (STOCKADE_BROKER_URL)")
	f.StringVar(&cfg.BrokerKeyFile, "broker-key-file", os.Getenv("STOCKADE_BROKER_KEY_FILE"), "file with a key of the workspace they belong to (STOCKADE_BROKER_KEY_FILE)")
	f.StringVar(&cfg.BrokerTarget, "broker-target", "", "target of their boxes (default: the broker's)")
	f.StringVar(&level, "log-level", level, "debug, info, warn or error")
	f.StringVar(&format, "log-format", format, "text or json")
	return c
}

// pipe is a standard stream whose Close ends a read or a write that waits.
type pipe struct {
	io.Reader
	io.Writer
	io.Closer
}

// pipeOf makes a stream of the process one that can be closed while it is used.
// Standard streams block in the kernel, where nothing could end them. A terminal is
// left as it is: its mode belongs to others too.
func pipeOf(stream any) pipe {
	if f, ok := stream.(*os.File); ok {
		info, err := f.Stat()
		fd := f.Fd()
		if err == nil && info.Mode()&(os.ModeNamedPipe|os.ModeSocket) != 0 && unix.SetNonblock(int(fd), true) == nil {
			f = os.NewFile(fd, f.Name()) // looks again, and uses the poller
			return pipe{f, f, f}
		}
	}
	p := pipe{Closer: io.NopCloser(nil)}
	p.Reader, _ = stream.(io.Reader)
	p.Writer, _ = stream.(io.Writer)
	if c, ok := stream.(io.Closer); ok {
		p.Closer = c
	}
	return p
}
