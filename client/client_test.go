package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

func open(t testing.TB, c *client.Client, w *world, id string) (*client.Process, *proc) {
	t.Helper()
	p, err := c.Open(t.Context(), client.OpenRequest{RequestID: id, Argv: []string{"cat"}, Limits: client.Limits{SpoolBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return p, w.procs[p.Handle()]
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	empty, good := filepath.Join(dir, "empty"), filepath.Join(dir, "good")
	if err := errors.Join(os.WriteFile(empty, []byte(" \n"), 0o600), os.WriteFile(good, []byte("stk_key\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  client.Config
		code client.Code
	}{
		"good":           {client.Config{URL: "http://127.0.0.1:1"}, ""},
		"key file":       {client.Config{URL: "https://example.com/prefix/", KeyFile: good}, ""},
		"no url":         {client.Config{}, client.Invalid},
		"no scheme":      {client.Config{URL: "127.0.0.1:1"}, client.Invalid},
		"other scheme":   {client.Config{URL: "ftp://x"}, client.Invalid},
		"user":           {client.Config{URL: "http://a:b@x"}, client.Invalid},
		"query":          {client.Config{URL: "http://x/?a=b"}, client.Invalid},
		"no key file":    {client.Config{URL: "http://x", KeyFile: dir + "/none"}, client.Unauthenticated},
		"empty file":     {client.Config{URL: "http://x", KeyFile: empty}, client.Unauthenticated},
		"newline inside": {client.Config{URL: "http://x", Key: "a\nb"}, client.Unauthenticated},
	} {
		if _, err := client.New(c.cfg); client.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want %q", name, err, c.code)
		}
	}
}

func TestErrorsCarryTheirCode(t *testing.T) {
	t.Parallel()
	s := newSite(t, newWorld())
	c := s.client(t, nil)
	_, err := c.Process("proc_none").Get(t.Context())
	var e *client.Error
	if !client.IsCode(err, client.NotFound) || !errors.As(err, &e) || e.Message == "" {
		t.Errorf("%v", err)
	}
	if _, err := c.WithKey("wrong").Process("x").Get(t.Context()); !client.IsCode(err, client.Unauthenticated) {
		t.Errorf("%v", err)
	}
	if _, err := c.Targets(t.Context()); !client.IsCode(err, client.Denied) {
		t.Errorf("%v", err)
	}
	if _, err := c.Open(t.Context(), client.OpenRequest{}); !client.IsCode(err, client.Invalid) {
		t.Errorf("%v", err)
	}
	// Names that would change the route name nothing instead.
	for _, handle := range []string{"", ".", "..", "a/b", "a?b", "../../v1/health"} {
		if _, err := c.Process(handle).Get(t.Context()); !client.IsCode(err, client.NotFound) {
			t.Errorf("handle %q: %v", handle, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Process("x").Get(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v is not about the context", err)
	}
	if h, err := c.WithKey("").Health(t.Context()); err != nil || h.Status != "ok" {
		t.Errorf("%+v %v", h, err)
	}
}

func TestAnotherKindOfServer(t *testing.T) {
	t.Parallel()
	for status, code := range map[int]client.Code{200: client.Internal, 301: client.Internal, 401: client.Unauthenticated, 404: client.Internal, 502: client.Unavailable, 418: client.Internal} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "https://elsewhere.invalid/")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "<html>hello</html>")
		}))
		c, err := client.New(client.Config{URL: srv.URL, Key: "k", RetryFor: -1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Box(t.Context(), "b"); client.CodeOf(err) != code {
			t.Errorf("%d: %v, want %s", status, err, code)
		}
		c.CloseIdle()
		srv.Close()
	}
}

// That a server does not work is what was asked for, and nothing to try again.
func TestHealthOfAFailingServer(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, `{"status":"failing","version":"v"}`)
	}))
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL, RetryFor: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdle()
	if h, err := c.Health(t.Context()); err != nil || h.Status != "failing" {
		t.Errorf("%+v, %v", h, err)
	}
}

func TestAServerThatNeverAnsweredIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.NotFoundHandler())
	srv.Close()
	c, err := client.New(client.Config{URL: srv.URL, Key: "k", RetryFor: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Box(t.Context(), "b"); !client.IsCode(err, client.Unavailable) {
		t.Errorf("%v", err)
	}
}

func TestOpenIsRepeatedAndDoneOnce(t *testing.T) {
	t.Parallel()
	w := newWorld()
	c := newSite(t, w).client(t, newLossy(t, 2, 0))
	handles := map[string]bool{}
	for i := range 20 {
		p, err := c.Open(t.Context(), client.OpenRequest{RequestID: fmt.Sprint("r", i), Argv: []string{"cat"}})
		if err != nil {
			t.Fatal(err)
		}
		handles[p.Handle()] = true
	}
	if w.opens != 20 || len(handles) != 20 {
		t.Errorf("20 requests made %d processes, %d handles", w.opens, len(handles))
	}
	if _, err := c.Open(t.Context(), client.OpenRequest{RequestID: "r0", Argv: []string{"other"}}); !client.IsCode(err, client.Conflict) {
		t.Errorf("%v", err)
	}
}

func TestWhatIsNotSafeIsNotRepeated(t *testing.T) {
	t.Parallel()
	w := newWorld()
	s := newSite(t, w)
	p, _ := open(t, s.client(t, nil), w, "r")
	if err := s.client(t, newLossy(t, 1, 0)).Process(p.Handle()).Signal(t.Context(), "SIGINT"); !client.IsCode(err, client.Unavailable) {
		t.Errorf("%v", err)
	}
	if w.signals != 1 {
		t.Errorf("%d signals were sent", w.signals)
	}
}

// Only what an earlier attempt may have done is taken for done.
func TestWhatNeverWasIsNotTakenForRemoved(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		first error
		want  client.Code
	}{
		"nothing was sent":    {&net.OpError{Op: "dial", Err: errors.New("refused")}, client.NotFound},
		"the answer was lost": {io.ErrUnexpectedEOF, ""},
	} {
		calls := 0
		c, err := client.New(client.Config{URL: "http://127.0.0.1:1", Key: "k", HTTP: &http.Client{Transport: roundTrip(func(*http.Request) (*http.Response, error) {
			if calls++; calls == 1 {
				return nil, tc.first
			}
			return &http.Response{StatusCode: 404, Status: "404", Header: http.Header{"Content-Type": {api.ProblemType}},
				Body: io.NopCloser(strings.NewReader(`{"code":"not_found","detail":"there is no box"}`))}, nil
		})}})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.RemoveBox(t.Context(), "box_x"); client.CodeOf(err) != tc.want || calls != 2 {
			t.Errorf("%s: %v after %d calls", name, err, calls)
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestInputArrivesOnceInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.window, w.hungry = 70_000, true
	c := newSite(t, w).client(t, newLossy(t, 3, 0))
	p, fp := open(t, c, w, "r")
	in := randomBytes(2 << 20)
	stdin := p.Stdin(t.Context())
	if n, err := io.Copy(stdin, bytes.NewReader(in)); err != nil || n != int64(len(in)) {
		t.Fatalf("%d %v", n, err)
	}
	if err := errors.Join(stdin.Close(), stdin.Close()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(fp.stdin, in) || !fp.eof || stdin.Offset() != int64(len(in)) {
		t.Errorf("%d bytes arrived, eof %v, offset %d", len(fp.stdin), fp.eof, stdin.Offset())
	}
	if _, err := stdin.Write([]byte("x")); !client.IsCode(err, client.Conflict) {
		t.Errorf("after close: %v", err)
	}
	// Repeating all of it, as after a crash, changes nothing.
	again := p.StdinAt(t.Context(), 0)
	if _, err := again.Write(in); err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil || !bytes.Equal(fp.stdin, in) {
		t.Errorf("%v, %d bytes", err, len(fp.stdin))
	}
	if _, err := p.StdinAt(t.Context(), 1<<40).Write([]byte("x")); !client.IsCode(err, client.Conflict) {
		t.Errorf("ahead: %v", err)
	}
}

func TestOutputSurvivesEveryCut(t *testing.T) {
	t.Parallel()
	w := newWorld()
	c := newSite(t, w).client(t, newLossy(t, 5, 700))
	p, fp := open(t, c, w, "r")
	rnd := rand.New(rand.NewPCG(1, 2))
	var want [2]bytes.Buffer
	go func() {
		for range 200 {
			i := rnd.IntN(2)
			text := strings.Repeat(string(rune('a'+rnd.IntN(26))), 1+rnd.IntN(300))
			want[i].WriteString(text)
			w.print(fp, wire.Kind(1+i), text)
		}
		w.exit(fp, 3)
	}()
	var stdout, stderr bytes.Buffer
	done, err := p.Copy(t.Context(), &stdout, &stderr, client.OutputOptions{Ack: true})
	if err != nil {
		t.Fatal(err)
	}
	if stdout.String() != want[0].String() || stderr.String() != want[1].String() {
		t.Errorf("%d and %d bytes came, %d and %d were printed", stdout.Len(), stderr.Len(), want[0].Len(), want[1].Len())
	}
	if done.Exit == nil || *done.Exit.Code != 3 || done.Cursor != fp.cursor(int64(len(fp.out))) || done.Stdout != int64(stdout.Len()) {
		t.Errorf("%+v", done)
	}
	if fp.acked != int64(len(fp.out)) {
		t.Errorf("%d of %d bytes were acknowledged", fp.acked, len(fp.out))
	}
}

// A log of tiny records is full of headers long before its bytes are many: a
// reader that has them all leaves less than a quarter of the log unacknowledged,
// without waiting for more.
func TestTinyRecordsAreAcknowledged(t *testing.T) {
	t.Parallel()
	const spool, records = 64 << 10, 1500
	w := newWorld()
	c := newSite(t, w).client(t, nil)
	p, err := c.Open(t.Context(), client.OpenRequest{RequestID: "r", Argv: []string{"cat"}, Limits: client.Limits{SpoolBytes: spool}})
	if err != nil {
		t.Fatal(err)
	}
	fp := w.procs[p.Handle()]
	ctx, cancel := context.WithCancel(t.Context())
	copied := make(chan error, 1)
	go func() {
		_, err := p.Copy(ctx, io.Discard, io.Discard, client.OutputOptions{Ack: true})
		copied <- err
	}()
	acknowledged := func(least int64) {
		t.Helper()
		for {
			w.mu.Lock()
			acked, changed := fp.acked, w.changed
			w.mu.Unlock()
			if acked >= least {
				return
			}
			select {
			case <-changed:
			case <-time.After(time.Minute):
				t.Fatalf("%d records of %d are acknowledged, and the reader waits", acked, least)
			}
		}
	}
	w.print(fp, wire.KindStdout, "x")
	acknowledged(1) // the first at once, the others not soon
	for i := range records {
		w.print(fp, wire.Kind(1+i%2), "x")
	}
	acknowledged(records - spool/4/(wire.HeaderSize+1))
	cancel()
	<-copied
}

func TestEverythingSurvivesARestartOfTheServer(t *testing.T) {
	t.Parallel()
	w := newWorld()
	s := newSite(t, w)
	c := s.client(t, nil)
	p, fp := open(t, c, w, "r")
	got := make(chan string, 1)
	go func() {
		var b bytes.Buffer
		if _, err := p.Copy(t.Context(), &b, nil, client.OutputOptions{}); err != nil {
			t.Error(err)
		}
		got <- b.String()
	}()
	w.print(fp, wire.KindStdout, "before ")
	s.stop()
	w.print(fp, wire.KindStdout, "while ")
	wrote := make(chan error, 1)
	go func() {
		_, err := p.Stdin(t.Context()).Write([]byte("input"))
		wrote <- err
	}()
	s.start()
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	w.print(fp, wire.KindStdout, "after")
	w.exit(fp, 0)
	if out := <-got; out != "before while after" {
		t.Errorf("%q", out)
	}
	if exit, err := p.Wait(t.Context()); err != nil || exit.Kind != client.ExitExited || *exit.Code != 0 {
		t.Errorf("%+v %v", exit, err)
	}
}

func TestGapsAreNamedExactly(t *testing.T) {
	t.Parallel()
	w := newWorld()
	c := newSite(t, w).client(t, nil)
	p, fp := open(t, c, w, "r")
	w.print(fp, wire.KindStdout, "0123456789")
	w.change(func() { fp.oldest = 4 })
	w.exit(fp, 0)
	from := client.OutputOptions{Cursor: fp.cursor(1)}
	if done, err := p.Copy(t.Context(), io.Discard, nil, from); !client.IsCode(err, client.Conflict) || len(done.Gaps) != 1 || done.Cursor != fp.cursor(1) {
		t.Errorf("a gap nobody asked about: %+v %v", done, err)
	}
	var gaps []client.Gap
	from.OnGap = func(g client.Gap) { gaps = append(gaps, g) }
	var out bytes.Buffer
	if _, err := p.Copy(t.Context(), &out, nil, from); err != nil || out.String() != "456789" {
		t.Errorf("%q %v", out.String(), err)
	}
	if want := (client.Gap{From: fp.cursor(1), To: fp.cursor(4), Bytes: 3}); len(gaps) != 1 || gaps[0] != want {
		t.Errorf("%+v, want %+v", gaps, want)
	}
	for _, bad := range []string{"x", "000000.1", fp.cursor(-1), strings.Replace(fp.cursor(1), ".", "", 1)} {
		if _, err := p.Output(t.Context(), client.OutputOptions{Cursor: bad}).Next(); !client.IsCode(err, client.Invalid) {
			t.Errorf("cursor %q: %v", bad, err)
		}
	}
	if _, err := p.Output(t.Context(), client.OutputOptions{Cursor: fp.cursor(99)}).Next(); !client.IsCode(err, client.Invalid) {
		t.Errorf("a cursor beyond the end: %v", err)
	}
}

func TestIterationAndNoFollow(t *testing.T) {
	t.Parallel()
	w := newWorld()
	c := newSite(t, w).client(t, nil)
	p, fp := open(t, c, w, "r")
	w.print(fp, wire.KindStdout, "one")
	w.print(fp, wire.KindStderr, "two")
	var got []string
	for chunk, err := range p.Output(t.Context(), client.OutputOptions{NoFollow: true}).All() {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s@%d %s", chunk.Stream, chunk.Offset, chunk.Data))
	}
	if want := "stdout@0 one,stderr@0 two"; strings.Join(got, ",") != want {
		t.Errorf("%v, want %s", got, want)
	}
	for range p.Output(t.Context(), client.OutputOptions{}).All() {
		break // of a process that lives on
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	o := p.Output(ctx, client.OutputOptions{Cursor: fp.cursor(6)})
	why := errors.New("enough")
	go cancel(why)
	if _, err := o.Next(); !errors.Is(err, why) {
		t.Errorf("%v", err)
	}
}

func TestDamagedOutputIsNotReturned(t *testing.T) {
	t.Parallel()
	const handle = "proc_aaaaaaaaaaaaaaaaaaaaaaaaaa"
	good := pack(wire.KindStdout, 0, 0, []byte("data"))
	flip := func(i int) []byte { b := bytes.Clone(good); b[i] ^= 1; return b }
	for name, body := range map[string][]byte{
		"header":       flip(9),
		"payload":      flip(len(good) - 1),
		"skips":        append(bytes.Clone(good), pack(wire.KindStdout, 9, 9, []byte("x"))...),
		"gap backward": append(bytes.Clone(good), pack(wire.KindGap, 4, 0, []byte(`{"from":4,"to":1}`))...),
		"bad status":   pack(wire.KindStatus, 0, 0, []byte("{")),
		"not frames":   []byte(strings.Repeat("<html>", 20)),
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) }))
		c, _ := client.New(client.Config{URL: srv.URL, RetryFor: -1})
		var err error
		for _, e := range c.Process(handle).Output(t.Context(), client.OutputOptions{}).All() {
			err = e
		}
		if !client.IsCode(err, client.Internal) {
			t.Errorf("%s: %v", name, err)
		}
		c.CloseIdle()
		srv.Close()
	}
}

func TestAttachCarriesBothWays(t *testing.T) {
	t.Parallel()
	w := newWorld()
	s := newSite(t, w)
	c := s.client(t, nil)
	p, fp := open(t, c, w, "r")
	w.print(fp, wire.KindStdout, "hello ")
	a, err := p.Attach(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	type result struct {
		out string
		err error
	}
	read := make(chan result, 1)
	go func() {
		var r result
		for {
			chunk, err := a.Next(t.Context())
			if err != nil {
				r.err = err
				read <- r
				return
			}
			r.out += string(chunk.Data)
		}
	}()
	in := randomBytes(900_000)
	stdin := a.Stdin(t.Context(), 0)
	if _, err := stdin.Write(in); err != nil {
		t.Fatal(err)
	}
	if err := stdin.Close(); err != nil || !bytes.Equal(fp.stdin, in) || !fp.eof {
		t.Fatalf("%v, %d bytes", err, len(fp.stdin))
	}
	if err := errors.Join(a.Resize(t.Context(), client.Winsize{Rows: 3, Cols: 4}), a.Signal(t.Context(), "SIGINT"), a.Ack(t.Context(), fp.cursor(3))); err != nil {
		t.Fatal(err)
	}
	w.print(fp, wire.KindStdout, "world")
	w.exit(fp, 5)
	r := <-read
	if r.out != "hello world" || !errors.Is(r.err, io.EOF) || a.Exit() == nil || *a.Exit().Code != 5 || a.Cursor() != fp.cursor(11) {
		t.Errorf("%q %v %+v", r.out, r.err, a.Exit())
	}
	if _, err := a.Write(t.Context(), 0, []byte("x"), false); !client.IsCode(err, client.Unavailable) {
		t.Errorf("after the end: %v", err)
	}
	// Refusals are ordinary errors.
	if _, err := c.Process("proc_none").Attach(t.Context(), ""); !client.IsCode(err, client.NotFound) {
		t.Errorf("%v", err)
	}
	if _, err := c.WithKey("wrong").Process(p.Handle()).Attach(t.Context(), ""); !client.IsCode(err, client.Unauthenticated) {
		t.Errorf("%v", err)
	}
	if _, err := p.Attach(t.Context(), "000000.1"); !client.IsCode(err, client.Invalid) {
		t.Errorf("%v", err)
	}
}

func TestAnAttachmentThatBreaksSaysWhereToGoOn(t *testing.T) {
	t.Parallel()
	w := newWorld()
	s := newSite(t, w)
	c := s.client(t, nil)
	p, fp := open(t, c, w, "r")
	w.print(fp, wire.KindStdout, "one")
	a, err := p.Attach(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if chunk, err := a.Next(t.Context()); err != nil || string(chunk.Data) != "one" {
		t.Fatal(err)
	}
	s.stop()
	if _, err := a.Next(t.Context()); !client.IsCode(err, client.Unavailable) {
		t.Errorf("%v", err)
	}
	w.print(fp, wire.KindStdout, "two")
	s.start()
	b, err := p.Attach(t.Context(), a.Cursor())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if chunk, err := b.Next(t.Context()); err != nil || string(chunk.Data) != "two" {
		t.Errorf("%q %v", chunk.Data, err)
	}
}

func TestWaitSeesEveryEnd(t *testing.T) {
	t.Parallel()
	w := newWorld()
	c := newSite(t, w).client(t, nil)
	p, fp := open(t, c, w, "r")
	done := make(chan client.Exit, 1)
	go func() {
		e, err := p.Wait(t.Context())
		if err != nil {
			t.Error(err)
		}
		done <- e
	}()
	w.change(func() { fp.ended, fp.exit = true, &api.Exit{Kind: api.ExitOOM} })
	if e := <-done; e.Kind != client.ExitOOM {
		t.Errorf("%+v", e)
	}
	ctx, cancel := context.WithCancel(t.Context())
	p2, _ := open(t, c, w, "r2")
	go cancel()
	if _, err := p2.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if r, err := p2.Close(t.Context(), client.CloseRequest{}); err != nil || !r.Quiescent || r.Receipt == nil {
		t.Errorf("%+v %v", r, err)
	}
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(b)
	return b
}
