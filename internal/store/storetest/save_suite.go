package storetest

import (
	"strconv"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func testSaveVersion(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	stale := p
	p.State = api.StateStarting
	p = w.save(p, store.Change{})
	for _, version := range []int64{stale.Version, p.Version + 1} {
		stale.Version, stale.State = version, api.StateClosed
		_, err := w.s.SaveProcess(w.ctx, stale, store.Change{Audit: []store.AuditEvent{w.event()}})
		e := w.code(err, errdefs.Conflict)
		w.is(e.Detail["version"], strconv.FormatInt(p.Version, 10))
	}
	got, err := w.s.Process(w.ctx, all, p.Handle)
	w.ok(err)
	w.is(got, p)
	p.Handle = "proc_none"
	_, err = w.s.SaveProcess(w.ctx, p, store.Change{})
	w.code(err, errdefs.NotFound)
}

// testSaveConcurrently: of many who read the same version one saves.
func testSaveConcurrently(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	const callers, each = 8, 10
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for done := 0; done < each; {
				q, err := w.s.Process(w.ctx, all, p.Handle)
				if err != nil {
					w.Errorf("reading: %v", err)
					return
				}
				q.GraceMillis++
				switch _, err := w.s.SaveProcess(w.ctx, q, store.Change{}); {
				case err == nil:
					done++
				case !errdefs.Is(err, errdefs.Conflict):
					w.Errorf("saving: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	got, err := w.s.Process(w.ctx, all, p.Handle)
	w.ok(err)
	w.is([]int64{got.GraceMillis, got.Version}, []int64{callers * each, callers*each + 1})
}

func testSaveIdentity(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	for name, change := range map[string]func(*store.Process){
		"request id": func(p *store.Process) { p.RequestID = "other" },
		"digest":     func(p *store.Process) { p.Digest = [32]byte{} },
		"workspace":  func(p *store.Process) { p.Workspace = "other" },
		"run":        func(p *store.Process) { p.Run = "other" },
		"target":     func(p *store.Process) { p.Target = "other" },
		"box":        func(p *store.Process) { p.Box = "other" },
		"generation": func(p *store.Process) { p.Generation++ },
		"created":    func(p *store.Process) { p.Created = p.Created.Add(time.Second) },
	} {
		q := p
		change(&q)
		if _, err := w.s.SaveProcess(w.ctx, q, store.Change{}); !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("another %s: %v", name, err)
		}
	}
	got, err := w.s.Process(w.ctx, all, p.Handle)
	w.ok(err)
	w.is(got, p)
}

// testSaveAtomic: a change of which one part is refused changes nothing.
func testSaveAtomic(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p, other := w.process(sc.run), w.process(sc.run)
	taken := w.newFence(other, other.Box)
	other.State = api.StateFenced
	other = w.save(other, store.Change{Fence: taken, Receipt: w.newReceipt(other)})
	event := w.event()
	w.ok(w.s.AppendAudit(w.ctx, event))

	twice := *taken
	twice.Handle = p.Handle
	foreignReceipt := w.newReceipt(p)
	foreignReceipt.ID, foreignReceipt.Body.ID = "rcpt_x", "rcpt_x"
	otherReceipt, err := w.s.Receipt(w.ctx, other.Handle)
	w.ok(err)
	sameReceipt := w.newReceipt(p)
	sameReceipt.ID, sameReceipt.Body.ID = otherReceipt.ID, otherReceipt.ID
	for name, c := range map[string]struct {
		change store.Change
		want   errdefs.Code
	}{
		"fence id taken":      {store.Change{Fence: &twice, Audit: []store.AuditEvent{w.event()}}, errdefs.Conflict},
		"another's fence":     {store.Change{Fence: taken}, errdefs.Invalid},
		"unknown fence":       {store.Change{Fence: w.newFence(p, ""), ClearFence: &store.Clear{ID: "fence_none", By: "b", Reason: "r", At: epoch}}, errdefs.NotFound},
		"lifting another's":   {store.Change{ClearFence: &store.Clear{ID: taken.ID, By: "b", Reason: "r", At: epoch}}, errdefs.NotFound},
		"receipt id taken":    {store.Change{Fence: w.newFence(p, ""), Receipt: sameReceipt}, errdefs.Conflict},
		"another's receipt":   {store.Change{Receipt: w.newReceipt(other)}, errdefs.Invalid},
		"audit id taken":      {store.Change{Fence: w.newFence(p, ""), Receipt: foreignReceipt, Audit: []store.AuditEvent{w.event(), event}}, errdefs.Conflict},
		"audit event invalid": {store.Change{Fence: w.newFence(p, ""), Audit: []store.AuditEvent{{}}}, errdefs.Invalid},
	} {
		q := p
		q.State = api.StateClosed
		if _, err := w.s.SaveProcess(w.ctx, q, c.change); !errdefs.Is(err, c.want) {
			w.Errorf("%s: got %v, want %s", name, err, c.want)
		}
	}
	got, err := w.s.Process(w.ctx, all, p.Handle)
	w.ok(err)
	w.is(got, p)
	fences, err := w.s.Fences(w.ctx, all, false, store.Page{Limit: 10})
	w.ok(err)
	w.is(ids(fences, fenceID), []string{taken.ID})
	_, err = w.s.Receipt(w.ctx, p.Handle)
	w.code(err, errdefs.NotFound)
	events, err := w.s.Audit(w.ctx, "", store.Page{Limit: 1})
	w.ok(err)
	w.is(events[0].ID, event.ID)
}

func testFences(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	f := w.newFence(p, p.Box)
	p.State, p.Fence = api.StateFenced, f.ID
	a := w.event()
	p = w.save(p, store.Change{Fence: f, Audit: []store.AuditEvent{a}})
	got, err := w.s.Fence(w.ctx, all, f.ID)
	w.ok(err)
	want := *f
	want.Created = cut(epoch)
	w.is(got, want)
	events, err := w.s.Audit(w.ctx, "", store.Page{Limit: 1})
	w.ok(err)
	w.is(events[0].ID, a.ID)

	open := func(r store.Run) error {
		_, _, err := w.s.CreateProcess(w.ctx, w.newProcess(r), store.Capacity{}, w.event())
		return err
	}
	e := w.code(open(sc.run), errdefs.Fenced)
	w.is(e.Detail["fence"], f.ID)
	// Nor does a run begin beside what may still be running: it would share its rights.
	begin := func() error { return w.s.CreateRun(w.ctx, w.newRun(sc.box), store.Capacity{}) }
	w.is(w.code(begin(), errdefs.Fenced).Detail["fence"], f.ID)
	w.ok(open(w.run(w.box("w", "t")))) // another box is not concerned

	standing := func() []string {
		list, err := w.s.Fences(w.ctx, all, true, store.Page{Limit: 10})
		w.ok(err)
		return ids(list, fenceID)
	}
	w.is(standing(), []string{f.ID})
	clear := &store.Clear{ID: f.ID, By: "key_9", Reason: "looked", At: epoch.Add(time.Second)}
	p.State = api.StateClosed
	p = w.save(p, store.Change{ClearFence: clear})
	w.is(standing(), []string{})
	w.ok(open(sc.run))
	w.ok(begin())
	got, err = w.s.Fence(w.ctx, all, f.ID)
	w.ok(err)
	want.Cleared, want.ClearedBy, want.ClearReason = cutMaybe(&clear.At), "key_9", "looked"
	w.is(got, want)
	list, err := w.s.Fences(w.ctx, all, false, store.Page{Limit: 10})
	w.ok(err)
	w.is(list, []store.Fence{want})

	_, err = w.s.SaveProcess(w.ctx, p, store.Change{ClearFence: clear})
	w.code(err, errdefs.Conflict)
	_, err = w.s.Fence(w.ctx, all, "fence_none")
	w.code(err, errdefs.NotFound)
}

func testFenceOfTarget(w *world) {
	w.target("t")
	w.target("u")
	a, b := w.scene("w", "t"), w.scene("v", "t")
	elsewhere := w.run(w.box("v", "u"))
	p := w.process(a.run)
	f := w.newFence(p, "")
	p.State = api.StateFenced
	w.save(p, store.Change{Fence: f})
	_, _, err := w.s.CreateProcess(w.ctx, w.newProcess(b.run), store.Capacity{}, w.event())
	e := w.code(err, errdefs.Fenced)
	w.is(e.Detail["fence"], f.ID)
	w.code(w.s.CreateRun(w.ctx, w.newRun(b.box), store.Capacity{}), errdefs.Fenced)
	w.process(elsewhere)
	_, err = w.s.SetRunState(w.ctx, b.run.ID, api.RunFinished, epoch)
	w.ok(err)
	w.code(w.s.SetBoxState(w.ctx, b.box.ID, api.BoxRemoving), errdefs.Fenced)
	idle, err := w.s.IdleBoxes(w.ctx, epoch.Add(time.Hour))
	w.ok(err)
	w.is(ids(idle, boxID), []string{})
	// Who is stopped by it may learn its id, and nothing more.
	_, err = w.s.Fence(w.ctx, store.Scope{Workspace: "v"}, f.ID)
	w.code(err, errdefs.NotFound)
}

func testReceipts(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	code := 0
	r := w.newReceipt(p)
	r.Body.Exit = &api.Exit{Kind: api.ExitExited, Code: &code}
	p.State, p.Receipt = api.StateClosed, r.ID
	p = w.save(p, store.Change{Receipt: r})
	got, err := w.s.Receipt(w.ctx, p.Handle)
	w.ok(err)
	want := clone(*r)
	want.Created = cut(epoch)
	w.is(got, want)
	_, err = w.s.SaveProcess(w.ctx, p, store.Change{Receipt: w.newReceipt(p)})
	w.code(err, errdefs.Conflict)
	_, err = w.s.Receipt(w.ctx, "proc_none")
	w.code(err, errdefs.NotFound)
}
