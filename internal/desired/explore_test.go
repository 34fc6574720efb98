package desired

import (
	"maps"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// The explorer walks every reachable table of two installations, two Workspaces,
// two generations, two revisions and two digests with every call, and compares
// each answer with the rules as said below, written a second time.

var (
	digestA = "aa" // the table does not look at digests, only for equality
	digestB = "bb"
)

func bind(id, ws string, gen, rev int64, digest string) pluginwire.Context {
	return pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: ws, PlacementGeneration: gen,
		InstallationUUID: id, RuntimeRevision: rev, ArtifactDigest: digest}
}

func bindings(digests ...string) (all []pluginwire.Context) {
	for _, id := range []string{"x", "y"} {
		for _, ws := range []string{"w", "v"} {
			for gen := int64(1); gen <= 2; gen++ {
				for rev := int64(1); rev <= 2; rev++ {
					for _, d := range digests {
						all = append(all, bind(id, ws, gen, rev, d))
					}
				}
			}
		}
	}
	return all
}

func clone(t *Table) *Table {
	c := *t
	c.current, c.marks = maps.Clone(t.current), maps.Clone(t.marks)
	return &c
}

func equal(a, b *Table) bool {
	return a.pin == b.pin && maps.Equal(a.current, b.current) && maps.Equal(a.marks, b.marks)
}

// state is a table as a comparable value.
type state [5]pluginwire.Context

func code(t *Table) state {
	return state{t.pin, t.current["x"], t.current["y"], t.marks["x"], t.marks["y"]}
}

// ordered is the candidate rule a second time, but for the capacity.
func ordered(t *Table, b pluginwire.Context) errdefs.Code {
	base, ok := t.current[b.InstallationUUID]
	if ok && base == b {
		return ""
	}
	if !ok {
		base, ok = t.marks[b.InstallationUUID]
	}
	higher := b.PlacementGeneration > base.PlacementGeneration ||
		b.PlacementGeneration == base.PlacementGeneration && b.RuntimeRevision > base.RuntimeRevision
	if ok && (b.WorkspaceUUID != base.WorkspaceUUID || !higher) {
		return errdefs.Conflict
	}
	return ""
}

func allowed(t *Table, b pluginwire.Context) errdefs.Code {
	if _, marked := t.marks[b.InstallationUUID]; ordered(t, b) == "" && !marked && len(t.marks) == t.max {
		return errdefs.Exhausted
	}
	return ordered(t, b)
}

func TestEveryTable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		table   *Table
		digests []string
		states  int
	}{
		{"shared, room for two", New("i", 2), []string{digestA, digestB}, 1089}, // (none, 16 current, 16 removed)²
		{"shared, room for one", New("i", 1), []string{digestA, digestB}, 65},
		{"single, room for two", NewSingle("i", 2), []string{digestA}, 0},
		{"single, room for one", NewSingle("i", 1), []string{digestA}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			all := bindings(c.digests...)
			seen := map[state]bool{code(c.table): true}
			todo := []*Table{c.table}
			steps := 0
			visit := func(next *Table) {
				steps++
				if k := code(next); !seen[k] {
					seen[k] = true
					todo = append(todo, next)
				}
			}
			for len(todo) > 0 {
				s := todo[0]
				todo = todo[1:]
				for _, b := range all {
					visit(checkActivate(t, s, b))
					visit(checkDeactivate(t, s, b))
					visit(checkAuthorise(t, s, b))
				}
				for _, next := range checkCollect(t, s) {
					visit(next)
				}
				if t.Failed() {
					t.Fatalf("in the table %v", code(s))
				}
			}
			if c.states != 0 && len(seen) != c.states {
				t.Errorf("%d tables are reachable, want %d", len(seen), c.states)
			}
			t.Logf("%d tables, %d steps", len(seen), steps)
		})
	}
}

// invariants of one step that is not Collect.
func invariants(t *testing.T, what string, s, next *Table) {
	t.Helper()
	for id, b := range next.current {
		mark, marked := next.marks[id]
		switch {
		case mark == b:
		case !next.single:
			t.Errorf("%s: %s is current and was not activated", what, id)
		case marked && (!newer(b, mark) || b.WorkspaceUUID != mark.WorkspaceUUID):
			t.Errorf("%s: %v is current after %v", what, b, mark)
		}
		if was, ok := s.current[id]; ok && b != was && (!newer(b, was) || b.WorkspaceUUID != was.WorkspaceUUID) {
			t.Errorf("%s: the current binding went from %v to %v", what, was, b)
		}
	}
	if len(next.marks) > next.max || len(next.current) > 2*next.max {
		t.Errorf("%s: %d watermarks and %d current of %d", what, len(next.marks), len(next.current), next.max)
	}
	for id, was := range s.marks {
		is, ok := next.marks[id]
		if !ok || is.WorkspaceUUID != was.WorkspaceUUID || is != was && !newer(is, was) {
			t.Errorf("%s: the watermark went from %v to %v", what, was, is)
		}
	}
	if !s.pin.IsZero() && next.pin != s.pin {
		t.Errorf("%s: the pin moved", what)
	}
}

func checkActivate(t *testing.T, s *Table, b pluginwire.Context) *Table {
	t.Helper()
	next := clone(s)
	want := allowed(s, b)
	if err := next.Candidate(b); errdefs.CodeOf(err) != want || !equal(s, next) {
		t.Errorf("candidate %v: %v, want %q and nothing changed", b, err, want)
	}
	prev, had, err := next.Activate(b)
	cur, running := s.current[b.InstallationUUID]
	switch {
	case errdefs.CodeOf(err) != want:
		t.Errorf("activate %v: %v, want %q", b, err, want)
	case err != nil:
		if !equal(s, next) || had {
			t.Errorf("activate %v was refused and changed the table", b)
		}
		if text := map[errdefs.Code]string{errdefs.Exhausted: "fence capacity", errdefs.Conflict: "stale"}[want]; !strings.Contains(err.Error(), text) &&
			!strings.Contains(err.Error(), "cannot move to another Workspace") {
			t.Errorf("activate %v: %q says neither %q nor that it cannot move", b, err, text)
		}
	case had != running || prev != cur || next.current[b.InstallationUUID] != b:
		t.Errorf("activate %v returned %v, %v", b, prev, had)
	}
	invariants(t, "activate", s, next)
	return next
}

func checkDeactivate(t *testing.T, s *Table, b pluginwire.Context) *Table {
	t.Helper()
	next := clone(s)
	err := next.Deactivate(b)
	cur, running := s.current[b.InstallationUUID]
	_, still := next.Current(b.InstallationUUID)
	if ok := running && cur == b; ok != (err == nil) || ok && still || !maps.Equal(next.marks, s.marks) {
		t.Errorf("deactivate %v: %v; current %v", b, err, still)
	}
	if err != nil && (!strings.Contains(err.Error(), "stale") || !equal(s, next)) {
		t.Errorf("deactivate %v: %v", b, err)
	}
	invariants(t, "deactivate", s, next)
	return next
}

func checkAuthorise(t *testing.T, s *Table, b pluginwire.Context) *Table {
	t.Helper()
	next := clone(s)
	err := next.Authorise(b)
	cur, running := s.current[b.InstallationUUID]
	var want errdefs.Code
	switch {
	case running && cur == b:
	case running:
		want = errdefs.Denied
	case !s.single:
		want = errdefs.NotFound
	case ordered(s, b) != "":
		want = ordered(s, b)
	case len(s.current) >= s.max:
		want = errdefs.Exhausted
	case !s.pin.IsZero() && s.pin != b.Workspace():
		want = errdefs.Denied
	}
	if errdefs.CodeOf(err) != want {
		t.Errorf("authorise %v: %v, want %q", b, err, want)
	}
	if err != nil && !equal(s, next) {
		t.Errorf("authorise %v was refused and changed the table", b)
	}
	if err == nil && (next.current[b.InstallationUUID] != b || !maps.Equal(next.marks, s.marks)) {
		t.Errorf("authorise %v was accepted and is not current, or left a watermark", b)
	}
	if running && want == errdefs.Denied && !strings.Contains(err.Error(), "cannot change generation, revision, or artifact") {
		t.Errorf("authorise %v: %v", b, err)
	}
	invariants(t, "authorise", s, next)
	return next
}

// checkCollect collects with every set to keep and every snapshot that differs
// from the truth in one installation.
func checkCollect(t *testing.T, s *Table) (nexts []*Table) {
	t.Helper()
	snapshots := []map[string]pluginwire.Context{s.Watermarks(), {}}
	for _, id := range []string{"x", "y"} {
		for _, b := range []pluginwire.Context{bind(id, "w", 1, 1, digestA), bind(id, "w", 1, 2, digestA)} { // one at least is not the truth
			other := s.Watermarks()
			other[id] = b
			snapshots = append(snapshots, other)
		}
	}
	for _, keep := range []map[string]bool{nil, {"x": true}, {"y": true}, {"x": true, "y": true}} {
		for _, snap := range snapshots {
			next := clone(s)
			n := next.Collect(keep, snap)
			want := clone(s)
			for id, mark := range s.marks {
				_, running := s.current[id]
				if was, ok := snap[id]; ok && was == mark && !running && !keep[id] {
					delete(want.marks, id)
				}
			}
			if !equal(next, want) || n != len(s.marks)-len(want.marks) {
				t.Errorf("collect %v with %v: %v, %d", keep, snap, code(next), n)
			}
			nexts = append(nexts, next)
		}
	}
	return nexts
}
