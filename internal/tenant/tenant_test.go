package tenant

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/storetest"
)

func TestMain(m *testing.M) { need.Main(m) }

var admin = authz.Principal{Kind: authz.Admin, Key: "key_operator"}

type fixture struct {
	*testing.T
	store *storetest.Memory
	svc   *Service
	log   *strings.Builder
}

func setup(t *testing.T) *fixture {
	f := &fixture{T: t, store: storetest.NewMemory(), log: new(strings.Builder)}
	f.svc = New(Config{Store: f.store, Logger: slog.New(slog.NewTextHandler(f.log, nil))})
	f.ok(f.store.CreateWorkspace(t.Context(), store.Workspace{Name: "w", Created: now()}, event("test", "test", "w", "w", now())))
	return f
}

func (f *fixture) ok(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// code requires an error with a code that says all of these things and names
// the next step.
func (f *fixture) code(err error, code errdefs.Code, says ...string) {
	f.Helper()
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Code != code {
		f.Fatalf("got %v, want the code %s", err, code)
	}
	for _, word := range says {
		if !strings.Contains(err.Error(), word) {
			f.Errorf("%q does not say %q", err, word)
		}
	}
}

// run makes a run and returns its token.
func (f *fixture) run(expires time.Time) (store.Run, string) {
	f.Helper()
	ctx := f.Context()
	_, err := f.store.PutTarget(ctx, store.Target{Name: "t", Kind: "box", Enabled: true})
	f.ok(err)
	b, _, err := f.store.CreateBox(ctx, store.Box{ID: secret.ID(ident.Box), Workspace: "w", Target: "t", State: api.BoxReady, Created: now(), Used: now()}, store.Capacity{})
	f.ok(err)
	r := store.Run{ID: secret.ID(ident.Run), Workspace: "w", Box: b.ID, Target: "t", State: api.RunActive, Created: now(), Expires: expires}
	text, hash := secret.NewKey(r.ID)
	r.TokenHash = hash
	f.ok(f.store.CreateRun(ctx, r, store.Capacity{}))
	return r, text
}

func TestAuthenticate(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	made, err := f.svc.CreateKey(ctx, admin, "w", api.KeyRequest{Name: "ci"})
	f.ok(err)
	p, err := f.svc.Authenticate(ctx, made.Secret)
	f.ok(err)
	if want := (authz.Principal{Kind: authz.Workspace, Key: made.Key.ID, Workspace: "w"}); p != want {
		t.Errorf("the workspace key is %+v, want %+v", p, want)
	}
	k, text := newKey(store.KeyAdmin, "", "", now())
	f.ok(f.store.CreateKey(ctx, k, event("test", "test", "", "", now())))
	p, err = f.svc.Authenticate(ctx, text)
	f.ok(err)
	if want := (authz.Principal{Kind: authz.Admin, Key: k.ID}); p != want {
		t.Errorf("the admin key is %+v, want %+v", p, want)
	}
	r, token := f.run(time.Now().Add(time.Hour))
	p, err = f.svc.Authenticate(ctx, token)
	f.ok(err)
	want := authz.Principal{Kind: authz.Run, Workspace: "w", Run: r.ID}
	if p != want {
		t.Errorf("the run token is %+v, want %+v", p, want)
	}
	_, err = f.store.SetRunState(ctx, r.ID, api.RunFinishing, now())
	f.ok(err)
	if p, err = f.svc.Authenticate(ctx, token); err != nil || p != want {
		t.Errorf("while the run finishes: %+v %v", p, err)
	}
}

func TestAuthenticateRefuses(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	refuse := func(credential string, says ...string) error {
		t.Helper()
		p, err := f.svc.Authenticate(ctx, credential)
		f.code(err, errdefs.Unauthenticated, says...)
		if p != (authz.Principal{}) {
			t.Errorf("a refusal gave %+v", p)
		}
		if e, _ := errors.AsType[*errdefs.Error](err); e.Next == "" {
			t.Errorf("%q says no next step", err)
		}
		if len(credential) > 40 && strings.Contains(err.Error(), credential[40:]) {
			t.Errorf("%q repeats the secret", err)
		}
		return err
	}
	refuse("", "no credential was given")
	refuse("hunter2", "malformed", "83 characters")
	refuse(strings.Repeat("x", 1<<20), "malformed")

	made, err := f.svc.CreateKey(ctx, admin, "w", api.KeyRequest{})
	f.ok(err)
	key := made.Secret
	unknownKey, _ := secret.NewKey(secret.ID(ident.Key))
	wrongKey, _ := secret.NewKey(made.Key.ID)
	// A stranger who knows an id learns nothing from trying it.
	if a, b := refuse(unknownKey, "not known"), refuse(wrongKey, "not known"); a.Error() != b.Error() {
		t.Errorf("an unknown key is told from a wrong one: %q, %q", a, b)
	}
	_, err = f.svc.RevokeKey(ctx, admin, made.Key.ID)
	f.ok(err)
	refuse(key, "revoked", made.Key.ID)
	if a, b := refuse(unknownKey), refuse(wrongKey); a.Error() != b.Error() {
		t.Errorf("a revoked key's id is told from an unknown one: %q, %q", a, b)
	}

	expired, expiredToken := f.run(time.Now().Add(-time.Second))
	refuse(expiredToken, "expired at", expired.ID)
	finished, finishedToken := f.run(time.Now().Add(time.Hour))
	_, err = f.store.SetRunState(ctx, finished.ID, api.RunFinished, now())
	f.ok(err)
	refuse(finishedToken, "finished at", finished.ID)
	unknownRun, _ := secret.NewKey(secret.ID(ident.Run))
	for _, id := range []string{expired.ID, finished.ID} {
		wrong, _ := secret.NewKey(id)
		if a, b := refuse(unknownRun, "not known"), refuse(wrong, "not known"); a.Error() != b.Error() {
			t.Errorf("an unknown run is told from a wrong token: %q, %q", a, b)
		}
	}
	// The id of a run with the form of a key, and the other way round.
	refuse(strings.Replace(finishedToken, "str_", "stk_", 1), "not known")

	f.ok(f.store.Close())
	_, err = f.svc.Authenticate(ctx, key)
	f.code(err, errdefs.Unavailable) // trouble of the ledger is not the caller's
	_, err = f.svc.Authenticate(ctx, finishedToken)
	f.code(err, errdefs.Unavailable)
}

func TestAdministration(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	for _, name := range []string{"", "a b", "..", strings.Repeat("x", 129)} {
		_, err := f.svc.CreateWorkspace(ctx, admin, api.WorkspaceRequest{Name: name})
		f.code(err, errdefs.Invalid)
	}
	for _, name := range []string{"v", "u"} {
		_, err := f.svc.CreateWorkspace(ctx, admin, api.WorkspaceRequest{Name: name})
		f.ok(err)
	}
	_, err := f.svc.CreateWorkspace(ctx, admin, api.WorkspaceRequest{Name: "v"})
	f.code(err, errdefs.Conflict)

	ws, err := f.svc.Workspaces(ctx, admin, 2, "")
	f.ok(err)
	if len(ws.Items) != 2 || ws.Items[0].Name != "u" || ws.Items[1].Name != "v" || ws.Next != "v" {
		t.Errorf("the first page is %+v", ws)
	}
	ws, err = f.svc.Workspaces(ctx, admin, 2, ws.Next)
	f.ok(err)
	if len(ws.Items) != 1 || ws.Items[0].Name != "w" || ws.Next != "" {
		t.Errorf("the last page is %+v", ws)
	}
	for _, limit := range []int{-1, MaxPage + 1} {
		_, err = f.svc.Workspaces(ctx, admin, limit, "")
		f.code(err, errdefs.Invalid)
		_, err = f.svc.Keys(ctx, admin, "w", limit, "")
		f.code(err, errdefs.Invalid)
	}

	_, err = f.svc.CreateKey(ctx, admin, "nowhere", api.KeyRequest{})
	f.code(err, errdefs.NotFound)
	_, err = f.svc.CreateKey(ctx, admin, "w", api.KeyRequest{Name: "a\nb"})
	f.code(err, errdefs.Invalid)
	_, err = f.svc.CreateKey(ctx, admin, "", api.KeyRequest{})
	f.code(err, errdefs.Invalid) // no admin key by this way
	var made []api.KeyCreated
	for range 3 {
		k, err := f.svc.CreateKey(ctx, admin, "w", api.KeyRequest{Name: "n"})
		f.ok(err)
		made = append(made, k)
	}
	ks, err := f.svc.Keys(ctx, admin, "w", 2, "")
	f.ok(err)
	if len(ks.Items) != 2 || ks.Items[0].ID != made[2].Key.ID || ks.Next != made[1].Key.ID {
		t.Errorf("the first page of keys is %+v", ks)
	}
	ks, err = f.svc.Keys(ctx, admin, "w", 2, ks.Next)
	f.ok(err)
	if len(ks.Items) != 1 || ks.Items[0] != made[0].Key || ks.Next != "" {
		t.Errorf("the last page of keys is %+v", ks)
	}
	_, err = f.svc.Keys(ctx, admin, "nowhere", 0, "")
	f.code(err, errdefs.NotFound)

	for range 2 {
		k, err := f.svc.RevokeKey(ctx, admin, made[0].Key.ID)
		f.ok(err)
		if k.RevokedAt == nil {
			t.Error("a revoked key has no time of revocation")
		}
	}
	_, err = f.svc.RevokeKey(ctx, admin, "key_none")
	f.code(err, errdefs.NotFound)
	_, err = f.svc.RevokeKey(ctx, admin, admin.Key)
	f.code(err, errdefs.Conflict, "reset-admin")

	// Everything was audited, once, and no secret is in the record or the log.
	events, err := f.store.Audit(ctx, "", store.Page{Limit: 100})
	f.ok(err)
	var got []string
	for _, e := range events {
		if e.Actor == admin.Key {
			got = append(got, e.Action)
		}
	}
	if want := "key.revoke key.create key.create key.create workspace.create workspace.create"; strings.Join(got, " ") != want {
		t.Errorf("audited: %v, want %s", got, want)
	}
	for _, k := range made {
		if strings.Contains(f.log.String(), k.Secret[30:]) {
			t.Error("the log holds a secret")
		}
	}
}

func TestOnlyTheOperatorAdministers(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	for _, c := range []struct {
		p    authz.Principal
		code errdefs.Code
	}{
		{authz.Principal{}, errdefs.Unauthenticated},
		{authz.Principal{Kind: authz.Workspace, Key: "key_w", Workspace: "w"}, errdefs.Denied},
		{authz.Principal{Kind: authz.Run, Workspace: "w", Run: "run_r"}, errdefs.Denied},
	} {
		for name, do := range map[string]func() error{
			"CreateWorkspace": func() error {
				_, err := f.svc.CreateWorkspace(ctx, c.p, api.WorkspaceRequest{Name: "x"})
				return err
			},
			"Workspaces": func() error { _, err := f.svc.Workspaces(ctx, c.p, 0, ""); return err },
			"CreateKey":  func() error { _, err := f.svc.CreateKey(ctx, c.p, "w", api.KeyRequest{}); return err },
			"Keys":       func() error { _, err := f.svc.Keys(ctx, c.p, "w", 0, ""); return err },
			"RevokeKey":  func() error { _, err := f.svc.RevokeKey(ctx, c.p, "key_w"); return err },
		} {
			if err := do(); !errdefs.Is(err, c.code) {
				t.Errorf("%s by %s: %v", name, c.p, err)
			}
		}
	}
}

// broken is a ledger whose next CreateKey calls fail, as a crash would cut them off.
type broken struct {
	store.Store
	left int
}

func (b *broken) CreateKey(ctx context.Context, k store.Key, a store.AuditEvent) error {
	if b.left == 0 {
		return errdefs.New(errdefs.Unavailable, "cut off")
	}
	b.left--
	return b.Store.CreateKey(ctx, k, a)
}
