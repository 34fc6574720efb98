// Package tenant is where a credential becomes a principal (P6), and where
// workspaces and keys are made, listed and revoked. It is the only package that
// turns text from outside into authority.
//
// Failed attempts are not counted and not slowed down: a credential has 256
// random bits, so guessing is hopeless at any rate, and a limiter would only
// give strangers a way to lock tenants out.
package tenant

import (
	"context"
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// Config is what a Service needs.
type Config struct {
	Store  store.Store
	Logger *slog.Logger // discards when nil
}

// Service authenticates and administers tenants. It keeps nothing in memory, so
// a revocation holds from the next call on. It is safe for concurrent use.
type Service struct {
	store store.Store
	log   *slog.Logger
}

// New makes a Service.
func New(cfg Config) *Service {
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Service{store: cfg.Store, log: log}
}

// Authenticate returns whose credential it is: the text of a key or a run token,
// without any scheme before it. Every refusal is unauthenticated. A caller who
// does not hold the whole secret learns only "not known", whatever the id in it;
// that it was revoked, has expired or belongs to a finished run is told only to
// whoever holds it. Trouble of the ledger comes back as it is.
func (s *Service) Authenticate(ctx context.Context, credential string) (authz.Principal, error) {
	if credential == "" {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "no credential was given").
			WithNext("send 'Authorization: Bearer KEY' with a workspace key, an admin key or a run token")
	}
	kind, id, hash, ok := secret.Parse(credential)
	if !ok {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the credential is malformed: it is neither a key nor a run token").
			WithNext("check that it was copied whole: it has %d characters and begins with stk_ or str_", secret.MaxText)
	}
	if kind == ident.Run {
		return s.run(ctx, id, hash)
	}
	return s.key(ctx, id, hash)
}

func (s *Service) key(ctx context.Context, id string, hash [32]byte) (authz.Principal, error) {
	k, err := s.store.Key(ctx, id)
	if err != nil && !errdefs.Is(err, errdefs.NotFound) {
		return authz.Principal{}, err
	}
	// For an unknown id the comparison is made with the zero hash, which no text has.
	if !secret.Equal(k.Hash, hash) || err != nil {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the key is not known to this server").
			WithNext("use the key that was shown when it was created; an operator can make a new one")
	}
	if k.Revoked != nil {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the key %s was revoked at %s", k.ID, stamp(*k.Revoked)).
			WithNext("ask the operator for a new key")
	}
	p := authz.Principal{Kind: authz.Workspace, Key: k.ID, Workspace: k.Workspace}
	if k.Kind == store.KeyAdmin {
		p = authz.Principal{Kind: authz.Admin, Key: k.ID}
	}
	return p, nil
}

func (s *Service) run(ctx context.Context, id string, hash [32]byte) (authz.Principal, error) {
	r, err := s.store.Run(ctx, store.Scope{All: true}, id)
	if err != nil && !errdefs.Is(err, errdefs.NotFound) {
		return authz.Principal{}, err
	}
	if !secret.Equal(r.TokenHash, hash) || err != nil {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the run token is not known to this server").
			WithNext("use the token that was shown when the run was created, or create a new run")
	}
	// Finishing still authenticates: its holder may watch the run end. That nothing
	// new starts in it is the ledger's to refuse.
	if r.State == api.RunFinished {
		when := ""
		if r.Finished != nil {
			when = " at " + stamp(*r.Finished)
		}
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the run %s finished%s, and its token with it", r.ID, when).
			WithNext("create a new run; what is left of this one can be read with the workspace key")
	}
	if !time.Now().Before(r.Expires) {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the token of the run %s expired at %s", r.ID, stamp(r.Expires)).
			WithNext("create a new run with a longer ttl_ms; what is left of this one can be read with the workspace key")
	}
	return authz.Principal{Kind: authz.Run, Workspace: r.Workspace, Run: r.ID}, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
