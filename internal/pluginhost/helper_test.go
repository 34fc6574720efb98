package pluginhost

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/worker"
)

func TestMain(m *testing.M) { need.Main(m) }

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
	if n := r.m.keys.Len(); n != 0 {
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
	absent  string // artifact whose tree is not there
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

func (f *fakeTrees) Ready(digest, _ string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return digest != f.absent
}

func (f *fakeTrees) set(hook func(ctx context.Context, digest string) error) {
	f.mu.Lock()
	f.hook = hook
	f.mu.Unlock()
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
