package tenant

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/sqlite"
)

var start = time.Date(2026, 5, 6, 7, 8, 9, 123456789, time.UTC)

// opens opens the state directory's ledger as a server does.
func opens(t *testing.T, dir string) (*Service, store.Store) {
	t.Helper()
	s, err := sqlite.Open(t.Context(), sqlite.Config{Path: filepath.Join(dir, "ledger.db")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return New(Config{Store: s}), s
}

func authenticates(t *testing.T, svc *Service, text string) authz.Principal {
	t.Helper()
	p, err := svc.Authenticate(t.Context(), text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func reads(t *testing.T, dir, name string) string {
	t.Helper()
	text, err := ReadKey(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestBootstrap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	svc, s := opens(t, dir)
	if err := svc.Bootstrap(t.Context(), dir, start); err != nil {
		t.Fatal(err)
	}
	adminKey, defaultKey := reads(t, dir, AdminKeyFile), reads(t, dir, DefaultKeyFile)
	if p := authenticates(t, svc, adminKey); p.Kind != authz.Admin {
		t.Errorf("admin.key is %+v", p)
	}
	if p := authenticates(t, svc, defaultKey); p.Kind != authz.Workspace || p.Workspace != DefaultWorkspace {
		t.Errorf("default.key is %+v", p)
	}
	for _, name := range []string{AdminKeyFile, DefaultKeyFile} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode() != 0o600 {
			t.Errorf("%s: %v (%v)", name, st, err)
		}
	}
	// A second start, and a restart, change nothing.
	if err := svc.Bootstrap(t.Context(), dir, start); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	svc, s = opens(t, dir)
	if err := svc.Bootstrap(t.Context(), dir, start.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if reads(t, dir, AdminKeyFile) != adminKey || reads(t, dir, DefaultKeyFile) != defaultKey {
		t.Error("a restart made new keys")
	}
	authenticates(t, svc, adminKey)
	events, err := s.Audit(t.Context(), "", store.Page{Limit: 10})
	if err != nil || len(events) != 3 {
		t.Errorf("%d acts were recorded, want 3 (%v)", len(events), err)
	}
}

// TestBootstrapAfterCrash: the start ends after each of its steps in turn.
func TestBootstrapAfterCrash(t *testing.T) {
	t.Parallel()
	for steps := range 3 {
		dir := t.TempDir()
		svc, s := opens(t, dir)
		svc.store = &broken{Store: s, left: steps}
		err := svc.Bootstrap(t.Context(), dir, start)
		if (steps < 2) != errdefs.Is(err, errdefs.Unavailable) {
			t.Fatalf("with %d keys recorded: %v", steps, err)
		}
		before, _ := os.ReadFile(filepath.Join(dir, AdminKeyFile))
		svc.store = s
		if err := svc.Bootstrap(t.Context(), dir, start); err != nil {
			t.Fatal(err)
		}
		if after := reads(t, dir, AdminKeyFile); after+"\n" != string(before) {
			t.Errorf("with %d keys recorded: the key file was replaced", steps)
		}
		authenticates(t, svc, reads(t, dir, AdminKeyFile))
		authenticates(t, svc, reads(t, dir, DefaultKeyFile))
	}
}

func TestBootstrapNeverOverwrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	svc, s := opens(t, dir)
	path := filepath.Join(dir, AdminKeyFile)
	if err := os.WriteFile(path, []byte("something of the operator's\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// On a first start a file that cannot be used stops the server: nobody could come in.
	if err := svc.Bootstrap(t.Context(), dir, start); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), path) {
		t.Fatalf("got %v", err)
	}
	if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := svc.Bootstrap(t.Context(), dir, start); !errdefs.Is(err, errdefs.Denied) || !strings.Contains(err.Error(), "chmod 600") {
		t.Fatalf("got %v", err)
	}
	if got, _ := os.ReadFile(path); string(got) != "x" {
		t.Errorf("the file was overwritten with %q", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := svc.Bootstrap(t.Context(), dir, start); err != nil {
		t.Fatal(err)
	}
	// A lost file is not made again by a restart, nor is another server's taken over.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := svc.Bootstrap(t.Context(), dir, start); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("a restart made a key: %v", err)
	}
	foreign, _ := secret.NewKey(secret.ID(ident.Key))
	if err := secret.WriteFile0600(path, []byte(foreign)); err != nil {
		t.Fatal(err)
	}
	if err := svc.Bootstrap(t.Context(), dir, start); err != nil {
		t.Fatal(err)
	}
	if _, err := svc.Authenticate(t.Context(), foreign); !errdefs.Is(err, errdefs.Unauthenticated) {
		t.Errorf("a key from a file was taken over: %v", err)
	}
	keys, err := s.Keys(t.Context(), "", store.Page{Limit: 10})
	if err != nil || len(keys) != 1 {
		t.Errorf("%d admin keys (%v)", len(keys), err)
	}
}

func TestResetAdmin(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	server, _ := opens(t, dir)
	if err := server.Bootstrap(t.Context(), dir, start); err != nil {
		t.Fatal(err)
	}
	old, workspace := reads(t, dir, AdminKeyFile), reads(t, dir, DefaultKeyFile)
	command, _ := opens(t, dir) // another program, beside the server
	for range 2 {
		if err := os.RemoveAll(filepath.Join(dir, AdminKeyFile)); err != nil {
			t.Fatal(err)
		}
		k, err := command.ResetAdmin(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		text := reads(t, dir, AdminKeyFile)
		if p := authenticates(t, server, text); p.Kind != authz.Admin || p.Key != k.ID || k.Kind != store.KeyAdmin {
			t.Errorf("the new key is %+v, %+v", p, k)
		}
		if _, err := server.Authenticate(t.Context(), old); !errdefs.Is(err, errdefs.Unauthenticated) || !strings.Contains(err.Error(), "revoked") {
			t.Errorf("the old key: %v", err)
		}
		old = text
	}
	authenticates(t, server, workspace)
	// It cannot write the file: the old key goes on working.
	path := filepath.Join(dir, AdminKeyFile)
	if err := os.Rename(path, path+".real"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path+".real", path); err != nil {
		t.Fatal(err)
	}
	if _, err := command.ResetAdmin(t.Context(), dir); !errdefs.Is(err, errdefs.Conflict) {
		t.Fatalf("got %v", err)
	}
	authenticates(t, server, old)
}

// TestResetAdminManyKeys: more than one page of old keys is revoked.
func TestResetAdminManyKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	dir := t.TempDir()
	for range DefaultPage + 5 {
		k, _ := newKey(store.KeyAdmin, "", "", now())
		f.ok(f.store.CreateKey(t.Context(), k, event("test", "test", "", k.ID, now())))
	}
	k, err := f.svc.ResetAdmin(t.Context(), dir)
	f.ok(err)
	list, err := f.svc.Keys(t.Context(), admin, "", MaxPage, "")
	f.ok(err)
	var good []api.Key
	for _, o := range list.Items {
		if o.RevokedAt == nil {
			good = append(good, o)
		}
	}
	if len(good) != 1 || good[0].ID != k.ID {
		t.Errorf("%d admin keys still work", len(good))
	}
}
