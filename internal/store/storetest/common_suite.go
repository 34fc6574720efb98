package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// testScope: a record outside the scope looks exactly like none (P6).
func testScope(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	sibling := w.run(sc.box)
	w.workspace("v")
	p := w.process(sc.run)
	f := w.newFence(p, p.Box)
	p.State = api.StateFenced
	p = w.save(p, store.Change{Fence: f})
	reads := map[string]func(s store.Scope, existing bool) error{
		"Box": func(s store.Scope, e bool) error { _, err := w.s.Box(w.ctx, s, pick(e, sc.box.ID)); return err },
		"Run": func(s store.Scope, e bool) error { _, err := w.s.Run(w.ctx, s, pick(e, sc.run.ID)); return err },
		"Process": func(s store.Scope, e bool) error {
			_, err := w.s.Process(w.ctx, s, pick(e, p.Handle))
			return err
		},
		"ProcessByRequest": func(s store.Scope, e bool) error {
			_, err := w.s.ProcessByRequest(w.ctx, s, sc.run.ID, pick(e, p.RequestID))
			return err
		},
		"Fence": func(s store.Scope, e bool) error { _, err := w.s.Fence(w.ctx, s, pick(e, f.ID)); return err },
	}
	lists := map[string]func(s store.Scope, pg store.Page) (int, error){
		"Boxes": func(s store.Scope, pg store.Page) (int, error) { l, err := w.s.Boxes(w.ctx, s, pg); return len(l), err },
		"Runs":  func(s store.Scope, pg store.Page) (int, error) { l, err := w.s.Runs(w.ctx, s, pg); return len(l), err },
		"Processes": func(s store.Scope, pg store.Page) (int, error) {
			l, err := w.s.Processes(w.ctx, s, store.ProcessFilter{Page: pg})
			return len(l), err
		},
		"Fences": func(s store.Scope, pg store.Page) (int, error) {
			l, err := w.s.Fences(w.ctx, s, false, pg)
			return len(l), err
		},
	}
	own := map[string]string{"Boxes": sc.box.ID, "Runs": sc.run.ID, "Processes": p.Handle, "Fences": f.ID}
	for _, c := range []struct {
		name string
		s    store.Scope
		sees bool
		runs int
	}{
		{"everything", all, true, 2},
		{"its workspace", store.Scope{Workspace: "w"}, true, 2},
		{"its run", store.Scope{Workspace: "w", Run: sc.run.ID}, true, 1},
		{"nothing", store.Scope{}, false, 0},
		{"another workspace", store.Scope{Workspace: "v"}, false, 0},
		{"the run in another workspace", store.Scope{Workspace: "v", Run: sc.run.ID}, false, 0},
		{"the run without a workspace", store.Scope{Run: sc.run.ID}, false, 0},
		{"a run that does not exist", store.Scope{Workspace: "w", Run: "run_none"}, false, 0},
	} {
		for name, read := range reads {
			err := read(c.s, true)
			if c.sees != (err == nil) {
				w.Errorf("%s in the scope of %s: %v", name, c.name, err)
				continue
			}
			if c.sees {
				continue
			}
			none := read(c.s, false)
			if shape(err, own) != shape(none, own) {
				w.Errorf("%s in the scope of %s: %q for a record of others, %q for none", name, c.name, err, none)
			}
		}
		for name, list := range lists {
			want := 0
			if c.sees {
				want = 1
			}
			if name == "Runs" {
				want = c.runs
			}
			n, err := list(c.s, store.Page{Limit: 10})
			if err != nil || n != want {
				w.Errorf("%s in the scope of %s: %d records, want %d (%v)", name, c.name, n, want, err)
			}
			_, err = list(c.s, store.Page{Limit: 10, After: own[name]})
			if c.sees != (err == nil) || !c.sees && !errdefs.Is(err, errdefs.NotFound) {
				w.Errorf("%s after a record, in the scope of %s: %v", name, c.name, err)
			}
		}
	}
	// Two runs in one box share it, and nothing else.
	s := store.Scope{Workspace: "w", Run: sibling.ID}
	w.ok(reads["Box"](s, true))
	for _, name := range []string{"Run", "Process", "ProcessByRequest", "Fence"} {
		w.code(reads[name](s, true), errdefs.NotFound)
	}
}

func pick(existing bool, id string) string {
	if existing {
		return id
	}
	return "none"
}

// shape is an error without the ids that were asked for.
func shape(err error, known map[string]string) string {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		return fmt.Sprint(err)
	}
	text := fmt.Sprintf("%s %s %s %v", e.Code, e.Message, e.Next, e.Detail)
	for _, id := range known {
		text = strings.ReplaceAll(text, id, "none")
	}
	// The request id is the one that is not in known.
	if i, j := strings.Index(text, `"req_`), strings.LastIndex(text, `"`); i >= 0 && j > i {
		text = text[:i] + `"none` + text[j:]
	}
	return text
}

func testPaging(w *world) {
	w.target("t")
	w.workspace("w")
	b := w.box("w", "t")
	var want []string // newest first
	var r store.Run
	for i := range 7 {
		r = w.newRun(b)
		// Times run backwards and repeat: the order of recording counts.
		r.Created = epoch.Add(-time.Duration(i/2) * time.Minute)
		w.ok(w.s.CreateRun(w.ctx, r, store.Capacity{}))
		want = append([]string{r.ID}, want...)
	}
	for limit := 1; limit <= 8; limit++ {
		var got []string
		after := ""
		for {
			page, err := w.s.Runs(w.ctx, store.Scope{Workspace: "w"}, store.Page{Limit: limit, After: after})
			w.ok(err)
			if len(page) > limit {
				w.Fatalf("%d records on a page of %d", len(page), limit)
			}
			if len(page) == 0 {
				break
			}
			got = append(got, ids(page, runID)...)
			after = page[len(page)-1].ID
			if len(got) > len(want) {
				break
			}
		}
		w.is(got, want)
	}
	page := func(p store.Page) []error {
		_, e1 := w.s.Runs(w.ctx, all, p)
		_, e2 := w.s.Boxes(w.ctx, all, p)
		_, e3 := w.s.Processes(w.ctx, all, store.ProcessFilter{Page: p})
		_, e4 := w.s.Fences(w.ctx, all, true, p)
		_, e5 := w.s.Audit(w.ctx, "", p)
		_, e6 := w.s.Keys(w.ctx, "", p)
		_, e7 := w.s.Workspaces(w.ctx, p)
		return []error{e1, e2, e3, e4, e5, e6, e7}
	}
	for _, limit := range []int{-1, 0, store.MaxPage + 1} {
		for _, err := range page(store.Page{Limit: limit}) {
			w.code(err, errdefs.Invalid)
		}
	}
	for _, err := range page(store.Page{Limit: store.MaxPage}) {
		w.ok(err)
	}
	for i, err := range page(store.Page{Limit: 1, After: "none"}) {
		if i == 6 {
			w.ok(err) // a name need not exist
			continue
		}
		w.code(err, errdefs.NotFound)
	}
}

// testInvalidRecords: what breaks its Validate is refused and leaves nothing.
func testInvalidRecords(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	p := w.process(sc.run)
	long := strings.Repeat("x", store.MaxText+1)
	one := 1
	for name, err := range map[string]error{
		"workspace name":  w.s.CreateWorkspace(w.ctx, store.Workspace{Created: epoch}, w.event()),
		"workspace event": w.s.CreateWorkspace(w.ctx, store.Workspace{Name: "x", Created: epoch}, store.AuditEvent{}),
		"key kind":        w.s.CreateKey(w.ctx, store.Key{ID: "k", Kind: "root", Workspace: "w", Hash: [32]byte{1}, Created: epoch}, w.event()),
		"admin key of a workspace": w.s.CreateKey(w.ctx, store.Key{ID: "k", Kind: store.KeyAdmin, Workspace: "w", Hash: [32]byte{1}, Created: epoch},
			w.event()),
		"workspace key of none": w.s.CreateKey(w.ctx, store.Key{ID: "k", Kind: store.KeyWorkspace, Hash: [32]byte{1}, Created: epoch}, w.event()),
		"key without a hash":    w.s.CreateKey(w.ctx, store.Key{ID: "k", Kind: store.KeyWorkspace, Workspace: "w", Created: epoch}, w.event()),
		"key name":              w.s.CreateKey(w.ctx, store.Key{ID: "k", Kind: store.KeyWorkspace, Workspace: "w", Name: long, Hash: [32]byte{1}, Created: epoch}, w.event()),
		"audit":                 w.s.AppendAudit(w.ctx, store.AuditEvent{ID: "a", At: epoch, Actor: "x"}),
		"audit year":            w.s.AppendAudit(w.ctx, store.AuditEvent{ID: "a", At: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), Actor: "x", Action: "y"}),
	} {
		if !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("%s: %v", name, err)
		}
	}
	_, err := w.s.PutTarget(w.ctx, store.Target{Name: "x", Kind: "cloud"})
	w.code(err, errdefs.Invalid)
	for name, change := range map[string]func(*store.Box){
		"state": func(b *store.Box) { b.State = "open" },
		"idle":  func(b *store.Box) { b.IdleMillis = -1 },
		"limit": func(b *store.Box) { b.Limits.Pids = -1 },
		"mount": func(b *store.Box) { b.Mounts = []api.Mount{{}} },
		"used":  func(b *store.Box) { b.Used = time.Time{} },
	} {
		b := w.newBox("w", "t")
		change(&b)
		if _, _, err := w.s.CreateBox(w.ctx, b, store.Capacity{}); !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("box with another %s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*store.Run){
		"state": func(r *store.Run) { r.State = "" },
		"installation": func(r *store.Run) {
			r.Installation = &api.Installation{InstanceUUID: "i", WorkspaceUUID: "w w", PlacementGeneration: 1, InstallationUUID: "p",
				RuntimeRevision: 1, ArtifactDigest: strings.Repeat("a", 64)}
		},
		"installation's digest": func(r *store.Run) {
			r.Installation = &api.Installation{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1, InstallationUUID: "p",
				RuntimeRevision: 1, ArtifactDigest: "A"}
		},
		"token":    func(r *store.Run) { r.TokenHash = [32]byte{} },
		"port":     func(r *store.Run) { r.Models = []store.ModelGrant{{Provider: "a", Port: 65536}} },
		"provider": func(r *store.Run) { r.Models = []store.ModelGrant{{Provider: "a"}, {Provider: "a"}} },
		"finished": func(r *store.Run) { r.Finished = &epoch },
	} {
		r := w.newRun(sc.box)
		change(&r)
		if err := w.s.CreateRun(w.ctx, r, store.Capacity{}); !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("run with another %s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*store.Process){
		"state":       func(p *store.Process) { p.State = "zombie" },
		"cleanup":     func(p *store.Process) { p.Cleanup = "" },
		"exit kind":   func(p *store.Process) { p.Exit = &api.Exit{Kind: "fine"} },
		"exit code":   func(p *store.Process) { p.Exit = &api.Exit{Kind: api.ExitUnknown, Code: &one} },
		"no code":     func(p *store.Process) { p.Exit = &api.Exit{Kind: api.ExitExited} },
		"offset":      func(p *store.Process) { p.Stdin.Accepted = -1 },
		"high offset": func(p *store.Process) { p.Log.Next = api.MaxOffset + 1 },
		"request id":  func(p *store.Process) { p.RequestID = "" },
		"reason":      func(p *store.Process) { p.Reason = long },
	} {
		q := p
		change(&q)
		if _, err := w.s.SaveProcess(w.ctx, q, store.Change{}); !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("saving with another %s: %v", name, err)
		}
		q.Handle = w.id("proc")
		if _, _, err := w.s.CreateProcess(w.ctx, q, store.Capacity{}, w.event()); !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("creating with another %s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*store.Receipt){
		"method":    func(r *store.Receipt) { r.Body.Method = "hope" },
		"signature": func(r *store.Receipt) { r.Body.Signature = nil },
		"body":      func(r *store.Receipt) { r.Body.Handle = "other" },
	} {
		r := w.newReceipt(p)
		change(r)
		if _, err := w.s.SaveProcess(w.ctx, p, store.Change{Receipt: r}); !errdefs.Is(err, errdefs.Invalid) {
			w.Errorf("receipt with another %s: %v", name, err)
		}
	}
	got, err := w.s.Process(w.ctx, all, p.Handle)
	w.ok(err)
	w.is(got, p)
	boxes, err := w.s.Boxes(w.ctx, all, store.Page{Limit: 10})
	w.ok(err)
	w.is(len(boxes), 1)
}

func testContext(w *world) {
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	err := w.s.CreateWorkspace(ctx, store.Workspace{Name: "w", Created: epoch}, w.event())
	w.code(err, errdefs.Unavailable)
	if !errors.Is(err, context.Canceled) {
		w.Errorf("the cause is not wrapped: %v", err)
	}
	_, err = w.s.Workspace(w.ctx, "w")
	w.code(err, errdefs.NotFound)
	_, err = w.s.Workspaces(ctx, store.Page{Limit: 1})
	w.code(err, errdefs.Unavailable)
	_, err = w.s.Workspace(ctx, "w")
	w.code(err, errdefs.Unavailable)
}

func testClosed(w *world) {
	w.target("t")
	sc := w.scene("w", "t")
	w.ok(w.s.Close())
	w.ok(w.s.Close())
	_, err := w.s.Instance(w.ctx)
	w.code(err, errdefs.Unavailable)
	_, err = w.s.NextGeneration(w.ctx)
	w.code(err, errdefs.Unavailable)
	_, err = w.s.Run(w.ctx, all, sc.run.ID)
	w.code(err, errdefs.Unavailable)
	_, err = w.s.Runs(w.ctx, all, store.Page{Limit: 1})
	w.code(err, errdefs.Unavailable)
	_, _, err = w.s.CreateProcess(w.ctx, w.newProcess(sc.run), store.Capacity{}, w.event())
	w.code(err, errdefs.Unavailable)
}

// testDurable: everything is there after a restart, and the ids go on.
func testDurable(w *world) {
	if w.cfg.Reopen == nil {
		w.Skip("this ledger is not durable")
	}
	instance, err := w.s.Instance(w.ctx)
	w.ok(err)
	_, err = w.s.NextGeneration(w.ctx)
	w.ok(err)
	w.target("t")
	sc := w.scene("w", "t")
	w.ok(w.s.CreateKey(w.ctx, store.Key{ID: "key_1", Kind: store.KeyAdmin, Hash: [32]byte{1}, Created: epoch}, w.event()))
	p := w.process(sc.run)
	f := w.newFence(p, p.Box)
	p.State = api.StateFenced
	p = w.save(p, store.Change{Fence: f, Receipt: w.newReceipt(p)})
	before := w.everything()

	w.s = w.cfg.Reopen(w, w.s)
	w.is(w.everything(), before)
	again, err := w.s.Instance(w.ctx)
	w.ok(err)
	w.is(again, instance)
	n, err := w.s.NextGeneration(w.ctx)
	w.ok(err)
	w.is(n, int64(2))
	_, _, err = w.s.CreateProcess(w.ctx, w.newProcess(sc.run), store.Capacity{}, w.event())
	w.code(err, errdefs.Fenced) // a fence outlives everything (P5)
}

// everything reads the whole ledger.
func (w *world) everything() []any {
	w.Helper()
	p := store.Page{Limit: store.MaxPage}
	ws, e1 := w.s.Workspaces(w.ctx, p)
	ts, e2 := w.s.Targets(w.ctx)
	bs, e3 := w.s.Boxes(w.ctx, all, p)
	rs, e4 := w.s.Runs(w.ctx, all, p)
	ps, e5 := w.s.Processes(w.ctx, all, store.ProcessFilter{Page: p})
	fs, e6 := w.s.Fences(w.ctx, all, false, p)
	as, e7 := w.s.Audit(w.ctx, "", p)
	ks, e8 := w.s.Keys(w.ctx, "", p)
	w.ok(errors.Join(e1, e2, e3, e4, e5, e6, e7, e8))
	out := []any{ws, ts, bs, rs, ps, fs, as, ks}
	for _, v := range ws {
		ks, err := w.s.Keys(w.ctx, v.Name, p)
		w.ok(err)
		out = append(out, ks)
	}
	for _, v := range ps {
		r, err := w.s.Receipt(w.ctx, v.Handle)
		if !errdefs.Is(err, errdefs.NotFound) {
			w.ok(err)
		}
		out = append(out, r)
	}
	return out
}
