package pluginhost

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

func want(mode pluginwire.Mode, bs ...pluginwire.Context) []pluginwire.DesiredState {
	var out []pluginwire.DesiredState
	for _, b := range bs {
		out = append(out, pluginwire.DesiredState{Binding: b, Enabled: true, Mode: mode})
	}
	return out
}

// CH-01: the first configuration is final; a repeat is fine and may move the
// marketplace; what refuses leaves nothing configured.
func TestConfigureOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newRig(t, dir)
	defer r.close()
	ctx := t.Context()
	isCode(t, r.m.Candidate(pack(t, "toy", "1").bind("x", 1, 1)), errdefs.Conflict)
	refused := errors.New("no limits here")
	launchers := r.m.cfg.Launchers
	r.m.cfg.Launchers = func(pluginwire.RuntimeConfig) (worker.Launcher, error) { return nil, refused }
	rc := runtimeConfig(pluginwire.ProfileShared, policy())
	if err := r.m.Configure(ctx, rc); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if _, ok := r.m.Configured(); ok {
		t.Fatal("configured after a refusal")
	}
	r.m.cfg.Launchers = launchers
	if err := r.m.Configure(ctx, rc); err != nil {
		t.Fatal(err)
	}
	again := rc
	again.CloudServiceURL = "https://market.example"
	if err := r.m.Configure(ctx, again); err != nil {
		t.Fatal(err)
	}
	if have, _ := r.m.Configured(); have != again {
		t.Errorf("%+v", have)
	}
	for _, change := range []func(*pluginwire.RuntimeConfig){
		func(c *pluginwire.RuntimeConfig) { c.Identity.RuntimeID = "other" },
		func(c *pluginwire.RuntimeConfig) { c.Policy.MaxPids++ },
		func(c *pluginwire.RuntimeConfig) { c.Profile = pluginwire.ProfileOSS },
	} {
		other := rc
		change(&other)
		isCode(t, r.m.Configure(ctx, other), errdefs.Conflict)
	}
}

// IM-01: private directories, 0700, one per installation.
func TestPrivateDirectories(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		for _, id := range []string{"inst-a", "inst-b"} {
			r.run(p.bind(id, 1, 1), p, pluginwire.ModeDedicated)
			for _, sub := range []string{"home", "tmp", "data", "root", "rpc-transfer"} {
				st, err := os.Stat(filepath.Join(r.dir, "plugin-runtime", "installations", id, sub))
				if err != nil || st.Mode().Perm() != 0o700 {
					r.t.Errorf("%s: %v, %v", sub, st, err)
				}
			}
		}
		evil := p.bind("../../outside", 1, 1)
		_, err := r.m.Apply(r.t.Context(), evil, p.archive, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated})
		isCode(r.t, err, errdefs.Invalid)
	})
}

// A package that is not the binding's changes nothing: not even the fence.
func TestDigestMismatchChangesNothing(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p, q := pack(r.t, "toy", "1"), pack(r.t, "toy", "2")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		next := q.bind("inst-a", 1, 2)
		if _, err := r.m.Apply(r.t.Context(), next, p.archive, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated}); err == nil || !strings.Contains(err.Error(), "digest") {
			r.t.Fatalf("%v", err)
		}
		r.call(b)
		if err := r.m.Authorise(b); err != nil {
			r.t.Error(err)
		}
	})
}

// IM-10: a remove whose caller leaves, twice, still ends everything.
func TestCancelledRemoveFinishes(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.launcher.set(func(w *puppet) {
			w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				if in.Action == pluginwire.ActionShutdown {
					<-ctx.Done()
					return nil, ctx.Err(), true
				}
				return nil, nil, false
			}
			w.behave()
		})
		r.run(b, p, pluginwire.ModeDedicated)
		ctx, cancel := context.WithCancel(r.t.Context())
		got := make(chan error, 1)
		go func() { _, err := r.m.Remove(ctx, b); got <- err }()
		synctest.Wait()
		cancel()
		if err := <-got; !errors.Is(err, context.Canceled) {
			r.t.Errorf("%v", err)
		}
		if st, _, _ := r.record(b); st != "" {
			r.t.Errorf("the record is %q", st)
		}
		select {
		case <-r.launcher.nth(0).ended:
		default:
			r.t.Error("the worker lives")
		}
		isCode(r.t, r.m.Candidate(b), errdefs.Conflict)
	})
}

// IM-12, IM-13, IM-14: max_workers rejects no dedicated installation; trees are
// prepared so many at a time, and who waits for an installation takes no place.
func TestPreparationsAreBounded(t *testing.T) {
	pol := policy()
	pol.MaxConcurrentRestarts, pol.MaxWorkers = 2, 1
	inBubble(t, pluginwire.ProfileOSS, pol, func(r *rig) {
		let := make(chan struct{})
		r.trees.set(func(ctx context.Context, _ string) error { <-let; return nil })
		p := pack(r.t, "toy", "1")
		for _, id := range []string{"inst-a", "inst-b", "inst-c", "inst-a"} { // the last waits for A, not for a place
			go r.quietly(p.bind(id, 1, 1), p)
		}
		synctest.Wait()
		r.trees.mu.Lock()
		now := r.trees.now
		r.trees.mu.Unlock()
		if now != 2 {
			r.t.Errorf("%d preparations at a time", now)
		}
		close(let)
		synctest.Wait()
		r.trees.mu.Lock()
		defer r.trees.mu.Unlock()
		if r.trees.most != 2 {
			r.t.Errorf("%d preparations at a time", r.trees.most)
		}
		for _, id := range []string{"inst-a", "inst-b", "inst-c"} {
			r.state(p.bind(id, 1, 1), pluginwire.StateRunning)
		}
	})
}

// quietly applies in a goroutine; the test looks at the state.
func (r *rig) quietly(b pluginwire.Context, p pkg) pluginwire.StateResult {
	res, err := r.m.Apply(r.t.Context(), b, p.archive, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated})
	if err != nil {
		r.t.Errorf("apply %s: %v", b.InstallationUUID, err)
	}
	return res
}

// IM-24, IM-25, IM-27: a tree that cannot be prepared fails the installation with
// its reason and starts nothing, in every profile; the same binding may be applied
// again. What is not ours to show is not shown.
func TestPreparationFails(t *testing.T) {
	for _, profile := range []pluginwire.Profile{pluginwire.ProfileOSS, pluginwire.ProfileShared} {
		t.Run(string(profile), func(t *testing.T) {
			inBubble(t, profile, policy(), func(r *rig) {
				p := pack(r.t, "toy", "1")
				b := p.bind("inst-a", 1, 1)
				r.trees.set(func(context.Context, string) error {
					return errdefs.New(errdefs.Invalid, "requirements.txt, line 2: pip options are not allowed")
				})
				res := r.apply(b, p, true, pluginwire.ModeDedicated)
				if res.State != pluginwire.StateFailed || res.ErrorCode != pluginwire.ErrorDependencyPrepare || !strings.Contains(res.Message, "pip options") || res.DependencyEnvironmentDigest != "" {
					r.t.Fatalf("%+v", res)
				}
				rec, err := r.m.Reconcile(r.t.Context(), want(pluginwire.ModeDedicated, b))
				if err != nil || len(rec.Failed) != 1 || rec.Failed[0].ErrorCode != pluginwire.ErrorDependencyPrepare || !slices.Equal(rec.Applied, []string{"inst-a"}) {
					r.t.Fatalf("%+v, %v", rec, err)
				}
				r.trees.set(func(context.Context, string) error { return errors.New("/secret/path: broken") })
				if res := r.apply(b, p, true, pluginwire.ModeDedicated); strings.Contains(res.Message, "secret") {
					r.t.Errorf("a tenant reads %q", res.Message)
				}
				if r.launcher.count() != 0 {
					r.t.Error("a worker was started")
				}
				r.trees.set(nil)
				r.run(b, p, pluginwire.ModeDedicated)
			})
		})
	}
}

// hangs gets no dependencies of these packages, or of any, until that is given up.
func hangs(digests ...string) func(context.Context, string) error {
	return func(ctx context.Context, digest string) error {
		if len(digests) > 0 && !slices.Contains(digests, digest) {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	}
}

// IM-16, superseded: a newer revision does not wait for the dependencies of the
// one it fences, and the fenced one says superseded and starts nothing.
func TestNewerRevisionInterruptsPreparing(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p, q := pack(r.t, "toy", "1"), pack(r.t, "toy", "2")
		old, next := p.bind("inst-a", 1, 1), q.bind("inst-a", 1, 2)
		r.trees.set(hangs(p.digest))
		first := make(chan pluginwire.StateResult, 1)
		go func() { first <- r.quietly(old, p) }()
		synctest.Wait()
		r.run(next, q, pluginwire.ModeDedicated)
		if res := <-first; res.State != pluginwire.StateSuperseded {
			r.t.Errorf("%+v", res)
		}
		if r.launcher.count() != 1 {
			r.t.Errorf("%d workers", r.launcher.count())
		}
		// A removal interrupts as well.
		third := p.bind("inst-a", 1, 3)
		go func() { first <- r.quietly(third, p) }()
		synctest.Wait()
		r.remove(third)
		if res := <-first; res.State != pluginwire.StateSuperseded {
			r.t.Errorf("%+v", res)
		}
	})
}

// A reconcile launches what needs no installer first: an index that hangs for one
// installation holds no other up, whatever the order they are named or were used in.
func TestReconcileDoesNotWaitForInstallers(t *testing.T) {
	pol := policy()
	pol.MaxConcurrentRestarts = 1
	inBubble(t, pluginwire.ProfileOSS, pol, func(r *rig) {
		p, q := pack(r.t, "toy", "1"), pack(r.t, "toy", "2")
		slow, a, b := p.bind("inst-slow", 1, 1), q.bind("inst-a", 1, 1), q.bind("inst-b", 1, 1)
		for _, k := range []pkg{p, q} {
			if _, err := r.m.cfg.Artifacts.Install(r.t.Context(), k.digest, k.archive); err != nil {
				r.t.Fatal(err)
			}
		}
		r.trees.absent = p.digest
		let := make(chan struct{})
		r.trees.set(func(_ context.Context, digest string) error {
			if digest == p.digest {
				<-let
			}
			return nil
		})
		done := make(chan pluginwire.ReconcileResult, 1)
		go func() {
			res, err := r.m.Reconcile(r.t.Context(), want(pluginwire.ModeDedicated, slow, a, b))
			if err != nil {
				r.t.Error(err)
			}
			done <- res
		}()
		synctest.Wait()
		r.state(a, pluginwire.StateRunning)
		r.state(b, pluginwire.StateRunning)
		close(let)
		if res := <-done; !slices.Equal(res.Applied, []string{"inst-slow", "inst-a", "inst-b"}) {
			r.t.Errorf("%+v", res)
		}
		synctest.Wait()
		r.state(slow, pluginwire.StateRunning)
	})
}

// A newer revision, or a removal, that was already waiting when the older one's
// preparing began ends it just as well.
func TestChangeThatWaitsInterruptsPreparing(t *testing.T) {
	for name, removal := range map[string]bool{"revision": false, "removal": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
				p, q := pack(r.t, "toy", "1"), pack(r.t, "toy", "2")
				old, next := p.bind("inst-a", 1, 1), q.bind("inst-a", 1, 2)
				r.trees.set(hangs(p.digest))
				unlock, err := r.m.keys.Take(r.t.Context(), "inst-a")
				if err != nil {
					r.t.Fatal(err)
				}
				first := make(chan pluginwire.StateResult, 1)
				go func() { first <- r.quietly(old, p) }()
				synctest.Wait()
				done := make(chan struct{})
				go func() {
					defer close(done)
					if removal {
						r.remove(old)
					} else {
						r.apply(next, q, true, pluginwire.ModeDedicated)
					}
				}()
				synctest.Wait()
				unlock()
				<-done
				if res := <-first; res.State != pluginwire.StateSuperseded {
					r.t.Errorf("%+v", res)
				}
				if n := len(r.m.changes); n != 0 {
					r.t.Errorf("%d changes are remembered", n)
				}
			})
		})
	}
}

// An apply whose caller leaves while dependencies are prepared leaves a failed
// installation that can be applied again.
func TestCancelledApply(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.trees.set(hangs())
		ctx, cancel := context.WithCancel(r.t.Context())
		done := make(chan struct{})
		go func() {
			_, _ = r.m.Apply(ctx, b, p.archive, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated})
			close(done)
		}()
		synctest.Wait()
		cancel()
		<-done
		r.state(b, pluginwire.StateFailed)
		r.trees.set(nil)
		r.run(b, p, pluginwire.ModeDedicated)
		// What runs is not stopped because somebody who applies it again leaves.
		r.trees.set(hangs())
		again, leave := context.WithCancel(r.t.Context())
		got := make(chan error, 1)
		go func() {
			_, err := r.m.Apply(again, b, nil, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated})
			got <- err
		}()
		synctest.Wait()
		leave()
		if err := <-got; !errors.Is(err, context.Canceled) {
			r.t.Errorf("%v", err)
		}
		r.state(b, pluginwire.StateRunning)
		r.call(b)
	})
}

// IM-19, IM-21: reconcile removes what is not wanted as it is, reports packages it
// lacks, and forgets the fences of what it does not know; one stale entry refuses
// all of it.
// TestNothingIsChangedForWhoHasLeft: what a superseded connection still asked for changes
// no desired state, however late it gets its turn.
func TestNothingIsChangedForWhoHasLeft(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		stays, comes := p.bind("stays", 1, 1), p.bind("comes", 1, 1)
		r.run(stays, p, pluginwire.ModeDedicated)
		left := errdefs.New(errdefs.Fenced, "superseded")
		ctx, leave := context.WithCancelCause(r.t.Context())
		leave(left)
		is := func(what string, err error) {
			if !errors.Is(err, left) {
				r.t.Errorf("%s: %v", what, err)
			}
		}
		for range 20 { // a turn that is free is there as soon as the end of ctx
			_, err := r.m.Apply(ctx, comes, p.archive, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated})
			is("apply", err)
			_, err = r.m.Remove(ctx, stays)
			is("remove", err)
			_, err = r.m.Reconcile(ctx, nil)
			is("reconcile", err)
		}
		// With the turn in hand already.
		_, err := r.m.apply(ctx, comes, nil, true, pluginwire.ModeDedicated)
		is("apply", err)
		is("remove", r.m.deactivate(ctx, stays))
		if _, ok := r.m.table.Current("comes"); ok {
			r.t.Error("an installation became current for a connection that had ended")
		}
		r.state(stays, pluginwire.StateRunning)
	})
}

func TestReconcile(t *testing.T) {
	pol := policy()
	pol.MaxInstallations, pol.MaxWorkers = 2, 2
	inBubble(t, pluginwire.ProfileOSS, pol, func(r *rig) {
		p, q := pack(r.t, "toy", "1"), pack(r.t, "toy", "2")
		a1, a2, b := p.bind("inst-a", 1, 1), q.bind("inst-a", 1, 2), p.bind("inst-b", 1, 1)
		r.run(a1, p, pluginwire.ModeDedicated)
		r.run(b, p, pluginwire.ModeDedicated)
		ctx := r.t.Context()
		_, err := r.m.Reconcile(ctx, want(pluginwire.ModeDedicated, a2, p.bind("inst-b", 1, 0)))
		if err == nil {
			r.t.Fatal("a bad entry was accepted")
		}
		r.call(a1)
		rec, err := r.m.Reconcile(ctx, want(pluginwire.ModeDedicated, a2, b))
		if err != nil || !slices.Equal(rec.Removed, []string{"inst-a"}) || !slices.Equal(rec.MissingArtifacts, []string{"inst-a"}) || !slices.Equal(rec.Applied, []string{"inst-a", "inst-b"}) {
			r.t.Fatalf("%+v, %v", rec, err)
		}
		isCode(r.t, r.m.Authorise(a1), errdefs.Denied)
		if err := r.m.Authorise(a2); err != nil {
			r.t.Error(err)
		}
		r.call(b)
		r.run(a2, q, pluginwire.ModeDedicated)
		// The fence is full; only an authoritative empty list makes room.
		r.remove(a2)
		r.remove(b)
		c := p.bind("inst-c", 1, 1)
		isCode(r.t, r.m.Candidate(c), errdefs.Exhausted)
		if rec, err = r.m.Reconcile(ctx, nil); err != nil || len(rec.Removed) != 0 {
			r.t.Fatalf("%+v, %v", rec, err)
		}
		if err := r.m.Candidate(c); err != nil {
			r.t.Error(err)
		}
		_, err = r.m.Reconcile(ctx, want(pluginwire.ModeDedicated, p.bind("1", 1, 1), p.bind("2", 1, 1), p.bind("3", 1, 1)))
		isCode(r.t, err, errdefs.Exhausted)
		_, err = r.m.Reconcile(ctx, want(pluginwire.ModeDedicated, p.bind("1", 1, 1), p.bind("1", 1, 2)))
		isCode(r.t, err, errdefs.Invalid)
	})
}

// IM-16, IM-17: a newer apply that comes while a reconcile waits to remove the
// installation wins, and its fence is not forgotten by that reconcile.
func TestReconcileLosesToNewerApply(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		old, next := p.bind("inst-a", 1, 1), p.bind("inst-a", 1, 2)
		r.run(old, p, pluginwire.ModeDedicated)
		unlock, err := r.m.keys.Take(r.t.Context(), "inst-a")
		if err != nil {
			r.t.Fatal(err)
		}
		type outcome struct {
			res pluginwire.ReconcileResult
			err error
		}
		done := make(chan outcome, 1)
		go func() {
			res, err := r.m.Reconcile(context.Background(), nil)
			done <- outcome{res, err}
		}()
		synctest.Wait()
		if _, err := r.m.apply(r.t.Context(), next, nil, true, pluginwire.ModeDedicated); err != nil {
			r.t.Fatal(err)
		}
		unlock()
		if o := <-done; o.err != nil || len(o.res.Removed) != 0 {
			r.t.Errorf("%+v", o)
		}
		synctest.Wait()
		r.state(next, pluginwire.StateRunning)
		isCode(r.t, r.m.Candidate(old), errdefs.Conflict)
	})
}

// A reconcile leaves the binding alone that LangBot used to reach legacy plugins:
// nobody applied it, so nobody removes it.
func TestReconcileLeavesLegacyBinding(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		bridge := pack(r.t, "toy", "1").bind("bridge", 1, 1)
		for range 2 {
			if err := r.m.Authorise(bridge); err != nil {
				r.t.Fatal(err)
			}
			if rec, err := r.m.Reconcile(r.t.Context(), nil); err != nil || len(rec.Removed) != 0 {
				r.t.Fatalf("%+v, %v", rec, err)
			}
		}
	})
}

// IM-26: when one entry of a batch is refused, the others are cancelled and
// joined, and no lock is left (see rig.close).
func TestReconcileBatchFails(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, bad := p.bind("inst-a", 1, 1), p.bind("!bad", 1, 1)
		if _, err := r.m.cfg.Artifacts.Install(r.t.Context(), p.digest, p.archive); err != nil {
			r.t.Fatal(err)
		}
		r.trees.set(hangs())
		_, err := r.m.Reconcile(r.t.Context(), want(pluginwire.ModeDedicated, a, bad))
		isCode(r.t, err, errdefs.Invalid)
		if st, _, _ := r.record(a); st == pluginwire.StateStarting || r.launcher.count() != 0 {
			r.t.Errorf("the sibling is %q", st)
		}
	})
}
