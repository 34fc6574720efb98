package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/spool"
	"github.com/stockade-run/stockade/internal/wire"
)

// TestMain lets the test binary be the host program: the shim that Start spawns,
// PID 1 of the containers, and a starter that dies.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "shim":
			os.Exit(Main(os.Args[3]))
		case oci.JoinCommand:
			os.Exit(oci.JoinMain(os.Args[2:]))
		case "init":
			os.Exit(InitMain(os.Args[2:]))
		case "start-and-die":
			if err := Start(context.Background(), os.Args[2], os.Args[3]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	}
	need.Main(m)
}

// patience bounds every wait of these tests.
const patience = time.Minute

var serial atomic.Int64

// proc is one process directory with a bundle in it.
type proc struct {
	t      testing.TB
	dir    string
	exe    string
	cfg    Config
	parent cgroup.Group
	client *Client
	last   func() // at the end of the clean-up
}

// over is a test over one runtime. What newProc makes for it uses that.
type over struct {
	*testing.T
	runtime string
}

// Run runs a subtest over the same runtime.
func (o *over) Run(name string, f func(t *over)) bool {
	return o.T.Run(name, func(t *testing.T) { f(&over{t, o.runtime}) })
}

// each runs a test over every runtime there is.
func each(t *testing.T, test func(t *over)) {
	need.EachRuntime(t, func(t *testing.T, path string) { test(&over{t, path}) })
}

var manners sync.Map // of oci.Manner, by path: a runtime takes a moment to say what it is

func manner(path string) oci.Manner {
	if m, ok := manners.Load(path); ok {
		return m.(oci.Manner)
	}
	rt, _ := oci.FindRuntime(path) // one that is no runtime has none
	manners.Store(path, rt.Manner)
	return rt.Manner
}

type option func(*Config, *specs.Spec)

func sh(script string) []string { return []string{"/bin/sh", "-c", script} }

// newProc makes a process directory for a command; nothing is started.
func newProc(t testing.TB, argv []string, opts ...option) *proc {
	t.Helper()
	exe, err := os.Executable()
	check(t, err)
	return newProcExe(t, exe, argv, opts...)
}

// newProcExe is newProc with another host program than the test binary.
func newProcExe(t testing.TB, exe string, argv []string, opts ...option) *proc {
	t.Helper()
	runtime := ""
	if o, ok := t.(*over); ok {
		runtime = o.runtime
	} else {
		runtime = need.Runc(t)
	}
	// Below a directory that a user of the container may pass through.
	base, err := os.MkdirTemp("", "shim")
	check(t, err)
	check(t, os.Chmod(base, 0o711))
	p := &proc{t: t, dir: filepath.Join(base, "p"), exe: exe}
	root := filepath.Join(base, "root")
	for _, d := range []string{p.dir, filepath.Join(p.dir, "bundle"), root, filepath.Join(base, "rt")} {
		check(t, os.Mkdir(d, 0o755))
	}
	n := serial.Add(1)
	id := fmt.Sprintf("shimtest-%d-%d", os.Getpid(), n)
	p.parent = cgroup.New("", "/"+id)
	p.cfg = Config{
		Spec:    wire.ProcSpec{ID: id, Box: "box", Argv: argv, Env: []string{"PATH=/usr/bin:/bin", "HOME=/tmp"}, SpoolBytes: 128 << 20},
		Runtime: runtime, RuntimeRoot: filepath.Join(base, "rt"), Container: id,
		Bundle: filepath.Join(p.dir, "bundle"), Cgroup: "/" + id + "/p",
	}
	con := oci.Container{
		Cwd: "/", Root: root, Init: exe, UIDBase: 0x10000000, Cgroup: p.cfg.Cgroup, TmpBytes: 64 << 20,
	}
	con.Seccomp, err = oci.Seccomp()
	check(t, err)
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() {
			con.Binds = append(con.Binds, oci.Bind{Source: dir, Dest: dir})
			check(t, os.MkdirAll(root+dir, 0o755))
		}
	}
	for _, dir := range []string{"proc", "dev", "tmp", ".stockade"} {
		check(t, os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	check(t, os.Chmod(filepath.Join(root, "tmp"), 0o1777)) // runc gives the tmpfs over it the same mode
	check(t, os.WriteFile(filepath.Join(root, oci.InitPath), nil, 0o755))
	con.Proc = p.cfg.Spec
	for _, o := range opts {
		o(&p.cfg, nil)
	}
	con.Proc = p.cfg.Spec
	if c := p.cfg.Spec.Cwd; c != "" {
		con.Cwd = c
	}
	p.cfg.Manner = manner(p.cfg.Runtime)
	con.OwnKernel = p.cfg.Manner.OwnKernel
	spec := oci.Spec(con)
	for i := range spec.Linux.Namespaces {
		if spec.Linux.Namespaces[i].Type == specs.NetworkNamespace {
			spec.Linux.Namespaces[i].Path = "" // a new one
		}
	}
	// Without CAP_SYS_RESOURCE nobody may raise a hard limit.
	spec.Process.Rlimits = nil
	for _, o := range opts {
		o(&p.cfg, spec)
	}
	b, err := json.Marshal(spec)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(p.cfg.Bundle, "config.json"), b, 0o600))
	check(t, WriteConfig(p.dir, p.cfg))
	p.client = NewClient(p.dir)
	t.Cleanup(func() { p.cleanup(base) })
	return p
}

// with changes the configuration before the bundle is made.
func with(f func(*Config)) option {
	return func(c *Config, s *specs.Spec) {
		if s == nil {
			f(c)
		}
	}
}

// bundle changes the bundle.
func bundle(f func(*specs.Spec)) option {
	return func(_ *Config, s *specs.Spec) {
		if s != nil {
			f(s)
		}
	}
}

// plain runs the command itself as PID 1, for a comparison.
func plain(c *Config, s *specs.Spec) {
	if s != nil {
		s.Process.Args = c.Spec.Argv
	}
}

func stdin(c *Config)          { c.Spec.Stdin = true }
func terminal(c *Config)       { c.Spec.PTY = &api.Winsize{Rows: 24, Cols: 80} }
func deadline(ms int64) option { return with(func(c *Config) { c.Spec.DeadlineMillis = ms }) }
func overflow(o api.Overflow, n int64) option {
	return with(func(c *Config) { c.Spec.Overflow, c.Spec.SpoolBytes = o, n })
}

// cleanup proves that nothing is left: no shim, no container, no cgroup.
func (p *proc) cleanup(base string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if alive, _ := Find(p.dir); alive {
		if st, err := p.client.Close(ctx, wire.Close{Reason: "clean-up"}); err != nil || st.Phase != wire.PhaseEnded {
			p.t.Errorf("clean-up: close: %+v %v", st, err)
			if id, ok := readIdentity(p.dir); ok {
				_ = unix.Kill(id.PID, unix.SIGKILL)
			}
		} else if err := p.client.Forget(ctx); err != nil {
			p.t.Errorf("clean-up: forget: %v", err)
		}
	}
	p.client.CloseIdle()
	said, _ := os.ReadFile(filepath.Join(p.dir, logFile))
	if bytes.Contains(said, []byte("DATA RACE")) || bytes.Contains(said, []byte("panic")) {
		p.t.Error("the shim had a race or panicked")
	}
	if p.t.Failed() {
		p.t.Logf("shim.log: %s", said)
	}
	left, _ := os.ReadDir(p.cfg.RuntimeRoot)
	// Newer crun keeps compiled system call filters there, for all containers.
	if left = slices.DeleteFunc(left, func(e os.DirEntry) bool { return e.Name() == ".cache" }); len(left) > 0 {
		p.t.Errorf("the runtime still knows %v", left)
	}
	if populated, err := p.parent.Populated(); err != nil || populated {
		p.t.Errorf("cgroup left populated: %v %v", populated, err)
		_ = p.parent.Kill(ctx)
	}
	if procs, _ := cgroup.New("", p.cfg.Cgroup).Procs(); len(procs) > 0 {
		p.t.Errorf("processes left: %v", procs)
	}
	check(p.t, p.parent.Remove(ctx))
	if p.last != nil {
		p.last()
	}
	check(p.t, os.RemoveAll(base))
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t testing.TB, err error, code errdefs.Code) {
	t.Helper()
	if errdefs.CodeOf(err) != code {
		t.Fatalf("got %q (%v), want %q", errdefs.CodeOf(err), err, code)
	}
}

func (p *proc) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	p.t.Cleanup(cancel)
	return ctx
}

func (p *proc) start() *proc {
	p.t.Helper()
	check(p.t, Start(p.ctx(), p.exe, p.dir))
	return p
}

// until waits for a state.
func (p *proc) until(log int64, what string, ok func(wire.ProcState) bool) wire.ProcState {
	p.t.Helper()
	ctx := p.ctx()
	var st wire.ProcState
	for {
		last := st
		var err error
		st, err = p.client.Wait(ctx, st.Rev, log)
		if err != nil {
			out, errs := p.output()
			p.t.Fatalf("waiting for %s: %v (last %+v; output %.200q %.200q)", what, err, last, out, errs)
		}
		if ok(st) {
			return st
		}
		if log >= 0 {
			log = st.Log.Next
		}
	}
}

// ended waits for the end and compares what the shim says with the record.
func (p *proc) ended() wire.ProcState {
	p.t.Helper()
	st := p.until(-1, "the end", func(st wire.ProcState) bool { return st.Phase == wire.PhaseEnded })
	rec, err := ReadExit(p.dir)
	check(p.t, err)
	a, _ := json.Marshal(st)
	b, _ := json.Marshal(rec)
	if !bytes.Equal(a, b) {
		p.t.Errorf("state and record differ:\n%s\n%s", a, b)
	}
	if st.Exit == nil || st.Ended == nil || !st.Log.EOF {
		p.t.Errorf("ended without exit, time or end of the log: %s", a)
	}
	return st
}

// quiescent waits for the end and demands a proof of it.
func (p *proc) quiescent() wire.ProcState {
	p.t.Helper()
	st := p.ended()
	if st.Proof == nil || st.Unproven != "" || st.Proof.EmptyAt.IsZero() {
		p.t.Errorf("no proof: %+v %q", st.Proof, st.Unproven)
	}
	return st
}

func (p *proc) wantExit(st wire.ProcState, kind api.ExitKind, code int, signal string) {
	p.t.Helper()
	e := st.Exit
	got := -1
	if e.Code != nil {
		got = *e.Code
	}
	if kind != api.ExitExited {
		code = -1
	}
	if e.Kind != kind || got != code || e.Signal != signal {
		p.t.Fatalf("exit %+v (code %d), want %s %d %s", e, got, kind, code, signal)
	}
}

// output reads the whole log, both streams apart.
func (p *proc) output() (stdout, stderr []byte) {
	p.t.Helper()
	r, err := spool.Open(filepath.Join(p.dir, spoolDir))
	check(p.t, err)
	defer r.Close()
	st, err := p.client.State(p.ctx())
	check(p.t, err)
	cursor := st.Log.Oldest
	for cursor < st.Log.Next {
		frames, next, gap, err := r.Read(cursor, 1<<20, st.Log.Next, nil)
		check(p.t, err)
		if gap != nil {
			p.t.Fatalf("gap %+v", gap)
		}
		for len(frames) > 0 {
			h, err := wire.ParseHeader(frames)
			check(p.t, err)
			body := frames[wire.HeaderSize : wire.HeaderSize+h.Length]
			if h.Kind == wire.KindStdout {
				stdout = append(stdout, body...)
			} else {
				stderr = append(stderr, body...)
			}
			frames = frames[wire.HeaderSize+h.Length:]
		}
		cursor = next
	}
	return stdout, stderr
}

// says waits until the output holds a text.
func (p *proc) says(text string) {
	p.t.Helper()
	p.until(0, fmt.Sprintf("%q", text), func(wire.ProcState) bool {
		out, errs := p.output()
		return strings.Contains(string(out)+string(errs), text)
	})
}
