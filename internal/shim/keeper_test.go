package shim

import (
	"context"
	"log/slog"
	"testing"

	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/wire"
)

// idleKeeper is a keeper whose goroutines do not run.
func idleKeeper(t *testing.T) *keeper {
	t.Helper()
	k, err := newKeeper(t.TempDir(), Config{Spec: wire.ProcSpec{ID: "p"}, CgroupRoot: t.TempDir(), Cgroup: "/p"}, identity{}, slog.New(slog.DiscardHandler))
	check(t, err)
	t.Cleanup(k.timer.close)
	return k
}

// A tree that does not die is killed again and again, each time for seconds. What
// is ordered when it has died at last is ordered once, and must not be lost.
func TestManyKillsLoseNoOtherOrder(t *testing.T) {
	t.Parallel()
	k := idleKeeper(t)
	for range 1000 {
		k.carryOut(process.KillTree{})
	}
	k.carryOut(process.CheckEmpty{})
	k.carryOut(process.ReadOOM{})
	go k.worker()
	defer close(k.done)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, want := range []string{"the answer to CheckEmpty", "the answer to ReadOOM"} {
		select {
		case <-k.events:
		case <-ctx.Done():
			t.Fatalf("%s never came", want)
		}
	}
}
