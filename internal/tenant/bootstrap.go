package tenant

import (
	"context"
	"path/filepath"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// What a first start makes.
const (
	DefaultWorkspace = "default"
	AdminKeyFile     = "admin.key"
	DefaultKeyFile   = "default.key"

	bootstrapName = "bootstrap" // the name of both keys
	bootstrapBy   = "server"    // the actor in the audit record
)

// Bootstrap makes what a first start needs: the workspace "default", an admin
// key in stateDir/admin.key and a key of that workspace in stateDir/default.key,
// both mode 0600. It is called at every start, before anything listens. It never
// overwrites a file, and where a key of the kind was ever recorded it makes no
// new one: a lost key file is replaced by [Service.ResetAdmin], not by a restart.
//
// The file is durable before the ledger knows the key, so a crash between the
// two leaves a file that the next start finds and records.
func (s *Service) Bootstrap(ctx context.Context, stateDir string, now time.Time) error {
	now = now.UTC().Truncate(time.Microsecond)
	w := store.Workspace{Name: DefaultWorkspace, Created: now}
	_, err := s.store.Workspace(ctx, w.Name)
	if errdefs.Is(err, errdefs.NotFound) {
		err = s.store.CreateWorkspace(ctx, w, event(bootstrapBy, authz.WorkspaceCreate, w.Name, w.Name, now))
	}
	if err != nil {
		return err
	}
	if err := s.firstKey(ctx, filepath.Join(stateDir, AdminKeyFile), store.KeyAdmin, "", now); err != nil {
		return err
	}
	return s.firstKey(ctx, filepath.Join(stateDir, DefaultKeyFile), store.KeyWorkspace, DefaultWorkspace, now)
}

func (s *Service) firstKey(ctx context.Context, path, kind, workspace string, now time.Time) error {
	known, err := s.store.Keys(ctx, workspace, store.Page{Limit: 1})
	if err != nil {
		return err
	}
	text, ferr := ReadKey(path)
	if len(known) > 0 {
		// Not a first start. A server works without these files; say what is odd and go on.
		if ferr != nil {
			s.log.WarnContext(ctx, "the key file cannot be used; 'stockade key reset-admin' makes a new admin key", "file", path, "err", ferr)
		}
		return nil
	}
	var k store.Key
	switch {
	case ferr == nil: // left by a first start that did not get to the ledger
		_, id, hash, _ := secret.Parse(text)
		k = store.Key{ID: id, Kind: kind, Workspace: workspace, Name: bootstrapName, Hash: hash, Created: now}
	case errdefs.Is(ferr, errdefs.NotFound):
		k, text = newKey(kind, workspace, bootstrapName, now)
		if err := secret.CreateFile0600(path, []byte(text+"\n")); err != nil {
			return err
		}
	default:
		return ferr
	}
	if err := s.store.CreateKey(ctx, k, keyEvent(bootstrapBy, authz.KeyCreate, k, now)); err != nil {
		return err
	}
	s.log.InfoContext(ctx, "key created", "file", path, "key", k.ID, "kind", kind)
	return nil
}

// ResetAdmin makes a new admin key, puts it into stateDir/admin.key in place of
// what is there, and revokes every other admin key. It is for an operator who
// has lost the key and can write to the state directory, which is proof enough;
// it works beside a running server. A crash in between leaves the old key or
// both working, never none. Audited.
func (s *Service) ResetAdmin(ctx context.Context, stateDir string) (api.Key, error) {
	at := now()
	k, text := newKey(store.KeyAdmin, "", "reset", at)
	if err := s.store.CreateKey(ctx, k, keyEvent("operator", authz.KeyCreate, k, at)); err != nil {
		return api.Key{}, err
	}
	if err := secret.WriteFile0600(filepath.Join(stateDir, AdminKeyFile), []byte(text+"\n")); err != nil {
		return api.Key{}, err
	}
	for after := ""; ; {
		old, err := s.store.Keys(ctx, "", store.Page{Limit: DefaultPage, After: after})
		if err != nil {
			return api.Key{}, err
		}
		for _, o := range old {
			after = o.ID
			if o.ID == k.ID || o.Revoked != nil {
				continue
			}
			if err := s.store.RevokeKey(ctx, o.ID, at, keyEvent("operator", authz.KeyRevoke, o, at)); err != nil {
				return api.Key{}, err
			}
		}
		if len(old) < DefaultPage {
			s.log.InfoContext(ctx, "admin key replaced", "key", k.ID)
			return keyOf(k), nil
		}
	}
}

// ReadKey reads a key from a file as [Service.Bootstrap] writes it, with the
// rules of secret.ReadFile0600. A file that holds something else is invalid.
func ReadKey(path string) (string, error) {
	data, err := secret.ReadFile0600(path)
	if err != nil {
		return "", err
	}
	text := strings.TrimSpace(string(data))
	if kind, _, _, ok := secret.Parse(text); !ok || kind != ident.Key {
		return "", errdefs.New(errdefs.Invalid, "%s does not hold a key", path).
			WithNext("move it away; 'stockade key reset-admin' makes a new admin key")
	}
	return text, nil
}
