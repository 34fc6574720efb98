package broker

import (
	"context"
	"crypto/sha256"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/sqlite"
	"github.com/stockade-run/stockade/internal/wire"
)

// realDriver reaches a real host program, which the test starts and kills.
type realDriver struct{ *hosttest.Host }

func (realDriver) Kind() string                 { return "box" }
func (realDriver) Ensure(context.Context) error { return nil }

// real is a broker over a real host program with real containers.
type real struct {
	t      *testing.T
	ctx    context.Context
	path   string
	host   *hosttest.Host
	boots  int64
	ledger *sqlite.Store
	signer *secret.Signer
	b      *Broker
	key    authz.Principal
	run    authz.Principal
}

func newReal(t *testing.T) *real {
	t.Helper()
	h := hosttest.New(t)
	t.Cleanup(func() { // what cleans up is a server above every one of the test
		h.Kill()
		h.Generation = 1 << 40
		h.Start()
	})
	r := &real{t: t, ctx: t.Context(), path: filepath.Join(t.TempDir(), "ledger.db"), host: h, signer: secret.NewSigner(),
		key: authz.Principal{Kind: authz.Workspace, Workspace: "w", Key: secret.ID(ident.Key)}}
	box := h.Box()
	r.boot()
	t.Cleanup(func() { r.stop() })
	r.ok(r.ledger.CreateWorkspace(r.ctx, store.Workspace{Name: "w", Created: now()}, r.b.audit(r.key, "", "workspace.create", "w", nil)))
	_, _, err := r.ledger.CreateBox(r.ctx, store.Box{ID: box, Workspace: "w", Target: "local", State: api.BoxCreating,
		Limits: api.BoxLimits{CPUMillis: 1000, MemoryBytes: 1 << 30, Pids: 100}, IdleMillis: 1000, Created: now(), Used: now()}, store.Capacity{})
	r.ok(err)
	r.ok(r.ledger.SetBoxState(r.ctx, box, api.BoxReady))
	created, err := r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: box})
	r.ok(err)
	r.run = authz.Principal{Kind: authz.Run, Workspace: "w", Run: created.Run.ID}
	return r
}

func (r *real) boot() {
	r.t.Helper()
	var err error
	r.ledger, err = sqlite.Open(context.Background(), sqlite.Config{Path: r.path})
	r.ok(err)
	r.b, err = New(Config{Store: r.ledger, Signer: r.signer, Targets: []TargetConfig{{Name: "local", Driver: realDriver{r.host}}}})
	r.ok(err)
	r.ok(r.b.Start(context.Background()))
	r.boots++
	r.host.Generation = r.boots // the ledger counts the same
	hosttest.Eventually(r.t, "the host is known", func() bool { return r.b.targets["local"].here() != nil })
}

func (r *real) stop() {
	r.t.Helper()
	r.ok(r.b.Stop(context.Background()))
	r.ok(r.ledger.Close())
}

func (r *real) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *real) sh(id, script string) api.Process {
	r.t.Helper()
	p, err := r.b.Open(r.ctx, r.run, api.OpenRequest{RequestID: id, Argv: []string{"/bin/sh", "-c", script}, Stdin: true})
	r.ok(err)
	return p
}

func (r *real) ends(handle string) api.Process {
	r.t.Helper()
	var p api.Process
	hosttest.Eventually(r.t, handle+" is closed", func() bool {
		var err error
		p, err = r.b.Get(r.ctx, r.key, handle)
		return err == nil && p.State == api.StateClosed
	})
	return p
}

// follow reads the whole log as a client does that reconnects.
func (r *real) follow(handle string) (stdout, stderr []byte, last api.ReadResponse) {
	r.t.Helper()
	for cursor := cursorAt(handle, 0); ; {
		got, err := r.b.Read(r.ctx, r.key, handle, ReadQuery{Cursor: cursor, Wait: 2 * time.Second})
		if errdefs.Is(err, errdefs.Unavailable) {
			time.Sleep(20 * time.Millisecond) // a client's own pause between tries
			continue
		}
		r.ok(err)
		if got.Gap != nil {
			r.t.Fatalf("a gap: %+v", got.Gap)
		}
		for _, rec := range got.Records {
			if rec.Stream == "stdout" {
				stdout = append(stdout, rec.Data...)
			} else {
				stderr = append(stderr, rec.Data...)
			}
		}
		if cursor = got.Next; got.EOF {
			return stdout, stderr, got
		}
	}
}

func TestRealProcess(t *testing.T) {
	r := newReal(t)
	p := r.sh("one", "echo out; echo err >&2; cat; pwd; exit 3")
	st, err := r.b.Write(r.ctx, r.run, p.Handle, 0, []byte("typed\n"), true)
	r.ok(err)
	if st.Accepted != 6 || !st.EOF {
		t.Fatalf("got %+v", st)
	}
	stdout, stderr, last := r.follow(p.Handle)
	if string(stdout) != "out\ntyped\n/workspace\n" || string(stderr) != "err\n" || last.Exit == nil || *last.Exit.Code != 3 {
		t.Fatalf("got %q, %q, %+v", stdout, stderr, last)
	}
	p = r.ends(p.Handle)
	checkReceipt(t, p)
	if p.Receipt.Method != "pid_namespace" || p.Log.Next != int64(len(stdout)+len(stderr)) || !p.Log.EOF {
		t.Fatalf("got %+v, log %+v", p.Receipt, p.Log)
	}
}

func TestRealCloseOfATreeThatIgnoresTERM(t *testing.T) {
	r := newReal(t)
	p := r.sh("one", `trap "" TERM; (trap "" TERM; setsid sleep 4711 & sleep 4712) & echo up; while :; do sleep 4713; done`)
	hosttest.Eventually(t, "it is up", func() bool {
		got, err := r.b.Read(r.ctx, r.key, p.Handle, ReadQuery{})
		return err == nil && len(got.Records) > 0
	})
	grace := int64(100)
	c, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{GraceMillis: &grace})
	r.ok(err)
	if !c.Quiescent || c.Process.Exit == nil || c.Process.Exit.Kind != api.ExitSignalled {
		t.Fatalf("got %+v, exit %+v", c, c.Process.Exit)
	}
	checkReceipt(t, c.Process)
	for _, s := range []string{"4711", "4712", "4713"} {
		if pids := r.host.Programs("sleep " + s); len(pids) != 0 {
			t.Errorf("sleep %s is alive after the receipt: %v", s, pids)
		}
	}
}

func TestRealRefusals(t *testing.T) {
	r := newReal(t)
	p, err := r.b.Open(r.ctx, r.run, api.OpenRequest{RequestID: "none", Argv: []string{"/no/such/program"}})
	r.ok(err)
	p = r.ends(p.Handle)
	if p.Exit == nil || p.Exit.Kind != api.ExitSpawnFailed {
		t.Fatalf("exit %+v", p.Exit)
	}
	checkReceipt(t, p)
	var texts []string
	for range 2 {
		_, err = r.b.Open(r.ctx, r.run, api.OpenRequest{RequestID: "cwd", Argv: []string{"/bin/true"}, Cwd: "no/such/dir"})
		if err == nil {
			t.Fatal("a missing working directory was accepted")
		}
		texts = append(texts, err.Error())
	}
	if texts[0] != texts[1] || !errdefs.Is(err, errdefs.Invalid) && !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("answers %q", texts)
	}
	p, err = r.b.GetByRequest(r.ctx, r.run, "cwd")
	r.ok(err)
	if p.State != api.StateNeverStarted {
		t.Errorf("state %s", p.State)
	}
}

// An id that was closed before its start arrived never starts on a real host.
func TestRealForbiddenStart(t *testing.T) {
	r := newReal(t)
	l, err := r.b.targets["local"].reach()
	r.ok(err)
	box, err := r.ledger.Run(r.ctx, everything(), r.run.Run)
	r.ok(err)
	spec := hosttest.Sh(box.Box, "sleep 4714")
	st, err := l.client.CloseProc(r.ctx, spec.ID, wire.Close{})
	r.ok(err)
	if st.Phase != wire.PhaseEnded || st.Proof == nil || st.Proof.Method != "never_started" || st.Box != "" {
		t.Fatalf("got %+v", st)
	}
	if st, err = l.client.Start(r.ctx, spec); err == nil && st.Phase != wire.PhaseEnded {
		t.Fatalf("it started: %+v", st)
	}
	if pids := r.host.Programs("sleep 4714"); len(pids) != 0 {
		t.Errorf("it runs: %v", pids)
	}
}

// The server and the host program die again and again while a process writes.
func TestRealRestarts(t *testing.T) {
	r := newReal(t)
	const lines = 200_000
	p := r.sh("one", `i=0; while [ $i -lt 200000 ]; do echo "line $i of the output that must not be lost"; i=$((i+1)); done; echo done >&2; exit 5`)
	sum := sha256.New()
	got, kills, cursor := 0, 0, cursorAt(p.Handle, 0)
	at := time.Now()
	for eof := false; !eof; {
		if kills < 6 && time.Since(at) > 100*time.Millisecond {
			if kills++; kills%2 == 0 {
				r.host.Kill()
				r.host.Start()
			} else {
				r.stop()
				r.boot()
			}
			at = time.Now()
		}
		resp, err := r.b.Read(r.ctx, r.key, p.Handle, ReadQuery{Cursor: cursor, Wait: 50 * time.Millisecond, MaxBytes: 64 << 10})
		if err != nil {
			if c := errdefs.CodeOf(err); c != errdefs.Unavailable {
				t.Fatalf("%s: %v", c, err)
			}
			time.Sleep(5 * time.Millisecond) // a client's own pause between tries
			continue
		}
		for _, rec := range resp.Records {
			if rec.Stream == "stdout" {
				sum.Write(rec.Data)
				got += len(rec.Data)
			}
		}
		if cursor = resp.Next; resp.Gap != nil {
			t.Fatalf("gap %+v", resp.Gap)
		}
		eof = resp.EOF
	}
	if kills < 2 {
		t.Errorf("only %d restarts happened", kills)
	}
	want := sha256.New()
	var all strings.Builder
	for i := range lines {
		all.WriteString("line " + decimal(int64(i)) + " of the output that must not be lost\n")
	}
	want.Write([]byte(all.String()))
	if got != all.Len() || string(sum.Sum(nil)) != string(want.Sum(nil)) {
		t.Fatalf("read %d bytes, want %d, or other ones", got, all.Len())
	}
	p = r.ends(p.Handle)
	if p.Exit == nil || p.Exit.Code == nil || *p.Exit.Code != 5 {
		t.Fatalf("exit %+v", p.Exit)
	}
	checkReceipt(t, p)
}
