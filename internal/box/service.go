package box

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/turns"
)

// hostTime bounds what the service asks of a host by itself or finishes for a
// caller who has left.
const hostTime = 2 * time.Minute

// Service owns the records of boxes. Its methods may be called from any goroutine.
type Service struct {
	cfg   Config
	log   *slog.Logger
	turns turns.Turns // of boxes, by id

	mu     sync.Mutex
	using  map[string]int // transfers of files under way, by box
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// New makes a service that reaps nothing before Start.
func New(cfg Config) (*Service, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	cfg.Limits = cfg.Limits.withDefaults()
	s := &Service{cfg: cfg, log: cfg.Logger, using: map[string]int{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s, nil
}

// Start begins to finish what was cut short and to reap idle boxes.
func (s *Service) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cancel != nil {
		return errdefs.New(errdefs.Internal, "the box service was started twice")
	}
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.wg.Go(func() {
		t := time.NewTicker(s.cfg.Limits.Sweep)
		defer t.Stop()
		for last := time.Now(); ; {
			at := time.Now()
			if !jumped(at.Round(0).Sub(last.Round(0)), at.Sub(last)) || s.startIdleAnew(ctx) == nil {
				s.sweep(ctx)
				last = at
			}
			select {
			case <-t.C:
			case <-ctx.Done():
				return
			}
		}
	})
	return nil
}

// Stop ends that and waits until ctx ends. It may be called twice.
func (s *Service) Stop(ctx context.Context) error {
	s.mu.Lock()
	if s.cancel != nil {
		s.cancel()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "the box service did not stop in time")
	}
}

func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

func everything() authz.Scope { return authz.Scope{All: true} }

func (s *Service) audit(ctx context.Context, actor, workspace string, action authz.Action, object string, detail map[string]string) error {
	return s.cfg.Store.AppendAudit(ctx, store.AuditEvent{ID: secret.ID(ident.Audit), At: now(), Actor: actor, Workspace: workspace,
		Action: string(action), Object: object, Detail: detail})
}

// find checks the right to an action on a box and returns its record.
func (s *Service) find(ctx context.Context, p authz.Principal, action authz.Action, id string) (store.Box, error) {
	if err := authz.Check(p, action); err != nil {
		return store.Box{}, err
	}
	if !ident.Valid(ident.Box, id) {
		return store.Box{}, errdefs.New(errdefs.NotFound, "there is no box %s", cut(id)).WithNext("list the boxes, or acquire one")
	}
	return s.cfg.Store.Box(ctx, p.Scope(), id)
}

// Get returns a box.
func (s *Service) Get(ctx context.Context, p authz.Principal, id string) (api.Box, error) {
	b, err := s.find(ctx, p, authz.BoxRead, id)
	if err != nil {
		return api.Box{}, err
	}
	in, err := s.inside(ctx, authz.Scope{Workspace: b.Workspace})
	if err != nil {
		return api.Box{}, err
	}
	return in.shape(b), nil
}

// List returns a page of the boxes in the caller's scope, newest first.
func (s *Service) List(ctx context.Context, p authz.Principal, page store.Page) (api.List[api.Box], error) {
	out := api.List[api.Box]{Items: []api.Box{}}
	if err := authz.Check(p, authz.BoxRead); err != nil {
		return out, err
	}
	if page.Limit == 0 {
		page.Limit = 100
	}
	if page.Limit < 1 || page.Limit > 1000 {
		return out, errdefs.New(errdefs.Invalid, "a page of %d is not possible, the limits are 1 and 1000", page.Limit)
	}
	boxes, err := s.cfg.Store.Boxes(ctx, p.Scope(), page)
	if err != nil {
		return out, err
	}
	in, err := s.inside(ctx, p.Scope())
	if err != nil {
		return out, err
	}
	for _, b := range boxes {
		out.Items = append(out.Items, in.shape(b))
	}
	if len(boxes) == page.Limit {
		out.Next = boxes[len(boxes)-1].ID
	}
	return out, nil
}

// inside is what is in boxes, by box.
type inside struct {
	runs  map[string]string
	procs map[string]int
	fence map[string]string
}

func (s *Service) inside(ctx context.Context, scope authz.Scope) (inside, error) {
	in := inside{map[string]string{}, map[string]int{}, map[string]string{}}
	runs, err := s.cfg.Store.UnfinishedRuns(ctx)
	if err != nil {
		return in, err
	}
	for _, r := range runs {
		in.runs[r.Box] = r.ID
	}
	for page := (store.Page{Limit: 1000}); ; {
		some, err := s.cfg.Store.Processes(ctx, scope, store.ProcessFilter{Live: true, NoSpec: true, Page: page})
		if err != nil {
			return in, err
		}
		for _, p := range some {
			in.procs[p.Box]++
		}
		if len(some) < page.Limit {
			break
		}
		page.After = some[len(some)-1].Handle
	}
	for page := (store.Page{Limit: 1000}); ; {
		some, err := s.cfg.Store.Fences(ctx, scope, true, page)
		if err != nil {
			return in, err
		}
		for _, f := range some {
			in.fence[f.Box] = f.ID
		}
		if len(some) < page.Limit {
			return in, nil
		}
		page.After = some[len(some)-1].ID
	}
}

func (in inside) shape(b store.Box) api.Box {
	return api.Box{ID: b.ID, Workspace: b.Workspace, Key: b.Key, Target: b.Target, State: b.State, Image: b.Image, Limits: b.Limits,
		Mounts: b.Mounts, IdleMillis: b.IdleMillis, Run: in.runs[b.ID], Processes: in.procs[b.ID], Fence: in.fence[b.ID],
		CreatedAt: b.Created, UsedAt: b.Used}
}

// take waits for a box's turn until ctx ends; the caller gives it back once.
func (s *Service) take(ctx context.Context, id string) (func(), error) {
	free, err := s.turns.Take(ctx, id)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the box %s is busy", id).WithNext("try again")
	}
	return free, nil
}

// cut bounds a text of a caller and makes it one harmless line.
func cut(s string) string {
	if len(s) > ident.MaxName {
		s = s[:ident.MaxName] + "…"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}
