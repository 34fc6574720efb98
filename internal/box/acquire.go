package box

import (
	"context"
	"errors"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// Acquire returns the box with the request's key, or makes one; without a key it
// makes one each time. What the request leaves out is the server's default for a
// new box and any for one that is there; what it names must be what the box has
// (conflict). Errors: invalid, not_found (target, image), conflict, exhausted
// (boxes per target or workspace), unavailable.
func (s *Service) Acquire(ctx context.Context, p authz.Principal, req api.BoxRequest) (api.Box, error) {
	if err := authz.Check(p, authz.BoxAcquire); err != nil {
		return api.Box{}, err
	}
	b, err := s.wanted(req)
	if err != nil {
		return api.Box{}, err
	}
	b.Workspace = p.Workspace
	target, err := s.cfg.Store.Target(ctx, b.Target)
	if err != nil {
		return api.Box{}, err
	}
	if !target.Enabled {
		return api.Box{}, errdefs.New(errdefs.Unavailable, "target %q is disabled", target.Name).WithNext("ask the operator").With("target", target.Name)
	}
	h, err := s.cfg.Hosts(b.Target)
	if err != nil {
		return api.Box{}, err
	}
	if b.Image, err = resolve(ctx, h, req.Image); err != nil {
		return api.Box{}, err
	}
	capacity := store.Capacity{PerTarget: s.cfg.Limits.PerTarget, PerWorkspace: s.cfg.Limits.PerWorkspace}
	if target.MaxBoxes > 0 {
		capacity.PerTarget = target.MaxBoxes
	}
	kept, created, err := s.cfg.Store.CreateBox(ctx, b, capacity)
	if err != nil {
		return api.Box{}, err
	}
	if !created {
		if err := s.same(kept, b, req); err != nil {
			return api.Box{}, err
		}
	}
	if kept, err = s.ready(ctx, kept, created); err != nil {
		return api.Box{}, err
	}
	if created {
		if err := s.audit(ctx, p.String(), kept.Workspace, authz.BoxAcquire, kept.ID, map[string]string{"key": kept.Key, "target": kept.Target}); err != nil {
			return api.Box{}, err
		}
	} else {
		if kept, err = s.reuse(ctx, kept.ID); err != nil {
			return api.Box{}, err
		}
	}
	in, err := s.inside(ctx, authz.Scope{Workspace: kept.Workspace})
	if err != nil {
		return api.Box{}, err
	}
	out := in.shape(kept)
	out.Reused = !created
	return out, nil
}

// wanted checks a request and returns the record it would make.
func (s *Service) wanted(req api.BoxRequest) (store.Box, error) {
	l := s.cfg.Limits
	at := now()
	b := store.Box{ID: secret.ID(ident.Box), Key: req.Key, Target: req.Target, State: api.BoxCreating,
		Limits: req.Limits, Mounts: req.Mounts, IdleMillis: req.IdleMillis, Created: at, Used: at}
	if req.Key != "" {
		if err := ident.CheckName("key", req.Key); err != nil {
			return b, err
		}
	}
	if b.Target == "" {
		b.Target = s.cfg.Target
	}
	if err := ident.CheckName("target", b.Target); err != nil {
		return b, err
	}
	limit := func(name string, v *int64, def, most, least int64) error {
		if *v == 0 {
			*v = def
			if most > 0 {
				*v = min(def, most)
			}
			return nil
		}
		if *v < least || most > 0 && *v > most {
			if most == 0 {
				most = api.MaxOffset
			}
			return errdefs.New(errdefs.Invalid, "limits.%s is %d, it may be %d to %d, or 0 for the default", name, *v, least, most)
		}
		return nil
	}
	for _, err := range []error{
		limit("cpu_millis", &b.Limits.CPUMillis, l.Default.CPUMillis, l.Max.CPUMillis, 10),
		limit("memory_bytes", &b.Limits.MemoryBytes, l.Default.MemoryBytes, l.Max.MemoryBytes, 16<<20),
		limit("pids", &b.Limits.Pids, l.Default.Pids, l.Max.Pids, api.MinPids),
		limit("idle_ms", &b.IdleMillis, l.Idle.Milliseconds(), l.MaxIdle.Milliseconds(), 1000),
		checkMounts(b.Mounts, l.Mounts),
	} {
		if err != nil {
			return b, err
		}
	}
	return b, nil
}

// checkMounts refuses what no host could allow; which sources it does allow is
// the operator's list on the host.
func checkMounts(mounts []api.Mount, most int) error {
	if len(mounts) > most {
		return errdefs.New(errdefs.Invalid, "%d mounts are named, the limit is %d", len(mounts), most)
	}
	for i, m := range mounts {
		for what, p := range map[string]string{"source": m.Source, "dest": m.Dest} {
			if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || len(p) > 1024 || strings.ContainsAny(p, "\x00\n") {
				return errdefs.New(errdefs.Invalid, "the %s of mount %d is not a clean absolute path", what, i).WithNext("use a path such as /srv/data")
			}
		}
		if slices.ContainsFunc(mounts[:i], func(o api.Mount) bool { return o.Dest == m.Dest }) {
			return errdefs.New(errdefs.Invalid, "two mounts have the dest %s", m.Dest)
		}
	}
	return nil
}

// same refuses to hand out a box that is not what the request names.
func (s *Service) same(kept, wanted store.Box, req api.BoxRequest) error {
	differs := func(what string) error {
		return errdefs.New(errdefs.Conflict, "the box with key %q is there with another %s", kept.Key, what).
			WithNext("leave it out, use another key, or remove the box first").With("box", kept.ID)
	}
	switch {
	case req.Target != "" && wanted.Target != kept.Target:
		return differs("target")
	case req.Image != "" && wanted.Image != kept.Image:
		return differs("image")
	case req.Limits.CPUMillis != 0 && req.Limits.CPUMillis != kept.Limits.CPUMillis:
		return differs("limits.cpu_millis")
	case req.Limits.MemoryBytes != 0 && req.Limits.MemoryBytes != kept.Limits.MemoryBytes:
		return differs("limits.memory_bytes")
	case req.Limits.Pids != 0 && req.Limits.Pids != kept.Limits.Pids:
		return differs("limits.pids")
	case len(req.Mounts) > 0 && !reflect.DeepEqual(req.Mounts, kept.Mounts):
		return differs("set of mounts")
	case req.IdleMillis != 0 && req.IdleMillis != kept.IdleMillis:
		return differs("idle_ms")
	}
	return nil
}

// resolve turns an image's digest or name into its digest.
func resolve(ctx context.Context, h Host, ref string) (string, error) {
	if ref == "" {
		return "", nil
	}
	images, err := h.Images(ctx)
	if err != nil {
		return "", err
	}
	for _, i := range images {
		if i.Digest == ref || slices.Contains(i.Names, ref) {
			return i.Digest, nil
		}
	}
	return "", errdefs.New(errdefs.NotFound, "there is no image %q on the target", cut(ref)).WithNext("load it with `stockade image load`")
}

// ready makes a box that is being created ready, whoever began it. A box that
// its host definitely refuses is taken out again, and the refusal returned.
func (s *Service) ready(ctx context.Context, b store.Box, mine bool) (store.Box, error) {
	if b.State == api.BoxReady {
		return b, nil
	}
	free, err := s.take(ctx, b.ID)
	if err != nil {
		return b, err
	}
	defer free()
	if !mine {
		// It may have become ready, or been taken out, while the lock was waited for.
		if b, err = s.cfg.Store.Box(ctx, everything(), b.ID); err != nil {
			if errdefs.Is(err, errdefs.NotFound) {
				err = errdefs.New(errdefs.Unavailable, "the box could not be created by the request that began it").WithNext("try again")
			}
			return b, err
		}
	}
	switch b.State {
	case api.BoxReady:
		return b, nil
	case api.BoxRemoving:
		return b, errdefs.New(errdefs.Conflict, "the box %s is being removed", b.ID).WithNext("try again in a moment")
	}
	h, err := s.cfg.Hosts(b.Target)
	if err != nil {
		return b, err
	}
	if _, err := h.PutBox(ctx, specOf(b)); err != nil {
		if refused(err) {
			s.discard(ctx, h, b)
			return b, err
		}
		next := "acquire it again; it is finished or taken out by itself meanwhile"
		if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Next != "" {
			next = e.Next + "; then " + next
		}
		return b, errdefs.Wrap(err, errdefs.Unavailable, "the host has not made the box yet: %s", message(err)).WithNext("%s", next).With("box", b.ID)
	}
	if err := s.cfg.Store.SetBoxState(ctx, b.ID, api.BoxReady); err != nil {
		return b, err
	}
	b.State = api.BoxReady
	return b, nil
}

// reuse begins the idle time of a ready box anew. It takes the box's turn, as the
// reaper does: what is handed out is not about to be removed for having been idle.
func (s *Service) reuse(ctx context.Context, id string) (store.Box, error) {
	free, err := s.take(ctx, id)
	if err != nil {
		return store.Box{}, err
	}
	defer free()
	b, err := s.touched(ctx, id)
	if err == nil && b.State != api.BoxReady || errdefs.Is(err, errdefs.NotFound) {
		err = errdefs.New(errdefs.Conflict, "the box %s is being removed", id).WithNext("try again in a moment")
	}
	return b, err
}

// touched records the use of a box and returns it.
func (s *Service) touched(ctx context.Context, id string) (store.Box, error) {
	if err := s.cfg.Store.TouchBox(ctx, id, now()); err != nil {
		return store.Box{}, err
	}
	return s.cfg.Store.Box(ctx, everything(), id)
}

// discard takes out a box that was never ready. What fails is left to the sweep.
func (s *Service) discard(ctx context.Context, h Host, b store.Box) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hostTime)
	defer cancel()
	err := s.cfg.Store.SetBoxState(ctx, b.ID, api.BoxRemoving)
	if err == nil {
		err = h.RemoveBox(ctx, b.ID)
	}
	if err == nil || errdefs.Is(err, errdefs.NotFound) {
		err = s.cfg.Store.DeleteBox(ctx, b.ID)
	}
	if err != nil {
		s.log.Warn("a box that was refused was not taken out yet", "box", b.ID, "error", err)
	}
}

func specOf(b store.Box) wire.BoxSpec {
	return wire.BoxSpec{ID: b.ID, Image: b.Image, Limits: b.Limits, Mounts: b.Mounts}
}

// refused reports whether the host definitely will not make this box, now or
// later.
func refused(err error) bool {
	return errors.Is(err, host.ErrAnswered) && slices.Contains([]errdefs.Code{
		errdefs.Invalid, errdefs.NotFound, errdefs.Denied, errdefs.Conflict, errdefs.Exhausted,
	}, errdefs.CodeOf(err))
}

func message(err error) string { return api.ProblemOf(err, "").Detail }

// sweep finishes what was cut short and removes idle boxes.
func (s *Service) sweep(ctx context.Context) {
	for page := (store.Page{Limit: 1000}); ; {
		boxes, err := s.cfg.Store.Boxes(ctx, everything(), page)
		if err != nil {
			s.complain(ctx, "boxes could not be looked through", err)
			break
		}
		for _, b := range boxes {
			switch b.State {
			case api.BoxCreating:
				// One that is just being made is left to its caller.
				if time.Since(b.Created) > s.cfg.Limits.Sweep {
					_, err = s.ready(ctx, b, false)
				}
			case api.BoxRemoving:
				err = s.finishRemoval(ctx, b)
			}
			if err != nil {
				s.complain(ctx, "a box is not finished yet", err, "box", b.ID, "state", b.State)
				err = nil
			}
		}
		if len(boxes) < page.Limit {
			break
		}
		page.After = boxes[len(boxes)-1].ID
	}
	idle, err := s.cfg.Store.IdleBoxes(ctx, now())
	if err != nil {
		s.complain(ctx, "idle boxes could not be looked for", err)
		return
	}
	for _, b := range idle {
		removed, err := s.reap(ctx, b)
		if err != nil {
			s.complain(ctx, "an idle box was not removed", err, "box", b.ID)
		}
		if !removed {
			continue
		}
		s.log.Info("an idle box was removed", "box", b.ID, "workspace", b.Workspace)
		if err := s.audit(ctx, "server", b.Workspace, authz.BoxRemove, b.ID, map[string]string{"reason": "idle"}); err != nil {
			s.complain(ctx, "the removal of an idle box was not audited", err, "box", b.ID)
		}
	}
}

// reap removes a box that was found idle, unless it has been used since, or files
// go in or out.
func (s *Service) reap(ctx context.Context, found store.Box) (removed bool, err error) {
	free, err := s.take(ctx, found.ID)
	if err != nil {
		return false, err
	}
	defer free()
	s.mu.Lock()
	used := s.using[found.ID] > 0
	s.mu.Unlock()
	if used {
		return false, nil
	}
	b, err := s.cfg.Store.Box(ctx, everything(), found.ID)
	if errdefs.Is(err, errdefs.NotFound) || err == nil && (b.State != api.BoxReady || !b.Used.Equal(found.Used)) {
		return false, nil
	}
	if err == nil {
		err = s.cfg.Store.SetBoxState(ctx, b.ID, api.BoxRemoving)
	}
	if err == nil {
		err = s.takeOff(ctx, b)
	}
	return err == nil, err
}

// maxDrift is how much more may pass on the machine's clock than has passed.
const maxDrift = 10 * time.Second

// jumped reports whether the machine's clock was set forward: on it more has passed
// than in truth.
func jumped(onClock, inTruth time.Duration) bool { return onClock-inTruth > maxDrift }

// startIdleAnew lets the idle time of every box begin now, because the clock it is
// counted by was set, and would make all of them idle for long.
func (s *Service) startIdleAnew(ctx context.Context) error {
	s.log.Warn("the machine's clock was set forward or stood still: the idle time of every box begins anew")
	// All that could ever be idle. What is in use is touched at the end of that.
	boxes, err := s.cfg.Store.IdleBoxes(ctx, now().Add(2*s.cfg.Limits.MaxIdle))
	for _, b := range boxes {
		if err == nil {
			err = s.cfg.Store.TouchBox(ctx, b.ID, now())
		}
		if errdefs.Is(err, errdefs.NotFound) {
			err = nil
		}
	}
	if err != nil {
		s.complain(ctx, "the idle time of boxes could not begin anew", err)
	}
	return err
}

func (s *Service) complain(ctx context.Context, what string, err error, args ...any) {
	if ctx.Err() == nil {
		s.log.Warn(what, append(args, "error", err)...)
	}
}

// Remove removes a box with its files: conflict while a process or a run is in
// it, fenced while a fence stands on it. A removal that was begun is finished by
// itself if this call fails later.
func (s *Service) Remove(ctx context.Context, p authz.Principal, id string) error {
	b, err := s.find(ctx, p, authz.BoxRemove, id)
	if err != nil {
		return err
	}
	if err := s.remove(ctx, b); err != nil {
		return err
	}
	return s.audit(ctx, p.String(), b.Workspace, authz.BoxRemove, b.ID, nil)
}

func (s *Service) remove(ctx context.Context, b store.Box) error {
	free, err := s.take(ctx, b.ID)
	if err != nil {
		return err
	}
	defer free()
	// The ledger checks and moves in one transaction, so nothing can begin in it
	// afterwards.
	if err := s.cfg.Store.SetBoxState(ctx, b.ID, api.BoxRemoving); err != nil {
		return err
	}
	return s.takeOff(ctx, b)
}

func (s *Service) finishRemoval(ctx context.Context, b store.Box) error {
	free, err := s.take(ctx, b.ID)
	if err != nil {
		return err
	}
	defer free()
	kept, err := s.cfg.Store.Box(ctx, everything(), b.ID)
	if errdefs.Is(err, errdefs.NotFound) || err == nil && kept.State != api.BoxRemoving {
		return nil
	}
	if err != nil {
		return err
	}
	return s.takeOff(ctx, kept)
}

// takeOff removes a box in state removing from its host, then its record.
func (s *Service) takeOff(ctx context.Context, b store.Box) error {
	h, err := s.cfg.Hosts(b.Target)
	if err != nil {
		return err
	}
	if err := h.RemoveBox(ctx, b.ID); err != nil && !(errors.Is(err, host.ErrAnswered) && errdefs.Is(err, errdefs.NotFound)) {
		return err
	}
	return s.cfg.Store.DeleteBox(ctx, b.ID)
}
