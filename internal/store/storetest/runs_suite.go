package storetest

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func testRunCreate(w *world) {
	w.target("t")
	w.target("u")
	w.workspace("w")
	w.workspace("v")
	b := w.box("w", "t")
	r := w.newRun(b)
	r.Created = epoch.Add(time.Minute)
	r.Models = []store.ModelGrant{{Provider: "z", Port: 4100}, {Provider: "a", Port: 4101}}
	w.ok(w.s.CreateRun(w.ctx, r, store.Capacity{}))
	got, err := w.s.Run(w.ctx, all, r.ID)
	w.ok(err)
	want := r
	want.Created, want.Expires = cut(r.Created), cut(r.Expires)
	w.is(got, want)
	touched, err := w.s.Box(w.ctx, all, b.ID)
	w.ok(err)
	w.is(touched.Used, cut(r.Created))

	w.code(w.s.CreateRun(w.ctx, r, store.Capacity{}), errdefs.Conflict) // the id
	bad := w.newRun(b)
	bad.Workspace = "v" // another tenant's box looks missing
	w.code(w.s.CreateRun(w.ctx, bad, store.Capacity{}), errdefs.NotFound)
	bad = w.newRun(b)
	bad.Box = "box_none"
	w.code(w.s.CreateRun(w.ctx, bad, store.Capacity{}), errdefs.NotFound)
	bad = w.newRun(b)
	bad.Target = "u"
	w.code(w.s.CreateRun(w.ctx, bad, store.Capacity{}), errdefs.Invalid)
	bad = w.newRun(b)
	bad.State = api.RunFinishing
	w.code(w.s.CreateRun(w.ctx, bad, store.Capacity{}), errdefs.Invalid)
	creating := w.newBox("w", "t")
	creating.State = api.BoxCreating
	_, _, err = w.s.CreateBox(w.ctx, creating, store.Capacity{})
	w.ok(err)
	w.code(w.s.CreateRun(w.ctx, w.newRun(creating), store.Capacity{}), errdefs.Conflict)
}

func testRunExclusive(w *world) {
	w.target("t")
	w.workspace("w")
	b := w.box("w", "t")
	shared := w.run(b)
	alone := w.newRun(b)
	alone.Exclusive = true
	w.code(w.s.CreateRun(w.ctx, alone, store.Capacity{}), errdefs.Conflict)
	_, err := w.s.SetRunState(w.ctx, shared.ID, api.RunFinishing, epoch)
	w.ok(err)
	w.code(w.s.CreateRun(w.ctx, alone, store.Capacity{}), errdefs.Conflict) // finishing still counts
	_, err = w.s.SetRunState(w.ctx, shared.ID, api.RunFinished, epoch)
	w.ok(err)
	w.ok(w.s.CreateRun(w.ctx, alone, store.Capacity{}))
	w.code(w.s.CreateRun(w.ctx, w.newRun(b), store.Capacity{}), errdefs.Conflict)
	w.run(w.box("w", "t")) // another box is free
	_, err = w.s.SetRunState(w.ctx, alone.ID, api.RunFinished, epoch)
	w.ok(err)
	w.run(b)
	w.run(b)
}

func testRunStates(w *world) {
	w.target("t")
	w.workspace("w")
	b := w.box("w", "t")
	at := epoch.Add(time.Minute)
	states := []api.RunState{api.RunActive, api.RunFinishing, api.RunFinished}
	for i, from := range states {
		for j, to := range states {
			r := w.run(b)
			_, err := w.s.SetRunState(w.ctx, r.ID, from, epoch)
			w.ok(err)
			before, err := w.s.Run(w.ctx, all, r.ID)
			w.ok(err)
			got, err := w.s.SetRunState(w.ctx, r.ID, to, at)
			want := before
			switch {
			case j < i:
				w.code(err, errdefs.Conflict)
			default:
				w.ok(err)
				want.State = to
				if to == api.RunFinished && i != j {
					want.Finished = cutMaybe(&at)
				}
				w.is(got, want)
			}
			read, err := w.s.Run(w.ctx, all, r.ID)
			w.ok(err)
			w.is(read, want)
		}
	}
	_, err := w.s.SetRunState(w.ctx, "run_none", api.RunFinished, at)
	w.code(err, errdefs.NotFound)
	_, err = w.s.SetRunState(w.ctx, "run_none", "paused", at)
	w.code(err, errdefs.Invalid)

	open, err := w.s.UnfinishedRuns(w.ctx)
	w.ok(err)
	var active, finishing int
	for i, r := range open {
		if i > 0 && r.ID == open[i-1].ID {
			w.Fatal("a run is listed twice")
		}
		switch r.State {
		case api.RunActive:
			active++
		case api.RunFinishing:
			finishing++
		default:
			w.Fatalf("run %s is %s", r.ID, r.State)
		}
	}
	w.is([]int{active, finishing}, []int{1, 3})
}

func testRunUsage(w *world) {
	w.target("t")
	w.workspace("w")
	r := w.newRun(w.box("w", "t"))
	r.Models = []store.ModelGrant{{Provider: "a", Port: 1}, {Provider: "b", Port: 2}}
	w.ok(w.s.CreateRun(w.ctx, r, store.Capacity{}))
	w.ok(w.s.AddRunUsage(w.ctx, r.ID, "b", 1, 20, 300))
	w.ok(w.s.AddRunUsage(w.ctx, r.ID, "b", 1, 20, 300))
	w.ok(w.s.AddRunUsage(w.ctx, r.ID, "a", api.MaxOffset, api.MaxOffset, 0))
	w.ok(w.s.AddRunUsage(w.ctx, r.ID, "a", api.MaxOffset, 1, 0))
	got, err := w.s.Run(w.ctx, all, r.ID)
	w.ok(err)
	w.is(got.Models, []store.ModelGrant{{Provider: "a", Port: 1, Requests: api.MaxOffset, BytesUp: api.MaxOffset}, {Provider: "b", Port: 2, Requests: 2, BytesUp: 40, BytesDown: 600}})
	w.code(w.s.AddRunUsage(w.ctx, r.ID, "c", 1, 1, 1), errdefs.NotFound)
	w.code(w.s.AddRunUsage(w.ctx, "run_none", "a", 1, 1, 1), errdefs.NotFound)
	w.code(w.s.AddRunUsage(w.ctx, r.ID, "a", -1, 0, 0), errdefs.Invalid)
	w.code(w.s.AddRunUsage(w.ctx, r.ID, "a", 0, api.MaxOffset+1, 0), errdefs.Invalid)
}

func testRunRetention(w *world) {
	w.target("t")
	w.workspace("w")
	b := w.box("w", "t")
	finish := func(r store.Run, at time.Time) {
		_, err := w.s.SetRunState(w.ctx, r.ID, api.RunFinished, at)
		w.ok(err)
	}
	old, later := epoch, epoch.Add(time.Hour)
	gone := func(r store.Run) store.Process {
		p := w.process(r)
		p.State, p.Cleanup, p.LogGone = api.StateClosed, api.CleanupQuiescent, true
		return w.save(p, store.Change{Receipt: w.newReceipt(p)})
	}

	forgotten := w.newRun(b)
	forgotten.Models = []store.ModelGrant{{Provider: "a"}}
	w.ok(w.s.CreateRun(w.ctx, forgotten, store.Capacity{}))
	p1 := gone(forgotten)
	tomb := w.newProcess(forgotten)
	tomb.State, tomb.Cleanup, tomb.Spec = api.StateNeverStarted, api.CleanupQuiescent, nil
	w.open(tomb) // never had a log
	lifted := w.process(forgotten)
	f1 := w.newFence(lifted, b.ID)
	lifted.State = api.StateFenced
	lifted = w.save(lifted, store.Change{Fence: f1})
	lifted.State, lifted.LogGone = api.StateClosed, true
	w.save(lifted, store.Change{ClearFence: &store.Clear{ID: f1.ID, By: "proof", Reason: "r", At: epoch}})
	finish(forgotten, old)

	active := w.run(b)
	gone(active)
	young := w.run(b)
	gone(young)
	finish(young, later)
	withLive := w.run(b)
	gone(withLive)
	w.process(withLive)
	finish(withLive, old)
	withLog := w.run(b)
	gone(withLog)
	w.end(w.process(withLog), old)
	finish(withLog, old)
	withFence := w.run(b)
	p := w.process(withFence)
	f2 := w.newFence(p, b.ID)
	p.State, p.LogGone = api.StateFenced, true
	w.save(p, store.Change{Fence: f2})
	finish(withFence, old)

	n, err := w.s.DeleteRunsFinishedBefore(w.ctx, old)
	w.ok(err)
	w.is(n, 0) // not before
	n, err = w.s.DeleteRunsFinishedBefore(w.ctx, old.Add(time.Microsecond))
	w.ok(err)
	w.is(n, 1)
	list, err := w.s.Runs(w.ctx, all, store.Page{Limit: 100})
	w.ok(err)
	w.is(ids(list, runID), []string{withFence.ID, withLog.ID, withLive.ID, young.ID, active.ID})
	_, err = w.s.Process(w.ctx, all, p1.Handle)
	w.code(err, errdefs.NotFound)
	_, err = w.s.Process(w.ctx, all, tomb.Handle)
	w.code(err, errdefs.NotFound)
	_, err = w.s.Receipt(w.ctx, p1.Handle)
	w.code(err, errdefs.NotFound)
	_, err = w.s.Fence(w.ctx, all, f1.ID)
	w.ok(err) // lifted fences stay
}
