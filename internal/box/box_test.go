package box

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/sqlite"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestMain(m *testing.M) { need.Main(m) }

// fakeHost holds boxes; what it answers can be spoiled.
type fakeHost struct {
	mu     sync.Mutex
	boxes  map[string]wire.BoxSpec
	files  map[string][]byte
	images []wire.ImageInfo
	puts   int
	fail   func(op string) error // before it is carried out
	after  func(op string) error // after it was carried out
}

func (h *fakeHost) do(op string, f func()) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fail != nil {
		if err := h.fail(op); err != nil {
			return err
		}
	}
	f()
	if h.after != nil {
		return h.after(op)
	}
	return nil
}

func (h *fakeHost) PutBox(_ context.Context, spec wire.BoxSpec) (wire.BoxInfo, error) {
	err := h.do("put", func() { h.boxes[spec.ID] = spec; h.puts++ })
	return wire.BoxInfo{Spec: spec}, err
}
func (h *fakeHost) RemoveBox(_ context.Context, id string) error {
	return h.do("remove", func() { delete(h.boxes, id) })
}
func (h *fakeHost) PutFiles(_ context.Context, id, path string, tar io.Reader) error {
	b, err := io.ReadAll(tar)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Indeterminate, "broken")
	}
	return h.do("files", func() { h.files[id+":"+path] = b })
}
func (h *fakeHost) GetFiles(_ context.Context, id, path string, w io.Writer) error {
	h.mu.Lock()
	b := h.files[id+":"+path]
	h.mu.Unlock()
	_, err := w.Write(b)
	return err
}
func (h *fakeHost) LoadImage(_ context.Context, name string, tar io.Reader) ([]wire.ImageInfo, error) {
	if _, err := io.Copy(io.Discard, tar); err != nil {
		return nil, err
	}
	i := wire.ImageInfo{Digest: "sha256:" + strings.Repeat("a", 64), Names: []string{name}}
	return []wire.ImageInfo{i}, h.do("image", func() { h.images = append(h.images, i) })
}
func (h *fakeHost) Images(context.Context) ([]wire.ImageInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.images, nil
}
func (h *fakeHost) RemoveImage(_ context.Context, digest string) error {
	return h.do("rmi", func() { h.images = nil })
}

func (h *fakeHost) has(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.boxes[id]
	return ok
}

func (h *fakeHost) set(fail, after func(string) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail, h.after = fail, after
}

// answered is an error as host.Client returns it for a definite answer.
func answered(code errdefs.Code) error {
	return errdefs.Wrap(fmt.Errorf("%w: no", host.ErrAnswered), code, "the host says no")
}

type rig struct {
	t     *testing.T
	ctx   context.Context
	path  string
	lim   Limits
	host  *fakeHost
	st    *sqlite.Store
	s     *Service
	admin authz.Principal
	key   authz.Principal
	other authz.Principal
}

func inBubble(t *testing.T, l Limits, f func(*rig)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		who := func(w string) authz.Principal {
			return authz.Principal{Kind: authz.Workspace, Workspace: w, Key: secret.ID(ident.Key)}
		}
		r := &rig{t: t, ctx: t.Context(), path: filepath.Join(dir, "ledger.db"), lim: l,
			host:  &fakeHost{boxes: map[string]wire.BoxSpec{}, files: map[string][]byte{}},
			admin: authz.Principal{Kind: authz.Admin, Key: secret.ID(ident.Key)}, key: who("w"), other: who("x")}
		r.boot()
		_, err := r.st.PutTarget(r.ctx, store.Target{Name: "local", Kind: "box", Generation: 1, Enabled: true})
		r.ok(err)
		for _, w := range []string{"w", "x"} {
			r.ok(r.st.CreateWorkspace(r.ctx, store.Workspace{Name: w, Created: now()}, store.AuditEvent{ID: secret.ID(ident.Audit), At: now(), Actor: "a", Action: "x"}))
		}
		f(r)
	})
}

func (r *rig) boot() {
	r.t.Helper()
	var err error
	r.st, err = sqlite.Open(r.ctx, sqlite.Config{Path: r.path})
	r.ok(err)
	r.s, err = New(Config{Store: r.st, Target: "local", Limits: r.lim, Hosts: func(target string) (Host, error) {
		if target != "local" {
			return nil, errdefs.New(errdefs.NotFound, "no such target")
		}
		return r.host, nil
	}})
	r.ok(err)
	r.ok(r.s.Start(r.ctx))
	s, st := r.s, r.st
	r.t.Cleanup(func() { _, _ = s.Stop(context.Background()), st.Close() }) // a failed test ends its bubble too
}

func (r *rig) stop() { r.t.Helper(); r.ok(r.s.Stop(context.Background())); r.ok(r.st.Close()) }

func (r *rig) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) code(err error, want errdefs.Code) {
	r.t.Helper()
	if errdefs.CodeOf(err) != want {
		r.t.Fatalf("got %q (%v), want %q", errdefs.CodeOf(err), err, want)
	}
}

func (r *rig) acquire(req api.BoxRequest) api.Box {
	r.t.Helper()
	b, err := r.s.Acquire(r.ctx, r.key, req)
	r.ok(err)
	return b
}

func (r *rig) run(b api.Box) store.Run {
	r.t.Helper()
	run := store.Run{ID: secret.ID(ident.Run), Workspace: b.Workspace, Box: b.ID, Target: b.Target, State: api.RunActive,
		TokenHash: [32]byte{1}, Created: now(), Expires: now().Add(time.Hour)}
	r.ok(r.st.CreateRun(r.ctx, run, store.Capacity{}))
	return run
}

func TestAcquireByKey(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		a := r.acquire(api.BoxRequest{Key: "k"})
		if a.State != api.BoxReady || a.Reused || a.Limits.CPUMillis != 2000 || a.IdleMillis != 1_800_000 || !r.host.has(a.ID) {
			r.t.Fatalf("got %+v", a)
		}
		b := r.acquire(api.BoxRequest{Key: "k"})
		if b.ID != a.ID || !b.Reused || r.host.puts != 1 {
			r.t.Fatalf("got %+v", b)
		}
		if c, d := r.acquire(api.BoxRequest{}), r.acquire(api.BoxRequest{}); c.ID == d.ID || c.ID == a.ID {
			r.t.Error("boxes without a key are the same")
		}
		for _, req := range []api.BoxRequest{
			{Key: "k", Limits: api.BoxLimits{Pids: 77}}, {Key: "k", Limits: api.BoxLimits{CPUMillis: 10}}, {Key: "k", Limits: api.BoxLimits{MemoryBytes: 16 << 20}},
			{Key: "k", Mounts: []api.Mount{{Source: "/a", Dest: "/b"}}}, {Key: "k", IdleMillis: 5000},
		} {
			_, err := r.s.Acquire(r.ctx, r.key, req)
			r.code(err, errdefs.Conflict)
		}
		o, err := r.s.Acquire(r.ctx, r.other, api.BoxRequest{Key: "k"})
		r.ok(err)
		if o.ID == a.ID {
			r.t.Fatal("another tenant got the box")
		}
		_, err = r.s.Acquire(r.ctx, r.admin, api.BoxRequest{})
		r.code(err, errdefs.Denied)
	})
}

func TestAcquireRefuses(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{Max: api.BoxLimits{MemoryBytes: 8 << 30}}, func(r *rig) {
		for name, req := range map[string]api.BoxRequest{
			"key": {Key: "a/b"}, "target": {Target: "a b"}, "cpu": {Limits: api.BoxLimits{CPUMillis: -1}}, "memory": {Limits: api.BoxLimits{MemoryBytes: 9 << 30}},
			"pids": {Limits: api.BoxLimits{Pids: 1}}, "idle": {IdleMillis: 1}, "relative mount": {Mounts: []api.Mount{{Source: "a", Dest: "/b"}}},
			"unclean mount": {Mounts: []api.Mount{{Source: "/a/../b", Dest: "/b"}}}, "root mount": {Mounts: []api.Mount{{Source: "/a", Dest: "/"}}},
			"same mount": {Mounts: []api.Mount{{Source: "/a", Dest: "/b"}, {Source: "/c", Dest: "/b"}}}, "mounts": {Mounts: make([]api.Mount, 65)},
		} {
			if _, err := r.s.Acquire(r.ctx, r.key, req); !errdefs.Is(err, errdefs.Invalid) {
				r.t.Errorf("%s: %v", name, err)
			}
		}
		_, err := r.s.Acquire(r.ctx, r.key, api.BoxRequest{Target: "nowhere"})
		r.code(err, errdefs.NotFound)
		_, err = r.s.Acquire(r.ctx, r.key, api.BoxRequest{Image: "nothing"})
		r.code(err, errdefs.NotFound)
		if len(r.host.boxes) != 0 {
			r.t.Error("the host has a box")
		}
		// A refusal of the host leaves nothing behind, and the key is free.
		r.host.set(func(string) error { return answered(errdefs.Denied) }, nil)
		_, err = r.s.Acquire(r.ctx, r.key, api.BoxRequest{Key: "k", Mounts: []api.Mount{{Source: "/secret", Dest: "/m"}}})
		r.code(err, errdefs.Denied)
		r.host.set(nil, nil)
		time.Sleep(2 * time.Minute)
		if b := r.acquire(api.BoxRequest{Key: "k"}); b.Reused {
			r.t.Error("the refused box was kept")
		}
	})
}

// The answer of the host is lost, or the server dies in between: the box is
// finished, and there is one.
func TestCreatingIsFinished(t *testing.T) {
	t.Parallel()
	for _, before := range []bool{true, false} {
		inBubble(t, Limits{}, func(r *rig) {
			lost := func(string) error { return errdefs.New(errdefs.Indeterminate, "the connection broke") }
			if before {
				r.host.set(lost, nil)
			} else {
				r.host.set(nil, lost)
			}
			_, err := r.s.Acquire(r.ctx, r.key, api.BoxRequest{Key: "k"})
			r.code(err, errdefs.Unavailable)
			r.stop()
			r.host.set(nil, nil)
			r.boot()
			time.Sleep(2 * time.Minute) // the sweep
			list, err := r.s.List(r.ctx, r.key, store.Page{})
			r.ok(err)
			if len(list.Items) != 1 || list.Items[0].State != api.BoxReady || !r.host.has(list.Items[0].ID) {
				r.t.Fatalf("got %+v", list)
			}
			if b := r.acquire(api.BoxRequest{Key: "k"}); b.ID != list.Items[0].ID {
				r.t.Error("another box")
			}
		})
	}
}

func TestConcurrentAcquiresShareABox(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		var wg sync.WaitGroup
		ids := make([]string, 12)
		for i := range ids {
			wg.Go(func() {
				if b, err := r.s.Acquire(r.ctx, r.key, api.BoxRequest{Key: "k"}); err == nil && b.State == api.BoxReady {
					ids[i] = b.ID
				}
			})
		}
		wg.Wait()
		for _, id := range ids {
			if id == "" || id != ids[0] {
				r.t.Fatalf("got %v", ids)
			}
		}
	})
}

func TestRemove(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		b := r.acquire(api.BoxRequest{Key: "k"})
		run := r.run(b)
		r.code(r.s.Remove(r.ctx, r.key, b.ID), errdefs.Conflict)
		if got, err := r.s.Get(r.ctx, r.key, b.ID); err != nil || got.Run != run.ID {
			r.t.Fatalf("got %+v, %v", got, err)
		}
		for _, s := range []api.RunState{api.RunFinishing, api.RunFinished} {
			_, err := r.st.SetRunState(r.ctx, run.ID, s, now())
			r.ok(err)
		}
		r.code(r.s.Remove(r.ctx, r.other, b.ID), errdefs.NotFound)
		r.code(r.s.Remove(r.ctx, r.key, "box_x"), errdefs.NotFound)
		// The host fails, and the server dies: the removal is finished all the same.
		r.host.set(func(string) error { return errors.New("boom") }, nil)
		if err := r.s.Remove(r.ctx, r.key, b.ID); err == nil {
			r.t.Fatal("removed although the host failed")
		}
		_, err := r.s.Acquire(r.ctx, r.key, api.BoxRequest{Key: "k"})
		r.code(err, errdefs.Conflict)
		r.code(r.s.PutFiles(r.ctx, r.key, b.ID, "", strings.NewReader("x")), errdefs.Conflict)
		r.stop()
		r.host.set(nil, nil)
		r.boot()
		time.Sleep(time.Minute)
		_, err = r.s.Get(r.ctx, r.key, b.ID)
		r.code(err, errdefs.NotFound)
		if r.host.has(b.ID) {
			r.t.Error("the host has it")
		}
		// One that the host does not know any more is removed.
		c := r.acquire(api.BoxRequest{})
		r.host.set(func(op string) error {
			if op == "remove" {
				return answered(errdefs.NotFound)
			}
			return nil
		}, nil)
		r.ok(r.s.Remove(r.ctx, r.admin, c.ID))
	})
}

func TestIdleBoxesAreReaped(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		idle := r.acquire(api.BoxRequest{IdleMillis: 60_000})
		busy := r.acquire(api.BoxRequest{IdleMillis: 60_000})
		r.run(busy)
		time.Sleep(50 * time.Second)
		if !r.host.has(idle.ID) {
			r.t.Fatal("reaped too early")
		}
		time.Sleep(time.Minute)
		if r.host.has(idle.ID) || !r.host.has(busy.ID) {
			r.t.Fatalf("idle %v, busy %v", r.host.has(idle.ID), r.host.has(busy.ID))
		}
		_, err := r.s.Get(r.ctx, r.key, idle.ID)
		r.code(err, errdefs.NotFound)
	})
}

// Files may take longer than a box may be idle, and are then still there.
func TestABoxIsNotIdleWhileFilesGoIn(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		box := r.acquire(api.BoxRequest{IdleMillis: 60_000})
		in, out := io.Pipe()
		done := make(chan error)
		go func() { done <- r.s.PutFiles(r.ctx, r.key, box.ID, "", in) }()
		time.Sleep(10 * time.Minute)
		r.ok(out.Close())
		r.ok(<-done)
		time.Sleep(50 * time.Second) // idle from the end on
		if !r.host.has(box.ID) {
			r.t.Fatal("reaped while it was used")
		}
		time.Sleep(time.Minute)
		if r.host.has(box.ID) {
			r.t.Fatal("never reaped")
		}
	})
}

// A clock that is set forward makes no box idle.
func TestAClockThatJumps(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		clock, truth time.Duration
		want         bool
	}{
		{30 * time.Second, 30 * time.Second, false}, {31 * time.Second, 30 * time.Second, false},
		{time.Hour, 30 * time.Second, true}, {-time.Hour, 30 * time.Second, false}, {8 * time.Hour, time.Millisecond, true},
	} {
		if jumped(c.clock, c.truth) != c.want {
			t.Errorf("%+v", c)
		}
	}
	inBubble(t, Limits{}, func(r *rig) {
		box := r.acquire(api.BoxRequest{IdleMillis: 60_000})
		time.Sleep(50 * time.Second)
		r.ok(r.s.startIdleAnew(r.ctx))
		time.Sleep(50 * time.Second)
		if !r.host.has(box.ID) {
			r.t.Error("reaped although its idle time began anew")
		}
	})
}

// What was used again, or is being removed, since it was found idle stays.
func TestReapLooksAgain(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		box := r.acquire(api.BoxRequest{Key: "k", IdleMillis: 60_000})
		found, err := r.st.Box(r.ctx, everything(), box.ID)
		r.ok(err)
		time.Sleep(time.Second)
		if again := r.acquire(api.BoxRequest{Key: "k"}); again.ID != box.ID {
			r.t.Fatal("another box")
		}
		if removed, err := r.s.reap(r.ctx, found); removed || err != nil || !r.host.has(box.ID) {
			r.t.Errorf("removed %v, %v", removed, err)
		}
	})
}

func TestCapacity(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{PerWorkspace: 2, PerTarget: 3}, func(r *rig) {
		r.acquire(api.BoxRequest{Key: "a"})
		b := r.acquire(api.BoxRequest{Key: "b"})
		_, err := r.s.Acquire(r.ctx, r.key, api.BoxRequest{Key: "c"})
		r.code(err, errdefs.Exhausted)
		r.acquire(api.BoxRequest{Key: "a"})
		_, err = r.s.Acquire(r.ctx, r.other, api.BoxRequest{})
		r.ok(err)
		_, err = r.s.Acquire(r.ctx, r.other, api.BoxRequest{})
		r.code(err, errdefs.Exhausted)
		r.ok(r.s.Remove(r.ctx, r.key, b.ID))
		r.acquire(api.BoxRequest{Key: "c"})
	})
}

func TestFilesAndImages(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{Files: 8, Image: 8}, func(r *rig) {
		b := r.acquire(api.BoxRequest{})
		r.ok(r.s.PutFiles(r.ctx, r.key, b.ID, "src", strings.NewReader("12345678")))
		r.code(r.s.PutFiles(r.ctx, r.key, b.ID, "src", strings.NewReader("123456789")), errdefs.Exhausted)
		var out bytes.Buffer
		r.ok(r.s.GetFiles(r.ctx, r.key, b.ID, "src", &out))
		if out.String() != "12345678" {
			r.t.Errorf("got %q", out.String())
		}
		r.host.files[b.ID+":/workspace/big"] = make([]byte, 9)
		r.code(r.s.GetFiles(r.ctx, r.key, b.ID, "big", &out), errdefs.Exhausted)
		for _, p := range []string{"../x", "/workspace/../etc", "a/../../x", "a\x00"} {
			r.code(r.s.PutFiles(r.ctx, r.key, b.ID, p, strings.NewReader("")), errdefs.Invalid)
			r.code(r.s.GetFiles(r.ctx, r.key, b.ID, p, io.Discard), errdefs.Invalid)
		}
		r.code(r.s.GetFiles(r.ctx, r.other, b.ID, "", io.Discard), errdefs.NotFound)
		r.code(r.s.GetFiles(r.ctx, r.admin, b.ID, "", io.Discard), errdefs.Denied)

		_, err := r.s.LoadImage(r.ctx, r.key, "", "go", strings.NewReader("x"))
		r.code(err, errdefs.Denied)
		_, err = r.s.LoadImage(r.ctx, r.admin, "", "go", strings.NewReader("123456789"))
		r.code(err, errdefs.Exhausted)
		images, err := r.s.LoadImage(r.ctx, r.admin, "", "go", strings.NewReader("x"))
		r.ok(err)
		boxed := r.acquire(api.BoxRequest{Key: "i", Image: "go"})
		if boxed.Image != images[0].Digest {
			r.t.Errorf("got %+v", boxed)
		}
		if again := r.acquire(api.BoxRequest{Key: "i", Image: images[0].Digest}); again.ID != boxed.ID {
			r.t.Error("name and digest are not the same image")
		}
		list, err := r.s.Images(r.ctx, r.key, "")
		r.ok(err)
		if len(list.Items) != 1 || list.Items[0].Boxes != 1 {
			r.t.Fatalf("got %+v", list)
		}
		r.code(r.s.RemoveImage(r.ctx, r.admin, "", "nothing"), errdefs.NotFound)
		r.ok(r.s.RemoveImage(r.ctx, r.admin, "", "go"))
		_, err = r.s.Images(r.ctx, r.key, "nowhere")
		r.code(err, errdefs.NotFound)
	})
}
