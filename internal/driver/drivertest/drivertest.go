// Package drivertest is the conformance suite of package driver. It runs real
// processes over any driver and holds what a broker relies on: exactly-once
// start, a log without loss, input by offset, proof of the end, generations,
// and all of that across the death of the host program.
package drivertest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/driver"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/wire"
)

// Target is a driver under test.
type Target struct {
	Driver driver.Driver
	// Kill ends the host program with SIGKILL, as far as the driver's test can
	// reach it. With nil the tests that need it are skipped.
	Kill func()
}

// Run runs the suite. open makes a target of its own for each test and takes it
// away with t.Cleanup; the suite itself closes every process and removes every
// box before that.
func Run(t *testing.T, open func(t *testing.T) Target) {
	for name, test := range map[string]func(*testing.T, *bench){
		"Ensure":             ensure,
		"ExactlyOnce":        exactlyOnce,
		"LogAndExit":         logAndExit,
		"Stdin":              stdin,
		"Close":              closing,
		"Generations":        generations,
		"Watch":              watch,
		"HostKilled":         hostKilled,
		"StopRefuses":        stopRefuses,
		"UnknownIDForbidden": unknownID,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			target := open(t)
			b := &bench{t: t, Target: target}
			if err := target.Driver.Ensure(b.ctx()); err != nil {
				t.Fatalf("ensure: %v", err)
			}
			b.c = b.client(1)
			t.Cleanup(b.cleanup)
			test(t, b)
		})
	}
}

func ensure(t *testing.T, b *bench) {
	info, err := b.client(0).Info(b.ctx())
	if err != nil || info.Protocol != wire.Protocol || !ident.Valid(ident.Host, info.HostID) || info.BootID == "" {
		t.Fatalf("info %+v, %v", info, err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := b.Driver.Ensure(b.ctx()); err != nil {
				t.Errorf("ensure again: %v", err)
			}
		})
	}
	wg.Wait()
	again, err := b.client(0).Info(b.ctx())
	if err != nil || again.HostID != info.HostID || !again.Started.Equal(info.Started) {
		t.Errorf("ensure changed something: %+v, %v; before %+v", again, err, info)
	}
	if b.Driver.Kind() == "" {
		t.Error("no kind")
	}
	ctx, cancel := context.WithCancel(b.ctx())
	cancel()
	if c, err := b.Driver.Dial(ctx); err == nil {
		c.Close() // a driver may be faster than its context
	}
}

func exactlyOnce(t *testing.T, b *bench) {
	spec := sh(b.box(), "echo ran >> /workspace/count; cat /workspace/count")
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			if _, err := b.client(1).Start(b.ctx(), spec); err != nil {
				t.Errorf("start: %v", err)
			}
		})
	}
	wg.Wait()
	b.ended(spec.ID)
	if st, err := b.c.Start(b.ctx(), spec); err != nil || st.Phase != wire.PhaseEnded {
		t.Errorf("start after the end: %+v, %v", st, err)
	}
	if out, _ := b.read(spec.ID); string(out) != "ran\n" {
		t.Errorf("it ran %q", out)
	}
	other := spec
	other.Cwd = "."
	other.Argv = []string{"/bin/true"}
	if _, err := b.c.Start(b.ctx(), other); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("another spec: %v", err)
	}
}

func logAndExit(t *testing.T, b *bench) {
	spec := b.start(sh(b.box(), "head -c 5000000 /dev/urandom > /tmp/x; sha256sum < /tmp/x >&2; cat /tmp/x; exit 3"))
	out, errs := b.read(spec.ID)
	sum := sha256.Sum256(out)
	if len(out) != 5000000 || !strings.HasPrefix(string(errs), hex.EncodeToString(sum[:])) {
		t.Errorf("%d bytes of digest %x; the process says %s", len(out), sum, errs)
	}
	st := b.ended(spec.ID)
	if st.Exit.Kind != api.ExitExited || *st.Exit.Code != 3 || st.Proof == nil || st.Log.Stdout != 5000000 {
		t.Errorf("%+v %+v", st, st.Exit)
	}
	if _, err := b.c.Log(b.ctx(), spec.ID, host.LogQuery{Cursor: st.Log.Next + 1}); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("beyond the end: %v", err)
	}
	missing := b.start(sh(b.box(), "exec /no/such/program"))
	if st := b.ended(missing.ID); st.Exit.Kind == api.ExitExited && *st.Exit.Code == 0 {
		t.Errorf("a missing program: %+v", st.Exit)
	}
	nothing := sh(spec.Box, "")
	nothing.Argv = []string{"/no/such/program"}
	b.start(nothing)
	if st := b.ended(nothing.ID); st.Exit.Kind != api.ExitSpawnFailed || st.Exit.Detail == "" {
		t.Errorf("no such program: %+v", st.Exit)
	}
}

func stdin(t *testing.T, b *bench) {
	spec := sh(b.box(), "cat")
	spec.Stdin = true
	b.start(spec)
	data := make([]byte, 3<<20)
	rand.Read(data)
	var at int64
	b.eventually("the input is written", func() bool {
		end := min(int64(len(data)), at+500_000)
		st, err := b.c.WriteStdin(b.ctx(), spec.ID, at, data[at:end], end == int64(len(data)))
		if err != nil && !errdefs.Is(err, errdefs.Exhausted) {
			t.Errorf("write at %d: %v", at, err)
			return true
		}
		if err == nil {
			at = max(st.Accepted-1000, 0) // some of it twice: repeating is harmless
			return st.EOF
		}
		return false
	})
	out, _ := b.read(spec.ID)
	if sha256.Sum256(out) != sha256.Sum256(data) {
		t.Errorf("%d of %d bytes came back, or others", len(out), len(data))
	}
}

func closing(t *testing.T, b *bench) {
	spec := b.start(sh(b.box(), `trap "" TERM; (trap "" TERM; setsid sleep 1000 & sleep 1000) & echo up; wait; sleep 1000`))
	b.said(spec.ID, 3)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			st, err := b.client(1).CloseProc(b.ctx(), spec.ID, wire.Close{Reason: "enough", GraceMillis: 50})
			if err != nil || st.Phase != wire.PhaseEnded || st.Proof == nil || st.Proof.BootID == "" || st.Proof.EmptyAt.IsZero() {
				t.Errorf("close: %+v, %v", st, err)
			}
		})
	}
	wg.Wait()
	if st := b.ended(spec.ID); st.Exit.Kind != api.ExitSignalled || st.Exit.Signal != "SIGKILL" {
		t.Errorf("exit %+v", st.Exit)
	}
	polite := b.start(sh(spec.Box, `trap "echo bye; exit 4" TERM; echo up; while :; do sleep 0.05; done`))
	b.said(polite.ID, 3)
	if st, err := b.c.CloseProc(b.ctx(), polite.ID, wire.Close{GraceMillis: 60_000}); err != nil || st.Proof == nil || st.Exit.Kind != api.ExitExited || *st.Exit.Code != 4 {
		t.Errorf("a polite one: %+v, %v", st, err)
	}
	if out, _ := b.read(polite.ID); string(out) != "up\nbye\n" {
		t.Errorf("it said %q", out)
	}
}

func generations(t *testing.T, b *bench) {
	spec := b.start(sh(b.box(), "echo up; sleep 1000"))
	b.said(spec.ID, 3)
	body, err := b.c.Log(b.ctx(), spec.ID, host.LogQuery{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	stream := host.NewFrameReader(body, 0)
	if _, err := stream.Next(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.client(7).Procs(b.ctx()); err != nil {
		t.Fatal(err)
	}
	for {
		batch, err := stream.Next()
		if err != nil {
			break // ended
		}
		if s := batch.Status; s != nil {
			if s.Error == nil || s.Error.Code != errdefs.Denied {
				t.Errorf("the open stream ended with %+v", s)
			}
			break
		}
	}
	for what, f := range map[string]func() error{
		"start": func() error { _, err := b.c.Start(b.ctx(), sh(spec.Box, "true")); return err },
		"close": func() error { _, err := b.c.CloseProc(b.ctx(), spec.ID, wire.Close{}); return err },
		"list":  func() error { _, err := b.c.Procs(b.ctx()); return err },
	} {
		if err := f(); !errdefs.Is(err, errdefs.Denied) {
			t.Errorf("%s by an old generation: %v", what, err)
		}
	}
	b.c = b.client(7)
	if st := b.until(spec.ID, "is there", func(wire.ProcState) bool { return true }); st.Phase != wire.PhaseRunning {
		t.Errorf("the process: %+v", st)
	}
}

func watch(t *testing.T, b *bench) {
	box := b.box()
	ctx, cancel := context.WithCancel(b.ctx())
	defer cancel()
	seen := make(chan wire.ProcState, 1000)
	over := make(chan error, 1)
	go func() { over <- b.c.Watch(ctx, func(st wire.ProcState) { seen <- st }) }()
	waiting := map[string]bool{}
	for range 5 {
		waiting[b.start(sh(box, "exit 6")).ID] = true
	}
	for len(waiting) > 0 {
		select {
		case st := <-seen:
			if st.Phase == wire.PhaseEnded {
				delete(waiting, st.ID)
			}
		case err := <-over:
			t.Fatalf("watch ended: %v", err)
		}
	}
	cancel()
	<-over
}

func hostKilled(t *testing.T, b *bench) {
	if b.Kill == nil {
		t.Skip("this driver's test cannot kill the host program")
	}
	box := b.box()
	spec := b.start(sh(box, `head -c 8000000 /dev/urandom > /tmp/x; sha256sum < /tmp/x >&2
for i in $(seq 0 79); do dd if=/tmp/x bs=100000 skip=$i count=1 2>/dev/null; sleep 0.01; done; exit 11`))
	quiet := b.start(sh(box, "echo up; sleep 1000"))
	b.said(quiet.ID, 3)
	before, err := b.c.Info(b.ctx())
	if err != nil {
		t.Fatal(err)
	}
	var out, errs []byte
	var wg sync.WaitGroup
	wg.Go(func() { out, errs = b.read(spec.ID) })
	for range 3 {
		b.Kill()
		if err := b.Driver.Ensure(b.ctx()); err != nil {
			t.Errorf("ensure after the host's death: %v", err)
		}
	}
	wg.Wait()
	sum := sha256.Sum256(out)
	if len(out) != 8000000 || !strings.HasPrefix(string(errs), hex.EncodeToString(sum[:])) {
		t.Errorf("%d bytes of digest %x; the process says %s", len(out), sum, errs)
	}
	if st := b.ended(spec.ID); st.Exit.Kind != api.ExitExited || *st.Exit.Code != 11 || st.Proof == nil {
		t.Errorf("%+v %+v", st, st.Exit)
	}
	after, err := b.c.Info(b.ctx())
	if err != nil || after.HostID != before.HostID || after.Started.Equal(before.Started) {
		t.Errorf("host %+v, %v; before %+v", after, err, before)
	}
	if st, err := b.c.CloseProc(b.ctx(), quiet.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Errorf("close of what another host program started: %+v, %v", st, err)
	}
}

func stopRefuses(t *testing.T, b *bench) {
	s, ok := b.Driver.(driver.Stopper)
	if !ok {
		t.Skip("this driver does not stop its host program")
	}
	spec := b.start(sh(b.box(), "echo up; sleep 1000"))
	b.said(spec.ID, 3)
	if err := s.Stop(b.ctx()); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("stop with a living process: %v", err)
	}
	if st, err := b.c.CloseProc(b.ctx(), spec.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Fatalf("close: %+v, %v", st, err)
	}
	for range 2 {
		if err := s.Stop(b.ctx()); err != nil {
			t.Errorf("stop: %v", err)
		}
	}
	var conn net.Conn
	var err error
	if conn, err = b.Driver.Dial(b.ctx()); err == nil {
		conn.Close()
		t.Error("it still answers")
	} else if !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("dial: %v", err)
	}
	if err := b.Driver.Ensure(b.ctx()); err != nil {
		t.Fatalf("ensure after stop: %v", err)
	}
	if st := b.ended(spec.ID); st.Proof == nil {
		t.Errorf("what was before: %+v", st)
	}
}

func unknownID(t *testing.T, b *bench) {
	spec := sh(b.box(), "echo ran")
	if st, err := b.c.CloseProc(b.ctx(), spec.ID, wire.Close{}); err != nil || st.Proof == nil || st.Proof.Method != "never_started" {
		t.Fatalf("close: %+v, %v", st, err)
	}
	if st, err := b.c.Start(b.ctx(), spec); err != nil || st.Phase != wire.PhaseEnded || st.Log.Next != 0 {
		t.Errorf("start: %+v, %v", st, err)
	}
}
