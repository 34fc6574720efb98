package metrics

import (
	"context"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// fakeStore answers what the test says.
type fakeStore struct {
	store.Store
	err  error
	live []store.Process
}

func (f *fakeStore) CreateProcess(_ context.Context, p store.Process, _ store.Capacity, _ store.AuditEvent) (store.Process, bool, error) {
	return p, p.RequestID != "repeated", f.err
}
func (f *fakeStore) SaveProcess(_ context.Context, p store.Process, _ store.Change) (int64, error) {
	return p.Version + 1, f.err
}
func (f *fakeStore) Processes(context.Context, store.Scope, store.ProcessFilter) ([]store.Process, error) {
	return f.live, f.err
}
func (f *fakeStore) Process(_ context.Context, _ store.Scope, handle string) (store.Process, error) {
	return store.Process{Handle: handle, State: api.StateFenced}, nil
}
func (f *fakeStore) AppendAudit(context.Context, store.AuditEvent) error { return f.err }

func TestTheLedgerIsCounted(t *testing.T) {
	t.Parallel()
	m := New("test")
	f := &fakeStore{live: []store.Process{{Handle: "old", State: api.StateRunning}}}
	s := m.Ledger(f)
	ctx := t.Context()
	shows := func(lines ...string) {
		t.Helper()
		text := scrape(m)
		for _, line := range lines {
			if !strings.Contains(text, "\n"+line+"\n") {
				t.Errorf("not shown: %s", line)
			}
		}
	}
	// A start of the server sees old ones, those that are fenced too.
	if got, _ := s.Processes(ctx, store.Scope{All: true}, store.ProcessFilter{Live: true}); len(got) != 1 {
		t.Errorf("%v", got)
	}
	_, _ = s.Process(ctx, store.Scope{All: true}, "fenced")
	shows(`stockade_processes{state="running"} 1`, `stockade_processes{state="fenced"} 1`)
	_, _, _ = s.CreateProcess(ctx, store.Process{Handle: "a", State: api.StateRequested}, store.Capacity{}, store.AuditEvent{})
	_, _, _ = s.CreateProcess(ctx, store.Process{Handle: "a", State: api.StateRequested, RequestID: "repeated"}, store.Capacity{}, store.AuditEvent{})
	_, _, _ = s.CreateProcess(ctx, store.Process{Handle: "tombstone", State: api.StateNeverStarted}, store.Capacity{}, store.AuditEvent{})
	shows(`stockade_processes{state="requested"} 1`)
	v, err := s.SaveProcess(ctx, store.Process{Handle: "a", State: api.StateRunning, Version: 4}, store.Change{})
	if v != 5 || err != nil {
		t.Errorf("%d %v", v, err)
	}
	// A list that a save has overtaken takes nothing back, and brings nothing back.
	_, _ = s.SaveProcess(ctx, store.Process{Handle: "over", State: api.StateClosed}, store.Change{})
	f.live = []store.Process{{Handle: "a", State: api.StateStarting}, {Handle: "over", State: api.StateRunning}}
	_, _ = s.Processes(ctx, store.Scope{All: true}, store.ProcessFilter{Live: true})
	_, _ = s.Processes(ctx, store.Scope{Workspace: "w"}, store.ProcessFilter{Live: true})
	shows(`stockade_processes{state="requested"} 0`, `stockade_processes{state="running"} 2`, `stockade_ledger_commits_total{result="ok"} 5`)
	_, _ = s.SaveProcess(ctx, store.Process{Handle: "a", State: api.StateFenced}, store.Change{Fence: &store.Fence{}})
	shows(`stockade_processes{state="running"} 1`, `stockade_processes{state="fenced"} 2`, `stockade_fences_total{event="raised"} 1`)
	_, _ = s.SaveProcess(ctx, store.Process{Handle: "a", State: api.StateClosed}, store.Change{ClearFence: &store.Clear{}})
	shows(`stockade_processes{state="fenced"} 1`, `stockade_fences_total{event="cleared"} 1`)
	f.err = errdefs.New(errdefs.Unavailable, "the disk is full")
	_, _ = s.SaveProcess(ctx, store.Process{Handle: "old", State: api.StateClosed}, store.Change{Fence: &store.Fence{}})
	_ = s.AppendAudit(ctx, store.AuditEvent{})
	shows(`stockade_processes{state="running"} 1`, `stockade_ledger_commits_total{result="error"} 2`, `stockade_fences_total{event="raised"} 1`)
	var none *Metrics
	if none.Ledger(f) != store.Store(f) {
		t.Error("without metrics the store is wrapped")
	}
}
