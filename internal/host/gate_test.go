package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func newGate(t testing.TB, dir string) *gate {
	t.Helper()
	g, err := openGate(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// Whatever comes in whatever order, with restarts between: a generation is
// obeyed only if none above it was obeyed before.
func TestGateIsMonotonic(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(base, "")
		if err != nil {
			t.Fatal(err)
		}
		g, err := openGate(context.Background(), dir)
		if err != nil {
			t.Fatal(err)
		}
		highest := int64(0)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			if rapid.IntRange(0, 4).Draw(t, "restart") == 0 {
				if g, err = openGate(context.Background(), dir); err != nil {
					t.Fatal(err)
				}
			}
			n := rapid.Int64Range(1, 6).Draw(t, "generation")
			ctx, release, err := g.admit(context.Background(), n)
			if (err == nil) != (n >= highest) {
				t.Fatalf("generation %d after %d: %v", n, highest, err)
			}
			if err != nil {
				if !errdefs.Is(err, errdefs.Denied) {
					t.Fatal(err)
				}
				continue
			}
			highest = n
			if ctx.Err() != nil {
				t.Fatal("admitted with a dead context")
			}
			if err := g.commit(n-1, func() error { t.Fatal("an old one committed"); return nil }); !errdefs.Is(err, errdefs.Denied) {
				t.Fatal(err)
			}
			release()
		}
	})
}

// After a new generation was admitted, no commit of an old one happens any more.
func TestGateEndsOldCommits(t *testing.T) {
	t.Parallel()
	g := newGate(t, t.TempDir())
	old, release, err := g.admit(context.Background(), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	var newer atomic.Bool
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for old.Err() == nil {
				_ = g.commit(1, func() error {
					if newer.Load() {
						t.Error("an old commit after the new generation was let in")
					}
					return nil
				})
			}
		})
	}
	_, release2, err := g.admit(context.Background(), 2)
	newer.Store(true)
	if err != nil {
		t.Fatal(err)
	}
	defer release2()
	wg.Wait()
	if !errdefs.Is(context.Cause(old), errdefs.Denied) {
		t.Errorf("the old request ended with %v", context.Cause(old))
	}
}

func TestGateObeysOnlyWhatIsDurable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	g := newGate(t, filepath.Join(dir, "missing"))
	if _, _, err := g.admit(context.Background(), 3); err == nil || errdefs.Is(err, errdefs.Denied) {
		t.Errorf("a generation that could not be recorded was let in: %v", err)
	}
	for _, text := range []string{"", "x", "-4", "99999999999999999999"} {
		d := t.TempDir()
		if err := os.WriteFile(filepath.Join(d, generationFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openGate(context.Background(), d); err == nil {
			t.Errorf("a damaged generation %q was read as one", text)
		}
	}
}

func TestHubIsBoundedAndLosesNoLastChange(t *testing.T) {
	t.Parallel()
	h := newHub()
	slow := h.watch()
	defer slow.close()
	gone := h.watch()
	gone.close()
	slow.mark([]string{"p1"})
	for i := range 100_000 {
		h.changed(fmt.Sprintf("p%d", i%10))
	}
	if len(slow.dirty) != 10 || len(h.watchers) != 1 || len(gone.dirty) != 0 {
		t.Errorf("%d entries, %d watchers", len(slow.dirty), len(h.watchers))
	}
	<-slow.wake
	if got := slow.take(); len(got) != 10 {
		t.Errorf("took %d", len(got))
	}
	select {
	case <-slow.wake:
		t.Error("woken for nothing")
	default:
	}
	h.changed("p3")
	<-slow.wake
	if got := slow.take(); len(got) != 1 || got[0] != "p3" {
		t.Errorf("took %v", got)
	}
}
