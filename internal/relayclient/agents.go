package relayclient

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/stockade-run/stockade/internal/agent"
	"github.com/stockade-run/stockade/internal/agent/acp"
	"github.com/stockade-run/stockade/internal/agent/claude"
	"github.com/stockade-run/stockade/internal/agent/codex"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/osproc"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// usualEnv is what any program needs of this machine's variables. Keys and tokens
// are not among them: each kind of agent names its vendor's.
var usualEnv = []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TERM", "TZ", "TMPDIR", "TMP", "TEMP", "XDG_*",
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
	"SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "IS_SANDBOX"}

// reservedEnv is what no payload may set: it would change which code runs before
// the program that is allowed. With "*" for commands only the first part counts.
var (
	reservedEnv = []string{"LD_*", "GLIBC_TUNABLES", "GCONV_PATH", "STOCKADE_*", "PWD"}
	searchEnv   = []string{"PATH", "NODE_OPTIONS", "NODE_PATH", "BASH_ENV", "ENV", "SHELLOPTS", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PERL5LIB", "PERL5OPT", "RUBYLIB", "RUBYOPT"}
)

// usualCommands may be named by a payload when the owner has named none.
var usualCommands = []string{"claude", "codex"}

// secretName is how a variable's name says that its value is a secret.
var secretName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?i)key|token|secret|passw|auth|cookie`) })

// agents is the Runner of real agents.
type agents struct {
	cfg     Config
	limits  relaywire.Limits
	log     *slog.Logger
	private *scratch // parent of the runs' private directories
	cgroup  string
}

// newAgents checks what the owner of the machine allows.
func newAgents(cfg Config, limits relaywire.Limits, cwd string, log *slog.Logger) (*agents, error) {
	if len(cfg.AllowWorkspace) == 0 {
		cfg.AllowWorkspace = []string{cwd}
	}
	for i, dir := range cfg.AllowWorkspace {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Invalid, "the workspace %s cannot be allowed", dir)
		}
		f, _, err := osproc.OpenWorkspace([]string{abs}, "")
		if err != nil {
			return nil, err
		}
		_ = f.Close()
		cfg.AllowWorkspace = slices.Clone(cfg.AllowWorkspace)
		cfg.AllowWorkspace[i] = abs
	}
	for _, name := range cfg.AllowCommand {
		if strings.Contains(name, "/") && !filepath.IsAbs(name) {
			return nil, errdefs.New(errdefs.Invalid, "the command %s cannot be allowed: give a name or an absolute path", name)
		}
	}
	private, err := newScratch(cfg.CgroupParent, log)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "no private directory can be made: %v", err)
	}
	return &agents{cfg: cfg, limits: limits, log: log, private: private, cgroup: private.group(cfg.CgroupParent)}, nil
}

// close removes what is left when every job has ended.
func (a *agents) close() {
	if err := a.private.clear(a.cfg.CgroupParent); err != nil {
		a.log.Warn("a private directory or control group stays behind, for the next client to remove", "error", err)
	}
}

// Run runs one agent.
func (a *agents) Run(ctx context.Context, jobID string, payload json.RawMessage, emit func(json.RawMessage) error, mcp MCP) error {
	run, err := a.prepare(jobID, payload, mcp)
	if run != nil {
		defer run.clean()
	}
	if err == nil && ctx.Err() != nil {
		return context.Cause(ctx) // cancelled before anything was started
	}
	if err == nil {
		err = run.start()
	}
	if f, ok := errors.AsType[*agent.Failure](err); ok {
		return emit(f.Event())
	}
	if err != nil {
		return err
	}
	return run.drive(ctx, emit)
}

// run is one run of one agent.
type run struct {
	a       *agents
	prefix  string
	codec   agent.Codec
	launch  agent.Launch
	private string
	dir     *os.File
	where   string
	cfg     osproc.Config
	proc    *osproc.Process
	log     *slog.Logger
}

func newCodec(payload json.RawMessage) (agent.Codec, string, error) {
	kind, err := agent.KindOf(payload)
	if err != nil {
		return nil, "agent_runtime", err
	}
	var c agent.Codec
	var prefix string
	switch kind {
	case agent.ACP:
		prefix = "acp"
		c, err = acp.New(payload)
	case agent.Claude:
		prefix = "claude_code"
		c, err = claude.New(payload)
	default:
		prefix = "codex"
		c, err = codex.New(payload)
	}
	return c, prefix, err
}

// prepare checks everything and starts nothing. A *agent.Failure is for the hub.
func (a *agents) prepare(jobID string, payload json.RawMessage, mcp MCP) (r *run, err error) {
	r = &run{a: a, log: a.log.With("job", jobID)}
	if r.codec, r.prefix, err = newCodec(payload); err != nil {
		return r, err
	}
	if r.private, err = os.MkdirTemp(a.private.path, "run-"); err != nil { // mode 0700
		return r, err
	}
	if r.launch, err = r.codec.Launch(agent.Host{Private: r.private, MCP: mcp.MCP}); err != nil {
		return r, err
	}
	mcp.SetCallTimeout(r.launch.CallTimeout)
	if r.dir, r.where, err = osproc.OpenWorkspace(a.cfg.AllowWorkspace, r.launch.Workspace); err != nil {
		return r, r.invalid(err)
	}
	program, err := a.program(r.prefix, r.launch)
	if err != nil {
		return r, err
	}
	rules := osproc.Rules{Allow: slices.Concat(usualEnv, r.launch.Inherit, a.cfg.AllowEnv), Reserved: reservedEnv}
	if !slices.Contains(a.cfg.AllowCommand, "*") {
		// Only for the payload's: our own PATH stays.
		for name := range r.launch.Env {
			if slices.Contains(searchEnv, name) {
				return r, r.invalid(errdefs.New(errdefs.Invalid, "the environment variable %s is reserved", name).WithNext("leave it out"))
			}
		}
	}
	set := map[string]string{"PWD": r.where}
	for name, value := range r.launch.Set {
		set[name] = value
	}
	env, err := osproc.Environment(os.Environ(), rules, r.launch.Env, set)
	if err != nil {
		return r, r.invalid(err)
	}
	secrets := []string{mcp.Token}
	env = slices.DeleteFunc(env, func(kv string) bool {
		name, value, _ := strings.Cut(kv, "=")
		if secretName().MatchString(name) {
			secrets = append(secrets, value)
		}
		return slices.Contains(r.launch.Unset, name)
	})
	for _, f := range r.launch.Files {
		if err := os.WriteFile(filepath.Join(r.private, f.Name), f.Data, 0o600); err != nil {
			return r, err
		}
	}
	r.cfg = osproc.Config{
		Argv: slices.Concat([]string{program}, r.launch.Command[1:], r.launch.Args), Env: env, Dir: r.dir, Secrets: secrets,
		Keeper: a.cfg.Keeper, CgroupParent: a.cgroup, MaxLine: int(a.limits.MessageBytes), Logger: r.log,
	}
	return r, nil
}

func (r *run) invalid(err error) error {
	return &agent.Failure{Code: r.prefix + ".config_invalid", Message: err.Error()}
}

// program finds what the payload names, if the owner allows it.
func (a *agents) program(prefix string, l agent.Launch) (string, error) {
	name := l.Command[0]
	allowed := slices.Contains(a.cfg.AllowCommand, name) || slices.Contains(a.cfg.AllowCommand, "*")
	if len(a.cfg.AllowCommand) == 0 {
		allowed = l.Preset || slices.Contains(usualCommands, name)
	}
	if !allowed {
		return "", &agent.Failure{Code: prefix + ".permission_denied",
			Message: fmt.Sprintf("the command %q is not allowed on this machine; start the client with --allow-command for it", name)}
	}
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			return "", agent.Invalid(prefix, "the command %q is neither a name nor an absolute path", name)
		}
		return name, nil
	}
	found, err := exec.LookPath(name) // never one of the working directory
	if errors.Is(err, fs.ErrPermission) {
		return "", &agent.Failure{Code: prefix + ".permission_denied", Message: fmt.Sprintf("the command %q may not be run on this machine", name)}
	}
	if err == nil {
		found, err = filepath.Abs(found)
	}
	if err != nil {
		return "", &agent.Failure{Code: prefix + ".command_not_found", Message: fmt.Sprintf("there is no command %q on this machine", name)}
	}
	return found, nil
}

func (r *run) start() (err error) {
	if r.proc, err = osproc.Start(r.cfg); err == nil {
		r.log.Info("an agent runs", "process", r.proc)
		return nil
	}
	code := ".start_failed"
	switch errdefs.CodeOf(err) {
	case errdefs.NotFound:
		code = ".command_not_found"
	case errdefs.Denied:
		code = ".permission_denied"
	}
	return &agent.Failure{Code: r.prefix + code, Message: err.Error()}
}

// clean frees what prepare took. The process has ended by then.
func (r *run) clean() {
	if r.dir != nil {
		_ = r.dir.Close()
	}
	if r.private != "" {
		if err := os.RemoveAll(r.private); err != nil {
			r.log.Warn("private files of a run stay behind", "error", err)
		}
	}
}
