package httpapi_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/box"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/httpapi"
	"github.com/stockade-run/stockade/internal/metrics"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store/sqlite"
	"github.com/stockade-run/stockade/internal/tenant"
)

// whole is a server with everything real: ledger, owners, API, host program and
// containers. It can be stopped and started again at the same address.
type whole struct {
	t    testing.TB
	dir  string
	addr string
	host *hosttest.Host

	stopped []func(context.Context) error // in the order of stopping
	tenant  *client.Client
	admin   *client.Client
}

type hostDriver struct{ h *hosttest.Host }

func (d hostDriver) Kind() string { return "box" }
func (d hostDriver) Ensure(ctx context.Context) error {
	c, err := d.h.Dial(ctx)
	if err != nil {
		return err
	}
	return c.Close()
}
func (d hostDriver) Dial(ctx context.Context) (net.Conn, error) { return d.h.Dial(ctx) }

func newWhole(t testing.TB) *whole {
	w := &whole{t: t, dir: t.TempDir(), addr: need.Loopback() + ":0", host: hosttest.New(t)}
	w.start()
	t.Cleanup(w.stop)
	for file, c := range map[string]**client.Client{"default.key": &w.tenant, "admin.key": &w.admin} {
		var err error
		if *c, err = client.New(client.Config{URL: "http://" + w.addr, KeyFile: filepath.Join(w.dir, file)}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup((*c).CloseIdle)
	}
	return w
}

func (w *whole) ok(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *whole) start() {
	w.t.Helper()
	ctx := context.Background()
	db, err := sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(w.dir, "ledger.db")})
	w.ok(err)
	counters := metrics.New("test")
	ledger := counters.Ledger(db)
	tenants := tenant.New(tenant.Config{Store: ledger})
	w.ok(tenants.Bootstrap(ctx, w.dir, time.Now()))
	signer, err := secret.OpenSigner(filepath.Join(w.dir, "receipt.key"))
	w.ok(err)
	b, err := broker.New(broker.Config{Store: ledger, Signer: signer, Targets: []broker.TargetConfig{{Name: "local", Driver: hostDriver{w.host}}}})
	w.ok(err)
	boxes, err := box.New(box.Config{Store: ledger, Target: "local", Hosts: func(target string) (box.Host, error) { return b.Host(target) }})
	w.ok(err)
	h, err := httpapi.New(httpapi.Config{Broker: b, Boxes: boxes, Tenants: tenants, Metrics: counters, Version: "test"})
	w.ok(err)
	w.ok(b.Start(ctx))
	w.ok(boxes.Start(ctx))
	l, err := net.Listen("tcp", w.addr)
	w.ok(err)
	w.addr = l.Addr().String()
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan struct{})
	go func() { _ = srv.Serve(l); close(served) }()
	w.stopped = []func(context.Context) error{
		func(context.Context) error { err := srv.Close(); <-served; return err }, // rude, as a kill is
		h.Shutdown, boxes.Stop, b.Stop, func(context.Context) error { return ledger.Close() },
	}
}

func (w *whole) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, f := range w.stopped {
		if err := f(ctx); err != nil {
			w.t.Error(err)
		}
	}
	w.stopped = nil
}

// run makes a run in a new box and returns a client with its token.
func (w *whole) run() (*client.Client, client.Box, client.Run) {
	w.t.Helper()
	b, err := w.tenant.AcquireBox(w.t.Context(), client.BoxRequest{})
	w.ok(err)
	r, err := w.tenant.CreateRun(w.t.Context(), client.RunRequest{Box: b.ID})
	w.ok(err)
	return w.tenant.WithKey(r.Token), b, r.Run
}

// bounded ends a test that waits in vain, so that its containers are taken away.
func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func sh(id, script string) client.OpenRequest {
	return client.OpenRequest{RequestID: id, Argv: []string{"/bin/sh", "-c", script}}
}

func TestOneRunFromEndToEnd(t *testing.T) {
	w := newWhole(t)
	ctx := bounded(t)
	c, b, run := w.run()

	// Files in, a program that uses them, files out.
	var in bytes.Buffer
	tw := tar.NewWriter(&in)
	w.ok(errors.Join(tw.WriteHeader(&tar.Header{Name: "dir/hello.txt", Mode: 0o644, Size: 5, Typeflag: tar.TypeReg}), second(tw.Write([]byte("hello"))), tw.Close()))
	w.ok(w.tenant.PutFiles(ctx, b.ID, "", &in))
	req := sh("r1", "cat dir/hello.txt; echo err >&2; cat > dir/copy.txt; exit 7")
	req.Stdin = true
	p, err := c.Open(ctx, req)
	w.ok(err)
	again, err := c.Open(ctx, req)
	w.ok(err)
	if again.Handle() != p.Handle() {
		t.Error("the same request made another process")
	}
	req.Argv = append(req.Argv, "x")
	if _, err := c.Open(ctx, req); !client.IsCode(err, client.Conflict) {
		t.Errorf("other arguments: %v", err)
	}
	stdin := p.Stdin(ctx)
	fmt.Fprint(stdin, "typed")
	w.ok(stdin.Close())
	var stdout, stderr bytes.Buffer
	_, err = p.Copy(ctx, &stdout, &stderr, client.OutputOptions{Ack: true})
	w.ok(err)
	if stdout.String() != "hello" || stderr.String() != "err\n" {
		t.Errorf("%q, %q", stdout.String(), stderr.String())
	}
	exit, err := p.Wait(ctx)
	w.ok(err)
	if exit.Kind != client.ExitExited || *exit.Code != 7 {
		t.Errorf("%+v", exit)
	}
	closed, err := p.Close(ctx, client.CloseRequest{Reason: "done"})
	w.ok(err)
	receipt, err := p.Receipt(ctx)
	w.ok(err)
	if !closed.Quiescent || !ed25519.Verify(receipt.PublicKey, receipt.Payload, receipt.Signature) {
		t.Errorf("%+v", closed)
	}
	rd, err := w.tenant.GetFiles(ctx, b.ID, "dir/copy.txt")
	w.ok(err)
	tr := tar.NewReader(rd)
	_, err = tr.Next()
	w.ok(err)
	if text, _ := io.ReadAll(tr); string(text) != "typed" {
		t.Errorf("%q came out", text)
	}
	rd.Close()

	// Who may do what.
	if got, err := c.ProcessByRequest(ctx, "r1"); err != nil || got.Handle() != p.Handle() {
		t.Errorf("%v", err)
	}
	other, _, _ := w.run()
	if _, err := other.Process(p.Handle()).Get(ctx); !client.IsCode(err, client.NotFound) {
		t.Errorf("another run sees it: %v", err)
	}
	if info, err := w.admin.Process(p.Handle()).Get(ctx); err != nil || info.Run != run.ID {
		t.Errorf("%v", err)
	}
	text, err := w.admin.Metrics(ctx)
	w.ok(err)
	for _, line := range []string{`stockade_target_up{target="local"} 1`, `stockade_opens_total{outcome="repeated"} 1`,
		`stockade_closes_total{outcome="quiescent"} 1`, `stockade_stdin_bytes_total 5`, `stockade_processes{state="running"} 0`} {
		if !strings.Contains(string(text), "\n"+line+"\n") {
			t.Errorf("the metrics do not show %s", line)
		}
	}

	fin, err := w.tenant.FinishRun(ctx, run.ID, client.FinishRequest{})
	w.ok(err)
	if !fin.Quiescent {
		t.Errorf("%+v", fin)
	}
	if _, err := c.Process(p.Handle()).Get(ctx); !client.IsCode(err, client.Unauthenticated) {
		t.Errorf("the token of a finished run: %v", err)
	}
	w.ok(w.tenant.RemoveBox(ctx, b.ID))
	if _, err := w.tenant.Box(ctx, b.ID); !client.IsCode(err, client.NotFound) {
		t.Errorf("%v", err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestEveryByteArrivesThroughRestartsOfTheServer(t *testing.T) {
	w := newWhole(t)
	ctx := bounded(t)
	c, _, _ := w.run()
	const size = 64 << 20
	req := sh("r1", "head -c "+strconv.Itoa(size)+" /dev/urandom | tee /tmp/x; sha256sum /tmp/x >&2")
	req.Limits.SpoolBytes = 16 << 20 // less than is printed: the child waits for what is acknowledged
	p, err := c.Open(ctx, req)
	w.ok(err)
	sum, n := sha256.New(), &counter{}
	var stderr bytes.Buffer
	got := make(chan error, 1)
	go func() {
		_, err := p.Copy(ctx, io.MultiWriter(sum, n), &stderr, client.OutputOptions{Ack: true})
		got <- err
	}()
	for i := range 3 {
		hosttest.Eventually(t, "more output arrives", func() bool { return n.n.Load() > int64(i+1)*size/5 })
		w.stop()
		w.start()
	}
	w.ok(<-got)
	if want := fmt.Sprintf("%x", sum.Sum(nil)); n.n.Load() != size || !strings.HasPrefix(stderr.String(), want) {
		t.Errorf("%d bytes with digest %s came; the child says %s", n.n.Load(), want, stderr.String())
	}
	if exit, err := p.Wait(ctx); err != nil || exit.Code == nil || *exit.Code != 0 {
		t.Errorf("%+v %v", exit, err)
	}
}

func TestAttachToATerminal(t *testing.T) {
	w := newWhole(t)
	ctx := bounded(t)
	c, _, _ := w.run()
	p, err := c.Open(ctx, client.OpenRequest{RequestID: "tty", Argv: []string{"/bin/sh"}, Stdin: true, PTY: &client.Winsize{Rows: 11, Cols: 44}})
	w.ok(err)
	a, err := p.Attach(ctx, "")
	w.ok(err)
	defer a.Close()
	lines := make(chan string, 1)
	go func() {
		defer close(lines)
		var all string
		for {
			chunk, err := a.Next(ctx)
			if err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("%v, after %q", err, all)
				}
				return
			}
			all += string(chunk.Data)
			for {
				line, rest, ok := strings.Cut(all, "\n")
				if !ok {
					break
				}
				all = rest
				// The prompt may stand before it, and the terminal echoes the command.
				if _, size, ok := strings.Cut(line, "size "); ok {
					lines <- strings.TrimSpace(size)
				}
			}
		}
	}()
	stdin := a.Stdin(ctx, 0)
	fmt.Fprintln(stdin, `echo "si""ze $(stty size)"`)
	if line := <-lines; line != "11 44" {
		t.Errorf("%q", line)
	}
	w.ok(a.Resize(ctx, client.Winsize{Rows: 22, Cols: 88}))
	fmt.Fprintln(stdin, `echo "si""ze $(stty size)"`)
	if line := <-lines; line != "22 88" {
		t.Errorf("%q", line)
	}
	fmt.Fprint(stdin, "exit 3\n")
	for range lines { //nolint:revive // until the socket ends
	}
	if exit, err := p.Wait(ctx); err != nil || exit.Code == nil || *exit.Code != 3 {
		t.Errorf("%+v %v", exit, err)
	}
}

// counter counts what is written.
type counter struct{ n atomic.Int64 }

func (c *counter) Write(p []byte) (int, error) { c.n.Add(int64(len(p))); return len(p), nil }

// BenchmarkChildToReader measures output all the way: child, pipe, shim, log on
// disk, host program, broker, API, client.
func BenchmarkChildToReader(b *testing.B) {
	w := newWhole(b)
	c, _, _ := w.run()
	const size = 1 << 30
	b.SetBytes(size)
	for i := range b.N {
		req := client.OpenRequest{RequestID: fmt.Sprint("r", i), Argv: []string{"head", "-c", strconv.Itoa(size), "/dev/zero"}}
		p, err := c.Open(b.Context(), req)
		w.ok(err)
		done, err := p.Copy(b.Context(), io.Discard, nil, client.OutputOptions{Ack: true})
		if err != nil || done.Stdout != size {
			b.Fatalf("%d bytes, %v", done.Stdout, err)
		}
	}
}
