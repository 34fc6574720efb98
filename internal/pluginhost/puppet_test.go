package pluginhost

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

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
	w.conn = rpc.New(rpc.Stdio(inR, outW, func() error { inR.Close(); return outW.Close() }), rpc.Config{Handle: w.handle})
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
