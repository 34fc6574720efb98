package desired

import (
	"maps"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

func TestMain(m *testing.M) { need.Main(m) }

func TestShapes(t *testing.T) {
	t.Parallel()
	full := bind("x", "w", 1, 1, digestA)
	foreign := full
	foreign.InstanceUUID = "other"
	installation := full.Workspace()
	installation.InstallationUUID = "x"
	for _, tab := range []*Table{New("i", 5), NewSingle("i", 5)} {
		for _, c := range []struct {
			b    pluginwire.Context
			want errdefs.Code
		}{
			{pluginwire.Context{}, errdefs.Invalid}, {full.Workspace(), errdefs.Invalid}, {installation, errdefs.Invalid}, {foreign, errdefs.Denied},
		} {
			_, _, err := tab.Activate(c.b)
			for what, err := range map[string]error{"candidate": tab.Candidate(c.b), "authorise": tab.Authorise(c.b), "deactivate": tab.Deactivate(c.b), "activate": err} {
				if !errdefs.Is(err, c.want) {
					t.Errorf("%s of %v: %v, want %s", what, c.b, err, c.want)
				}
			}
		}
		if len(tab.Watermarks())+len(tab.Applied()) != 0 {
			t.Errorf("refused bindings are remembered")
		}
	}
}

func TestHigherGenerationTakesAnyRevision(t *testing.T) {
	t.Parallel()
	tab := New("i", 1)
	activate(t, tab, bind("x", "w", 1, 9, digestA))
	old := bind("x", "w", 1, 9, digestA)
	b := bind("x", "w", 2, 1, digestB)
	if prev, had, err := tab.Activate(b); err != nil || !had || prev != old {
		t.Fatalf("a higher generation with a lower revision: %v, %v, %v", prev, had, err)
	}
	// The fenced one is nothing any more, and comes back neither by action nor as a candidate.
	for what, err := range map[string]error{"authorise": tab.Authorise(old), "candidate": tab.Candidate(old), "deactivate": tab.Deactivate(old)} {
		if err == nil {
			t.Errorf("%s of a fenced binding", what)
		}
	}
}

// TestMaxInstallations: a removed installation holds its place until a reconcile
// forgets it.
func TestMaxInstallations(t *testing.T) {
	t.Parallel()
	tab := New("i", 1)
	x, y := bind("x", "w", 1, 1, digestA), bind("y", "w", 1, 1, digestA)
	activate(t, tab, x)
	if err := tab.Deactivate(x); err != nil {
		t.Fatal(err)
	}
	if err := tab.Candidate(y); !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "fence capacity") {
		t.Fatalf("a second installation: %v", err)
	}
	if err := tab.Candidate(x); !errdefs.Is(err, errdefs.Conflict) {
		t.Fatalf("the removed binding again: %v", err)
	}
	if n := tab.Collect(nil, tab.Watermarks()); n != 1 {
		t.Fatalf("an empty reconcile forgot %d", n)
	}
	activate(t, tab, y)
}

// TestTakenIn: what a single-Workspace runtime took in without an apply is current,
// can be replaced and removed, and leaves nothing.
func TestTakenIn(t *testing.T) {
	t.Parallel()
	tab := NewSingle("i", 2)
	x1, x2, x3 := bind("x", "w", 1, 1, digestA), bind("x", "w", 1, 2, digestA), bind("x", "w", 1, 3, digestA)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(tab.Authorise(x1))
	if len(tab.Applied())+len(tab.Watermarks()) != 0 {
		t.Error("taken in as if applied")
	}
	if err := tab.Authorise(x2); !errdefs.Is(err, errdefs.Denied) {
		t.Errorf("an action changed the revision: %v", err)
	}
	must(tab.Deactivate(x1))
	must(tab.Authorise(x1))
	activate(t, tab, x2) // now it is applied
	if len(tab.Applied()) != 1 || len(tab.Watermarks()) != 1 {
		t.Error("not applied")
	}
	must(tab.Deactivate(x2))
	for _, b := range []pluginwire.Context{x1, x2} {
		if err := tab.Authorise(b); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("%v came back: %v", b, err)
		}
	}
	must(tab.Authorise(x3))
	must(tab.Authorise(bind("y", "w", 1, 1, digestA)))
	if err := tab.Authorise(bind("z", "w", 1, 1, digestA)); !errdefs.Is(err, errdefs.Exhausted) {
		t.Errorf("beyond the capacity: %v", err)
	}
}

// TestCollectKeepsWhatHappenedMeanwhile: an apply between the snapshot and the
// collection is not forgotten, even if the installation was removed again.
func TestCollectKeepsWhatHappenedMeanwhile(t *testing.T) {
	t.Parallel()
	tab := New("i", 5)
	one, two := bind("x", "w", 1, 1, digestA), bind("x", "w", 1, 2, digestA)
	activate(t, tab, one)
	if err := tab.Deactivate(one); err != nil {
		t.Fatal(err)
	}
	snapshot := tab.Watermarks()
	activate(t, tab, two)
	if err := tab.Deactivate(two); err != nil {
		t.Fatal(err)
	}
	if n := tab.Collect(nil, snapshot); n != 0 || tab.Candidate(one) == nil || tab.Candidate(two) == nil {
		t.Errorf("%d forgotten; an old binding may come back", n)
	}
}

func TestPin(t *testing.T) {
	t.Parallel()
	shared, single := New("i", 5), NewSingle("i", 5)
	w := bind("x", "w", 1, 1, digestA)
	if err := shared.Pin(w); !errdefs.Is(err, errdefs.Denied) {
		t.Errorf("a shared runtime was pinned: %v", err)
	}
	if _, ok := single.Pinned(); ok {
		t.Error("pinned from the beginning")
	}
	if err := single.Pin(pluginwire.Context{InstanceUUID: "other", WorkspaceUUID: "w", PlacementGeneration: 1}); !errdefs.Is(err, errdefs.Denied) {
		t.Errorf("pinned to another instance: %v", err)
	}
	for range 2 {
		if err := single.Pin(w); err != nil {
			t.Fatal(err)
		}
	}
	if ws, ok := single.Pinned(); !ok || ws != w.Workspace() {
		t.Errorf("pinned to %v", ws)
	}
	for _, other := range []pluginwire.Context{bind("y", "v", 1, 1, digestA), bind("y", "w", 2, 1, digestA)} {
		if err := single.Authorise(other); !errdefs.Is(err, errdefs.Denied) {
			t.Errorf("authorised %v: %v", other, err)
		}
		if _, ok := single.Current("y"); ok {
			t.Error("a refused binding is current")
		}
	}
	// Desired state is not held to the pin: the control plane may place what it wants.
	if err := single.Candidate(bind("y", "v", 1, 1, digestA)); err != nil {
		t.Error(err)
	}
}

func activate(t *testing.T, tab *Table, b pluginwire.Context) {
	t.Helper()
	if _, _, err := tab.Activate(b); err != nil {
		t.Fatal(err)
	}
}

func genBinding(ids int) *rapid.Generator[pluginwire.Context] {
	return rapid.Custom(func(t *rapid.T) pluginwire.Context {
		return bind(string(rune('a'+rapid.IntRange(0, ids-1).Draw(t, "id"))), rapid.SampledFrom([]string{"w", "w", "w", "v"}).Draw(t, "ws"),
			rapid.Int64Range(1, 5).Draw(t, "gen"), rapid.Int64Range(1, 5).Draw(t, "rev"), rapid.SampledFrom([]string{digestA, digestB}).Draw(t, "digest"))
	})
}

// TestOneLives: whoever does what the table says, starting what it activates and
// ending what it returns, never has two bindings of one installation.
func TestOneLives(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tab := New("i", rapid.IntRange(1, 6).Draw(t, "max"))
		live := map[pluginwire.Context]bool{}
		best := map[string]pluginwire.Context{} // since the watermark was forgotten
		snapshot := tab.Watermarks()
		t.Repeat(map[string]func(*rapid.T){
			"activate": func(t *rapid.T) {
				b := genBinding(8).Draw(t, "b")
				prev, had, err := tab.Activate(b)
				if err != nil {
					return
				}
				if top, ok := best[b.InstallationUUID]; ok && b != top && !newer(b, top) {
					t.Fatalf("%v was accepted after %v", b, top)
				}
				best[b.InstallationUUID] = b
				if had {
					delete(live, prev)
				}
				live[b] = true
			},
			"deactivate": func(t *rapid.T) {
				b := genBinding(8).Draw(t, "b")
				if cur, ok := tab.Current(b.InstallationUUID); ok && rapid.Bool().Draw(t, "current") {
					b = cur
				}
				if err := tab.Deactivate(b); err == nil {
					delete(live, b)
				}
			},
			"snapshot": func(*rapid.T) { snapshot = tab.Watermarks() },
			"collect": func(t *rapid.T) {
				keep := map[string]bool{rapid.StringMatching("[a-h]").Draw(t, "keep"): true}
				tab.Collect(keep, snapshot)
				for id := range best {
					if _, ok := tab.Watermarks()[id]; !ok {
						delete(best, id)
					}
				}
			},
			"": func(t *rapid.T) {
				active := tab.Applied()
				if len(active) != len(live) {
					t.Fatalf("%v live, %v current", live, active)
				}
				for b := range live {
					if active[b.InstallationUUID] != b || tab.Authorise(b) != nil {
						t.Fatalf("%v lives and is not current", b)
					}
				}
			},
		})
	})
}

// TestCandidatesAreAllOrNothing: a desired state is accepted as a whole exactly if
// each could be activated one after another, and asking changes nothing.
func TestCandidatesAreAllOrNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tab := New("i", rapid.IntRange(1, 6).Draw(t, "max"))
		for _, b := range rapid.SliceOfN(genBinding(8), 0, 10).Draw(t, "before") {
			if _, _, err := tab.Activate(b); err == nil && rapid.Bool().Draw(t, "remove") {
				if err := tab.Deactivate(b); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := rapid.SliceOfN(genBinding(8), 0, 6).Draw(t, "desired")
		before := clone(tab)
		err := tab.Candidates(want)
		if !equal(before, tab) {
			t.Fatal("asking changed the table")
		}
		try, ids, ok := clone(tab), map[string]bool{}, true
		for _, b := range want {
			_, _, err := try.Activate(b)
			ok = ok && err == nil && !ids[b.InstallationUUID]
			ids[b.InstallationUUID] = true
		}
		if ok != (err == nil) {
			t.Fatalf("%v; one after another: %v", err, ok)
		}
		if marks := tab.Watermarks(); maps.Equal(marks, tab.marks) {
			marks["new"] = bind("new", "w", 1, 1, digestA)
			if _, ok := tab.marks["new"]; ok {
				t.Fatal("the copy is the table")
			}
		}
	})
}
