// Package demo is "stockade demo": one story that a newcomer can watch, told by
// what really happens. It starts a server of its own, lets a coding agent mend a
// small program in a box, kills the server half-way, goes on, compares what the
// agent wrote with what was read, ends a process that does not want to end, and
// leaves nothing behind. It uses the public client and the programs a user has,
// nothing else.
package demo

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/serverproc"
	"github.com/stockade-run/stockade/internal/testmodel"
)

// Agents are the agents the demo can run, the default first.
func Agents() []string { return []string{agentTest, agentCodex, agentClaude} }

const (
	agentTest   = "testagent"
	agentCodex  = "codex"
	agentClaude = "claude"
)

// Config is what a demo is made from.
type Config struct {
	// Agent is one of Agents; empty is the first.
	Agent string
	// Stockade is the path of the stockade program; empty is this one.
	Stockade string
	// HostBinary is the path of stockade-host; empty leaves it to the server.
	HostBinary string
	// TestAgent is the path of the testagent program; empty looks beside Stockade.
	TestAgent string
	// AgentsDir is the directory with the vendors' CLIs (node_modules/.bin);
	// empty finds or makes it below the checkout.
	AgentsDir string
	// Out gets the story.
	Out io.Writer
	// StateDir is the server's state directory, which must not exist yet or be
	// empty; empty makes a temporary one.
	StateDir string
	// Keep leaves the state directory, with the logs, where it is.
	Keep bool
	// Env is the environment to take a user's API keys from; nil is the process's.
	Env func(string) string
}

// The bounds of the story: nothing in it waits for ever.
const (
	startTime   = 60 * time.Second // for a server to answer; the first start makes the host program's directory
	taskTime    = 10 * time.Minute // for the agent; a real model may take its time
	cleanupTime = 90 * time.Second
	closeGrace  = 1500 * time.Millisecond
)

// story is the state of one demo.
type story struct {
	cfg     Config
	say     *teller
	dir     string // state directory
	toolArg string // the server's --host-tools
	model   *modelSource
	server  *serverproc.Server
	tenant  *client.Client // with the key of the workspace
	host    string         // id of the host program
	box     client.Box
	run     client.Run
	task    *client.Client // with the run's token
	started time.Time
}

// Run tells the story. It returns nil only if every claim in it was checked and
// held, and it cleans up in every case, also when ctx ends.
func Run(ctx context.Context, cfg Config) (err error) {
	s, err := prepare(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := s.cleanup(context.WithoutCancel(ctx)); err == nil {
			err = cerr
		}
		switch {
		case err == nil:
			s.summary()
		case ctx.Err() != nil: // whatever it was doing failed because of that
			err = errdefs.Wrap(err, errdefs.Unavailable, "the demo was interrupted before its end")
		}
	}()
	if err := s.open(ctx); err != nil {
		return err
	}
	if err := s.agent(ctx); err != nil {
		return err
	}
	return s.stubborn(ctx)
}

// prepare checks everything that can be missing before anything is started.
func prepare(ctx context.Context, cfg Config) (*story, error) {
	if cfg.Agent == "" {
		cfg.Agent = Agents()[0]
	}
	if !slices.Contains(Agents(), cfg.Agent) {
		return nil, errdefs.New(errdefs.Invalid, "there is no agent %q", cfg.Agent).WithNext("use one of %v", Agents())
	}
	if cfg.Out == nil {
		cfg.Out = io.Discard
	}
	if cfg.Env == nil {
		cfg.Env = os.Getenv
	}
	if cfg.Stockade == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "this program does not know its own path").WithNext("name it with --stockade")
		}
		cfg.Stockade = self
	}
	s := &story{cfg: cfg, say: newTeller(cfg.Out), started: time.Now()}
	if os.Geteuid() != 0 {
		return nil, errdefs.New(errdefs.Denied, "boxes need namespaces and cgroups, which this user may not make").WithNext("run the demo as root (sudo)")
	}
	if err := s.stateDir(); err != nil {
		return nil, err
	}
	err := s.tools(ctx)
	if err == nil {
		s.model, err = newModelSource(s.cfg, s.dir)
	}
	if err != nil {
		s.removeStateDir()
		return nil, err
	}
	return s, nil
}

func (s *story) stateDir() error {
	if s.cfg.StateDir == "" {
		dir, err := os.MkdirTemp("", "stockade-demo-")
		if err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "no temporary directory can be made")
		}
		s.dir = dir
		return nil
	}
	dir, err := filepath.Abs(s.cfg.StateDir)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the state directory cannot be used")
	}
	entries, err := os.ReadDir(dir)
	if err == nil && len(entries) > 0 {
		return errdefs.New(errdefs.Conflict, "the state directory %s is not empty", dir).WithNext("name one that does not exist")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the state directory %s cannot be made", dir)
	}
	s.dir = dir
	return nil
}

// removeStateDir removes what the demo made; a directory the user named stays,
// empty.
func (s *story) removeStateDir() {
	if s.cfg.Keep {
		return
	}
	entries, _ := os.ReadDir(s.dir)
	for _, e := range entries {
		_ = os.RemoveAll(filepath.Join(s.dir, e.Name()))
	}
	if s.cfg.StateDir == "" {
		_ = os.Remove(s.dir)
	}
}

// open starts the server, the box and the run.
func (s *story) open(ctx context.Context) error {
	s.say.chapter("A server, a box, a run")
	s.say.step("Starting a server on embedded defaults in %s", s.dir)
	if s.model != nil {
		s.say.note("%s", s.model.what)
	}
	var err error
	if s.server, err = newServer(s); err != nil {
		return err
	}
	if err := s.server.Start(ctx); err != nil {
		return err
	}
	s.say.note("it answers at %s (pid %d)", s.server.URL(), s.server.PID())
	if s.tenant, err = client.New(client.Config{URL: s.server.URL(), KeyFile: filepath.Join(s.dir, "default.key"), UserAgent: "stockade-demo"}); err != nil {
		return err
	}
	s.say.step("Acquiring a box: a sandbox without a network, with its own files and limits")
	if s.box, err = s.tenant.AcquireBox(ctx, client.BoxRequest{Key: "demo-" + rand.Text()[:8]}); err != nil {
		return err
	}
	s.say.note("%s", s.box.ID)
	if s.host, err = s.hostID(ctx); err != nil {
		return err
	}
	s.say.step("Uploading a small program whose test fails")
	tar, err := repositoryTar(s.cfg.Agent)
	if err != nil {
		return err
	}
	if err := s.tenant.PutFiles(ctx, s.box.ID, "", tar); err != nil {
		return err
	}
	s.say.step("Creating a run, the invocation that owns what the agent may do")
	req := client.RunRequest{Box: s.box.ID}
	if s.model != nil {
		req.Models = []string{s.model.provider}
	}
	created, err := s.tenant.CreateRun(ctx, req)
	if err != nil {
		return err
	}
	s.run, s.task = created.Run, s.tenant.WithKey(created.Token)
	s.say.note("%s", s.run.ID)
	for _, m := range s.run.Models {
		s.say.note("inside the box, and only there, %s leads to %s; the key stays outside", m.BaseURL, m.Provider)
	}
	return nil
}

// hostID asks, as the operator, which host program the box is on.
func (s *story) hostID(ctx context.Context) (string, error) {
	c, err := client.New(client.Config{URL: s.server.URL(), KeyFile: filepath.Join(s.dir, "admin.key"), UserAgent: "stockade-demo"})
	if err != nil {
		return "", err
	}
	defer c.CloseIdle()
	target, err := c.Target(ctx, s.box.Target)
	if err == nil && target.Host == "" {
		err = errdefs.New(errdefs.Internal, "the target %s does not say which host program it has", target.Name)
	}
	return target.Host, err
}

// modelSource is where the vendors' CLIs get their answers from.
type modelSource struct {
	provider string // and its style: openai or anthropic
	entry    string // the server's --models
	env      string // a variable the server needs for it
	what     string
	secret   string // the scripted server's key
	scripted *testmodel.Server
}

func newModelSource(cfg Config, dir string) (*modelSource, error) {
	m := &modelSource{}
	var realURL string
	switch cfg.Agent {
	case agentCodex:
		m.provider, m.env, realURL = "openai", "OPENAI_API_KEY", "https://api.openai.com/v1"
	case agentClaude:
		m.provider, m.env, realURL = "anthropic", "ANTHROPIC_API_KEY", "https://api.anthropic.com"
	default:
		return nil, nil
	}
	if cfg.Env(m.env) != "" {
		m.what = fmt.Sprintf("its model is %s, with the key in your %s", realURL, m.env)
		m.entry = fmt.Sprintf("%s=%s,style=%s,key-env=%s", m.provider, realURL, m.provider, m.env)
		return m, nil
	}
	// The scripted server wants a key as well, so that a key can be looked for
	// where none must be.
	key := "demo-key-" + rand.Text()
	file := filepath.Join(dir, "model.key")
	if err := os.WriteFile(file, []byte(key+"\n"), 0o600); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the key file of the scripted model cannot be written")
	}
	server, err := testmodel.Start(testmodel.Config{Script: modelScript(), Key: key, Pace: 30 * time.Millisecond})
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the scripted model server could not start")
	}
	m.scripted, m.secret, m.what = server, key, fmt.Sprintf("its model is a script (no %s in the environment)", m.env)
	m.env = ""
	base := server.URL()
	if m.provider == "openai" {
		base += "/v1"
	}
	m.entry = fmt.Sprintf("%s=%s,style=%s,key-file=%s", m.provider, base, m.provider, file)
	return m, nil
}
