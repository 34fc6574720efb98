package storetest

import (
	"fmt"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func testInstance(w *world) {
	id, err := w.s.Instance(w.ctx)
	w.ok(err)
	again, err := w.s.Instance(w.ctx)
	w.ok(err)
	w.is(again, id)
	for want := int64(1); want <= 3; want++ {
		n, err := w.s.NextGeneration(w.ctx)
		w.ok(err)
		w.is(n, want)
	}
}

func testWorkspaces(w *world) {
	a := w.event()
	a.Workspace = "b"
	w.ok(w.s.CreateWorkspace(w.ctx, store.Workspace{Name: "b", Created: epoch}, a))
	w.workspace("a")
	w.workspace("c")
	w.code(w.s.CreateWorkspace(w.ctx, store.Workspace{Name: "b", Created: epoch}, w.event()), errdefs.Conflict)

	got, err := w.s.Workspace(w.ctx, "b")
	w.ok(err)
	w.is(got, store.Workspace{Name: "b", Created: cut(epoch)})
	_, err = w.s.Workspace(w.ctx, "B")
	w.code(err, errdefs.NotFound)

	name := func(v store.Workspace) string { return v.Name }
	list, err := w.s.Workspaces(w.ctx, store.Page{Limit: 2})
	w.ok(err)
	w.is(ids(list, name), []string{"a", "b"})
	list, err = w.s.Workspaces(w.ctx, store.Page{Limit: 2, After: "b"})
	w.ok(err)
	w.is(ids(list, name), []string{"c"})
	list, err = w.s.Workspaces(w.ctx, store.Page{Limit: 2, After: "bb"})
	w.ok(err)
	w.is(ids(list, name), []string{"c"})

	events, err := w.s.Audit(w.ctx, "b", store.Page{Limit: 10})
	w.ok(err)
	w.is(ids(events, eventID), []string{a.ID})
}

func testKeys(w *world) {
	w.workspace("w")
	k := store.Key{ID: "key_1", Kind: store.KeyWorkspace, Workspace: "w", Name: "n", Hash: [32]byte{1, 2, 3}, Created: epoch}
	admin := store.Key{ID: "key_2", Kind: store.KeyAdmin, Hash: [32]byte{4}, Created: epoch}
	w.ok(w.s.CreateKey(w.ctx, k, w.event()))
	w.ok(w.s.CreateKey(w.ctx, admin, w.event()))
	w.code(w.s.CreateKey(w.ctx, k, w.event()), errdefs.Conflict)
	other := k
	other.ID, other.Workspace = "key_3", "nowhere"
	w.code(w.s.CreateKey(w.ctx, other, w.event()), errdefs.NotFound)

	got, err := w.s.Key(w.ctx, "key_1")
	w.ok(err)
	k.Created = cut(epoch)
	w.is(got, k)
	_, err = w.s.Key(w.ctx, "key_3")
	w.code(err, errdefs.NotFound)

	for workspace, want := range map[string][]string{"w": {"key_1"}, "": {"key_2"}, "nowhere": {}} {
		list, err := w.s.Keys(w.ctx, workspace, store.Page{Limit: 10})
		w.ok(err)
		w.is(ids(list, keyID), want)
	}

	a := w.event()
	w.ok(w.s.RevokeKey(w.ctx, "key_1", epoch, a))
	w.ok(w.s.RevokeKey(w.ctx, "key_1", epoch.Add(time.Hour), w.event()))
	got, err = w.s.Key(w.ctx, "key_1")
	w.ok(err)
	w.is(*got.Revoked, cut(epoch))
	w.code(w.s.RevokeKey(w.ctx, "key_9", epoch, w.event()), errdefs.NotFound)
	events, err := w.s.Audit(w.ctx, "", store.Page{Limit: 1})
	w.ok(err)
	w.is(ids(events, eventID), []string{a.ID}) // the second and third revocation recorded nothing
}

func testTargets(w *world) {
	put := store.Target{Name: "t", Kind: "box", Enabled: true, MaxBoxes: 5}
	want := put
	want.Generation = 1
	got, err := w.s.PutTarget(w.ctx, put)
	w.ok(err)
	w.is(got, want)
	put.MaxBoxes, put.Enabled = 9, false
	got, err = w.s.PutTarget(w.ctx, put)
	w.ok(err)
	w.is(got, want) // the existing one stays as it is

	w.ok(w.s.SetTargetHost(w.ctx, "t", "host_1", "boot"))
	want.HostID, want.BootID = "host_1", "boot"
	for i, enabled := range []bool{false, false, true} {
		got, err = w.s.SetTargetEnabled(w.ctx, "t", enabled, w.event())
		w.ok(err)
		want.Enabled = enabled
		if i != 1 {
			want.Generation++
		}
		w.is(got, want)
	}
	got, err = w.s.Target(w.ctx, "t")
	w.ok(err)
	w.is(got, want)
	events, err := w.s.Audit(w.ctx, "", store.Page{Limit: 10})
	w.ok(err)
	w.is(len(events), 2)

	_, err = w.s.Target(w.ctx, "u")
	w.code(err, errdefs.NotFound)
	_, err = w.s.SetTargetEnabled(w.ctx, "u", true, w.event())
	w.code(err, errdefs.NotFound)
	w.code(w.s.SetTargetHost(w.ctx, "u", "h", "b"), errdefs.NotFound)

	w.target("a")
	list, err := w.s.Targets(w.ctx)
	w.ok(err)
	w.is(ids(list, func(t store.Target) string { return t.Name }), []string{"a", "t"})
}

func testAudit(w *world) {
	for i := range 5 {
		a := w.event()
		a.ID, a.At = fmt.Sprintf("aud%d", i), epoch.Add(time.Duration(i)*time.Second)
		a.Object, a.Detail = "o", map[string]string{"k": "v"}
		if i%2 == 1 {
			a.Workspace = "w"
		}
		w.ok(w.s.AppendAudit(w.ctx, a))
		w.code(w.s.AppendAudit(w.ctx, a), errdefs.Conflict)
	}
	list, err := w.s.Audit(w.ctx, "w", store.Page{Limit: 10})
	w.ok(err)
	w.is(list, []store.AuditEvent{
		{ID: "aud3", At: cut(epoch.Add(3 * time.Second)), Actor: "key_test", Workspace: "w", Action: "test", Object: "o", Detail: map[string]string{"k": "v"}},
		{ID: "aud1", At: cut(epoch.Add(time.Second)), Actor: "key_test", Workspace: "w", Action: "test", Object: "o", Detail: map[string]string{"k": "v"}},
	})
	n, err := w.s.DeleteAuditBefore(w.ctx, epoch.Add(2*time.Second))
	w.ok(err)
	w.is(n, 2)
	list, err = w.s.Audit(w.ctx, "", store.Page{Limit: 10})
	w.ok(err)
	w.is(ids(list, eventID), []string{"aud4", "aud3", "aud2"})
}
