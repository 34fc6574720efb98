package registration_test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
)

var (
	start   = time.Unix(1_700_000_000, 0)
	binding = pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1, InstallationUUID: "p", RuntimeRevision: 1,
		ArtifactDigest: strings.Repeat("a", 64)}
)

func TestACapabilityWorksOnce(t *testing.T) {
	t.Parallel()
	r := registration.New(8)
	want := registration.Grant{Author: "a", Name: "n", Binding: binding, Launch: 7}
	text, err := r.Issue(want, start)
	if err != nil {
		t.Fatal(err)
	}
	// The peers want at least 32 characters and no space.
	if !regexp.MustCompile(`^[A-Za-z0-9_-]{64}$`).MatchString(text) {
		t.Errorf("capability %q", text)
	}
	if got, ok := r.Peek(text, start); !ok || got != want || !r.Pending(text, start) {
		t.Errorf("peek: %+v %v", got, ok)
	}
	if got, err := r.Consume(text, start); err != nil || got != want {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := r.Consume(text, start); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("a replayed capability: %v", err)
	}
	if r.Pending(text, start) {
		t.Error("a used capability is pending")
	}
}

func TestCapabilitiesExpireAndAreBounded(t *testing.T) {
	t.Parallel()
	r := registration.New(2)
	first, _ := r.Issue(registration.Grant{}, start)
	if _, err := r.Issue(registration.Grant{}, start.Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Issue(registration.Grant{}, start); !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "capacity reached") {
		t.Errorf("a third: %v", err)
	}
	later := start.Add(registration.CapabilityLife)
	if r.Pending(first, later) {
		t.Error("an expired capability is pending")
	}
	if n := r.Count(later); n != 1 {
		t.Errorf("%d are pending", n)
	}
	if _, err := r.Consume(first, later); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("an expired one: %v", err)
	}
	// A clock that jumps back does not bring it to life again.
	if _, err := r.Consume(first, start); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("after the clock jumped back: %v", err)
	}
}

func TestRevocationSparesPools(t *testing.T) {
	t.Parallel()
	r := registration.New(8)
	own, _ := r.Issue(registration.Grant{Binding: binding}, start)
	pool, _ := r.Issue(registration.Grant{Binding: binding, Pool: binding.ArtifactDigest}, start)
	single, _ := r.Issue(registration.Grant{}, start)
	r.RevokeBinding(binding)
	if r.Pending(own, start) || !r.Pending(pool, start) || !r.Pending(single, start) {
		t.Error("a binding's revocation takes its own capability and no other")
	}
	r.RevokePool("")
	r.Revoke("never issued")
	r.Revoke(single)
	if !r.Pending(pool, start) || r.Pending(single, start) {
		t.Error("revoking one, and no pool")
	}
	r.RevokePool(binding.ArtifactDigest)
	if r.Count(start) != 0 {
		t.Error("a pool's capability is left")
	}
}

func TestDebugKeys(t *testing.T) {
	t.Parallel()
	d := registration.NewDebug()
	ws := binding.Workspace()
	key, expires, err := d.Issue(binding, start)
	if err != nil || !expires.Equal(start.Add(registration.DebugKeyLife)) {
		t.Fatalf("%v, %v", expires, err)
	}
	if again, e, _ := d.Issue(ws, start.Add(time.Hour)); again != key || !e.Equal(expires) {
		t.Error("asking again gives another key or a longer life")
	}
	other := ws
	other.WorkspaceUUID = "other"
	if k, _, _ := d.Issue(other, start); k == key {
		t.Error("two workspaces have one key")
	}
	if got, err := d.Check(key, start); err != nil || got != ws {
		t.Errorf("%+v, %v", got, err)
	}
	moved := ws
	moved.PlacementGeneration = 2
	fresh, _, _ := d.Issue(moved, start)
	if _, err := d.Check(key, start); !errdefs.Is(err, errdefs.Fenced) || !strings.Contains(err.Error(), "fenced") {
		t.Errorf("a key of the older generation: %v", err)
	}
	if k, _, err := d.Issue(ws, start); !errdefs.Is(err, errdefs.Fenced) || k != "" {
		t.Errorf("a key for the older generation: %v", err)
	}
	if got, err := d.Check(fresh, start); err != nil || got != moved {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{"", "guess", fresh} {
		if _, err := d.Check(text, start.Add(registration.DebugKeyLife)); !errdefs.Is(err, errdefs.Unauthenticated) || !strings.Contains(err.Error(), "expired") {
			t.Errorf("%q when expired: %v", text, err)
		}
	}
	if _, err := d.Check(key, start.Add(registration.DebugKeyLife)); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("the replaced key when expired: %v", err)
	}
}

// TestClockJumps: capabilities and debug keys live as long as they were given, even
// when the wall clock is set forward or back meanwhile.
func TestClockJumps(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, by := range []time.Duration{-48 * time.Hour, 48 * time.Hour} {
		r, d := registration.New(8), registration.NewDebug()
		capability, err := r.Issue(registration.Grant{}, now)
		if err != nil {
			t.Fatal(err)
		}
		key, _, err := d.Issue(binding.Workspace(), now)
		if err != nil {
			t.Fatal(err)
		}
		later := plugintest.Jump(t, now, by)
		if _, err := d.Check(key, later); err != nil {
			t.Errorf("a debug key after a jump by %s: %v", by, err)
		}
		if again, _, err := d.Issue(binding.Workspace(), later); err != nil || again != key {
			t.Errorf("asked again after a jump by %s: another key, %v", by, err)
		}
		if !r.Pending(capability, later) || r.Count(later) != 1 {
			t.Errorf("a capability is gone after a jump by %s", by)
		}
		if r.Pending(capability, later.Add(registration.CapabilityLife)) {
			t.Errorf("a capability lives longer after a jump by %s", by)
		}
		if _, err := d.Check(key, later.Add(registration.DebugKeyLife)); err == nil {
			t.Errorf("a debug key lives longer after a jump by %s", by)
		}
	}
}
