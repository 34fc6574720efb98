package storetest

import (
	"fmt"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func testProcessOnce(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.newProcess(sc.run)
	p.Created = epoch.Add(time.Minute)
	p.Version = 77 // is set by the ledger
	a := w.event()
	got, created, err := w.s.CreateProcess(w.ctx, p, store.Capacity{}, a)
	w.ok(err)
	w.is(created, true)
	want := p
	want.Version, want.Created = 1, cut(p.Created)
	w.is(got, want)
	b, err := w.s.Box(w.ctx, all, sc.box.ID)
	w.ok(err)
	w.is(b.Used, cut(p.Created))

	again := p
	again.Handle, again.Digest = w.id("proc"), [32]byte{200} // other arguments: the caller compares
	repeat := func() {
		got, created, err := w.s.CreateProcess(w.ctx, again, store.Capacity{PerRun: 1, PerTarget: 1, PerWorkspace: 1}, w.event())
		w.ok(err)
		w.is(created, false)
		w.is(got, want)
	}
	repeat()
	// … whatever happens to the target, the process and the run.
	_, err = w.s.SetTargetEnabled(w.ctx, "t", false, w.event())
	w.ok(err)
	repeat()
	want.State, want.Cleanup = api.StateClosing, api.CleanupPending
	want = w.save(want, store.Change{})
	repeat()
	want = w.end(want, cut(epoch))
	_, err = w.s.SetRunState(w.ctx, sc.run.ID, api.RunFinished, epoch)
	w.ok(err)
	repeat()

	events, err := w.s.Audit(w.ctx, "", store.Page{Limit: 2})
	w.ok(err)
	w.is(events[1].ID, a.ID) // then came the one about the target; the repeats recorded nothing

	// But not for another tenant that has come by the run's id.
	w.workspace("v")
	again.Workspace = "v"
	_, _, err = w.s.CreateProcess(w.ctx, again, store.Capacity{}, w.event())
	w.code(err, errdefs.NotFound)
}

func testProcessOnceConcurrently(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	const callers, rounds = 16, 10
	for range rounds {
		p := w.newProcess(sc.run)
		got, created := make([]store.Process, callers), make([]bool, callers)
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				q := p
				q.Handle, q.Digest = w.id("proc"), [32]byte{byte(i + 1)}
				var err error
				if got[i], created[i], err = w.s.CreateProcess(w.ctx, q, store.Capacity{}, w.event()); err != nil {
					w.Errorf("caller %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		n := 0
		for i := range callers {
			if created[i] {
				n++
			}
			w.is(got[i], got[0])
		}
		w.is(n, 1)
	}
	list, err := w.s.Processes(w.ctx, all, store.ProcessFilter{Page: store.Page{Limit: 100}})
	w.ok(err)
	w.is(len(list), rounds)
}

func testProcessRefusals(w *world) {
	w.target("t")
	w.target("u")
	sc := w.scene("w", "t")
	w.workspace("v")
	try := func(change func(*store.Process)) error {
		p := w.newProcess(sc.run)
		change(&p)
		_, created, err := w.s.CreateProcess(w.ctx, p, store.Capacity{}, w.event())
		w.is(created, err == nil)
		return err
	}
	same := func(*store.Process) {}
	w.code(try(func(p *store.Process) { p.Run = "run_none" }), errdefs.NotFound)
	w.code(try(func(p *store.Process) { p.Workspace = "v" }), errdefs.NotFound)
	w.code(try(func(p *store.Process) { p.Box = "box_none" }), errdefs.Invalid)
	w.code(try(func(p *store.Process) { p.Target = "u" }), errdefs.Invalid)
	w.code(try(func(p *store.Process) { p.State = api.StateRunning }), errdefs.Invalid)
	first := w.process(sc.run)
	w.code(try(func(p *store.Process) { p.Handle = first.Handle }), errdefs.Conflict)

	_, err := w.s.SetTargetEnabled(w.ctx, "t", false, w.event())
	w.ok(err)
	w.code(try(same), errdefs.Conflict)
	_, err = w.s.SetTargetEnabled(w.ctx, "t", true, w.event())
	w.ok(err)

	first.State = api.StateClosing
	first = w.save(first, store.Change{})
	next := w.run(sc.box)
	elsewhere := func(p *store.Process) { p.Run = next.ID }
	e := w.code(try(elsewhere), errdefs.Cancelling)
	w.is(e.Detail["handle"], first.Handle)
	other := w.run(w.box("w", "t"))
	w.process(other) // another box is not concerned
	first.Cleanup = api.CleanupQuiescent
	w.save(first, store.Change{})
	w.ok(try(elsewhere))
	w.ok(try(same))

	for _, state := range []api.RunState{api.RunFinishing, api.RunFinished} {
		_, err := w.s.SetRunState(w.ctx, sc.run.ID, state, epoch)
		w.ok(err)
		w.code(try(same), errdefs.Conflict)
		w.code(try(func(p *store.Process) { p.State = api.StateNeverStarted }), errdefs.Conflict)
	}
	// What was refused left nothing behind.
	list, err := w.s.Processes(w.ctx, all, store.ProcessFilter{Box: sc.box.ID, Page: store.Page{Limit: 100}})
	w.ok(err)
	w.is(len(list), 3)
}

func testProcessTombstone(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	f := w.newFence(p, "")
	p.State = api.StateClosing
	w.save(p, store.Change{Fence: f})
	_, err := w.s.SetTargetEnabled(w.ctx, "t", false, w.event())
	w.ok(err)

	// Neither fence, stop, switch nor capacity keeps a close from coming first.
	tomb := w.newProcess(sc.run)
	tomb.State, tomb.Cleanup, tomb.Spec, tomb.Digest = api.StateNeverStarted, api.CleanupQuiescent, nil, [32]byte{}
	got, created, err := w.s.CreateProcess(w.ctx, tomb, store.Capacity{PerRun: 1, PerTarget: 1, PerWorkspace: 1}, w.event())
	w.ok(err)
	w.is(created, true)
	w.is(got.State, api.StateNeverStarted)
	w.is(len(got.Spec), 0)

	late := w.newProcess(sc.run)
	late.RequestID = tomb.RequestID
	got, created, err = w.s.CreateProcess(w.ctx, late, store.Capacity{}, w.event())
	w.ok(err)
	w.is(created, false)
	w.is(got.Handle, tomb.Handle)
}

func testProcessCapacity(w *world) {
	w.target("t")
	w.target("u")
	a, b := w.scene("w", "t"), w.scene("v", "t")
	a2 := w.run(a.box)
	elsewhere := w.run(w.box("w", "u"))
	try := func(r store.Run, c store.Capacity) error {
		_, _, err := w.s.CreateProcess(w.ctx, w.newProcess(r), c, w.event())
		return err
	}
	first := w.process(a.run)
	w.process(a2)
	w.process(b.run)
	for _, c := range []struct {
		run   store.Run
		cap   store.Capacity
		limit string
	}{
		{a.run, store.Capacity{PerRun: 1}, "per_run"},
		{a.run, store.Capacity{PerTarget: 3}, "per_target"},
		{elsewhere, store.Capacity{PerWorkspace: 2}, "per_workspace"},
	} {
		e := w.code(try(c.run, c.cap), errdefs.Exhausted)
		w.is(e.Detail["limit"], c.limit)
	}
	w.ok(try(elsewhere, store.Capacity{PerTarget: 1, PerWorkspace: 3, PerRun: 1}))
	w.end(first, epoch) // makes room
	w.ok(try(a.run, store.Capacity{PerTarget: 3, PerWorkspace: 3, PerRun: 1}))
}

// What is kept of a workspace is bounded too, and goes with its runs.
func testKept(w *world) {
	w.target("t")
	sc, other := w.scene("w", "t"), w.scene("v", "t")
	old := w.run(sc.box)
	first := w.newProcess(old)
	first.Spec = []byte("12345678")
	first = w.end(w.open(first), epoch)
	first.LogGone = true
	w.save(first, store.Change{})
	try := func(r store.Run, spec string, state api.ProcessState, k store.Kept) error {
		p := w.newProcess(r)
		p.Spec, p.State = []byte(spec), state
		_, _, err := w.s.CreateProcess(w.ctx, p, store.Capacity{Kept: k}, w.event())
		return err
	}
	refused := func(err error, limit string) {
		w.Helper()
		w.is(w.code(err, errdefs.Exhausted).Detail["limit"], limit)
	}
	full := store.Kept{Runs: 2, Processes: 1, SpecBytes: 8}
	refused(try(sc.run, "", api.StateRequested, full), "kept_processes")
	refused(try(sc.run, "", api.StateNeverStarted, full), "kept_processes")
	refused(try(sc.run, "1", api.StateRequested, store.Kept{SpecBytes: 8}), "kept_spec_bytes")
	w.ok(try(sc.run, "", api.StateRequested, store.Kept{SpecBytes: 8})) // needs no room
	w.ok(try(other.run, "12345678", api.StateRequested, full))          // the neighbour is not concerned
	begin := func(c store.Capacity) error { return w.s.CreateRun(w.ctx, w.newRun(sc.box), c) }
	refused(begin(store.Capacity{Kept: full}), "kept_runs")
	refused(begin(store.Capacity{PerWorkspace: 2}), "per_workspace")
	_, err := w.s.SetRunState(w.ctx, old.ID, api.RunFinished, epoch)
	w.ok(err)
	refused(begin(store.Capacity{Kept: full}), "kept_runs")
	w.ok(begin(store.Capacity{PerWorkspace: 2}))
	n, err := w.s.DeleteRunsFinishedBefore(w.ctx, epoch.Add(time.Hour))
	w.ok(err)
	w.is(n, 1)
	refused(begin(store.Capacity{Kept: full}), "kept_runs") // one went, one came
	w.ok(begin(store.Capacity{Kept: store.Kept{Runs: 3}}))
	w.ok(try(sc.run, "12345678", api.StateRequested, store.Kept{Processes: 2, SpecBytes: 8}))
}

func testExcessLogs(w *world) {
	w.target("t")
	sc, other := w.scene("w", "t"), w.scene("v", "t")
	// closed makes a process that closed at a minute, with a log of 10 bytes of
	// which the first 2 are gone.
	closed := func(r store.Run, minute int) store.Process {
		p := w.newProcess(r)
		p.Spec = []byte("spec")
		p = w.open(p)
		p.Log = api.LogState{Oldest: 2, Next: 10}
		return w.end(p, epoch.Add(time.Duration(minute)*time.Minute))
	}
	gone := closed(sc.run, 9)
	gone.LogGone = true
	w.save(gone, store.Change{})
	w.process(sc.run)
	second, first, third := closed(sc.run, 2), closed(sc.run, 1), closed(sc.run, 3)
	theirs := closed(other.run, 0)
	for _, c := range []struct {
		logs  int
		bytes int64
		limit int
		want  []string
	}{
		{3, 24, 9, []string{}},
		{0, 0, 9, []string{}},
		{1, 0, 9, []string{first.Handle, second.Handle}},
		{1, 0, 1, []string{first.Handle}},
		{0, 23, 9, []string{first.Handle}},
		{2, 8, 9, []string{first.Handle, second.Handle}},
		{0, 7, 9, []string{theirs.Handle, first.Handle, second.Handle, third.Handle}},
	} {
		got, err := w.s.ExcessLogs(w.ctx, c.logs, c.bytes, c.limit)
		w.ok(err)
		if have := ids(got, handleOf); fmt.Sprint(have) != fmt.Sprint(c.want) {
			w.Errorf("%d logs, %d bytes, %d at once: got %v, want %v", c.logs, c.bytes, c.limit, have, c.want)
		}
		if len(got) > 0 {
			want, err := w.s.Process(w.ctx, all, got[0].Handle)
			w.ok(err)
			want.Spec = nil
			w.is(got[0], want)
		}
	}
}

func testProcessCapacityConcurrently(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	const callers, bound = 16, 5
	made := make([]bool, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			_, created, err := w.s.CreateProcess(w.ctx, w.newProcess(sc.run), store.Capacity{PerRun: bound}, w.event())
			if err != nil && !errdefs.Is(err, errdefs.Exhausted) {
				w.Errorf("caller %d: %v", i, err)
			}
			made[i] = created
		})
	}
	wg.Wait()
	w.is(count(made, func(b *bool) bool { return *b }), bound)
}

func testProcessFields(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	code := 3
	at := func(n int) *time.Time { t := cut(epoch.Add(time.Duration(n) * time.Second)); return &t }
	for i, exit := range []*api.Exit{nil, {Kind: api.ExitExited, Code: &code}, {Kind: api.ExitSignalled, Signal: "SIGKILL", Detail: "d"},
		{Kind: api.ExitOOM, Signal: "SIGKILL"}, {Kind: api.ExitDeadline}, {Kind: api.ExitSpawnFailed, Detail: "no such file"}, {Kind: api.ExitUnknown}} {
		p := w.process(sc.run)
		p.HostID, p.BootID, p.State, p.Exit, p.Cleanup = "host_1", "boot", api.StateExited, exit, api.CleanupUnproven
		p.Reason, p.CloseAsked, p.GraceMillis, p.Fence, p.Receipt = "why\x00é", at(1), int64(i), "fence_1", "rcpt_1"
		p.Stdin = api.StdinState{Accepted: 5, EOF: true, Window: 6}
		p.Log = api.LogState{Oldest: 1, Next: api.MaxOffset, Stdout: 2, Stderr: 3, EOF: true, Blocked: true, Failure: "f"}
		p.LogGone, p.Started, p.Exited, p.Closed = true, at(2), at(3), at(4)
		p = w.save(p, store.Change{})
		got, err := w.s.Process(w.ctx, all, p.Handle)
		w.ok(err)
		w.is(got, p)
		got, err = w.s.ProcessByRequest(w.ctx, all, p.Run, p.RequestID)
		w.ok(err)
		w.is(got, p)
	}
	// The spec is fixed at the start; what looks like SQL is text.
	p := w.newProcess(sc.run)
	p.RequestID, p.Spec = `'; DROP TABLE processes; --`, []byte(`{"argv":["a\u0000"]}`)
	p = w.open(p)
	changed := p
	changed.Spec = []byte("{}")
	w.save(changed, store.Change{})
	got, err := w.s.ProcessByRequest(w.ctx, all, p.Run, p.RequestID)
	w.ok(err)
	w.is(string(got.Spec), string(p.Spec))

	for _, state := range []api.ProcessState{api.StateRequested, api.StateStarting, api.StateRunning, api.StateClosing, api.StateExited,
		api.StateUnknown, api.StateFenced, api.StateClosed, api.StateNeverStarted} {
		got.State = state
		got = w.save(got, store.Change{})
		read, err := w.s.Process(w.ctx, all, got.Handle)
		w.ok(err)
		w.is(read, got)
	}
}

func testProcessFilter(w *world) {
	w.target("t")
	w.target("u")
	a := w.scene("w", "t")
	b := w.run(w.box("w", "u"))
	live := w.process(a.run)
	fencedOne := w.process(a.run)
	fencedOne.State = api.StateFenced
	fencedOne = w.save(fencedOne, store.Change{})
	old := w.end(w.process(b), epoch)
	kept := w.end(w.process(b), epoch.Add(time.Hour))
	old.LogGone = true
	old = w.save(old, store.Change{})
	for _, c := range []struct {
		name string
		f    store.ProcessFilter
		want []string
	}{
		{"all", store.ProcessFilter{}, []string{kept.Handle, old.Handle, fencedOne.Handle, live.Handle}},
		{"box", store.ProcessFilter{Box: a.box.ID}, []string{fencedOne.Handle, live.Handle}},
		{"target", store.ProcessFilter{Target: "u"}, []string{kept.Handle, old.Handle}},
		{"live", store.ProcessFilter{Live: true}, []string{live.Handle}},
		{"closed", store.ProcessFilter{ClosedBefore: epoch.Add(time.Minute)}, []string{old.Handle}},
		{"closed at that moment", store.ProcessFilter{ClosedBefore: epoch}, []string{}},
		{"log kept", store.ProcessFilter{Target: "u", LogKept: true}, []string{kept.Handle}},
		{"nothing", store.ProcessFilter{Box: a.box.ID, Target: "u"}, []string{}},
	} {
		c.f.Page.Limit = 10
		list, err := w.s.Processes(w.ctx, all, c.f)
		w.ok(err)
		if got := ids(list, handleOf); fmt.Sprint(got) != fmt.Sprint(c.want) {
			w.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
		c.f.NoSpec = true
		bare, err := w.s.Processes(w.ctx, all, c.f)
		w.ok(err)
		for i := range list {
			list[i].Spec = nil
		}
		w.is(bare, list)
	}
}
