package pluginhost

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
	"github.com/stockade-run/stockade/internal/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const instance = "instance-1"

// pkg is a plugin package made for a test.
type pkg struct {
	author, name string
	archive      []byte
	digest       string
}

func pack(t testing.TB, name, version string) pkg {
	t.Helper()
	var b bytes.Buffer
	zw := zip.NewWriter(&b)
	w, err := zw.Create("manifest.yaml")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(w, "kind: Plugin\nmetadata: {author: tester, name: %s, version: %s}\n", name, version)
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b.Bytes())
	return pkg{"tester", name, b.Bytes(), hex.EncodeToString(sum[:])}
}

func (p pkg) bind(uuid string, generation, revision int64) pluginwire.Context {
	return pluginwire.Context{InstanceUUID: instance, WorkspaceUUID: "ws-1", PlacementGeneration: generation,
		InstallationUUID: uuid, RuntimeRevision: revision, ArtifactDigest: p.digest}
}

// rig is a manager whose workers, trees and LangBot are of the test.
type rig struct {
	t        *testing.T
	m        *Manager
	dir      string
	launcher *fakeLauncher
	trees    *fakeTrees
	host     *langbot
}

func policy() pluginwire.WorkerPolicy {
	return pluginwire.WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 128, MaxPids: 32, MaxOpenFiles: 64, MaxFileSizeMB: 8,
		MaxWorkers: 16, MaxTotalCPUs: 8, MaxTotalMemoryMB: 8192, MaxInstallations: 100, MaxPendingRegistrations: 64,
		MaxConcurrentRestarts: 4, RestartFailureThreshold: 8, RestartFailureWindow: 30, RestartCircuitOpen: 60}
}

func runtimeConfig(profile pluginwire.Profile, p pluginwire.WorkerPolicy) pluginwire.RuntimeConfig {
	return pluginwire.RuntimeConfig{Identity: pluginwire.RuntimeIdentity{InstanceUUID: instance, RuntimeID: "rt"}, Policy: p, Profile: profile}
}

// inBubble runs a test in virtual time with a manager that is configured.
func inBubble(t *testing.T, profile pluginwire.Profile, p pluginwire.WorkerPolicy, f func(r *rig)) {
	t.Helper()
	t.Parallel()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, dir)
		defer r.close()
		if err := r.m.Configure(t.Context(), runtimeConfig(profile, p)); err != nil {
			t.Fatal(err)
		}
		f(r)
	})
}

func newRig(t *testing.T, dir string) *rig {
	t.Helper()
	r := &rig{t: t, dir: dir, launcher: &fakeLauncher{t: t}, trees: &fakeTrees{}, host: newLangbot(t, filepath.Join(dir, "control"))}
	arts, err := artifact.Open(artifact.Config{Dir: filepath.Join(dir, "plugin-runtime", "artifacts")})
	if err != nil {
		t.Fatal(err)
	}
	r.m, err = New(Config{
		DataDir: dir, Artifacts: arts, Host: r.host,
		Launchers: func(pluginwire.RuntimeConfig) (worker.Launcher, error) { return r.launcher, nil },
		Trees:     func(pluginwire.RuntimeConfig, worker.Launcher) (Trees, error) { return r.trees, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := r.m.Shutdown(ctx); err != nil {
		r.t.Errorf("shutdown: %v", err)
	}
	r.host.close()
	if n := r.m.keys.len(); n != 0 {
		r.t.Errorf("%d installation locks are left", n)
	}
}

func (r *rig) apply(b pluginwire.Context, p pkg, enabled bool, mode pluginwire.Mode) pluginwire.StateResult {
	r.t.Helper()
	res, err := r.m.Apply(r.t.Context(), b, p.archive, pluginwire.ApplyRequest{Enabled: enabled, Mode: mode})
	if err != nil {
		r.t.Fatalf("apply %s: %v", b.InstallationUUID, err)
	}
	return res
}

// run applies and waits, in virtual time, until everything that can happen has.
func (r *rig) run(b pluginwire.Context, p pkg, mode pluginwire.Mode) {
	r.t.Helper()
	r.apply(b, p, true, mode)
	synctest.Wait()
	r.state(b, pluginwire.StateRunning)
}

func (r *rig) remove(b pluginwire.Context) {
	r.t.Helper()
	if res, err := r.m.Remove(r.t.Context(), b); err != nil || res.State != pluginwire.StateRemoved {
		r.t.Fatalf("remove: %+v, %v", res, err)
	}
}

func (r *rig) record(b pluginwire.Context) (st, code, message string) {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	i := r.m.installs[b]
	if i == nil {
		return "", "", ""
	}
	return i.state, i.code, i.message
}

func (r *rig) state(b pluginwire.Context, want string) {
	r.t.Helper()
	if st, code, msg := r.record(b); st != want {
		r.t.Fatalf("%s is %q (%s %s), want %q", b.InstallationUUID, st, code, msg, want)
	}
}

func (r *rig) plugin(b pluginwire.Context) *Plugin {
	r.t.Helper()
	ps := r.m.Plugins(b)
	if len(ps) != 1 {
		r.t.Fatalf("%s sees %d plugins, want 1", b.InstallationUUID, len(ps))
	}
	return ps[0]
}

// call calls the puppet's echo tool and returns which process answered.
func (r *rig) call(b pluginwire.Context) (launch int) {
	r.t.Helper()
	raw, err := r.plugin(b).Call(r.t.Context(), pluginwire.ActionCallTool, map[string]string{"tool_name": "echo"}, 0)
	if err != nil {
		r.t.Fatalf("call %s: %v", b.InstallationUUID, err)
	}
	var out struct{ Launch int }
	if err := json.Unmarshal(raw, &out); err != nil {
		r.t.Fatal(err)
	}
	return out.Launch
}

// fakeTrees prepares nothing, when and how the test says.
type fakeTrees struct {
	mu      sync.Mutex
	hook    func(ctx context.Context, digest string) error
	suffix  string // of the tree's digest
	now     int
	most    int
	started int
}

func (f *fakeTrees) Prepare(ctx context.Context, digest, code string) (deptree.Tree, error) {
	f.mu.Lock()
	f.started++
	f.now++
	f.most = max(f.most, f.now)
	hook, suffix := f.hook, f.suffix
	f.mu.Unlock()
	defer func() { f.mu.Lock(); f.now--; f.mu.Unlock() }()
	if hook != nil {
		if err := hook(ctx, digest); err != nil {
			return deptree.Tree{}, err
		}
	}
	return deptree.Tree{Digest: "tree-of-" + digest + suffix, SitePackages: "/site"}, nil
}

func (f *fakeTrees) set(hook func(ctx context.Context, digest string) error) {
	f.mu.Lock()
	f.hook = hook
	f.mu.Unlock()
}

// fakeLauncher starts puppets.
type fakeLauncher struct {
	t       *testing.T
	mu      sync.Mutex
	puppets []*puppet
	script  func(w *puppet) // how the next ones behave; nil is as the SDK does
	refuse  func(n int) error
	closed  bool
}

func (f *fakeLauncher) Install(context.Context, worker.InstallSpec) error {
	return errors.ErrUnsupported
}

func (f *fakeLauncher) Close() error {
	f.mu.Lock()
	f.closed = true
	all := slices.Clone(f.puppets)
	f.mu.Unlock()
	for _, w := range all {
		w.exit(worker.Exit{Text: "killed", Code: -1})
	}
	return nil
}

func (f *fakeLauncher) Start(ctx context.Context, spec worker.Spec) (*worker.Process, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		if err := f.refuse(len(f.puppets)); err != nil {
			return nil, err
		}
	}
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	errR, errW := io.Pipe()
	w := &puppet{t: f.t, n: len(f.puppets), spec: spec, in: inR, out: outW, stderr: errW, ended: make(chan struct{})}
	w.conn = rpc.New(rpc.Stdio(inR, outW, func() error { inR.Close(); return outW.Close() }), rpc.Config{Handle: w.handle, CancelOnClose: true})
	f.puppets = append(f.puppets, w)
	script := f.script
	if script == nil {
		script = (*puppet).behave
	}
	go script(w)
	return worker.NewProcess(w, inW, outR, errR, nil), nil
}

func (f *fakeLauncher) set(script func(w *puppet)) {
	f.mu.Lock()
	f.script = script
	f.mu.Unlock()
}

func (f *fakeLauncher) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.puppets)
}

func (f *fakeLauncher) nth(n int) *puppet {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if n >= len(f.puppets) {
		f.t.Fatalf("only %d workers were started", len(f.puppets))
	}
	return f.puppets[n]
}

// puppet is a worker in memory. It is also the tree of its process.
type puppet struct {
	t      *testing.T
	n      int
	spec   worker.Spec
	in     *io.PipeReader
	out    *io.PipeWriter
	stderr *io.PipeWriter
	conn   *rpc.Conn

	mu       sync.Mutex
	name     string // of the plugin it says it is; "" is the artifact's, "toy"
	settings map[pluginwire.Context]json.RawMessage
	seen     []string // actions, in order
	contexts []pluginwire.Context
	signals  []string
	last     worker.Exit
	ended    chan struct{}
	// on takes the place of an action's answer when it returns true.
	on func(w *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool)
	// wrapped answers get_plugin_slot_container as SDK 0.7 does.
	wrapped    bool
	ignoreTerm bool
	undead     bool   // nothing ends it but the launcher's Close
	status     string // of the container after initialising; "" is initialized
}

// behave is a worker as the SDK makes one: it registers, serves, and ends when
// its input does.
func (w *puppet) behave() {
	go func() {
		if _, err := w.register(w.spec.Capability); err != nil {
			w.exit(worker.Exit{Text: "exited with code 1", Code: 1})
		}
	}()
	_ = w.conn.Run(context.Background())
	w.exit(worker.Exit{Text: "exited with code 0"})
}

func (w *puppet) register(capability string) (json.RawMessage, error) {
	return w.conn.Call(context.Background(), pluginwire.ActionRegisterPlugin, map[string]any{
		"plugin_container": w.container(StatusMounted), "prod_mode": true, "plugin_debug_key": "", "registration_capability": capability,
	}, rpc.CallOptions{Timeout: -1})
}

func (w *puppet) container(status string) map[string]any {
	w.mu.Lock()
	defer w.mu.Unlock()
	name := w.name
	if name == "" {
		name = "toy"
	}
	component := func(kind, name string) map[string]any {
		return map[string]any{"owner": "builtin", "rel_path": "x.yaml", "manifest": map[string]any{"kind": kind,
			"metadata": map[string]any{"name": name, "label": map[string]string{"en_US": name}}, "spec": map[string]any{}}}
	}
	plugin := component("Plugin", name)
	plugin["manifest"].(map[string]any)["metadata"].(map[string]any)["author"] = "tester"
	return map[string]any{"debug": false, "manifest": plugin, "plugin_instance": nil, "enabled": true, "priority": 0, "plugin_config": map[string]any{},
		"status": status, "components": []any{map[string]any{"manifest": component("Tool", "echo"), "component_instance": nil, "component_config": map[string]any{}}}}
}

func (w *puppet) handle(ctx context.Context, in *rpc.Inbound) (any, error) {
	w.mu.Lock()
	w.seen = append(w.seen, in.Action)
	w.contexts = append(w.contexts, in.Context)
	on, wrapped, status := w.on, w.wrapped, w.status
	w.mu.Unlock()
	if status == "" {
		status = StatusInitialized
	}
	if on != nil {
		if out, err, done := on(w, ctx, in); done {
			return out, err
		}
	}
	switch in.Action {
	case pluginwire.ActionInitializePlugin, pluginwire.ActionAttachPluginSlot:
		w.mu.Lock()
		if w.settings == nil {
			w.settings = map[pluginwire.Context]json.RawMessage{}
		}
		w.settings[in.Context] = pluginwire.Field(in.Data, "plugin_settings")
		w.mu.Unlock()
		return nil, nil
	case pluginwire.ActionDetachPluginSlot:
		w.mu.Lock()
		delete(w.settings, in.Context)
		w.mu.Unlock()
		return nil, nil
	case pluginwire.ActionGetPluginContainer:
		return w.container(status), nil
	case pluginwire.ActionGetPluginSlotContainer:
		if wrapped {
			return map[string]any{"enabled": true, "priority": 3, "plugin_config": map[string]any{}, "plugin_container": w.container(status)}, nil
		}
		return w.container(status), nil
	case pluginwire.ActionShutdown:
		return nil, nil
	case pluginwire.ActionCallTool:
		return map[string]any{"launch": w.n}, nil
	}
	return nil, pluginwire.UnknownAction(in.Action)
}

func (w *puppet) setting(b pluginwire.Context) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.settings[b])
}

func (w *puppet) actions() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.seen)
}

func (w *puppet) signalled() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.signals)
}

// ask sends an action to the runtime.
func (w *puppet) ask(action string, data any, as pluginwire.Context) (json.RawMessage, error) {
	return w.conn.Call(context.Background(), action, data, rpc.CallOptions{Context: as})
}

// The puppet as a tree.

func (w *puppet) PID() int { return 1000 + w.n }

func (w *puppet) Wait() worker.Exit {
	<-w.ended
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last
}

func (w *puppet) exit(e worker.Exit) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.ended:
		return
	default:
	}
	w.last = e
	close(w.ended)
	w.in.Close()
	w.out.Close()
	w.stderr.Close()
}

func (w *puppet) signal(name string) (alive bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.ended:
		return false
	default:
		w.signals = append(w.signals, name)
		return true
	}
}

func (w *puppet) Terminate() {
	if w.signal("TERM") && !w.ignoreTerm {
		w.exit(worker.Exit{Text: "ended by SIGTERM", Code: -1})
	}
}

func (w *puppet) Kill(context.Context) error {
	if w.signal("KILL") && !w.undead {
		w.exit(worker.Exit{Text: "ended by SIGKILL", Code: -1})
	}
	return nil
}

// langbot is LangBot at the other end of a real connection; it is the Host.
type langbot struct {
	near, far *rpc.Conn
	files     *transfer.Store // what it pushed to the runtime
	holder    *transfer.Holder
	group     sync.WaitGroup

	mu    sync.Mutex
	calls []hostCall
	// on takes the place of an action's answer when it returns true.
	on func(ctx context.Context, in *rpc.Inbound) (any, error, bool)
	// config is the plugin_config of an installation.
	config map[string]string
}

type hostCall struct {
	action string
	data   string
	from   pluginwire.Context
}

func newLangbot(t *testing.T, dir string) *langbot {
	t.Helper()
	store, err := transfer.Open(transfer.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	h := &langbot{files: store, config: map[string]string{}}
	h.holder = store.Holder(nil)
	aR, aW := io.Pipe()
	bR, bW := io.Pipe()
	h.near = rpc.New(rpc.Stdio(aR, bW, func() error { aR.Close(); return bW.Close() }), rpc.Config{Handle: func(ctx context.Context, in *rpc.Inbound) (any, error) {
		return nil, h.holder.Chunk(in.Data, in.Context)
	}})
	h.far = rpc.New(rpc.Stdio(bR, aW, func() error { bR.Close(); return aW.Close() }), rpc.Config{Handle: h.handle, CancelOnClose: true})
	h.group.Go(func() { _ = h.near.Run(context.Background()) })
	h.group.Go(func() { _ = h.far.Run(context.Background()) })
	return h
}

func (h *langbot) close() {
	h.near.Close(nil)
	h.far.Close(nil)
	h.group.Wait()
	h.holder.Close()
	h.files.Close()
}

func (h *langbot) handle(ctx context.Context, in *rpc.Inbound) (any, error) {
	h.mu.Lock()
	h.calls = append(h.calls, hostCall{in.Action, string(in.Data), in.Context})
	on, config := h.on, h.config[in.Context.InstallationUUID]
	h.mu.Unlock()
	if on != nil {
		if out, err, done := on(ctx, in); done {
			return out, err
		}
	}
	if config == "" {
		config = "{}"
	}
	switch in.Action {
	case pluginwire.ActionGetPluginSettings:
		s := map[string]any{"enabled": true, "priority": 1, "plugin_config": json.RawMessage(config), "install_source": "local", "install_info": map[string]any{}}
		s["installation_uuid"] = in.Context.InstallationUUID
		if in.Context.InstallationUUID == "" {
			s["installation_uuid"] = "inst-from-host"
		}
		return s, nil
	case pluginwire.ActionInitializePluginSettings:
		return nil, nil
	case pluginwire.ActionGetBots:
		return map[string]any{"bots": []string{}}, nil
	}
	return nil, pluginwire.UnknownAction(in.Action)
}

func (h *langbot) set(config map[string]string) {
	h.mu.Lock()
	h.config = config
	h.mu.Unlock()
}

func (h *langbot) answer(on func(ctx context.Context, in *rpc.Inbound) (any, error, bool)) {
	h.mu.Lock()
	h.on = on
	h.mu.Unlock()
}

// made returns the calls of an action.
func (h *langbot) made(action string) []hostCall {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.calls), func(c hostCall) bool { return c.action != action })
}

func (h *langbot) Call(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (json.RawMessage, error) {
	return h.near.Call(ctx, action, data, rpc.CallOptions{Context: from, Timeout: timeout})
}

func (h *langbot) Stream(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (*rpc.Stream, error) {
	return h.near.Stream(ctx, action, data, rpc.CallOptions{Context: from, Timeout: timeout})
}

func (h *langbot) ReadFile(_ context.Context, key string, as pluginwire.Context) ([]byte, error) {
	return h.files.Read(key, as)
}
func (h *langbot) DeleteFile(key string, as pluginwire.Context) error { return h.files.Delete(key, as) }
func (h *langbot) SendFile(ctx context.Context, data []byte, ext string, from pluginwire.Context) (string, error) {
	return transfer.Send(ctx, h.near, data, ext, from)
}

// isCode fails the test unless err has the code and text in it.
func isCode(t *testing.T, err error, code errdefs.Code) {
	t.Helper()
	if !errdefs.Is(err, code) {
		t.Fatalf("got %v (%s), want a %s error", err, errdefs.CodeOf(err), code)
	}
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
