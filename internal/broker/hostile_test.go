package broker

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// Whatever a host says, what is made of it can be saved: a host must not be able
// to stop the owners of its processes by making every save fail.
func FuzzHostState(f *testing.F) {
	code := 3
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	for _, st := range []wire.ProcState{
		{Phase: wire.PhaseAccepted}, {Phase: wire.PhaseRunning, Started: &at},
		{Phase: wire.PhaseEnded, Ended: &at, Exit: &api.Exit{Kind: api.ExitExited, Code: &code}, Proof: &wire.Proof{Method: "cgroup", EmptyAt: at}},
		{Phase: wire.PhaseEnded, Exit: &api.Exit{Kind: api.ExitSignalled, Signal: "SIGKILL"}, Unproven: "no"},
		{Phase: wire.PhaseEnded, Proof: &wire.Proof{Method: "never_started", EmptyAt: at}},
		{Phase: wire.PhaseEnded, Log: api.LogState{Next: -1}, Stdin: api.StdinState{Accepted: 1 << 60}},
	} {
		b, err := json.Marshal(st)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, false)
		f.Add(b, true)
	}
	b, err := New(Config{Store: struct{ store.Store }{}, Signer: secret.NewSigner(), Targets: []TargetConfig{{Name: "local", Driver: &fakeHost{}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte, closing bool) {
		var st wire.ProcState
		if json.Unmarshal(data, &st) != nil {
			return
		}
		made := now()
		o := &owner{b: b, handle: secret.ID(ident.Process), target: b.targets["local"]}
		o.rec = store.Process{Handle: o.handle, RequestID: "r", Workspace: "w", Run: "run", Target: "local", Box: st.Box, Generation: 1,
			HostID: "host", BootID: "boot", Version: 1, State: api.StateRunning, Cleanup: api.CleanupPending, Created: made, Started: &made}
		if o.rec.Box == "" {
			o.rec.Box = "box"
		}
		if len(o.rec.Box) > ident.MaxName {
			return // no record has such a box
		}
		if closing {
			o.rec.State, o.rec.CloseAsked = api.StateClosing, &made
		}
		st.ID = o.handle
		r, err := reportOf(o.rec, "host", "boot", st)
		if err != nil {
			return
		}
		c := o.plan(r, wish{}, now())
		if err := c.rec.Validate(); err != nil {
			t.Fatalf("a report makes a record that cannot be saved: %v", err)
		}
		if err := c.change.Validate(&c.rec); err != nil {
			t.Fatalf("a report makes a change that cannot be saved: %v", err)
		}
		if c.rec.State == api.StateClosed && c.receipt == nil {
			t.Fatal("closed without a receipt")
		}
		if c.receipt != nil && !secret.Verify(c.receipt.PublicKey, c.receipt.Payload, c.receipt.Signature) {
			t.Fatal("a receipt that does not verify")
		}
		if e := c.rec.Exit; e != nil && e.Kind == api.ExitExited && (r.State.Phase != wire.PhaseEnded || r.State.Exit == nil) {
			t.Fatal("an exit from nothing")
		}
	})
}

// A host program that stays away is told of once, and again when it came and went.
func TestAHostThatStaysAwayIsToldOfOnce(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		var logged bytes.Buffer
		r.log = slog.New(slog.NewTextHandler(&logged, nil))
		r.restart()
		r.up()
		for range 2 {
			r.host.stop()
			time.Sleep(10 * time.Minute)
			r.host.start()
			r.up()
		}
		r.stop()
		// The connection that broke, and why there is no new one.
		if n := strings.Count(logged.String(), "does not answer"); n != 4 {
			r.t.Errorf("said %d times:\n%s", n, logged.String())
		}
		r.boot()
	})
}
