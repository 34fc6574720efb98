package pluginlegacy

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

var scope = pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1}

// pack makes a package; more is pairs of a file's name and content.
func pack(name, version string, more ...string) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	files := append([]string{"manifest.yaml", "kind: Plugin\nmetadata:\n  author: a\n  name: " + name + "\n  version: " + version + "\n",
		"main.py", "VERSION = '" + version + "'\n"}, more...)
	for i := 0; i+1 < len(files); i += 2 {
		w, err := z.Create(files[i])
		if err == nil {
			_, err = w.Write([]byte(files[i+1]))
		}
		if err != nil {
			panic(err)
		}
	}
	if err := z.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// runner is a Runner whose plugins are ready unless their version is in broken.
type runner struct {
	mu       sync.Mutex
	running  map[string]string // version, by identity
	started  []Plugin
	debug    map[string]bool
	ended    int
	broken   map[string]bool
	settings []string
	source   string
	refuse   error         // of InitialiseSettings
	pin      chan struct{} // nil: pinned
}

func newRunner() *runner {
	return &runner{running: map[string]string{}, debug: map[string]bool{}, broken: map[string]bool{}, source: "marketplace"}
}

func (r *runner) Start(p Plugin) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	id := p.Author + "/" + p.Name
	if _, ok := r.running[id]; ok {
		return errdefs.New(errdefs.Conflict, "%s runs", id)
	}
	_, version, err := read(p.Dir)
	if err != nil {
		return err
	}
	r.running[id] = version
	r.started = append(r.started, p)
	return nil
}

func (r *runner) Stop(author, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, author+"/"+name)
}

func (r *runner) Ready(author, name string) (bool, string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.running[author+"/"+name]
	if r.broken[v] {
		return false, "exited with code 1"
	}
	return ok, ""
}

func (r *runner) Debug(_ pluginwire.Context, author, name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.debug[author+"/"+name]
}

func (r *runner) EndDebug(context.Context, pluginwire.Context, string, string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended++
	return nil
}

func (r *runner) Pinned(ctx context.Context) error {
	if r.pin == nil {
		return nil
	}
	select {
	case <-r.pin:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *runner) InitialiseSettings(_ context.Context, s pluginwire.Context, author, name, source string, info json.RawMessage) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settings = append(r.settings, fmt.Sprint(author, "/", name, " ", source, " ", string(info), " ", s.WorkspaceUUID))
	return r.refuse
}

func (r *runner) Source(context.Context, pluginwire.Context, string, string) (string, error) {
	return r.source, nil
}

func (r *runner) version(id string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.running[id]
}

func (r *runner) starts() []Plugin {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.started)
}

// noInstaller is asked for nothing.
type noInstaller struct{}

func (noInstaller) Install(context.Context, deptree.InstallSpec) error {
	return errors.New("no installer here")
}

func config(dir string, r *runner) Config {
	return Config{DataDir: dir, Interp: deptree.Interpreter{Path: "/nonexistent/python", Version: "3.11", SDK: "0.7.18"}, Runner: r,
		Installer: func() deptree.Installer { return noInstaller{} }, ReadyWithin: 250 * time.Millisecond, Between: time.Millisecond}
}

func runtimeConfig(capacity int) pluginwire.RuntimeConfig {
	return pluginwire.RuntimeConfig{Profile: pluginwire.ProfileOSS, Policy: pluginwire.WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 1, MaxPids: 1, MaxOpenFiles: 1, MaxFileSizeMB: 1,
		MaxWorkers: capacity, MaxTotalCPUs: float64(capacity), MaxTotalMemoryMB: capacity, MaxInstallations: 100, MaxConcurrentRestarts: 1}}
}

// begin makes an owner that has begun, until the test ends.
func begin(t *testing.T, c Config, rc pluginwire.RuntimeConfig) *Owner {
	t.Helper()
	c.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	o, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	o.Configured(rc)
	t.Cleanup(o.Close)
	return o
}

// progress collects what was told.
type progress struct {
	mu   sync.Mutex
	all  []string
	meta []map[string]any
}

func (p *progress) tell(action string, m map[string]any) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all, p.meta = append(p.all, action), append(p.meta, m)
	return nil
}

func local(pack []byte) Install {
	return Install{Scope: scope, Source: "local", Info: json.RawMessage(`{}`), Package: pack}
}

func mustInstall(t *testing.T, o *Owner, in Install) {
	t.Helper()
	if err := o.Install(t.Context(), in, new(progress).tell); err != nil {
		t.Fatal(err)
	}
}

func isCode(t *testing.T, err error, code errdefs.Code, words ...string) {
	t.Helper()
	if errdefs.CodeOf(err) != code || err == nil {
		t.Errorf("%v, want code %s", err, code)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q lacks %q", err, w)
		}
	}
}

// onDisk is what lies below DATA, but for the content of plugins: their versions.
func onDisk(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	for _, d := range []string{pluginsDir, stagingDir, backupsDir} {
		ents, err := os.ReadDir(filepath.Join(dir, d))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for _, e := range ents {
			_, version, err := read(filepath.Join(dir, d, e.Name()))
			if err != nil {
				version = err.Error()
			}
			if _, err := os.Stat(filepath.Join(dir, d, e.Name(), "main.py")); err != nil {
				version += " a part"
			}
			name := e.Name()
			if d != pluginsDir {
				name, _, _ = strings.Cut(name, "-")
			}
			out = append(out, d+"/"+name+" "+version)
		}
	}
	return strings.Join(out, ", ")
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s did not happen", what)
		}
	}
}

// packRaw makes a package of a manifest alone.
func packRaw(manifest string) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	w, err := z.Create("manifest.yaml")
	if err == nil {
		_, err = w.Write([]byte(manifest))
	}
	if err = errors.Join(err, z.Close()); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
