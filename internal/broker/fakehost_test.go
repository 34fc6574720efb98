package broker

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/wire"
)

// fakeHost speaks the host API over in-memory connections. What it holds is its
// machine: it survives restarts of the "program", which only cut connections.
type fakeHost struct {
	t testing.TB

	mu      sync.Mutex
	hostID  string
	boot    string
	down    bool // the program does not run
	procs   map[string]*fakeProc
	execs   map[string]int // how often each id was really executed
	boxes   map[string]wire.BoxSpec
	changed chan struct{} // closed and replaced at every change
	conns   map[net.Conn]bool
	highest int64
	log     []string // what was asked, in order
	delays  int

	// fault is asked before every request: what goes wrong with it.
	fault func(op, id string) fault
	// unproven makes ends come without proof.
	unproven bool
	// lie may change every state told.
	lie func(*wire.ProcState)

	server *http.Server
	queue  chan net.Conn
	closed chan struct{}
	answer int64          // most output in one answer that is not followed; 0: as asked
	late   sync.WaitGroup // requests that are carried out after their connection broke
}

type fault int

const (
	none      fault = iota
	loseFirst       // the connection breaks before it is carried out
	loseAfter       // it is carried out and the answer is lost
	late            // the connection breaks, and it is carried out later
	refuse          // a definite refusal
	busy            // a refusal that may pass
)

type fakeProc struct {
	spec  wire.ProcSpec
	state wire.ProcState
	out   []outFrame
	lost  int64 // output before this cursor is not kept
	in    []byte
	sigs  []string
}

type outFrame struct {
	kind   wire.Kind
	cursor int64
	offset int64
	data   []byte
}

func newFakeHost(t testing.TB) *fakeHost {
	h := &fakeHost{t: t, hostID: secret.ID(ident.Host), boot: "boot-1", procs: map[string]*fakeProc{}, execs: map[string]int{},
		boxes: map[string]wire.BoxSpec{}, changed: make(chan struct{}), conns: map[net.Conn]bool{},
		queue: make(chan net.Conn), closed: make(chan struct{})}
	h.server = &http.Server{Handler: h.handler()}
	done := make(chan struct{})
	go func() { defer close(done); _ = h.server.Serve(h) }()
	t.Cleanup(func() {
		close(h.closed)
		_ = h.server.Close()
		<-done
		h.late.Wait()
	})
	return h
}

// Accept, Close and Addr make it a net.Listener.
func (h *fakeHost) Accept() (net.Conn, error) {
	select {
	case c := <-h.queue:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}
func (h *fakeHost) Close() error   { return nil }
func (h *fakeHost) Addr() net.Addr { return &net.UnixAddr{Name: "fake", Net: "unix"} }

// Kind, Ensure and Dial make it a driver.
func (h *fakeHost) Kind() string { return "box" }

func (h *fakeHost) Ensure(context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.down {
		return errdefs.New(errdefs.Unavailable, "the fake host is down")
	}
	return nil
}

func (h *fakeHost) Dial(ctx context.Context) (net.Conn, error) {
	h.mu.Lock()
	down := h.down
	h.mu.Unlock()
	if down {
		return nil, errdefs.New(errdefs.Unavailable, "the fake host is down")
	}
	here, there := net.Pipe()
	h.mu.Lock()
	h.conns[there] = true
	h.mu.Unlock()
	select {
	case h.queue <- there:
		return here, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// set changes something under the lock and wakes who waits.
func (h *fakeHost) set(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	close(h.changed)
	h.changed = make(chan struct{})
}

// stop kills the host program; processes live on.
func (h *fakeHost) stop() {
	h.set(func() {
		h.down = true
		for c := range h.conns {
			_ = c.Close()
			delete(h.conns, c)
		}
	})
}

func (h *fakeHost) start() { h.set(func() { h.down = false }) }

func (h *fakeHost) restart() { h.stop(); h.start() }

// reboot restarts the machine.
func (h *fakeHost) reboot(boot string) {
	h.stop()
	h.set(func() {
		h.boot = boot
		at := time.Now()
		for _, p := range h.procs {
			if p.state.Proof == nil {
				p.end(at, &api.Exit{Kind: api.ExitUnknown, Detail: "the machine was restarted"}, &wire.Proof{Method: "reboot", BootID: boot, EmptyAt: at})
			}
		}
	})
	h.start()
}

func (p *fakeProc) end(at time.Time, exit *api.Exit, proof *wire.Proof) {
	p.state.Phase, p.state.Ended, p.state.Exit, p.state.Proof = wire.PhaseEnded, &at, exit, proof
	p.state.Log.EOF = true
	if proof == nil {
		p.state.Unproven = "a member would not die"
	} else {
		p.state.Unproven = ""
	}
	p.state.Rev++
}

func exited(code int) *api.Exit { return &api.Exit{Kind: api.ExitExited, Code: &code} }

// exit ends a process by itself.
func (h *fakeHost) exit(id string, code int) {
	h.set(func() {
		p := h.procs[id]
		if p == nil || p.state.Phase == wire.PhaseEnded {
			return
		}
		p.end(time.Now(), exited(code), h.proof())
	})
}

func (h *fakeHost) proof() *wire.Proof {
	if h.unproven {
		return nil
	}
	return &wire.Proof{Method: "pid_namespace", BootID: h.boot, Container: "c", Cgroup: "/g", EmptyAt: time.Now()}
}

// prove gives a late proof.
func (h *fakeHost) prove(id string) {
	h.set(func() {
		p := h.procs[id]
		p.state.Proof, p.state.Unproven = &wire.Proof{Method: "cgroup", BootID: h.boot, EmptyAt: time.Now()}, ""
		p.state.Rev++
	})
}

// forgetRecord damages the host: its record is gone.
func (h *fakeHost) forgetRecord(id string) { h.set(func() { delete(h.procs, id) }) }

func (h *fakeHost) output(id string, k wire.Kind, data string) {
	h.set(func() {
		p := h.procs[id]
		f := outFrame{kind: k, cursor: p.state.Log.Next, data: []byte(data)}
		if k == wire.KindStdout {
			f.offset = p.state.Log.Stdout
			p.state.Log.Stdout += int64(len(data))
		} else {
			f.offset = p.state.Log.Stderr
			p.state.Log.Stderr += int64(len(data))
		}
		p.state.Log.Next += int64(len(data))
		p.out = append(p.out, f)
	})
}

// drop loses the output before a cursor.
func (h *fakeHost) drop(id string, before int64) {
	h.set(func() { h.procs[id].lost, h.procs[id].state.Log.Oldest = before, before })
}

func (h *fakeHost) ran(id string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.execs[id]
}

// has reports whether a process is kept.
func (h *fakeHost) has(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.procs[id] != nil
}

func (h *fakeHost) count(op string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, l := range h.log {
		if l == op {
			n++
		}
	}
	return n
}

func (h *fakeHost) alive() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ids []string
	for id, p := range h.procs {
		if p.state.Phase != wire.PhaseEnded {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (h *fakeHost) told(st wire.ProcState) wire.ProcState {
	if h.lie != nil {
		h.lie(&st)
	}
	return st
}

// create is PUT: idempotent by id. h.mu is held.
func (h *fakeHost) create(spec wire.ProcSpec) *fakeProc {
	if p := h.procs[spec.ID]; p != nil {
		return p
	}
	at := time.Now()
	h.execs[spec.ID]++
	p := &fakeProc{spec: spec, state: wire.ProcState{ID: spec.ID, Box: spec.Box, Rev: 1, Phase: wire.PhaseRunning, Started: &at,
		Stdin: api.StdinState{Window: StdinWindow}}}
	h.procs[spec.ID] = p
	return p
}

// kill is POST close. h.mu is held.
func (h *fakeHost) kill(id string) *fakeProc {
	p := h.procs[id]
	at := time.Now()
	if p == nil {
		p = &fakeProc{state: wire.ProcState{ID: id}}
		p.end(at, &api.Exit{Kind: api.ExitSpawnFailed, Detail: "it was closed before it started"}, &wire.Proof{Method: "never_started", BootID: h.boot, EmptyAt: at})
		h.procs[id] = p
		return p
	}
	if p.state.Phase != wire.PhaseEnded {
		p.end(at, &api.Exit{Kind: api.ExitSignalled, Signal: "SIGKILL"}, h.proof())
	}
	return p
}

func (h *fakeHost) handler() http.Handler {
	mux := http.NewServeMux()
	op := func(pattern, name string, f func(w http.ResponseWriter, r *http.Request)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			id := r.PathValue("id")
			h.mu.Lock()
			h.log = append(h.log, name)
			what := none
			if h.fault != nil {
				what = h.fault(name, id)
			}
			generation, _ := strconv.ParseInt(r.Header.Get(wire.GenerationHeader), 10, 64)
			stale := generation < h.highest
			h.highest = max(h.highest, generation)
			h.mu.Unlock()
			if stale {
				problem(w, errdefs.New(errdefs.Denied, "an older server generation"))
				return
			}
			switch what {
			case loseFirst:
				panic(http.ErrAbortHandler)
			case refuse:
				problem(w, errdefs.New(errdefs.Invalid, "the directory does not exist").WithNext("make it"))
				return
			case busy:
				problem(w, errdefs.New(errdefs.Unavailable, "not now"))
				return
			case late:
				body, _ := io.ReadAll(r.Body)
				h.mu.Lock()
				h.delays++
				delay := time.Duration(50<<(h.delays%8)) * time.Millisecond // 50 ms to 6.4 s
				h.mu.Unlock()
				h.late.Go(func() {
					time.Sleep(delay) // virtual time, in a bubble
					var spec wire.ProcSpec
					if name == "start" && json.Unmarshal(body, &spec) == nil {
						h.set(func() { h.create(spec) })
					}
				})
				panic(http.ErrAbortHandler)
			case loseAfter:
				f(discard{http.Header{}}, r)
				panic(http.ErrAbortHandler)
			}
			f(w, r)
		})
	}
	op("GET /v1/info", "info", func(w http.ResponseWriter, _ *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		answerJSON(w, wire.HostInfo{HostID: h.hostID, BootID: h.boot, Protocol: wire.Protocol, Version: "fake"})
	})
	op("PUT /v1/lease", "lease", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
	op("GET /v1/boxes/{id}", "box", func(w http.ResponseWriter, r *http.Request) {
		answerJSON(w, wire.BoxInfo{Spec: wire.BoxSpec{ID: r.PathValue("id")}, NetNS: "/netns/" + r.PathValue("id")})
	})
	op("GET /v1/procs", "list", func(w http.ResponseWriter, _ *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		all := []wire.ProcState{}
		for _, p := range h.procs {
			all = append(all, h.told(p.state))
		}
		answerJSON(w, all)
	})
	op("PUT /v1/procs/{id}", "start", func(w http.ResponseWriter, r *http.Request) {
		var spec wire.ProcSpec
		if err := json.NewDecoder(r.Body).Decode(&spec); err != nil || spec.ID != r.PathValue("id") {
			problem(w, errdefs.New(errdefs.Invalid, "bad spec"))
			return
		}
		h.set(func() { answerJSON(w, h.told(h.create(spec).state)) })
	})
	op("GET /v1/procs/{id}", "ask", func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		defer h.mu.Unlock()
		p := h.procs[r.PathValue("id")]
		if p == nil {
			problem(w, errdefs.New(errdefs.NotFound, "no such process"))
			return
		}
		answerJSON(w, h.told(p.state))
	})
	op("DELETE /v1/procs/{id}", "forget", func(w http.ResponseWriter, r *http.Request) {
		h.set(func() { delete(h.procs, r.PathValue("id")) })
		w.WriteHeader(204)
	})
	op("POST /v1/procs/{id}/close", "close", func(w http.ResponseWriter, r *http.Request) {
		h.set(func() { answerJSON(w, h.told(h.kill(r.PathValue("id")).state)) })
	})
	op("POST /v1/procs/{id}/ack", "ack", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
	op("POST /v1/procs/{id}/signal", "signal", func(w http.ResponseWriter, r *http.Request) {
		var s wire.Signal
		_ = json.NewDecoder(r.Body).Decode(&s)
		h.set(func() {
			if p := h.procs[r.PathValue("id")]; p != nil {
				p.sigs = append(p.sigs, s.Signal)
			}
		})
		w.WriteHeader(204)
	})
	op("POST /v1/procs/{id}/resize", "resize", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
	op("PUT /v1/procs/{id}/stdin", "stdin", h.stdin)
	op("GET /v1/watch", "watch", h.watch)
	op("GET /v1/procs/{id}/log", "log", h.readLog)
	return mux
}

func (h *fakeHost) stdin(w http.ResponseWriter, r *http.Request) {
	offset, _ := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	data, _ := io.ReadAll(r.Body)
	h.set(func() {
		p := h.procs[r.PathValue("id")]
		if p == nil || offset > p.state.Stdin.Accepted {
			problem(w, errdefs.New(errdefs.Conflict, "expected offset is another"))
			return
		}
		if fresh := offset + int64(len(data)) - p.state.Stdin.Accepted; fresh > 0 {
			p.in = append(p.in, data[int64(len(data))-fresh:]...)
			p.state.Stdin.Accepted += fresh
		}
		p.state.Stdin.EOF = p.state.Stdin.EOF || r.URL.Query().Get("eof") == "true"
		answerJSON(w, p.state.Stdin)
	})
}

func (h *fakeHost) watch(w http.ResponseWriter, r *http.Request) {
	sent := map[string]uint64{}
	control := http.NewResponseController(w)
	for {
		h.mu.Lock()
		changed := h.changed
		var news []wire.ProcState
		for id, p := range h.procs {
			if sent[id] != p.state.Rev {
				sent[id] = p.state.Rev
				news = append(news, h.told(p.state))
			}
		}
		h.mu.Unlock()
		for _, st := range news {
			if json.NewEncoder(w).Encode(st) != nil {
				return
			}
		}
		if control.Flush() != nil {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		case <-h.closed:
			return
		}
	}
}

func (h *fakeHost) readLog(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	cursor, _ := strconv.ParseInt(q.Get("cursor"), 10, 64)
	most, _ := strconv.ParseInt(q.Get("max_bytes"), 10, 64)
	wait, _ := strconv.ParseInt(q.Get("wait_ms"), 10, 64)
	follow := q.Get("follow") == "true"
	if most == 0 {
		most = 1 << 20
	}
	h.mu.Lock()
	if h.answer > 0 {
		most = min(most, h.answer)
	}
	h.mu.Unlock()
	limit := time.NewTimer(time.Duration(wait) * time.Millisecond)
	defer limit.Stop()
	control := http.NewResponseController(w)
	w.Header().Set("Content-Type", wire.FramesType)
	for {
		h.mu.Lock()
		p := h.procs[r.PathValue("id")]
		if p == nil {
			h.mu.Unlock()
			problem(w, errdefs.New(errdefs.NotFound, "no such process"))
			return
		}
		if cursor > p.state.Log.Next {
			h.mu.Unlock()
			problem(w, errdefs.New(errdefs.Invalid, "the cursor is beyond the end"))
			return
		}
		var buf []byte
		if cursor < p.lost {
			buf = note(buf, wire.KindGap, cursor, wire.GapFrame{From: cursor, To: p.lost})
			cursor = p.lost
		}
		for _, f := range p.out {
			end := f.cursor + int64(len(f.data))
			if end <= cursor || (!follow && most == 0) {
				continue
			}
			skip := max(cursor-f.cursor, 0)
			data := f.data[skip:]
			if !follow && int64(len(data)) > most {
				data = data[:most]
			}
			buf = wire.AppendHeader(buf, wire.Header{Kind: f.kind, Length: len(data), Cursor: cursor, Offset: f.offset + skip, Sum: wire.Sum(data)})
			buf = append(buf, data...)
			cursor += int64(len(data))
			if !follow {
				most -= int64(len(data))
			}
		}
		changed := h.changed
		eof := p.state.Log.EOF && cursor == p.state.Log.Next
		status := wire.StatusFrame{Next: cursor, Oldest: p.lost, EOF: eof, Phase: p.state.Phase, Exit: p.state.Exit}
		h.mu.Unlock()
		timeUp := wait == 0
		if len(buf) == 0 && !eof && (follow || !timeUp) {
			select {
			case <-changed:
				continue
			case <-limit.C:
				if !follow {
					wait = 0
				}
				continue
			case <-r.Context().Done():
				return
			case <-h.closed:
				return
			}
		}
		if eof || !follow {
			buf = note(buf, wire.KindStatus, cursor, status)
		}
		if _, err := w.Write(buf); err != nil {
			return
		}
		if control.Flush() != nil || eof || !follow {
			return
		}
	}
}

func note(b []byte, k wire.Kind, cursor int64, v any) []byte {
	payload, _ := json.Marshal(v)
	b = wire.AppendHeader(b, wire.Header{Kind: k, Length: len(payload), Cursor: cursor, Sum: wire.Sum(payload)})
	return append(b, payload...)
}

func answerJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func problem(w http.ResponseWriter, err error) {
	p := api.ProblemOf(err, "")
	w.Header().Set("Content-Type", api.ProblemType)
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p)
}

type discard struct{ h http.Header }

func (d discard) Header() http.Header         { return d.h }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) WriteHeader(int)             {}
