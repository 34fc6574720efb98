package plugincontrol

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// fakeManager is a plugin host in memory: whatever is asked is allowed.
type fakeManager struct {
	mu       sync.Mutex
	cfg      pluginwire.RuntimeConfig
	set      bool
	plugins  []Plugin
	applied  []byte
	refuse   error // what Candidate and Authorise say
	legacy   bool
	noted    []string
	reconcil []pluginwire.DesiredState
}

func (m *fakeManager) Configure(_ context.Context, c pluginwire.RuntimeConfig) error {
	if m.set && !m.cfg.SameFixed(c) {
		return errdefs.New(errdefs.Conflict, "cannot be changed")
	}
	m.cfg, m.set = c, true
	return nil
}
func (m *fakeManager) Configured() (pluginwire.RuntimeConfig, bool) { return m.cfg, m.set }
func (m *fakeManager) Candidate(pluginwire.Context) error           { return m.refuse }
func (m *fakeManager) Authorise(pluginwire.Context) error           { return m.refuse }
func (m *fakeManager) LegacyBound(pluginwire.Context) bool          { return m.legacy }
func (m *fakeManager) Apply(_ context.Context, b pluginwire.Context, archive []byte, _ pluginwire.ApplyRequest) (pluginwire.StateResult, error) {
	m.applied = archive
	return pluginwire.StateResult{InstallationUUID: b.InstallationUUID, State: pluginwire.StateStarting}, nil
}
func (m *fakeManager) Reconcile(_ context.Context, s []pluginwire.DesiredState) (pluginwire.ReconcileResult, error) {
	m.reconcil = s
	return pluginwire.ReconcileResult{}, nil
}
func (m *fakeManager) Remove(_ context.Context, b pluginwire.Context) (pluginwire.StateResult, error) {
	return pluginwire.StateResult{InstallationUUID: b.InstallationUUID, State: pluginwire.StateRemoved}, nil
}
func (m *fakeManager) Plugins(pluginwire.Context) []Plugin { return m.plugins }
func (m *fakeManager) Logs(pluginwire.Context, string, string, int, string) []pluginlog.Line {
	return nil
}
func (m *fakeManager) Note(_ pluginwire.Context, author, name string, _ time.Time, level, line string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.noted = append(m.noted, author+"/"+name+" "+level+" "+line)
	return true
}
func (m *fakeManager) IssueDebugToken(pluginwire.Context, time.Time) (string, time.Time, error) {
	return "token", time.Unix(0, 0), nil
}
func (m *fakeManager) Health() map[string]any { return map[string]any{} }

// fakePlugin answers every action with a function.
type fakePlugin struct {
	author, name string
	c            pluginhost.Container
	answer       func(ctx context.Context, action string, data json.RawMessage) (string, error)
	frames       []string
	files        map[string][]byte
	mu           sync.Mutex
	asked        []string // "action data"
}

// plugin makes a ready plugin with components, given as kind/name.
func plugin(name string, priority int, kinds ...string) *fakePlugin {
	p := &fakePlugin{author: "a", name: name, files: map[string][]byte{}}
	p.c = pluginhost.Container{Author: "a", Name: name, Enabled: true, Priority: priority, Status: pluginhost.StatusInitialized,
		JSON: json.RawMessage(`{"name":"` + name + `"}`)}
	for _, kind := range kinds {
		p.c.Components = append(p.c.Components, pluginhost.Component{Kind: kind, Name: name + "-" + kind,
			Manifest: json.RawMessage(`{"owner":"a/` + name + `","kind":"` + kind + `"}`), Metadata: json.RawMessage(`{"name":"x"}`), Spec: json.RawMessage(`{}`)})
	}
	return p
}

func (p *fakePlugin) Author() string                  { return p.author }
func (p *fakePlugin) Name() string                    { return p.name }
func (p *fakePlugin) Container() pluginhost.Container { return p.c }
func (p *fakePlugin) Ready() bool                     { return p.c.Enabled && p.c.Status == pluginhost.StatusInitialized }
func (p *fakePlugin) Binding() pluginwire.Context     { return pluginwire.Context{} }
func (p *fakePlugin) Debug() bool                     { return false }
func (p *fakePlugin) Call(ctx context.Context, action string, data any, _ time.Duration) (json.RawMessage, error) {
	raw := data.(json.RawMessage)
	p.mu.Lock()
	p.asked = append(p.asked, action+" "+string(raw))
	p.mu.Unlock()
	if p.answer == nil {
		return json.RawMessage(`{}`), nil
	}
	s, err := p.answer(ctx, action, raw)
	return json.RawMessage(s), err
}
func (p *fakePlugin) Stream(_ context.Context, action string, data any, _ time.Duration) (Stream, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, action+" "+string(data.(json.RawMessage)))
	return &fakeStream{frames: p.frames}, nil
}
func (p *fakePlugin) SendFile(_ context.Context, data []byte, ext string) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := "worker-key." + ext
	p.files[key] = data
	return key, nil
}
func (p *fakePlugin) ReadFile(key string) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, ok := p.files[key]
	if !ok {
		return nil, errdefs.New(errdefs.NotFound, "Invalid file transfer key")
	}
	return b, nil
}
func (p *fakePlugin) DeleteFile(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.files, key)
	return nil
}

// fakeStream gives frames; one that begins with ! is an error.
type fakeStream struct{ frames []string }

func (s *fakeStream) Next(context.Context) (json.RawMessage, error) {
	if len(s.frames) == 0 {
		return nil, io.EOF
	}
	f := s.frames[0]
	s.frames = s.frames[1:]
	if f[0] == '!' {
		return nil, &rpc.PeerError{Message: f[1:]}
	}
	return json.RawMessage(f), nil
}
func (s *fakeStream) Close() {}

// binding is what every request of these tests carries.
var binding = pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1, InstallationUUID: "u", RuntimeRevision: 1,
	ArtifactDigest: "0000000000000000000000000000000000000000000000000000000000000000"}

// langbot is LangBot's end of a control connection in memory, handshake done.
type langbot struct {
	*rpc.Conn
	files *transfer.Store
}

type setup struct {
	m       *fakeManager
	link    *Link
	control *Control
}

func open(t testing.TB, profile pluginwire.Profile, plugins ...Plugin) *setup {
	t.Helper()
	store, err := transfer.Open(transfer.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := &setup{m: &fakeManager{plugins: plugins}, link: NewLink()}
	s.m.cfg = pluginwire.RuntimeConfig{Identity: pluginwire.RuntimeIdentity{InstanceUUID: "i", RuntimeID: "r"}, Profile: profile}
	s.control = New(Config{Manager: s.m, Link: s.link, Transfers: store, DataDir: t.TempDir(), DebugPort: func() int { return 5401 },
		Logger: slog.New(slog.NewTextHandler(t.Output(), nil))})
	t.Cleanup(func() {
		s.control.Close(io.EOF)
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// connect makes a connection whose handshake is not done yet.
func (s *setup) connect(t testing.TB) *langbot {
	t.Helper()
	here, there := net.Pipe()
	files, err := transfer.Open(transfer.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	held := files.Holder(nil)
	l := &langbot{files: files}
	l.Conn = rpc.New(rpc.Stdio(here, here, here.Close), rpc.Config{Handle: func(_ context.Context, in *rpc.Inbound) (any, error) {
		if in.Action == pluginwire.ActionFileChunk {
			return nil, held.Chunk(in.Data, in.Context)
		}
		return nil, pluginwire.UnknownAction(in.Action)
	}})
	var ran sync.WaitGroup
	ran.Go(func() { _ = s.control.Serve(context.Background(), rpc.Stdio(there, there, there.Close)) })
	ran.Go(func() { _ = l.Run(context.Background()) })
	t.Cleanup(func() {
		l.Close(nil)
		ran.Wait()
		held.Close()
		if err := files.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

const config = `{"runtime_identity":{"instance_uuid":"i","runtime_id":"r"},"worker_policy":{"max_cpus":1,"max_memory_mb":512,"max_pids":64,"max_open_files":64,"max_file_size_mb":8},"runtime_profile":"`

func (s *setup) ready(t testing.TB) *langbot {
	t.Helper()
	l := s.connect(t)
	if _, err := l.Call(t.Context(), pluginwire.ActionSetRuntimeConfig, json.RawMessage(config+string(s.m.cfg.Profile)+`"}`), rpc.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	return l
}

// ask asks under the binding.
func (l *langbot) ask(t testing.TB, action, data string) (string, error) {
	t.Helper()
	out, err := l.Call(t.Context(), action, json.RawMessage(data), rpc.CallOptions{Context: binding})
	return string(out), err
}

// frames asks for a stream.
func (l *langbot) frames(t testing.TB, action, data string) (out []string, err error) {
	t.Helper()
	s, err := l.Stream(t.Context(), action, json.RawMessage(data), rpc.CallOptions{Context: binding})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	for {
		f, err := s.Next(t.Context())
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		out = append(out, string(f))
	}
}
