package host_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

func itoa(n int) string { return strconv.Itoa(n) }

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestInfoAndDirectory(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	info, err := h.As(0).Info(ctx)
	if err != nil || info.Protocol != wire.Protocol || info.Version != hosttest.Version || !strings.HasPrefix(info.Runtime, "runc ") {
		t.Fatalf("%+v, %v", info, err)
	}
	if _, err := h.As(0).Procs(ctx); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("without a generation: %v", err)
	}
	st, err := os.Stat(filepath.Join(h.Dir, host.SocketFile))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}
	out, err := exec.Command(h.Exe, "serve", "--dir", h.Dir).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "another host program") {
		t.Errorf("a second host program: %v, %s", err, out)
	}
	h.Restart()
	again, err := h.Client().Info(ctx)
	if err != nil || again.HostID != info.HostID || again.BootID != info.BootID {
		t.Errorf("after a restart: %+v, %v; before: %+v", again, err, info)
	}
}

func TestAnOldGenerationCanDoNothing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := h.Run(hosttest.Sh(h.Box(), "echo up; sleep 1000"))
	h.Phase(spec.ID, wire.PhaseRunning)
	old := h.Client() // its connections stay open
	body, err := old.Log(ctx, spec.ID, host.LogQuery{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	stream := host.NewFrameReader(body, 0)
	if b, err := stream.Next(); err != nil || len(b.Frames) == 0 {
		t.Fatalf("%+v, %v", b, err)
	}
	watched := make(chan error, 1)
	go func() { watched <- old.Watch(ctx, func(wire.ProcState) {}) }()

	if _, err := h.As(2).Procs(ctx); err != nil {
		t.Fatal(err)
	}
	if b, err := stream.Next(); err != nil || b.Status == nil || b.Status.Error == nil || b.Status.Error.Code != errdefs.Denied {
		t.Errorf("the open stream: %+v, %v", b, err)
	}
	if err := <-watched; err == nil {
		t.Error("the open watch went on")
	}
	denied := func(what string, err error) {
		t.Helper()
		if !errdefs.Is(err, errdefs.Denied) || !host.Refused(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	everything := func(c *host.Client) {
		_, err := c.Procs(ctx)
		denied("list", err)
		_, err = c.Start(ctx, hosttest.Sh(spec.Box, "true"))
		denied("start", err)
		_, err = c.CloseProc(ctx, spec.ID, wire.Close{})
		denied("close", err)
		_, err = c.Log(ctx, spec.ID, host.LogQuery{})
		denied("log", err)
		_, err = c.WriteStdin(ctx, spec.ID, 0, nil, true)
		denied("stdin", err)
		denied("signal", c.Signal(ctx, spec.ID, "SIGTERM"))
		denied("forget", c.Forget(ctx, spec.ID))
		denied("lease", c.SetLease(ctx, time.Hour))
		denied("remove box", c.RemoveBox(ctx, spec.Box))
		denied("shutdown", c.Shutdown(ctx, true))
		_, err = c.Info(ctx)
		denied("info", err)
	}
	everything(old)
	h.Generation = 2
	h.Restart()
	everything(h.As(1))
	if st := h.Phase(spec.ID, wire.PhaseRunning); st.Phase != wire.PhaseRunning {
		t.Errorf("the process: %+v", st)
	}
}

func TestShutdown(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := h.Run(hosttest.Sh(h.Box(), "echo up; sleep 1000"))
	h.Phase(spec.ID, wire.PhaseRunning)
	if err := h.Client().Shutdown(ctx, false); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("with a living process: %v", err)
	}
	// A stream that is open does not hold it up.
	body, err := h.Client().Log(ctx, spec.ID, host.LogQuery{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if err := h.Client().Shutdown(ctx, true); err != nil {
		t.Fatal(err)
	}
	hosttest.Eventually(t, "the host program is gone", func() bool {
		held, err := host.Locked(h.Dir)
		return err == nil && !held
	})
	h.Restart()
	if st, err := h.Client().Proc(ctx, spec.ID); err != nil || st.Phase != wire.PhaseRunning {
		t.Errorf("after it: %+v, %v", st, err)
	}
}

func TestReadingALog(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := hosttest.Sh(h.Box(), "printf 0123456789; read x; printf abc")
	spec.Stdin = true
	h.Run(spec)
	read := func(q host.LogQuery) (string, *wire.StatusFrame) {
		t.Helper()
		body, err := h.Client().Log(ctx, spec.ID, q)
		if err != nil {
			t.Fatalf("%+v: %v", q, err)
		}
		defer body.Close()
		r := host.NewFrameReader(body, q.Cursor)
		var got []byte
		for {
			b, err := r.Next()
			if err != nil {
				t.Fatalf("%+v: %v", q, err)
			}
			for _, p := range host.Frames(b.Frames) {
				got = append(got, p...)
			}
			if b.Status != nil {
				return string(got), b.Status
			}
		}
	}
	if got, st := read(host.LogQuery{Wait: 20 * time.Second}); got != "0123456789" || st.EOF || st.Next != 10 {
		t.Errorf("waiting: %q, %+v", got, st)
	}
	if got, st := read(host.LogQuery{Cursor: 3, MaxBytes: 4}); got != "3456" || st.Next != 7 || st.EOF {
		t.Errorf("inside: %q, %+v", got, st)
	}
	if got, st := read(host.LogQuery{Cursor: 10}); got != "" || st.Next != 10 || st.EOF {
		t.Errorf("at the end: %q, %+v", got, st)
	}
	if got, st := read(host.LogQuery{Cursor: 10, Wait: 50 * time.Millisecond}); got != "" || st.EOF {
		t.Errorf("waiting for nothing: %q, %+v", got, st)
	}
	for _, q := range []host.LogQuery{{Cursor: 11}, {Cursor: -1}, {Cursor: 1 << 60}, {Wait: time.Hour}, {MaxBytes: 1 << 40}} {
		if body, err := h.Client().Log(ctx, spec.ID, q); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", q, err)
			if err == nil {
				body.Close()
			}
		}
	}
	// Many wait for the same byte.
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if got, _ := read(host.LogQuery{Cursor: 10, Wait: 20 * time.Second}); got != "abc" {
				t.Errorf("one of many: %q", got)
			}
		})
		wg.Go(func() {
			if got, st := read(host.LogQuery{Cursor: 5, Follow: true}); got != "56789abc" || !st.EOF {
				t.Errorf("a follower: %q, %+v", got, st)
			}
		})
	}
	if _, err := h.Client().WriteStdin(ctx, spec.ID, 0, []byte("x\n"), true); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if got, st := read(host.LogQuery{Cursor: 10}); got != "abc" || !st.EOF {
		t.Errorf("after the end: %q, %+v", got, st)
	}
}

func TestDroppedOutputIsAnExactGap(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	spec := hosttest.Sh(h.Box(), "head -c 3000000 /dev/zero")
	spec.Overflow, spec.SpoolBytes = api.OverflowDropOldest, 1<<20
	h.Run(spec)
	end := h.Phase(spec.ID, wire.PhaseEnded)
	body, err := h.Client().Log(context.Background(), spec.ID, host.LogQuery{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	r := host.NewFrameReader(body, 0)
	var gap, got int64
	for {
		b, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		for h := range host.Frames(b.Frames) {
			got += int64(h.Length)
		}
		if b.Gap != nil {
			gap += b.Gap.To - b.Gap.From
		}
		if b.Status != nil {
			break
		}
	}
	if gap+got != 3000000 || gap == 0 || gap != end.Log.Oldest {
		t.Errorf("gap of %d, %d bytes, oldest kept %d", gap, got, end.Log.Oldest)
	}
}

// A reader that takes nothing holds up neither the process nor other readers.
func TestASlowReaderStallsOnlyItself(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := h.Run(hosttest.Sh(h.Box(), "head -c 30000000 /dev/zero"))
	var slow []io.ReadCloser
	for range 4 {
		body, err := h.Client().Log(ctx, spec.ID, host.LogQuery{Follow: true})
		if err != nil {
			t.Fatal(err)
		}
		defer body.Close()
		slow = append(slow, body)
	}
	if out, _ := h.Output(spec.ID); len(out) != 30000000 {
		t.Errorf("%d bytes", len(out))
	}
	h.Phase(spec.ID, wire.PhaseEnded)
	n, err := io.Copy(io.Discard, slow[0])
	if err != nil || n < 30000000 {
		t.Errorf("the slow one: %d bytes, %v", n, err)
	}
}

// raw sends a request as nobody's client would.
func raw(t *testing.T, h *hosttest.Host, method, path, body string, header http.Header) (int, api.Problem) {
	t.Helper()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return h.Dial(ctx) }, DisableKeepAlives: true}
	r, err := http.NewRequest(method, "http://host"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(wire.GenerationHeader, "1")
	for k, v := range header {
		r.Header[k] = v
	}
	resp, err := (&http.Client{Transport: tr}).Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	var p api.Problem
	if resp.Header.Get("Content-Type") == api.ProblemType {
		if err := json.Unmarshal(b, &p); err != nil {
			t.Errorf("%s %s: %v in %s", method, path, err, b)
		}
	}
	return resp.StatusCode, p
}

func TestHostileRequests(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	id := hosttest.NewID("proc")
	big := strings.Repeat("x", 5<<20)
	for _, c := range []struct {
		method, path, body string
		header             http.Header
		want               errdefs.Code
	}{
		{"GET", "/v1/nothing", "", nil, errdefs.NotFound},
		{"DELETE", "/v1/info", "", nil, errdefs.NotFound},
		{"GET", "/v1/procs", "", http.Header{wire.GenerationHeader: {"x"}}, errdefs.Invalid},
		{"GET", "/v1/procs", "", http.Header{wire.GenerationHeader: {"-1"}}, errdefs.Invalid},
		{"GET", "/v1/procs", "", http.Header{wire.GenerationHeader: {"99999999999999999999"}}, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id, "", nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id, "null", nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id, "[]", nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id, `{"id":"` + id + `","surprise":1}`, nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id, `{}{}`, nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id, big, nil, errdefs.Invalid},
		{"PUT", "/v1/procs/..%2f..%2fetc", `{"id":"../../etc"}`, nil, errdefs.Invalid},
		{"POST", "/v1/procs/..%2f..%2fetc/close", `{"reason":"","grace_ms":0}`, nil, errdefs.Invalid},
		{"POST", "/v1/procs/" + id + "/close", `{"reason":"","grace_ms":-1}`, nil, errdefs.Invalid},
		{"POST", "/v1/procs/" + id + "/close", `{"reason":"","grace_ms":99999999}`, nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id + "/stdin?offset=-1", "x", nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id + "/stdin?offset=0", "x", nil, errdefs.NotFound},
		{"PUT", "/v1/procs/" + id + "/stdin?offset=0", big, nil, errdefs.Invalid},
		{"PUT", "/v1/procs/" + id + "/stdin?offset=0&eof=maybe", "x", nil, errdefs.Invalid},
		{"POST", "/v1/procs/" + id + "/ack", "", nil, errdefs.Invalid},
		{"GET", "/v1/procs/" + id + "/log", "", nil, errdefs.NotFound},
		{"PUT", "/v1/lease", `{"ms":0}`, nil, errdefs.Invalid},
		{"PUT", "/v1/lease", `{"ms":9223372036854775807}`, nil, errdefs.Invalid},
		{"POST", "/v1/shutdown?keep=perhaps", "", nil, errdefs.Invalid},
		{"PUT", "/v1/boxes/x", `{"id":"y","limits":{}}`, nil, errdefs.Invalid},
		{"GET", "/v1/boxes/..%2f..", "", nil, errdefs.NotFound},
		{"PUT", "/v1/boxes/" + hosttest.NewID("box") + "/files?path=/workspace", "not a tar", nil, errdefs.NotFound},
		{"DELETE", "/v1/images/sha256:nothing", "", nil, ""},
	} {
		status, p := raw(t, h, c.method, c.path, c.body, c.header)
		if c.want != "" && (p.Code != c.want || status != api.Status(c.want) || p.Detail == "") {
			t.Errorf("%s %s: %d %+v, want %s", c.method, c.path, status, p, c.want)
		}
		if p.Code == errdefs.Internal {
			t.Errorf("%s %s: %+v", c.method, c.path, p)
		}
	}
	conn, err := h.Dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, _ = conn.Write(append([]byte("GET / HTTP/1.1\r\nHost: x\r\nX: "), bytes.Repeat([]byte("y"), 64<<10)...))
	_, _ = io.Copy(io.Discard, conn)
	if _, err := h.Client().Info(context.Background()); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Join(h.Dir, "procs")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestLease(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	box := h.Box()
	if err := h.Client().SetLease(ctx, 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	spec := h.Run(hosttest.Sh(box, "sleep 1000"))
	h.Phase(spec.ID, wire.PhaseRunning)
	h.Restart()
	before, err := os.ReadFile(filepath.Join(h.Dir, "lease"))
	if err != nil {
		t.Fatal(err)
	}
	other := h.Run(hosttest.Sh(box, "sleep 1000"))
	if after, err := os.ReadFile(filepath.Join(h.Dir, "lease")); err != nil || !bytes.Equal(before, after) {
		t.Errorf("a start changed the lease the server gave: %v", err)
	}
	h.Phase(other.ID, wire.PhaseRunning)

	// One that starts when the lease is over, and no server asks for it, ends at once.
	h.Kill()
	if err := shim.WriteLease(filepath.Join(h.Dir, "lease"), time.Nanosecond); err != nil {
		t.Fatal(err)
	}
	late := hosttest.Sh(box, "sleep 1000")
	dir := filepath.Join(h.Dir, "procs", late.ID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := host.WriteSpec(dir, late); err != nil {
		t.Fatal(err)
	}
	h.Start()
	if st := h.Phase(late.ID, wire.PhaseEnded); st.Exit.Kind != api.ExitDeadline || st.Proof == nil {
		t.Errorf("exit %+v", st.Exit)
	}
	if st := h.Phase(spec.ID, wire.PhaseRunning); st.Phase != wire.PhaseRunning {
		t.Errorf("one whose shim heard of the longer lease: %+v", st)
	}
	// A server that starts something lives.
	fresh := h.Run(hosttest.Sh(box, "echo here; sleep 1000"))
	hosttest.Eventually(t, "it runs", func() bool {
		st, err := h.Client().Proc(ctx, fresh.ID)
		return err == nil && st.Phase == wire.PhaseRunning && st.Log.Next == 5
	})
}
