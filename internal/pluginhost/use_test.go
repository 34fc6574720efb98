package pluginhost

import (
	"slices"
	"testing"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// The record of use follows apply, reconcile and remove; a restarted runtime forgets
// nothing before LangBot has told the whole desired state again.
func TestRecordOfUse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newRig(t, dir)
	if err := r.m.Configure(t.Context(), runtimeConfig(pluginwire.ProfileOSS, policy())); err != nil {
		t.Fatal(err)
	}
	one, two := pack(t, "one", "1"), pack(t, "two", "1")
	a, b := one.bind("a", 1, 1), two.bind("b", 1, 1)
	recorded := func(m *Manager, want ...string) {
		t.Helper()
		u, ok, err := artifact.LoadUse(m.root)
		slices.Sort(want)
		if err != nil || !ok || !slices.Equal(u.Artifacts, want) || u.At.IsZero() {
			t.Errorf("recorded %+v, %v, %v; want %v", u, ok, err, want)
		}
		if trees := m.using().Trees; m == r.m && (!slices.Equal(u.Trees, trees) || len(want) > 0 && len(trees) == 0) {
			t.Errorf("recorded trees %v, used %v", u.Trees, trees)
		}
	}
	r.apply(a, one, true, pluginwire.ModeDedicated)
	r.apply(b, two, true, pluginwire.ModeDedicated)
	recorded(r.m, a.ArtifactDigest, b.ArtifactDigest)
	r.close()

	r = newRig(t, dir)
	defer r.close()
	if err := r.m.Configure(t.Context(), runtimeConfig(pluginwire.ProfileOSS, policy())); err != nil {
		t.Fatal(err)
	}
	r.apply(a, one, true, pluginwire.ModeDedicated)
	if u, _, _ := artifact.LoadUse(r.m.root); len(u.Artifacts) != 2 {
		t.Errorf("an apply before the first reconcile forgot an artifact: %+v", u)
	}
	if _, err := r.m.Reconcile(t.Context(), want(pluginwire.ModeDedicated, a)); err != nil {
		t.Fatal(err)
	}
	recorded(r.m, a.ArtifactDigest)
	r.remove(a)
	recorded(r.m)
}
