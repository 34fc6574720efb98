package server_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/serverproc"
)

// TestNemesis is the promises over the whole core, with real boxes: clients of two
// tenants open, repeat, write, read, signal, close and lose processes, while the
// server, the host program, keepers and what is in the containers are killed and
// stopped, and the disk gets full. What is told must be true at every moment, and in
// the end nothing is left.
//
// STOCKADE_NEMESIS_OPS is the number of operations and starts it; 120 take some ten
// seconds. STOCKADE_NEMESIS_SEED repeats a run as far as the machine repeats itself.
// It runs on request and not in CI: on a busy machine one run in twelve ends with a
// host program that a killed server had just started, and that outlives the stop of
// the next server, or with a keeper that nobody is known to have killed.
func TestNemesis(t *testing.T) {
	ops, err := strconv.ParseInt(os.Getenv("STOCKADE_NEMESIS_OPS"), 10, 64)
	if err != nil {
		t.Skip("a soak: set STOCKADE_NEMESIS_OPS to the number of operations")
	}
	runtime := cmp.Or(os.Getenv("STOCKADE_NEMESIS_RUNTIME"), need.Runc(t))
	seed := uint64(time.Now().UnixNano())
	if n, err := strconv.ParseUint(os.Getenv("STOCKADE_NEMESIS_SEED"), 10, 64); err == nil {
		seed = n
	}
	t.Logf("seed %d", seed)
	bin, starts, state := t.TempDir(), t.TempDir(), t.TempDir()
	need.Programs(t, bin)
	if err := os.Chmod(starts, 0o777); err != nil {
		t.Fatal(err)
	}
	need.Disk(t, state, fmt.Sprintf("size=%dm,mode=700", 160+ops/10))
	s, err := serverproc.New(serverproc.Config{Exe: filepath.Join(bin, "stockade"), StateDir: state,
		Args: []string{"--host-allow-mounts", starts, "--host-runtime", runtime}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute+time.Duration(ops)*time.Second)
	defer cancel()
	if err := s.Start(ctx); err != nil {
		t.Fatal(err)
	}
	n := &nemesis{t: t, s: s, bin: bin, state: state, rng: rand.New(rand.NewPCG(seed, 0)), shims: map[string]bool{}, insides: map[string]bool{}}
	t.Cleanup(func() {
		end, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = s.Stop(end) // done already, unless the test was given up
		for _, kind := range []string{"host", "shim", "runtime", "inside"} {
			for _, p := range n.find(kind) {
				p.signal(unix.SIGKILL)
			}
		}
	})
	k := &soak{t: t, n: n, starts: starts, left: &atomic.Int64{}}
	k.left.Store(ops)
	admin, err := s.Client("admin")
	if err != nil {
		t.Fatal(err)
	}
	defer admin.CloseIdle()
	var workers sync.WaitGroup
	for i := range 6 {
		name := fmt.Sprint("tenant-", i/3)
		if i%3 == 0 {
			if _, err := admin.CreateWorkspace(ctx, api.WorkspaceRequest{Name: name}); err != nil {
				t.Fatal(err)
			}
			key, err := admin.CreateKey(ctx, name, api.KeyRequest{})
			if err != nil {
				t.Fatal(err)
			}
			k.tenants = append(k.tenants, admin.WithKey(key.Secret))
		}
		w := &worker{soak: k, name: fmt.Sprint("w", i), tenant: k.tenants[i/3], foreign: i / 3, rng: rand.New(rand.NewPCG(seed, uint64(i)+1))}
		workers.Go(func() { w.work(ctx) })
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(n.rng.IntN(400)) * time.Millisecond):
				n.act(ctx)
			}
		}
	}()
	workers.Wait()
	close(stop)
	<-stopped
	t.Logf("%d processes, acts: %v", len(k.procs), n.acts)
	k.end(ctx)
	stopCtx, cancelStop := context.WithTimeout(ctx, time.Minute)
	defer cancelStop()
	if err := s.Stop(stopCtx); err != nil {
		t.Error(err)
	}
	for _, left := range n.leftovers(k.boxes) {
		t.Errorf("left behind: %s", left)
	}
	if t.Failed() {
		for _, f := range []string{"server.log", "host/host.log"} {
			b, _ := os.ReadFile(filepath.Join(state, f))
			for line := range strings.Lines(string(b)) {
				if !strings.Contains(line, "level=INFO") {
					t.Logf("%s: %s", f, strings.TrimSpace(line))
				}
			}
		}
	}
}

// soak is what all clients share.
type soak struct {
	t       *testing.T
	n       *nemesis
	starts  string // mounted in every box: each command leaves a line for each start
	left    *atomic.Int64
	tenants []*client.Client

	mu    sync.Mutex
	procs []*proc
	boxes []string // every one that there was
}

// proc is what is known of one process.
type proc struct {
	word    string // in its environment, and the name of its starts
	kind    string
	req     api.OpenRequest
	tenant  int
	runner  *client.Client
	outN    int // seq 1 outN is its output
	errN    int
	code    int
	at      time.Time
	started bool // its open was answered
	short   bool // its run may end by itself

	mu      sync.Mutex
	handle  string
	touched bool // signalled or closed: it may end as that does
	quiet   bool
	cursor  string           // where the last reader was cut off,
	got     map[string]int64 // and how much of each stream it had
	input   int64            // accepted
	eof     int64            // -1 until written
	exit    *api.Exit
}

func (k *soak) bad(p *proc, format string, args ...any) {
	k.t.Helper()
	shim, inside := k.n.killed(p.handle)
	k.t.Errorf("%s %s %s (shim killed %v, inside killed %v, starved %v): %s", p.word, p.kind, p.handle, shim, inside, k.n.starved(p.at), fmt.Sprintf(format, args...))
}

// trouble reports an error that no fault explains.
func (k *soak) trouble(p *proc, doing string, err error, more ...client.Code) {
	k.t.Helper()
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return
	}
	code := client.CodeOf(err)
	if p.short && (code == client.Unauthenticated || code == client.Conflict) {
		return
	}
	if slices.Contains(append(more, client.Unavailable, client.Indeterminate), code) {
		return
	}
	if code == client.Exhausted && k.n.starved(p.at) {
		return
	}
	k.bad(p, "%s: %s: %v", doing, code, err)
}

func seq(n int) []byte {
	var b []byte
	for i := 1; i <= n; i++ {
		b = append(strconv.AppendInt(b, int64(i), 10), '\n')
	}
	return b
}

// worker is one client: it has one box and one run at a time.
type worker struct {
	*soak
	name    string
	tenant  *client.Client
	foreign int // index of its own tenant
	rng     *rand.Rand
	box     api.Box
	run     api.RunCreated
	runner  *client.Client
	mine    []*proc
	serial  int
	short   bool // the run may end by itself
}

func (w *worker) work(ctx context.Context) {
	for ctx.Err() == nil && w.soak.left.Load() > 0 {
		if !w.begin(ctx) {
			continue
		}
		for i := 10 + w.rng.IntN(30); i > 0 && ctx.Err() == nil && w.soak.left.Add(-1) >= 0; i-- {
			w.op(ctx)
		}
		w.finish(ctx)
	}
}

// begin takes the box and makes a run in it.
func (w *worker) begin(ctx context.Context) bool {
	about := &proc{word: w.name, kind: "begin", at: time.Now().Add(-5 * time.Second)}
	req := api.BoxRequest{Key: w.name, Mounts: []api.Mount{{Source: w.starts, Dest: "/starts", Writable: true}}}
	box, err := w.tenant.AcquireBox(ctx, req)
	if err != nil {
		w.trouble(about, "acquire box", err, client.Fenced, client.Conflict)
		idle(ctx, 200*time.Millisecond)
		return false
	}
	w.box = box
	w.mu.Lock()
	w.boxes = append(w.boxes, box.ID)
	w.mu.Unlock()
	if again, err := w.tenant.AcquireBox(ctx, req); err != nil {
		w.trouble(about, "acquire box again", err)
	} else if again.ID != box.ID {
		w.bad(about, "box %s, then %s", box.ID, again.ID)
	}
	if w.run, err = w.tenant.CreateRun(ctx, api.RunRequest{Box: box.ID, TTLMillis: w.ttl()}); err != nil {
		w.trouble(about, "create run", err, client.Fenced, client.Cancelling)
		return false
	}
	w.runner, w.mine = w.tenant.WithKey(w.run.Token), nil
	return true
}

// ttl is now and then so short that the run ends by itself.
func (w *worker) ttl() int64 {
	w.short = w.rng.IntN(6) == 0
	if w.short {
		return 1000 + w.rng.Int64N(5000)
	}
	return 0
}

func (w *worker) op(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	if len(w.mine) == 0 || w.rng.IntN(3) == 0 {
		w.open(ctx)
		return
	}
	p := w.mine[w.rng.IntN(len(w.mine))]
	switch w.rng.IntN(11) {
	case 0:
		w.reopen(ctx, p)
	case 1, 2:
		w.write(ctx, p)
	case 3, 4:
		w.read(ctx, p, false)
	case 5:
		w.get(ctx, p)
	case 6:
		w.close(ctx, p, w.runner)
	case 7:
		w.poke(ctx, p)
	case 8:
		w.files(ctx)
	case 9:
		if !w.short {
			w.strange(ctx)
		}
	case 10:
		w.attach(ctx, p)
	}
}

func (w *worker) open(ctx context.Context) {
	w.serial++
	p := &proc{short: w.short, touched: w.short, word: fmt.Sprintf("nem%d%s-%d-", os.Getpid(), w.name, w.serial), tenant: w.foreign, runner: w.runner, at: time.Now(), eof: -1}
	p.kind = []string{"seq", "big", "cat", "stay", "stay", "pty", "tree", "deep", "deep"}[w.rng.IntN(9)]
	script := ""
	switch p.kind {
	case "seq", "pty":
		p.outN, p.errN, p.code = w.rng.IntN(2000), w.rng.IntN(50), 1+w.rng.IntN(90)
		script = fmt.Sprintf("seq 1 %d; seq 1 %d >&2; exit %d", p.outN, p.errN, p.code)
		if p.kind == "pty" {
			p.errN = 0
			script = fmt.Sprintf("seq 1 %d; exit %d", p.outN, p.code)
		}
	case "big":
		p.outN, p.code = 600_000, 1+w.rng.IntN(90) // 4 MB
		script = fmt.Sprintf("seq 1 %d; exit %d", p.outN, p.code)
	case "cat":
		p.outN, p.code = 600_000, 1+w.rng.IntN(90)
		script = fmt.Sprintf("cat; exit %d", p.code)
	case "stay":
		script = "while :; do sleep 5; done"
	case "deep": // it is not ended by a dead pipe, nor politely
		script = "trap '' TERM HUP INT USR1; setsid sleep 1000 & (sleep 1000 & sleep 1000) & while :; do sleep 5; done"
	case "tree":
		p.outN, p.code = 3, 1+w.rng.IntN(90)
		script = fmt.Sprintf("trap '' TERM HUP INT; setsid sleep 1000 & (sleep 1000 & sleep 1000) & seq 1 3; exit %d", p.code)
	}
	p.req = api.OpenRequest{RequestID: p.word, Argv: []string{"sh", "-c", "echo x >> /starts/" + p.word + "; " + script},
		Env: map[string]string{"NEMESIS": p.word}, Stdin: p.kind == "cat"}
	if p.kind == "pty" {
		p.req.PTY = &api.Winsize{Rows: 24, Cols: 80}
	}
	if w.rng.IntN(6) == 0 {
		p.req.Limits.DeadlineMillis = 1 + w.rng.Int64N(2000)
		p.touched = true // it may end as one that is closed
	}
	if p.kind == "big" {
		p.req.Limits.SpoolBytes = 1 << 20
		if w.rng.IntN(2) == 0 {
			p.req.Limits.Overflow = api.OverflowDropOldest
		}
	}
	w.mu.Lock()
	w.procs = append(w.procs, p)
	w.mu.Unlock()
	w.mine = append(w.mine, p)
	if w.rng.IntN(10) == 0 { // closed before it is opened
		w.closeByRequest(ctx, p)
	}
	// The same from many at once, some of which go away.
	var all sync.WaitGroup
	for range w.rng.IntN(3) {
		d := time.Duration(w.rng.IntN(100)) * time.Millisecond
		all.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, d)
			defer cancel()
			w.reopen(ctx, p)
		})
	}
	if w.rng.IntN(8) == 0 { // closed while it starts
		d := time.Duration(w.rng.IntN(150)) * time.Millisecond
		all.Go(func() {
			idle(ctx, d)
			w.closeByRequest(ctx, p)
		})
	}
	w.reopen(ctx, p)
	all.Wait()
}

// finish ends the run and now and then removes the box.
func (w *worker) finish(ctx context.Context) {
	about := &proc{word: w.name, kind: "finish", at: time.Now().Add(-5 * time.Second)}
	if w.rng.IntN(3) == 0 && !w.short {
		if err := w.tenant.RemoveBox(ctx, w.box.ID); err == nil {
			w.bad(about, "a box with a run was removed")
		} else {
			w.trouble(about, "remove box in use", err, client.Conflict, client.Fenced)
		}
	}
	for _, p := range w.mine {
		p.mu.Lock()
		p.touched = true
		p.mu.Unlock()
	}
	for ctx.Err() == nil {
		about.at = time.Now().Add(-5 * time.Second)
		r, err := w.tenant.FinishRun(ctx, w.run.Run.ID, api.FinishRequest{GraceMillis: w.grace()})
		if err != nil {
			w.trouble(about, "finish", err, client.Cancelling)
			idle(ctx, 100*time.Millisecond)
			continue
		}
		for _, c := range r.Processes {
			i := slices.IndexFunc(w.mine, func(p *proc) bool { return p.word == c.Process.RequestID })
			if i < 0 {
				w.bad(about, "finished a process of another: %s", c.Process.RequestID)
				continue
			}
			w.closed(w.mine[i], c, nil)
			if r.Quiescent && !c.Quiescent {
				w.bad(w.mine[i], "the run is quiescent, it is not")
			}
		}
		if r.Quiescent {
			for _, p := range w.mine {
				if left := alive(p.word); len(left) > 0 {
					w.bad(p, "its run is quiescent, and on the machine: %v", left)
				}
			}
		}
		break
	}
	if _, err := w.runner.ProcessByRequest(ctx, "none"); err == nil || client.IsCode(err, client.NotFound) {
		w.bad(about, "the token works after the end of its run: %v", err)
	}
	for _, p := range w.mine {
		p.runner = w.tenant // the token is no more
	}
	if w.rng.IntN(2) == 0 {
		w.trouble(about, "remove box", w.tenant.RemoveBox(ctx, w.box.ID), client.Conflict, client.Fenced, client.Cancelling)
	}
}

// end closes everything, on a machine that is left alone, and checks it all again.
func (k *soak) end(ctx context.Context) {
	about := &proc{word: "end", at: time.Now()}
	for i, c := range k.tenants {
		runs, err := c.Runs(ctx, client.Page{Limit: 1000})
		if err != nil {
			k.t.Fatal(err)
		}
		for _, r := range runs.Items {
			for end := time.Now().Add(2 * time.Minute); ; {
				f, err := c.FinishRun(ctx, r.ID, api.FinishRequest{GraceMillis: new(int64)})
				if err == nil && f.Quiescent {
					break
				}
				if time.Now().After(end) {
					k.bad(about, "run %s of tenant %d is never quiescent: %v %+v", r.ID, i, err, f)
					break
				}
				idle(ctx, 200*time.Millisecond)
			}
		}
		fences, err := c.Fences(ctx, client.FenceFilter{})
		if err != nil || len(fences.Items) > 0 {
			k.bad(about, "fences: %+v, %v", fences.Items, err)
		}
		live, err := c.Processes(ctx, client.ProcessFilter{Live: true})
		if err != nil || len(live.Items) > 0 {
			k.bad(about, "live: %+v, %v", live.Items, err)
		}
	}
	known := map[string]bool{}
	for _, c := range k.tenants {
		for f := (client.ProcessFilter{Page: client.Page{Limit: 1000}}); ; {
			l, err := c.Processes(ctx, f)
			if err != nil {
				k.t.Fatal(err)
			}
			for _, p := range l.Items {
				known[p.Handle] = true
			}
			if f.Page.After = l.Next; l.Next == "" {
				break
			}
		}
	}
	dirs, _ := os.ReadDir(filepath.Join(k.n.state, "host", "procs"))
	for _, d := range dirs {
		if !known[d.Name()] {
			k.bad(about, "nobody knows the host's %s", d.Name())
		}
	}
	kinds := map[string]int{}
	for _, p := range k.procs {
		p.runner = k.tenants[p.tenant]
		if p.handle == "" {
			if n := k.count(p); n > 0 {
				k.t.Logf("%s was never answered, and started %d times", p.word, n)
			}
			continue
		}
		info, err := p.runner.Process(p.handle).Get(ctx)
		if err != nil {
			k.bad(p, "get at the end: %v", err)
			continue
		}
		if info.State != api.StateClosed && info.State != api.StateNeverStarted || info.Cleanup != api.CleanupQuiescent {
			k.bad(p, "at the end it is %s %s", info.State, info.Cleanup)
		}
		k.look(p, info)
		k.read(ctx, p, true)
		kind := string(info.State)
		if info.Exit != nil {
			kind = string(info.Exit.Kind)
		}
		kinds[kind]++
	}
	k.t.Logf("ends: %v", kinds)
	for _, c := range k.tenants {
		boxes, err := c.Boxes(ctx, client.Page{})
		if err != nil {
			k.t.Fatal(err)
		}
		for _, b := range boxes.Items {
			if err := c.RemoveBox(ctx, b.ID); err != nil {
				k.bad(about, "remove box %+v: %v", b, err)
			}
		}
	}
}
