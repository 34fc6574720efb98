package server_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
)

// reopen opens with the request of p: the first time, and again.
func (w *worker) reopen(ctx context.Context, p *proc) {
	q, err := w.runner.Open(ctx, p.req)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		more := []client.Code{client.Fenced, client.Cancelling}
		if p.touched {
			more = append(more, client.Conflict)
		}
		w.trouble(p, "open", err, more...)
		return
	}
	if p.handle != "" && p.handle != q.Handle() {
		w.bad(p, "another handle: %s", q.Handle())
	}
	p.handle, p.started = q.Handle(), true
}

func (p *proc) name() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.handle
}

func (w *worker) write(ctx context.Context, p *proc) {
	h := p.name()
	if p.kind != "cat" || h == "" {
		return
	}
	in := seq(p.outN)
	p.mu.Lock()
	at, eof := p.input, p.eof
	p.mu.Unlock()
	if eof >= 0 {
		in = in[:eof]
	}
	from := at - min(at, int64(w.rng.IntN(3000))) // some of it again
	to := min(int64(len(in)), at+int64(w.rng.IntN(60_000)))
	end := eof >= 0 && to == eof || eof < 0 && w.rng.IntN(4) == 0
	if end && eof < 0 {
		p.mu.Lock()
		p.eof = to // it may be accepted though no answer comes
		p.mu.Unlock()
	}
	st, err := w.runner.Process(h).Write(ctx, from, in[from:to], end)
	if err != nil {
		w.trouble(p, fmt.Sprintf("write %d-%d eof %v", from, to, end), err, w.unopened(p, client.Conflict, client.Exhausted)...)
		return
	}
	if st.Accepted < at && p.exit == nil || st.Accepted > to {
		w.bad(p, "wrote %d-%d, accepted %d, before %d", from, to, st.Accepted, at)
	}
	p.mu.Lock()
	p.input = max(p.input, st.Accepted)
	p.mu.Unlock()
}

// unopened adds what one says that may have been closed before it was opened.
func (w *soak) unopened(p *proc, codes ...client.Code) []client.Code {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.started {
		codes = append(codes, client.Invalid)
	}
	return codes
}

// expect is the whole of a stream.
func (p *proc) expect(stream string) []byte {
	n := p.outN
	if stream == client.Stderr {
		n = p.errN
	}
	b := seq(n)
	if p.kind == "pty" {
		b = bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n"))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kind == "cat" && stream == client.Stdout && p.eof >= 0 {
		b = b[:p.eof]
	}
	return b
}

// read reads some output, or all of it, from the start and through reconnects.
func (w *soak) read(ctx context.Context, p *proc, whole bool) {
	h := p.name()
	if h == "" {
		return
	}
	if !whole {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(1500))*time.Millisecond)
		defer cancel()
	}
	want := map[string][]byte{client.Stdout: p.expect(client.Stdout), client.Stderr: p.expect(client.Stderr)}
	// From the oldest byte, or from where the reader before was cut off.
	got, from := map[string]int64{}, ""
	if !whole && rand.IntN(2) == 0 {
		p.mu.Lock()
		from, got = p.cursor, maps.Clone(p.got)
		p.mu.Unlock()
	}
	if got == nil {
		got = map[string]int64{}
	}
	o := p.runner.Process(h).Output(ctx, client.OutputOptions{Cursor: from, Ack: p.kind == "big" && !whole})
	defer o.Close()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.cursor, p.got = o.Cursor(), got
	}()
	first := from == ""
	for {
		c, err := o.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			w.trouble(p, "read", err)
			return
		}
		if c.Gap != nil {
			if p.kind != "big" {
				w.bad(p, "a gap: %+v", c.Gap)
			}
			got[client.Stdout] += c.Gap.Bytes // big has no other stream
			continue
		}
		if first && p.kind == "big" {
			got[c.Stream] = c.Offset // the oldest byte that is kept
		}
		first = false
		if c.Offset != got[c.Stream] {
			w.bad(p, "%s: offset %d, want %d", c.Stream, c.Offset, got[c.Stream])
			return
		}
		end := c.Offset + int64(len(c.Data))
		if end > int64(len(want[c.Stream])) || !bytes.Equal(c.Data, want[c.Stream][c.Offset:end]) {
			if p.kind == "pty" || p.outN <= 3 && c.Stream == client.Stderr {
				return // a terminal echoes and shells complain
			}
			if _, inside := w.n.killed(h); (inside || w.n.starved(p.at)) && c.Stream == client.Stderr {
				return // the shell says that its child was killed, runc that the disk is full
			}
			w.bad(p, "%s %d-%d is not what was written (%d): %.80q", c.Stream, c.Offset, end, len(want[c.Stream]), c.Data)
			return
		}
		got[c.Stream] = end
	}
	// The end of the log.
	info, err := p.runner.Process(h).Get(ctx)
	if err != nil {
		w.trouble(p, "get", err)
		return
	}
	_, inside := w.n.killed(h)
	if info.Exit == nil || info.Exit.Kind != api.ExitExited || *info.Exit.Code != p.code || inside || info.Log.Failure != "" || p.kind == "stay" || p.kind == "deep" {
		return
	}
	for s, b := range want {
		if got[s] != int64(len(b)) {
			w.bad(p, "%s ends at %d of %d without a word (failure %q, log %+v)", s, got[s], len(b), info.Log.Failure, info.Log)
		}
	}
}

// attach reads over a socket, for a while.
func (w *worker) attach(ctx context.Context, p *proc) {
	h := p.name()
	if h == "" || p.kind == "pty" || p.kind == "tree" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(w.rng.IntN(1500))*time.Millisecond)
	defer cancel()
	a, err := p.runner.Process(h).Attach(ctx, "")
	if err != nil {
		w.trouble(p, "attach", err)
		return
	}
	defer a.Close()
	want, got := p.expect(client.Stdout), int64(-1)
	for {
		c, err := a.Next(ctx)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			w.trouble(p, "attached", err)
			return
		}
		if c.Gap != nil {
			if got += c.Gap.Bytes; p.kind != "big" || got < c.Gap.Bytes {
				w.bad(p, "attached: a gap: %+v", c.Gap)
			}
			continue
		}
		if c.Stream == client.Stderr {
			continue
		}
		if got < 0 && p.kind != "big" {
			got = 0
		}
		if got >= 0 && c.Offset != got || c.Offset+int64(len(c.Data)) > int64(len(want)) || !bytes.Equal(c.Data, want[c.Offset:][:len(c.Data)]) {
			w.bad(p, "attached: %d bytes at %d after %d of %d are not what was written", len(c.Data), c.Offset, got, len(want))
			return
		}
		got = c.Offset + int64(len(c.Data))
	}
}

func (w *soak) get(ctx context.Context, p *proc) {
	h := p.name()
	if h == "" {
		return
	}
	q, err := p.runner.ProcessByRequest(ctx, p.word)
	w.trouble(p, "get by request", err)
	if err == nil && q.Handle() != h {
		w.bad(p, "by request: %s", q.Handle())
	}
	info, err := p.runner.Process(h).Get(ctx)
	if w.trouble(p, "get", err); err == nil {
		w.look(p, info)
	}
}

// look checks what is told of a process.
func (w *soak) look(p *proc, info api.Process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	shim, inside := w.n.killed(p.handle)
	starved := w.n.starved(p.at)
	if p.exit != nil && (info.Exit == nil || p.exit.Kind != api.ExitUnknown && (info.Exit.Kind != p.exit.Kind || deref(info.Exit.Code) != deref(p.exit.Code))) {
		w.bad(p, "exit %+v became %+v", p.exit, info.Exit)
	}
	if p.quiet && info.Cleanup != api.CleanupQuiescent {
		w.bad(p, "was quiescent, is %s %s", info.State, info.Cleanup)
	}
	if (info.State == api.StateFenced) != (info.Fence != "") {
		w.bad(p, "state %s with fence %q", info.State, info.Fence)
	}
	if info.State == api.StateFenced {
		w.t.Logf("fenced: %s %s killed %v %v starved %v", p.word, p.handle, shim, inside, starved)
	}
	if info.Cleanup == api.CleanupQuiescent {
		if info.Receipt == nil && info.State == api.StateClosed {
			w.bad(p, "quiescent without a receipt")
		}
		p.quiet = true
		if r := info.Receipt; r != nil && (!ed25519.Verify(r.PublicKey, r.Payload, r.Signature) || r.Handle != info.Handle) {
			w.bad(p, "the receipt is not signed for it: %+v", r)
		}
		if left := alive(p.word); len(left) > 0 {
			w.bad(p, "quiescent, and on the machine: %v", left)
		}
	}
	if info.State == api.StateNeverStarted {
		if p.started && !p.touched {
			w.bad(p, "never started after it was told started: %s", info.Reason)
		}
		if n := w.count(p); n != 0 {
			w.bad(p, "never started, and started %d times", n)
		}
	}
	if n := w.count(p); n > 1 {
		w.bad(p, "started %d times", n)
	}
	if info.Exit == nil {
		return
	}
	p.exit = info.Exit
	switch e := info.Exit; e.Kind {
	case api.ExitExited:
		if *e.Code != p.code && !p.touched && !inside {
			w.bad(p, "exit code %d, want %d", *e.Code, p.code)
		}
	case api.ExitDeadline:
		if p.req.Limits.DeadlineMillis == 0 {
			w.bad(p, "exit %+v", e)
		}
	case api.ExitSignalled:
		lost := strings.Contains(e.Detail, "could no longer be kept") && starved // it is stopped then
		if !p.touched && !inside && !lost {
			w.bad(p, "exit %+v", e)
		}
	case api.ExitSpawnFailed, api.ExitUnknown:
		if !shim && !inside && (!starved || info.ExitedAt != nil && !w.n.starvedIn(p.at, *info.ExitedAt)) {
			w.bad(p, "exit %+v", e)
		}
		if n := w.count(p); e.Kind == api.ExitSpawnFailed && n != 0 {
			w.bad(p, "exit %+v, and started %d times", e, n)
		}
	default:
		w.bad(p, "exit %+v", e)
	}
	if (info.Exit.Kind == api.ExitExited || info.Exit.Kind == api.ExitSignalled) && info.Cleanup == api.CleanupQuiescent {
		if n := w.count(p); n != 1 && !p.touched && !inside {
			w.bad(p, "ended %+v, and started %d times", *info.Exit, n)
		}
	}
}

func deref(p *int) int {
	if p == nil {
		return -1
	}
	return *p
}

func (w *soak) count(p *proc) int {
	b, _ := os.ReadFile(filepath.Join(w.starts, p.word))
	return bytes.Count(b, []byte("\n"))
}

func (w *worker) grace() *int64 {
	g := []int64{0, 0, 100, 2000}[w.rng.IntN(4)]
	return &g
}

func (w *worker) close(ctx context.Context, p *proc, c *client.Client) {
	h := p.name()
	if h == "" {
		return
	}
	p.mu.Lock()
	p.touched = true
	p.mu.Unlock()
	r, err := c.Process(h).Close(ctx, api.CloseRequest{Reason: "soak", GraceMillis: w.grace()})
	w.closed(p, r, err)
}

func (w *soak) closed(p *proc, r api.CloseResponse, err error) {
	if err != nil {
		w.trouble(p, "close", err, client.Cancelling)
		return
	}
	p.mu.Lock()
	if p.handle == "" {
		p.handle = r.Process.Handle
	}
	p.mu.Unlock()
	if r.Quiescent != (r.Receipt != nil) || r.Quiescent == (r.Fence != nil) {
		w.bad(p, "close: quiescent %v, receipt %v, fence %v", r.Quiescent, r.Receipt, r.Fence)
	}
	if !r.Quiescent {
		w.t.Logf("not quiescent: %s %s: %+v", p.word, p.handle, r.Fence)
	}
	w.look(p, r.Process)
}

func (w *worker) closeByRequest(ctx context.Context, p *proc) {
	p.mu.Lock()
	p.touched = true
	p.mu.Unlock()
	r, err := w.runner.CloseByRequest(ctx, api.CloseByRequest{RequestID: p.word, CloseRequest: api.CloseRequest{GraceMillis: new(int64)}})
	w.closed(p, r, err)
}

// poke signals or resizes.
func (w *worker) poke(ctx context.Context, p *proc) {
	h := p.name()
	if h == "" {
		return
	}
	if p.kind == "pty" {
		w.trouble(p, "resize", w.runner.Process(h).Resize(ctx, api.Winsize{Rows: 1 + uint16(w.rng.IntN(200)), Cols: 80}), w.unopened(p, client.Conflict)...)
		return
	}
	p.mu.Lock()
	p.touched = true
	p.mu.Unlock()
	w.trouble(p, "signal", w.runner.Process(h).Signal(ctx, []string{"SIGTERM", "SIGUSR1", "SIGINT"}[w.rng.IntN(3)]), client.Conflict)
}

// files puts a file into the box and gets it back.
func (w *worker) files(ctx context.Context) {
	about := &proc{word: w.name, kind: "files", at: time.Now().Add(-5 * time.Second)}
	content := bytes.Repeat([]byte(w.name+"."), w.rng.IntN(100_000))
	name := fmt.Sprint("file-", w.rng.IntN(5))
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	_ = tw.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg})
	_, _ = tw.Write(content)
	_ = tw.Close()
	if err := w.tenant.PutFiles(ctx, w.box.ID, ".", &b); err != nil {
		w.trouble(about, "put files", err)
		return
	}
	r, err := w.tenant.GetFiles(ctx, w.box.ID, name)
	if err != nil {
		w.trouble(about, "get files", err)
		return
	}
	defer r.Close()
	tr := tar.NewReader(r)
	if _, err := tr.Next(); err != nil {
		return // cut off
	}
	got, err := io.ReadAll(tr)
	if err == nil && !bytes.Equal(got, content) {
		w.bad(about, "put %d bytes, got %d others", len(content), len(got))
	}
}

// strange uses what belongs to somebody else: it looks like what is not there.
func (w *worker) strange(ctx context.Context) {
	w.mu.Lock()
	p := w.procs[w.rng.IntN(len(w.procs))]
	w.mu.Unlock()
	h := p.name()
	if h == "" || slices.Contains(w.mine, p) {
		return
	}
	missing := h[:len(h)-4] + "aaaa"
	for what, call := range map[string]func(*client.Process) error{
		"get":   func(q *client.Process) error { _, err := q.Get(ctx); return err },
		"close": func(q *client.Process) error { _, err := q.Close(ctx, api.CloseRequest{}); return err },
		"read":  func(q *client.Process) error { _, err := q.Read(ctx, client.ReadOptions{}); return err },
		"write": func(q *client.Process) error { _, err := q.Write(ctx, 0, []byte("x"), false); return err },
	} {
		err, not := call(w.runner.Process(h)), call(w.runner.Process(missing))
		if err == nil {
			w.bad(p, "%s by a stranger is answered", what)
			continue
		}
		w.trouble(p, what+" by a stranger", err, client.NotFound)
		if not != nil && client.IsCode(err, client.NotFound) && client.IsCode(not, client.NotFound) && err.Error() != strings.ReplaceAll(not.Error(), missing, h) {
			w.bad(p, "%s by a stranger: %v, one that is not there: %v", what, err, not)
		}
	}
}
