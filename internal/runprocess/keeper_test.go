package runprocess

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

var errDown = errdefs.Wrap(errors.New("connection refused"), errdefs.Unavailable, "the server at http://10.0.0.1:7717 does not answer")

// TestNotGranted: without a grant nothing tells that the actions exist.
func TestNotGranted(t *testing.T) {
	t.Parallel()
	f := newFake()
	k := rig(t, f)
	legacy := binding("a")
	legacy.RuntimeRevision, legacy.ArtifactDigest = 0, ""
	for name, s := range map[string]Start{
		"another plugin":      {Plugin: "stockade/other", Binding: binding("a"), RunID: "r"},
		"no whole binding":    {Plugin: plug, Binding: legacy, RunID: "r"},
		"no id":               {Plugin: plug, Binding: binding("a")},
		"an id that is large": {Plugin: plug, Binding: binding("a"), RunID: strings.Repeat("r", maxRunID+1)},
	} {
		if k.Begin(s) != nil {
			t.Errorf("%s: a run began", name)
		}
		if s.RunID != "r" {
			continue
		}
		raw, _ := json.Marshal(open)
		for _, k := range []*Keeper{k, nil} {
			_, err := k.Answer(t.Context(), 1, s.Plugin, s.Binding, pluginwire.ActionOpenRunProcess, raw)
			if got := pluginwire.FromError(err); got != "ValueError: Action open_run_process not found" {
				t.Errorf("%s: %s", name, got)
			}
		}
	}
	var none *Keeper
	none.Begin(runOf("a", "r")).End(t.Context(), "", time.Hour)
	if _, err := ask(t.Context(), k, "a", "run_a_process", open); err == nil {
		t.Error("another action was answered")
	}
	all := New(Config{Plugins: []string{All}})
	if !all.Granted("who/ever", binding("a")) || all.Granted("who/ever", legacy) {
		t.Error("all is not every plugin with a binding")
	}
}

// TestOnlyItsOwnRun: the binding and the run's id together name a run.
func TestOnlyItsOwnRun(t *testing.T) {
	t.Parallel()
	f := newFake()
	k := rig(t, f)
	r := k.Begin(runOf("a", "r"))
	if k.Begin(runOf("a", "r")) != nil {
		t.Error("two runs have one name")
	}
	other := k.Begin(runOf("b", "other"))
	out, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open)
	if got, _ := out.(process); err != nil || got.Handle != "proc-q" || got.IO.MaxReadBytes != MaxData || got.IO.MaxWaitMillis != 20000 {
		t.Fatalf("%+v, %v", out, err)
	}
	newer := binding("a")
	newer.RuntimeRevision = 2
	raw, _ := json.Marshal(open)
	_, foreign := ask(t.Context(), k, "b", pluginwire.ActionOpenRunProcess, open)
	_, missing := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, with(open, "run_id", "none"))
	_, later := k.Answer(t.Context(), "conn", plug, newer, pluginwire.ActionOpenRunProcess, raw)
	r.End(t.Context(), "over", time.Minute)
	_, over := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open)
	_, _, like := refusal(t, foreign)
	for what, err := range map[string]error{"another's": foreign, "none": missing, "another revision's": later, "one that ended": over} {
		if code, retry, text := refusal(t, err); code != errdefs.NotFound || retry || strings.ReplaceAll(text, "none", "r") != like {
			t.Errorf("%s: %s %s", what, code, text)
		}
	}
	other.End(t.Context(), "", 0)
	if err := k.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if begun, finished, removed := f.counts(); begun != 2 || finished != 2 || removed != 1 {
		t.Errorf("%d begun, %d finished, %d boxes removed", begun, finished, removed)
	}
	i := slices.IndexFunc(f.runs, func(r api.RunRequest) bool { return r.Installation.InstallationUUID == "a" })
	if b := binding("a"); *f.runs[i].Installation != (api.Installation{InstanceUUID: b.InstanceUUID, WorkspaceUUID: b.WorkspaceUUID, PlacementGeneration: 1,
		InstallationUUID: "a", RuntimeRevision: 1, ArtifactDigest: b.ArtifactDigest}) || f.runs[i].TTLMillis != ttlDefault.Milliseconds() {
		t.Errorf("%+v", f.runs[i])
	}
	if k.Begin(runOf("a", "after")) != nil {
		t.Error("a run began after the end")
	}
}

// TestTheEndComesFirst: what is under way returns before the broker is told of the end,
// and a run is only waited for if it can have left something.
func TestTheEndComesFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		gate := make(chan struct{})
		f.finish = func(context.Context) error { <-gate; return nil }
		f.call = func(ctx context.Context, what string) error {
			if what == "read" {
				<-ctx.Done()
				return errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the call was given up")
			}
			return nil
		}
		k := New(Config{Broker: f, Plugins: []string{plug}})
		idle := k.Begin(runOf("a", "idle"))
		at := time.Now()
		idle.End(t.Context(), "over", time.Hour)
		r := k.Begin(runOf("a", "r"))
		if _, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open); err != nil {
			t.Fatal(err)
		}
		read := make(chan error)
		go func() {
			_, err := ask(t.Context(), k, "a", pluginwire.ActionReadRunProcess, m{"run_id": "r", "handle": "h", "wait_ms": 10000})
			read <- err
		}()
		synctest.Wait()
		ended := make(chan struct{})
		go func() { r.End(t.Context(), "over", TellWithin); close(ended) }()
		if code, _, _ := refusal(t, <-read); code != errdefs.NotFound {
			t.Errorf("a read under way: %s", code)
		}
		synctest.Wait()
		if time.Since(at) != 0 {
			t.Error("somebody waited")
		}
		<-ended
		if time.Since(at) != TellWithin {
			t.Errorf("the end was told after %s", time.Since(at))
		}
		close(gate)
		if err := k.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if c := k.Counters(); c.Proven != 2 || c.Active != 0 || c.Begun != 2 {
			t.Errorf("%+v", c)
		}
	})
}

// TestBrokerDown: nothing hangs, what may pass says so, and when the broker is back
// the run is begun and, in the end, finished.
func TestBrokerDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		var down atomic.Bool
		down.Store(true)
		f.acquire = func(context.Context) error {
			if down.Load() {
				return errDown
			}
			return nil
		}
		f.finish = f.acquire
		k := New(Config{Broker: f, Plugins: []string{plug}})
		lost := k.Begin(runOf("a", "lost"))
		r := k.Begin(runOf("a", "r"))
		synctest.Wait()
		_, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open)
		if code, retry, text := refusal(t, err); code != errdefs.Unavailable || !retry || strings.Contains(text, "10.0.0.1") {
			t.Errorf("%s %v %s", code, retry, text)
		}
		lost.End(t.Context(), "", time.Hour)
		down.Store(false)
		if _, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open); err != nil {
			t.Error(err)
		}
		down.Store(true)
		at := time.Now()
		r.End(t.Context(), "over", Patience(at.Add(time.Second), at))
		if time.Since(at) != tellLeast {
			t.Errorf("the end was told after %s", time.Since(at))
		}
		time.Sleep(time.Minute)
		down.Store(false)
		if err := k.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if begun, finished, _ := f.counts(); begun != 1 || finished != 1 {
			t.Errorf("%d begun, %d finished", begun, finished)
		}
	})
}

// TestCloseDoesNotHang: a broker that never answers leaves its runs to their time.
func TestCloseDoesNotHang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.begin = func(ctx context.Context) error {
			<-ctx.Done()
			return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "no answer")
		}
		k := New(Config{Broker: f, Plugins: []string{plug}})
		k.Begin(runOf("a", "r"))
		asked := make(chan error)
		go func() {
			_, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open)
			asked <- err
		}()
		at := time.Now()
		if code, retry, _ := refusal(t, <-asked); code != errdefs.Unavailable || !retry || time.Since(at) != BeginWithin {
			t.Errorf("%s %v after %s", code, retry, time.Since(at))
		}
		f.begin = nil
		if _, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open); err != nil {
			t.Fatal(err)
		}
		f.finish = func(ctx context.Context) error {
			<-ctx.Done()
			return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "no answer")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
		defer cancel()
		if err := k.Close(ctx); !errdefs.Is(err, errdefs.Indeterminate) {
			t.Errorf("%v", err)
		}
		if c := k.Counters(); c.Unproven != 1 || c.Failed != 1 {
			t.Errorf("%+v", c)
		}
	})
}

// TestBounds: neither a run nor a worker takes all lanes of a connection.
func TestBounds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.call = func(ctx context.Context, _ string) error {
			<-ctx.Done()
			return errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the call was given up")
		}
		k := New(Config{Broker: f, Plugins: []string{plug}})
		const runs = ConnCalls/RunCalls + 1
		var ended []*Run
		for n := range runs {
			ended = append(ended, k.Begin(runOf("a", strconv.Itoa(n))))
		}
		done, waiting := make(chan error), 0
		call := func(run int, action string, more ...any) (now error) {
			waiting++
			go func() {
				_, err := ask(t.Context(), k, "a", action, with(m{"run_id": strconv.Itoa(run), "handle": "h"}, more...))
				done <- err
			}()
			synctest.Wait()
			select {
			case err := <-done:
				waiting--
				return err
			default:
				return nil
			}
		}
		busy := func(err error, text string) {
			t.Helper()
			if err == nil {
				t.Fatal("it was admitted")
			}
			if code, retry, got := refusal(t, err); code != errdefs.Unavailable || !retry || !strings.Contains(got, text) {
				t.Errorf("%s %v %s", code, retry, got)
			}
		}
		for n := range runs - 1 {
			for range RunPolls {
				if err := call(n, pluginwire.ActionReadRunProcess, "wait_ms", 20000); err != nil {
					t.Fatal(err)
				}
			}
			busy(call(n, pluginwire.ActionReadRunProcess, "wait_ms", 1), "reads that wait")
			for range RunCalls - RunPolls {
				if err := call(n, pluginwire.ActionGetRunProcess); err != nil {
					t.Fatal(err)
				}
			}
			busy(call(n, pluginwire.ActionGetRunProcess), "this run has")
		}
		busy(call(runs-1, pluginwire.ActionGetRunProcess), "this worker has")
		raw, _ := json.Marshal(m{"run_id": strconv.Itoa(runs - 1), "handle": "h"})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := k.Answer(ctx, "another", plug, binding("a"), pluginwire.ActionGetRunProcess, raw); err == nil || strings.Contains(err.Error(), "limit") {
			t.Errorf("over another connection: %v", err)
		}
		for _, r := range ended {
			r.End(t.Context(), "", 0)
		}
		for range waiting {
			<-done
		}
		if err := k.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if len(k.conns) != 0 {
			t.Errorf("calls are still counted: %v", k.conns)
		}
	})
}

// TestEndsByItself: a run ends with its worker and with its deadline, also while its
// stream waits for LangBot.
func TestEndsByItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		k := New(Config{Broker: f, Plugins: []string{plug}})
		gone := make(chan struct{})
		a, b := runOf("a", "r"), runOf("b", "r")
		a.Gone, b.Deadline = gone, time.Now().Add(time.Minute)
		k.Begin(a)
		k.Begin(b)
		synctest.Wait()
		close(gone)
		synctest.Wait()
		if _, finished, _ := f.counts(); finished != 1 || k.Counters().Active != 1 {
			t.Errorf("%d finished, %+v", finished, k.Counters())
		}
		time.Sleep(time.Minute + overMargin)
		synctest.Wait()
		if _, finished, _ := f.counts(); finished != 2 || k.Counters().Active != 0 {
			t.Errorf("%d finished, %+v", finished, k.Counters())
		}
		if err := k.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestTooManyRuns: a broker that does not answer does not let runs pile up.
func TestTooManyRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.acquire = func(ctx context.Context) error { <-ctx.Done(); return errDown }
		k := New(Config{Broker: f, Plugins: []string{plug}})
		for n := range MaxRuns {
			r := k.Begin(runOf("a", strconv.Itoa(n)))
			if r == nil {
				t.Fatalf("run %d was not granted", n)
			}
			r.End(t.Context(), "", time.Hour)
		}
		if k.Begin(runOf("a", "r")) != nil {
			t.Error("one more was granted")
		}
		if c := k.Counters(); c.Active != 0 || c.Ending != MaxRuns {
			t.Errorf("%+v", c)
		}
		time.Sleep(BeginWithin)
		synctest.Wait()
		if r := k.Begin(runOf("a", "r")); r == nil {
			t.Error("none is granted afterwards")
		}
		if err := k.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestBegin: what stands in the way of a run, and how each try goes on.
func TestBegin(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		errs []error // of one try after another
		code errdefs.Code
		ttl  time.Duration
	}{
		"a box that went":        {errs: []error{errdefs.New(errdefs.Conflict, "removing")}, ttl: ttlDefault},
		"a lower limit":          {errs: []error{errdefs.New(errdefs.Invalid, "ttl_ms").With("limit", "60000")}, ttl: time.Minute},
		"no lower limit":         {errs: []error{errdefs.New(errdefs.Invalid, "box")}, code: errdefs.Invalid},
		"a fence":                {errs: []error{errdefs.New(errdefs.Fenced, "something may run")}, code: errdefs.Fenced},
		"a wrong key":            {errs: []error{errdefs.New(errdefs.Unauthenticated, "key key_1 was revoked")}, code: errdefs.Denied},
		"boxes that always go":   {errs: slices.Repeat([]error{errdefs.New(errdefs.Conflict, "removing")}, beginTries), code: errdefs.Conflict},
		"a fault of the broker":  {errs: []error{errdefs.New(errdefs.Internal, "secret")}, code: errdefs.Internal},
		"no room for more boxes": {errs: []error{errdefs.New(errdefs.Exhausted, "64 boxes")}, code: errdefs.Exhausted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake()
			k := rig(t, f)
			f.begin = func(context.Context) error {
				f.mu.Lock()
				defer f.mu.Unlock()
				if len(c.errs) == 0 {
					return nil
				}
				err := c.errs[0]
				c.errs = c.errs[1:]
				return err
			}
			// The first attempt is the run's own; held until the call waits for it.
			r := k.Begin(runOf("a", "r"))
			a, err := r.ready(t.Context())
			if c.code == "" {
				if err != nil || f.runs[0].TTLMillis != c.ttl.Milliseconds() {
					t.Errorf("%v, %+v", err, f.runs)
				}
				return
			}
			if got := r.ofBroker(err, false); errdefs.CodeOf(got) != c.code || strings.Contains(got.Error(), "secret") || strings.Contains(got.Error(), "key_1") || a.run.ID != "" {
				t.Errorf("%v", got)
			}
		})
	}
}

// TestExpired: a run that the broker ended by itself looks like one that is over.
func TestExpired(t *testing.T) {
	t.Parallel()
	f := newFake()
	k := rig(t, f)
	k.Begin(runOf("a", "r"))
	f.call = func(context.Context, string) error {
		return errdefs.New(errdefs.Unauthenticated, "the run's token has expired")
	}
	for _, action := range []string{pluginwire.ActionGetRunProcess, pluginwire.ActionCloseRunProcess} {
		_, err := ask(t.Context(), k, "a", action, m{"run_id": "r", "handle": "h"})
		if code, _, text := refusal(t, err); code != errdefs.NotFound || strings.Contains(text, "token") {
			t.Errorf("%s %s", code, text)
		}
	}
}

// TestBoxes: who shares a box, and which boxes go with their run.
func TestBoxes(t *testing.T) {
	t.Parallel()
	base := BoxKey(binding("a"), []string{"bot", "talk", ""}, "r")
	upgraded := binding("a")
	upgraded.RuntimeRevision, upgraded.ArtifactDigest, upgraded.PlacementGeneration = 7, strings.Repeat("b", 64), 2
	if BoxKey(upgraded, []string{"bot", "talk", ""}, "r2") != base {
		t.Error("an upgrade loses the files")
	}
	elsewhere, foreign := binding("a"), binding("a")
	elsewhere.WorkspaceUUID, foreign.InstanceUUID = "w2", "i2"
	seen := map[string]bool{base: true}
	for _, k := range []string{
		BoxKey(binding("b"), []string{"bot", "talk", ""}, "r"), BoxKey(elsewhere, []string{"bot", "talk", ""}, "r"), BoxKey(foreign, []string{"bot", "talk", ""}, "r"),
		BoxKey(binding("a"), []string{"bot", "talk", "thread"}, "r"), BoxKey(binding("a"), []string{"bott", "alk", ""}, "r"),
		BoxKey(binding("a"), nil, "r"), BoxKey(binding("a"), nil, "r2"), BoxKey(binding("a"), []string{"r"}, "r"),
	} {
		if seen[k] || len(k) > 128 {
			t.Errorf("%s is shared", k)
		}
		seen[k] = true
	}
	for name, c := range map[string]struct {
		talk     []string
		open     bool
		unproven bool
		want     []string
	}{
		"used, of a conversation": {[]string{"t"}, true, false, nil},
		"unused":                  {[]string{"t"}, false, false, []string{"box-1"}},
		"used, of no one":         {nil, true, false, []string{"box-1"}},
		"not proven":              {nil, true, true, nil},
	} {
		f := newFake()
		f.unproven = c.unproven
		k := New(Config{Broker: f, Plugins: []string{plug}})
		s := runOf("a", "r")
		s.Conversation = c.talk
		r := k.Begin(s)
		if c.open {
			if _, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open); err != nil {
				t.Fatal(err)
			}
		}
		r.End(t.Context(), "", time.Minute)
		if err := k.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if !slices.Equal(f.removed, c.want) {
			t.Errorf("%s: removed %v", name, f.removed)
		}
	}
}

// TestSharedBox: a run that made its box for nothing does not take it from another run
// of the conversation.
func TestSharedBox(t *testing.T) {
	t.Parallel()
	for _, used := range []bool{true, false} {
		f := newFake()
		k := New(Config{Broker: f, Plugins: []string{plug}})
		first := k.Begin(runOf("a", "first"))
		if _, err := first.ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		second := k.Begin(runOf("a", "r"))
		if a, err := second.ready(t.Context()); err != nil || !a.box.Reused {
			t.Fatalf("%v", err)
		}
		if used {
			if _, err := ask(t.Context(), k, "a", pluginwire.ActionOpenRunProcess, open); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range []*Run{second, first} {
			r.End(t.Context(), "", 0)
			<-r.done
		}
		if err := k.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if (len(f.removed) == 0) != used || len(k.boxes) != 0 {
			t.Errorf("used %v: removed %v, remembered %v", used, f.removed, k.boxes)
		}
	}
}

func TestTimes(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	for _, c := range []struct {
		left          time.Duration // 0: no deadline
		ttl, patience time.Duration
	}{
		{0, time.Hour, TellWithin}, {5 * time.Minute, 6 * time.Minute, TellWithin}, {3 * time.Second, 63 * time.Second, 2500 * time.Millisecond},
		{-time.Hour, time.Minute, time.Second}, {1000 * time.Hour, 24 * time.Hour, TellWithin},
	} {
		deadline := time.Time{}
		if c.left != 0 {
			deadline = now.Add(c.left)
		}
		if ttl, p := TTL(deadline, now), Patience(deadline, now); ttl != c.ttl || p != c.patience {
			t.Errorf("%s: %s, %s", c.left, ttl, p)
		}
	}
}
