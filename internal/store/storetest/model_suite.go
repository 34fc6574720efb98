package storetest

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// testEqualsModel runs random operations on the ledger and on [Memory]: every
// answer, and in the end every record, must be the same. Ids come from small
// sets, so that operations meet.
func testEqualsModel(w *world) {
	rapid.Check(w, func(t *rapid.T) {
		d := &duel{T: t, w: w, real: w.cfg.Open(w), model: NewMemory()}
		defer func() {
			if err := d.real.Close(); err != nil {
				t.Errorf("closing: %v", err)
			}
		}()
		d.begin()
		ops := d.ops()
		for range rapid.IntRange(1, 80).Draw(t, "length") {
			ops[rapid.IntRange(0, len(ops)-1).Draw(t, "op")](d)
		}
		d.both("everything", func(s store.Store) (any, error) {
			v := world{TB: w.TB, s: s, ctx: w.ctx}
			return v.everything(), nil
		})
	})
}

// duel is a ledger and the model of it.
type duel struct {
	*rapid.T
	w           *world
	real, model store.Store
	events      int
}

// both does the same to the two and compares what they answer.
func (d *duel) both(what string, do func(store.Store) (any, error)) any {
	d.Helper()
	want, wantErr := do(d.model)
	got, gotErr := do(d.real)
	if g, w := outcome(gotErr), outcome(wantErr); g != w {
		d.Fatalf("%s:\n got the error %s (%v)\nwant the error %s (%v)", what, g, gotErr, w, wantErr)
	}
	if !reflect.DeepEqual(got, want) {
		d.Fatalf("%s:\n got %+v\nwant %+v", what, got, want)
	}
	return want
}

// outcome is what of an error must be equal: the code, and the facts in it but
// for the wording.
func outcome(err error) string {
	if err == nil {
		return "none"
	}
	e, ok := err.(*errdefs.Error)
	if !ok {
		return fmt.Sprintf("%T", err)
	}
	return fmt.Sprint(e.Code, " ", e.Detail["fence"], " ", e.Detail["version"], " ", e.Detail["bound"])
}

func (d *duel) pick(kind string, n int) string {
	return fmt.Sprintf("%s_%d", kind, rapid.IntRange(0, n-1).Draw(d.T, kind))
}

func (d *duel) flip(what string) bool { return rapid.Bool().Draw(d.T, what) }

func (d *duel) at() time.Time {
	return epoch.Add(time.Duration(rapid.IntRange(0, 20).Draw(d.T, "ms")) * time.Millisecond)
}

func (d *duel) event() store.AuditEvent {
	d.events++
	id := fmt.Sprintf("aud_%d", d.events)
	if d.events > 1 && rapid.IntRange(0, 19).Draw(d.T, "repeat the event") == 0 {
		id = "aud_1"
	}
	return store.AuditEvent{ID: id, At: d.at(), Actor: "x", Workspace: d.pick("w", 2), Action: "y"}
}

func (d *duel) scope() store.Scope {
	switch rapid.IntRange(0, 3).Draw(d.T, "scope") {
	case 0:
		return store.Scope{}
	case 1:
		return store.Scope{Workspace: d.pick("w", 2)}
	case 2:
		return store.Scope{Workspace: d.pick("w", 2), Run: d.pick("run", 4)}
	}
	return store.Scope{All: true}
}

func (d *duel) page(kind string, n int) store.Page {
	p := store.Page{Limit: rapid.IntRange(0, 5).Draw(d.T, "limit")}
	if d.flip("after") {
		p.After = d.pick(kind, n)
	}
	return p
}

func (d *duel) capacity() store.Capacity {
	n := func(what string) int { return rapid.IntRange(0, 3).Draw(d.T, what) }
	c := store.Capacity{PerTarget: n("per target"), PerWorkspace: n("per workspace"), PerRun: n("per run")}
	if d.flip("kept") {
		c.Kept = store.Kept{Runs: 2 + n("kept runs"), Processes: 2 + n("kept processes"), SpecBytes: int64(8 * n("kept bytes"))}
	}
	return c
}

// begin fills the ledger, so that most operations find something.
func (d *duel) begin() {
	for i := range 2 {
		a := d.event()
		d.both("CreateWorkspace", func(s store.Store) (any, error) {
			return nil, s.CreateWorkspace(d.w.ctx, store.Workspace{Name: fmt.Sprintf("w_%d", i), Created: epoch}, a)
		})
		d.both("PutTarget", func(s store.Store) (any, error) {
			return s.PutTarget(d.w.ctx, store.Target{Name: fmt.Sprintf("t_%d", i), Kind: "box", Enabled: true})
		})
	}
}

func (d *duel) ops() []func(*duel) {
	return []func(*duel){
		(*duel).createKey, (*duel).revokeKey, (*duel).target, (*duel).createBox, (*duel).createBox, (*duel).boxState, (*duel).box,
		(*duel).createRun, (*duel).createRun, (*duel).runState, (*duel).runUsage, (*duel).retention,
		(*duel).createProcess, (*duel).createProcess, (*duel).createProcess, (*duel).saveProcess, (*duel).saveProcess, (*duel).saveProcess, (*duel).saveProcess,
		(*duel).reads, (*duel).lists, (*duel).reopen,
	}
}

func (d *duel) createKey() {
	k := store.Key{ID: d.pick("key", 4), Kind: store.KeyWorkspace, Workspace: d.pick("w", 3), Hash: [32]byte{1}, Created: d.at()}
	if d.flip("admin") {
		k.Kind, k.Workspace = store.KeyAdmin, ""
	}
	a := d.event()
	d.both("CreateKey", func(s store.Store) (any, error) { return nil, s.CreateKey(d.w.ctx, k, a) })
}

func (d *duel) revokeKey() {
	id, at, a := d.pick("key", 4), d.at(), d.event()
	d.both("RevokeKey", func(s store.Store) (any, error) { return nil, s.RevokeKey(d.w.ctx, id, at, a) })
}

func (d *duel) target() {
	name, on, a := d.pick("t", 3), rapid.IntRange(0, 3).Draw(d.T, "off") > 0, d.event()
	d.both("SetTargetEnabled", func(s store.Store) (any, error) { return s.SetTargetEnabled(d.w.ctx, name, on, a) })
}

func (d *duel) createBox() {
	b := store.Box{ID: d.pick("box", 5), Workspace: d.pick("w", 2), Target: d.pick("t", 2), IdleMillis: 3, Created: d.at(), Used: d.at(),
		State: rapid.SampledFrom([]api.BoxState{api.BoxReady, api.BoxReady, api.BoxCreating}).Draw(d.T, "state")}
	if d.flip("keyed") {
		b.Key = d.pick("k", 2)
	}
	c := d.capacity()
	d.both("CreateBox", func(s store.Store) (any, error) {
		got, created, err := s.CreateBox(d.w.ctx, b, c)
		return []any{got, created}, err
	})
}

func (d *duel) boxState() {
	id := d.pick("box", 5)
	state := rapid.SampledFrom([]api.BoxState{api.BoxReady, api.BoxRemoving, api.BoxCreating, "odd"}).Draw(d.T, "state")
	d.both("SetBoxState", func(s store.Store) (any, error) { return nil, s.SetBoxState(d.w.ctx, id, state) })
}

func (d *duel) box() {
	id, at := d.pick("box", 5), d.at()
	if d.flip("delete") {
		d.both("DeleteBox", func(s store.Store) (any, error) { return nil, s.DeleteBox(d.w.ctx, id) })
		return
	}
	d.both("TouchBox", func(s store.Store) (any, error) { return nil, s.TouchBox(d.w.ctx, id, at) })
}

func (d *duel) createRun() {
	r := store.Run{ID: d.pick("run", 4), Workspace: d.pick("w", 2), Box: d.pick("box", 5), Target: d.pick("t", 2), State: api.RunActive,
		TokenHash: [32]byte{1}, Exclusive: rapid.IntRange(0, 4).Draw(d.T, "exclusive") == 0, AutoFinish: rapid.Bool().Draw(d.T, "auto"), Created: d.at(), Expires: d.at()}
	if d.flip("models") {
		r.Models = []store.ModelGrant{{Provider: "p_1", Port: 4000}, {Provider: "p_0"}}
	}
	if d.flip("installation") {
		r.Installation = &api.Installation{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1, InstallationUUID: "p",
			RuntimeRevision: 2, ArtifactDigest: strings.Repeat("a", 64)}
	}
	if b, err := d.model.Box(d.w.ctx, all, r.Box); err == nil && rapid.IntRange(0, 4).Draw(d.T, "odd") > 0 {
		r.Workspace, r.Target = b.Workspace, b.Target
	}
	c := d.capacity()
	d.both("CreateRun", func(s store.Store) (any, error) { return nil, s.CreateRun(d.w.ctx, r, c) })
}

func (d *duel) runState() {
	id, at := d.pick("run", 4), d.at()
	state := rapid.SampledFrom([]api.RunState{api.RunActive, api.RunFinishing, api.RunFinished}).Draw(d.T, "state")
	d.both("SetRunState", func(s store.Store) (any, error) { return s.SetRunState(d.w.ctx, id, state, at) })
}

func (d *duel) runUsage() {
	id, provider, n := d.pick("run", 4), d.pick("p", 3), rapid.Int64Range(-1, api.MaxOffset).Draw(d.T, "n")
	d.both("AddRunUsage", func(s store.Store) (any, error) { return nil, s.AddRunUsage(d.w.ctx, id, provider, 1, n, 2) })
}

func (d *duel) retention() {
	at := d.at()
	d.both("DeleteRunsFinishedBefore", func(s store.Store) (any, error) { return s.DeleteRunsFinishedBefore(d.w.ctx, at) })
	at = d.at()
	d.both("DeleteAuditBefore", func(s store.Store) (any, error) {
		return s.DeleteAuditBefore(d.w.ctx, at.Add(-15*time.Millisecond))
	})
	d.both("IdleBoxes", func(s store.Store) (any, error) { return s.IdleBoxes(d.w.ctx, at) })
}

func (d *duel) createProcess() {
	p := store.Process{Handle: d.pick("proc", 8), RequestID: d.pick("req", 4), Digest: [32]byte{2}, Workspace: d.pick("w", 2), Run: d.pick("run", 4),
		Target: d.pick("t", 2), Box: d.pick("box", 5), State: api.StateRequested, Cleanup: api.CleanupPending, Spec: []byte("{}"), Created: d.at()}
	if r, err := d.model.Run(d.w.ctx, all, p.Run); err == nil && rapid.IntRange(0, 5).Draw(d.T, "odd") > 0 {
		p.Workspace, p.Target, p.Box = r.Workspace, r.Target, r.Box
	}
	if rapid.IntRange(0, 4).Draw(d.T, "tombstone") == 0 {
		p.State, p.Spec = api.StateNeverStarted, nil
	}
	c, a := d.capacity(), d.event()
	d.both("CreateProcess", func(s store.Store) (any, error) {
		got, created, err := s.CreateProcess(d.w.ctx, p, c, a)
		return []any{got, created}, err
	})
}

func (d *duel) saveProcess() {
	p, err := d.model.Process(d.w.ctx, all, d.pick("proc", 8))
	if err != nil {
		p = store.Process{Handle: "proc_0", RequestID: "r", Workspace: "w_0", Run: "run_0", Target: "t_0", Box: "box_0", Created: epoch, Version: 1}
	}
	if rapid.IntRange(0, 5).Draw(d.T, "stale") == 0 {
		p.Version--
	}
	if rapid.IntRange(0, 9).Draw(d.T, "other") == 0 {
		p.Box = d.pick("box", 5)
	}
	p.State = rapid.SampledFrom([]api.ProcessState{api.StateStarting, api.StateRunning, api.StateClosing, api.StateExited, api.StateUnknown,
		api.StateFenced, api.StateClosed, api.StateClosed, "odd"}).Draw(d.T, "state")
	p.Cleanup = rapid.SampledFrom([]api.Cleanup{api.CleanupPending, api.CleanupQuiescent, api.CleanupUnproven}).Draw(d.T, "cleanup")
	p.LogGone = d.flip("log gone")
	if d.flip("closed") {
		at := d.at()
		p.Closed = &at
	}
	var c store.Change
	if d.flip("fence") {
		c.Fence = &store.Fence{ID: d.pick("fence", 6), Workspace: p.Workspace, Target: p.Target, Handle: p.Handle, Reason: "r", Created: d.at()}
		if rapid.IntRange(0, 3).Draw(d.T, "whole target") > 0 {
			c.Fence.Box = p.Box
		}
	}
	if d.flip("lift") {
		c.ClearFence = &store.Clear{ID: d.pick("fence", 6), By: "proof", Reason: "r", At: d.at()}
	}
	if d.flip("receipt") {
		id := d.pick("rcpt", 6)
		c.Receipt = &store.Receipt{ID: id, Handle: p.Handle, Created: d.at(), Body: api.Receipt{ID: id, Handle: p.Handle, Method: "reboot",
			EmptyAt: epoch.UTC(), Payload: []byte("p"), PublicKey: []byte("k"), Signature: []byte("s")}}
	}
	for range rapid.IntRange(0, 2).Draw(d.T, "events") {
		c.Audit = append(c.Audit, d.event())
	}
	d.both("SaveProcess", func(s store.Store) (any, error) { return s.SaveProcess(d.w.ctx, p, c) })
}

func (d *duel) reads() {
	sc, run, req := d.scope(), d.pick("run", 4), d.pick("req", 4)
	handle, fence, box := d.pick("proc", 8), d.pick("fence", 6), d.pick("box", 5)
	d.both("Box", func(s store.Store) (any, error) { return s.Box(d.w.ctx, sc, box) })
	d.both("Run", func(s store.Store) (any, error) { return s.Run(d.w.ctx, sc, run) })
	d.both("Process", func(s store.Store) (any, error) { return s.Process(d.w.ctx, sc, handle) })
	d.both("ProcessByRequest", func(s store.Store) (any, error) { return s.ProcessByRequest(d.w.ctx, sc, run, req) })
	d.both("Receipt", func(s store.Store) (any, error) { return s.Receipt(d.w.ctx, handle) })
	d.both("Fence", func(s store.Store) (any, error) { return s.Fence(d.w.ctx, sc, fence) })
	d.both("UnfinishedRuns", func(s store.Store) (any, error) { return s.UnfinishedRuns(d.w.ctx) })
}

func (d *duel) lists() {
	sc := d.scope()
	pg := d.page("box", 5)
	d.both("Boxes", func(s store.Store) (any, error) { return s.Boxes(d.w.ctx, sc, pg) })
	pg = d.page("run", 4)
	d.both("Runs", func(s store.Store) (any, error) { return s.Runs(d.w.ctx, sc, pg) })
	f := store.ProcessFilter{Live: d.flip("live"), LogKept: d.flip("kept"), NoSpec: d.flip("no spec"), Page: d.page("proc", 8)}
	if d.flip("by box") {
		f.Box = d.pick("box", 5)
	}
	if d.flip("by target") {
		f.Target = d.pick("t", 2)
	}
	if d.flip("by time") {
		f.ClosedBefore = d.at()
	}
	d.both("Processes", func(s store.Store) (any, error) { return s.Processes(d.w.ctx, sc, f) })
	standing := d.flip("standing")
	pg = d.page("fence", 6)
	d.both("Fences", func(s store.Store) (any, error) { return s.Fences(d.w.ctx, sc, standing, pg) })
	workspace := d.pick("w", 2)
	pg = d.page("aud", 30)
	d.both("Audit", func(s store.Store) (any, error) { return s.Audit(d.w.ctx, workspace, pg) })
	pg = d.page("key", 4)
	d.both("Keys", func(s store.Store) (any, error) { return s.Keys(d.w.ctx, workspace, pg) })
}

func (d *duel) reopen() {
	if d.w.cfg.Reopen != nil && rapid.IntRange(0, 3).Draw(d.T, "restart") == 0 {
		d.real = d.w.cfg.Reopen(d.w, d.real)
	}
}
