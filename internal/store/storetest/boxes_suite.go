package storetest

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func testBoxReuseKey(w *world) {
	w.target("t")
	w.workspace("w")
	w.workspace("v")
	b := w.newBox("w", "t")
	b.Key = "k"
	got, created, err := w.s.CreateBox(w.ctx, b, store.Capacity{})
	w.ok(err)
	w.is(created, true)
	b.Created, b.Used = cut(b.Created), cut(b.Used)
	w.is(got, b)
	read, err := w.s.Box(w.ctx, all, b.ID)
	w.ok(err)
	w.is(read, b)

	// The same key is the same box, at any capacity and on a target that is switched off.
	_, err = w.s.SetTargetEnabled(w.ctx, "t", false, w.event())
	w.ok(err)
	second := w.newBox("w", "t")
	second.Key = "k"
	got, created, err = w.s.CreateBox(w.ctx, second, store.Capacity{PerTarget: 1, PerWorkspace: 1})
	w.ok(err)
	w.is(created, false)
	w.is(got, b)
	_, err = w.s.SetTargetEnabled(w.ctx, "t", true, w.event())
	w.ok(err)

	// Another workspace's key is another box; so is no key, each time.
	foreign := w.newBox("v", "t")
	foreign.Key = "k"
	_, created, err = w.s.CreateBox(w.ctx, foreign, store.Capacity{})
	w.ok(err)
	w.is(created, true)
	w.box("w", "t")
	w.box("w", "t")

	w.ok(w.s.SetBoxState(w.ctx, b.ID, api.BoxRemoving))
	_, _, err = w.s.CreateBox(w.ctx, second, store.Capacity{})
	w.code(err, errdefs.Conflict)
	w.ok(w.s.DeleteBox(w.ctx, b.ID))
	got, created, err = w.s.CreateBox(w.ctx, second, store.Capacity{})
	w.ok(err)
	w.is(created, true)
	w.is(got.ID, second.ID)
	_, _, err = w.s.CreateBox(w.ctx, store.Box{ID: second.ID, Workspace: "w", Target: "t", State: api.BoxReady, Created: epoch, Used: epoch}, store.Capacity{})
	w.code(err, errdefs.Conflict)
}

func testBoxCapacity(w *world) {
	w.target("t")
	w.target("u")
	w.workspace("w")
	w.workspace("v")
	w.box("w", "t")
	w.box("w", "t")
	w.box("v", "t")
	create := func(workspace, target string, c store.Capacity) error {
		_, _, err := w.s.CreateBox(w.ctx, w.newBox(workspace, target), c)
		return err
	}
	e := w.code(create("v", "t", store.Capacity{PerTarget: 3}), errdefs.Exhausted)
	w.is(e.Detail, map[string]string{"limit": "per_target", "bound": "3"})
	e = w.code(create("w", "u", store.Capacity{PerTarget: 3, PerWorkspace: 2}), errdefs.Exhausted)
	w.is(e.Detail, map[string]string{"limit": "per_workspace", "bound": "2"})
	w.ok(create("v", "t", store.Capacity{PerTarget: 4, PerWorkspace: 2}))

	w.code(create("x", "t", store.Capacity{}), errdefs.NotFound)
	w.code(create("w", "x", store.Capacity{}), errdefs.NotFound)
	_, err := w.s.SetTargetEnabled(w.ctx, "u", false, w.event())
	w.ok(err)
	w.code(create("w", "u", store.Capacity{}), errdefs.Conflict)
}

func testBoxStates(w *world) {
	w.target("t")
	w.workspace("w")
	states := []api.BoxState{api.BoxCreating, api.BoxReady, api.BoxRemoving}
	for i, from := range states {
		for j, to := range states {
			b := w.newBox("w", "t")
			b.State = from
			_, _, err := w.s.CreateBox(w.ctx, b, store.Capacity{})
			w.ok(err)
			err = w.s.SetBoxState(w.ctx, b.ID, to)
			want := to
			if j < i {
				w.code(err, errdefs.Conflict)
				want = from
			} else {
				w.ok(err)
			}
			got, err := w.s.Box(w.ctx, all, b.ID)
			w.ok(err)
			w.is(got.State, want)
			err = w.s.DeleteBox(w.ctx, b.ID)
			if want == api.BoxReady {
				w.code(err, errdefs.Conflict)
				continue
			}
			w.ok(err)
			w.code(w.s.DeleteBox(w.ctx, b.ID), errdefs.NotFound)
			_, err = w.s.Box(w.ctx, all, b.ID)
			w.code(err, errdefs.NotFound)
		}
	}
	w.code(w.s.SetBoxState(w.ctx, "box_none", api.BoxReady), errdefs.NotFound)
	w.code(w.s.SetBoxState(w.ctx, "box_none", "broken"), errdefs.Invalid)

	b := w.box("w", "t")
	w.ok(w.s.TouchBox(w.ctx, b.ID, epoch.Add(time.Minute)))
	w.ok(w.s.TouchBox(w.ctx, b.ID, epoch.Add(time.Second)))
	got, err := w.s.Box(w.ctx, all, b.ID)
	w.ok(err)
	w.is(got.Used, cut(epoch.Add(time.Minute)))
	w.code(w.s.TouchBox(w.ctx, "box_none", epoch), errdefs.NotFound)
}

func testBoxInUse(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	remove := func() error { return w.s.SetBoxState(w.ctx, sc.box.ID, api.BoxRemoving) }
	p := w.process(sc.run)
	w.code(remove(), errdefs.Conflict) // a run and a process
	_, err := w.s.SetRunState(w.ctx, sc.run.ID, api.RunFinishing, epoch)
	w.ok(err)
	w.code(remove(), errdefs.Conflict)
	_, err = w.s.SetRunState(w.ctx, sc.run.ID, api.RunFinished, epoch)
	w.ok(err)
	w.code(remove(), errdefs.Conflict) // the process alone
	f := w.newFence(p, p.Box)
	p.State, p.Cleanup, p.Fence = api.StateFenced, api.CleanupUnproven, f.ID
	p = w.save(p, store.Change{Fence: f})
	e := w.code(remove(), errdefs.Fenced) // the fence alone
	w.is(e.Detail["fence"], f.ID)
	p.State, p.Cleanup = api.StateClosed, api.CleanupQuiescent
	w.save(p, store.Change{ClearFence: &store.Clear{ID: f.ID, By: "proof", Reason: "r", At: epoch}})
	w.ok(remove())
	w.ok(remove())
	w.code(w.s.CreateRun(w.ctx, w.newRun(sc.box), store.Capacity{}), errdefs.Conflict)
}

func testBoxIdle(w *world) {
	w.target("t")
	w.workspace("w")
	later := epoch.Add(2 * time.Second) // the boxes are idle after one
	idle := func(now time.Time) []string {
		list, err := w.s.IdleBoxes(w.ctx, now)
		w.ok(err)
		return ids(list, boxID)
	}
	a, b := w.box("w", "t"), w.box("w", "t")
	creating := w.newBox("w", "t")
	creating.State = api.BoxCreating
	_, _, err := w.s.CreateBox(w.ctx, creating, store.Capacity{})
	w.ok(err)
	w.is(idle(epoch.Add(time.Second)), []string{})
	w.is(idle(later), []string{a.ID, b.ID})
	w.ok(w.s.TouchBox(w.ctx, a.ID, epoch.Add(time.Millisecond)))
	w.is(idle(later), []string{b.ID, a.ID}) // longest unused first

	r := w.run(a)
	w.is(idle(later), []string{b.ID})
	p := w.process(r)
	_, err = w.s.SetRunState(w.ctx, r.ID, api.RunFinished, epoch)
	w.ok(err)
	w.is(idle(later), []string{b.ID})
	f := w.newFence(p, p.Box)
	p.State = api.StateFenced
	p = w.save(p, store.Change{Fence: f})
	w.is(idle(later), []string{b.ID})
	w.save(p, store.Change{ClearFence: &store.Clear{ID: f.ID, By: "key_1", Reason: "r", At: epoch}})
	w.is(idle(later), []string{b.ID, a.ID})

	// The time begins when the last of them ends, however long it took: what a run
	// of hours has made is not gone with it.
	r = w.run(a)
	p = w.process(r)
	_, err = w.s.SetRunState(w.ctx, r.ID, api.RunFinishing, epoch.Add(4*time.Hour))
	w.ok(err)
	_, err = w.s.SetRunState(w.ctx, r.ID, api.RunFinished, epoch.Add(5*time.Hour))
	w.ok(err)
	_, err = w.s.SetRunState(w.ctx, r.ID, api.RunFinished, epoch.Add(9*time.Hour)) // changes nothing
	w.ok(err)
	f = w.newFence(p, p.Box)
	p.State = api.StateFenced
	p = w.save(p, store.Change{Fence: f})
	got, err := w.s.Box(w.ctx, all, a.ID)
	w.ok(err)
	w.is(got.Used, cut(epoch.Add(5*time.Hour)))
	w.save(p, store.Change{ClearFence: &store.Clear{ID: f.ID, By: "key_1", Reason: "r", At: epoch.Add(7 * time.Hour)}})
	w.is(idle(epoch.Add(7*time.Hour+time.Second)), []string{b.ID})
	w.is(idle(epoch.Add(7*time.Hour+2*time.Second)), []string{b.ID, a.ID})
}
