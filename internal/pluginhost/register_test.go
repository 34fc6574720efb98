package pluginhost

import (
	"context"
	"encoding/json"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

// PH-04, PH-05, LM-22, LM-23: registrations that are refused, and that a worker of
// the runtime then fails with the reason. LangBot is asked only after the
// capability was used up.
func TestRefusedRegistrations(t *testing.T) {
	type attempt struct {
		change func(w *puppet, data map[string]any)
		text   string
		asked  bool // LangBot
	}
	for name, a := range map[string]attempt{
		"no capability":      {func(w *puppet, d map[string]any) { d["registration_capability"] = "" }, "capability", false},
		"unknown capability": {func(w *puppet, d map[string]any) { d["registration_capability"] = strings.Repeat("x", 64) }, "invalid, expired or was used", false},
		"not prod":           {func(w *puppet, d map[string]any) { d["prod_mode"] = false }, "prod_mode", false},
		"another plugin":     {func(w *puppet, d map[string]any) { w.name = "forger"; d["plugin_container"] = w.container("mounted") }, "capability of plugin tester/toy", false},
		"no container":       {func(w *puppet, d map[string]any) { d["plugin_container"] = nil }, "plugin container", false},
		"identity changes later": {func(w *puppet, d map[string]any) {
			w.on = func(w *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				if in.Action != pluginwire.ActionGetPluginContainer {
					return nil, nil, false
				}
				w.mu.Lock()
				w.name = "forger"
				w.mu.Unlock()
				return w.container(StatusInitialized), nil, true
			}
		}, "changed its identity", true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
				p := pack(r.t, "toy", "1")
				b := p.bind("inst-a", 1, 1)
				answer := make(chan error, 1)
				r.launcher.set(func(w *puppet) {
					data := map[string]any{"plugin_container": w.container("mounted"), "prod_mode": true, "plugin_debug_key": "", "registration_capability": w.spec.Capability}
					a.change(w, data)
					go func() {
						_, err := w.conn.Call(context.Background(), pluginwire.ActionRegisterPlugin, data, rpc.CallOptions{Timeout: -1})
						answer <- err
					}()
					_ = w.conn.Run(context.Background())
					w.exit(worker.Exit{Text: "exited with code 0"})
				})
				r.apply(b, p, true, pluginwire.ModeDedicated)
				synctest.Wait()
				if err := <-answer; err == nil || !strings.Contains(err.Error(), a.text) {
					r.t.Errorf("the worker was told %v, want %q", err, a.text)
				}
				time.Sleep(1500 * time.Millisecond) // virtual: it may take its time to end
				if asked := len(r.host.made(pluginwire.ActionGetPluginSettings)) > 0; asked != a.asked {
					r.t.Errorf("LangBot was asked: %v", asked)
				}
				if len(r.m.Plugins(b)) != 0 {
					r.t.Error("it is registered")
				}
				r.remove(b)
			})
		})
	}
}

// IM-18, IM-22: capabilities are bounded by their own number and work once.
func TestCapabilities(t *testing.T) {
	t.Parallel()
	p := pack(t, "toy", "1")
	now := time.Now()
	pending := registration.New(2)
	grant := registration.Grant{Author: "tester", Name: "toy", Binding: p.bind("a", 1, 1), Launch: 1}
	first, err := pending.Issue(grant, now)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pending.Issue(grant, now); err != nil {
		t.Fatal(err)
	}
	if _, err := pending.Issue(grant, now); err == nil || !strings.Contains(err.Error(), "capacity reached") {
		t.Errorf("%v", err)
	}
	if got, err := pending.Consume(first, now); err != nil || got != grant {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := pending.Consume(first, now); err == nil {
		t.Error("it worked twice")
	}
}

// A second registration on a registered connection is refused and changes nothing.
func TestSecondRegistration(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		w := r.launcher.nth(0)
		if _, err := w.register(w.spec.Capability); err == nil || !strings.Contains(err.Error(), "already registered") {
			r.t.Errorf("%v", err)
		}
		r.call(b)
	})
}

// Settings of another installation fail the registration.
func TestForeignSettings(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			return map[string]any{"installation_uuid": "inst-b"}, nil, in.Action == pluginwire.ActionGetPluginSettings
		})
		r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		if st, _, msg := r.record(b); st != pluginwire.StateFailed || !strings.Contains(msg, "another installation") {
			r.t.Errorf("%s %s", st, msg)
		}
	})
}

// author is a plugin's author at the debug port.
type author struct {
	*puppet
	served chan error
}

func (r *rig) author(adm Admission, name string) *author {
	r.t.Helper()
	aR, aW := io.Pipe()
	bR, bW := io.Pipe()
	w := &puppet{t: r.t, n: 100, name: name, in: bR, out: aW, ended: make(chan struct{})}
	_, w.stderr = io.Pipe()
	w.conn = rpc.New(rpc.Stdio(bR, aW, func() error { bR.Close(); return aW.Close() }), rpc.Config{Handle: w.handle})
	a := &author{puppet: w, served: make(chan error, 1)}
	go func() { _ = w.conn.Run(context.Background()) }()
	go func() {
		a.served <- r.m.ServeWorker(context.Background(), rpc.Stdio(aR, bW, func() error { aR.Close(); return bW.Close() }), adm)
	}()
	return a
}

func (a *author) debug(key string) error {
	_, err := a.conn.Call(context.Background(), pluginwire.ActionRegisterPlugin, map[string]any{
		"plugin_container": a.container(StatusMounted), "prod_mode": false, "plugin_debug_key": key, "registration_capability": "",
	}, rpc.CallOptions{Timeout: -1})
	return err
}

var workspace = pluginwire.Context{InstanceUUID: instance, WorkspaceUUID: "ws-1", PlacementGeneration: 1}

// PH-03, LM-26: a plugin under development, from its key to its end; the key is
// looked at again with every message.
func TestDebugPlugin(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		if _, err := r.m.CheckAdmission("static-key-that-is-long-enough-for-anybody", ""); !errdefs.Is(err, errdefs.Unauthenticated) {
			r.t.Fatalf("%v", err)
		}
		key, expires, err := r.m.IssueDebugToken(workspace, time.Now())
		if err != nil || !expires.Equal(time.Now().Add(registration.DebugKeyLife)) {
			r.t.Fatalf("%s, %v", expires, err)
		}
		adm, err := r.m.CheckAdmission(key, "")
		if err != nil {
			r.t.Fatal(err)
		}
		wrong := r.author(adm, "toy")
		if err := wrong.debug("another-key"); err == nil {
			r.t.Error("registered with another key")
		}
		wrong.conn.Close(nil)
		<-wrong.served
		a := r.author(adm, "toy")
		if err := a.debug(key); err != nil {
			r.t.Fatal(err)
		}
		calls := r.host.made(pluginwire.ActionInitializePluginSettings)
		if len(calls) != 1 || calls[0].from != workspace || !strings.Contains(calls[0].data, `"install_source":"debug"`) {
			r.t.Errorf("%+v", calls)
		}
		bridge := pack(r.t, "x", "1").bind("bridge", 1, 1)
		ps := r.m.Plugins(bridge)
		if len(ps) != 1 || !ps[0].Debug() || ps[0].Binding().InstallationUUID != "inst-from-host" || !ps[0].Container().Debug {
			r.t.Fatalf("%+v", ps)
		}
		if _, err := ps[0].Call(r.t.Context(), pluginwire.ActionCallTool, struct{}{}, 0); err != nil {
			r.t.Error(err)
		}
		if _, err := a.ask(pluginwire.ActionGetBots, struct{}{}, pluginwire.Context{}); err != nil {
			r.t.Error(err)
		}
		second := r.author(adm, "toy")
		if err := second.debug(key); err == nil || !strings.Contains(err.Error(), "already registered") {
			r.t.Errorf("%v", err)
		}
		second.conn.Close(nil)
		<-second.served
		time.Sleep(registration.DebugKeyLife)
		if _, err := a.ask(pluginwire.ActionGetBots, struct{}{}, pluginwire.Context{}); err == nil || !strings.Contains(err.Error(), "expired") {
			r.t.Errorf("%v", err)
		}
		if _, err := ps[0].Call(r.t.Context(), pluginwire.ActionCallTool, struct{}{}, 0); err != nil {
			r.t.Errorf("a call to it: %v", err)
		}
		a.conn.Close(nil)
		<-a.served
		if len(r.m.Plugins(bridge)) != 0 {
			r.t.Error("it is still there")
		}
	})
}

// A connection of the debug port that registers nothing is closed in time; one that
// did stays.
func TestDebugConnectionThatSaysNothing(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		key, _, err := r.m.IssueDebugToken(workspace, time.Now())
		if err != nil {
			r.t.Fatal(err)
		}
		adm, err := r.m.CheckAdmission(key, "")
		if err != nil {
			r.t.Fatal(err)
		}
		silent, good := r.author(adm, "silent"), r.author(adm, "toy")
		if err := good.debug(key); err != nil {
			r.t.Fatal(err)
		}
		before := time.Now()
		<-silent.served
		if took := time.Since(before); took != RegisterWithin {
			r.t.Errorf("closed after %s", took)
		}
		time.Sleep(RegisterWithin)
		if _, err := good.ask(pluginwire.ActionGetBots, struct{}{}, pluginwire.Context{}); err != nil {
			r.t.Errorf("the registered one: %v", err)
		}
		good.conn.Close(nil)
		<-good.served
	})
}

// One Workspace's connections are bounded and keep no other Workspace out; the place of
// one that ended is free before its end is told.
func TestDebugConnectionsAreBounded(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		other := workspace
		other.WorkspaceUUID = "ws-2"
		admission := func(ws pluginwire.Context) Admission {
			key, _, err := r.m.IssueDebugToken(ws, time.Now())
			if err != nil {
				r.t.Fatal(err)
			}
			adm, err := r.m.CheckAdmission(key, "")
			if err != nil {
				r.t.Fatal(err)
			}
			return adm
		}
		mine := admission(workspace)
		var open []*author
		for range DebugConnections {
			open = append(open, r.author(mine, "toy"))
		}
		synctest.Wait()
		isCode(r.t, <-r.author(mine, "toy").served, errdefs.Exhausted)
		open = append(open, r.author(admission(other), "toy"))
		synctest.Wait()
		open[0].conn.Close(nil)
		<-open[0].served
		open = append(open[1:], r.author(mine, "toy"))
		synctest.Wait()
		for _, a := range open {
			select {
			case err := <-a.served:
				r.t.Errorf("a connection ended: %v", err)
			default:
			}
			a.conn.Close(nil)
			<-a.served
		}
		if n := len(r.m.debugging); n != 0 {
			r.t.Errorf("%d Workspaces are counted", n)
		}
	})
}

// A newer generation fences the key of the older one.
func TestDebugKeyIsFenced(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		key, _, err := r.m.IssueDebugToken(workspace, time.Now())
		if err != nil {
			r.t.Fatal(err)
		}
		adm, _ := r.m.CheckAdmission(key, "")
		a := r.author(adm, "toy")
		if err := a.debug(key); err != nil {
			r.t.Fatal(err)
		}
		next := workspace
		next.PlacementGeneration = 2
		if _, _, err := r.m.IssueDebugToken(next, time.Now()); err != nil {
			r.t.Fatal(err)
		}
		if _, err := a.ask(pluginwire.ActionGetBots, struct{}{}, pluginwire.Context{}); err == nil {
			r.t.Error("the old key still works")
		}
		binding := pack(r.t, "x", "1").bind("i", 1, 1)
		_, _, err = r.m.IssueDebugToken(binding, time.Now())
		isCode(r.t, err, errdefs.Denied)
		foreign := workspace
		foreign.InstanceUUID = "other"
		_, _, err = r.m.IssueDebugToken(foreign, time.Now())
		isCode(r.t, err, errdefs.Denied)
	})
}

// A pending capability opens the debug port and no more: the worker it was made
// for is another.
func TestCapabilityAtTheDebugPort(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		let := make(chan struct{})
		r.launcher.set(func(w *puppet) { <-let; w.behave() })
		r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		stolen := r.launcher.nth(0).spec.Capability
		adm, err := r.m.CheckAdmission("", stolen)
		if err != nil {
			r.t.Fatal(err)
		}
		thief := r.author(adm, "toy")
		if _, err := thief.register(stolen); err == nil || !strings.Contains(err.Error(), "transport changed") {
			r.t.Errorf("%v", err)
		}
		thief.conn.Close(nil)
		<-thief.served
		close(let)
		synctest.Wait()
		r.state(b, pluginwire.StateRunning)
		if _, err := r.m.CheckAdmission("", stolen); err == nil {
			r.t.Error("a used capability opens the port")
		}
	})
}

// LS-01, LS-02, LS-03: a managed installation hides the legacy plugin of the same
// identity, even when it does not run, but only in its own Workspace.
func TestLegacyShadow(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		bridge := p.bind("bridge", 1, 1)
		if err := r.m.StartLegacy(Legacy{Author: "tester", Name: "toy", Dir: r.dir}); err != nil {
			r.t.Fatal(err)
		}
		isCode(r.t, r.m.StartLegacy(Legacy{Author: "tester", Name: "toy", Dir: r.dir}), errdefs.Conflict)
		synctest.Wait()
		if ready, _ := r.m.LegacyReady("tester", "toy"); ready || len(r.host.made(pluginwire.ActionGetPluginSettings)) != 0 {
			r.t.Error("a legacy plugin registered without a Workspace") // LM-24
		}
		if err := r.m.Authorise(bridge); err != nil {
			r.t.Fatal(err)
		}
		synctest.Wait()
		if ready, why := r.m.LegacyReady("tester", "toy"); !ready {
			r.t.Fatalf("not ready: %s", why)
		}
		if w := r.launcher.nth(0); !w.spec.Legacy || w.spec.Private != nil {
			r.t.Errorf("%+v", w.spec)
		}
		seen := func(c pluginwire.Context) int { return len(r.m.Plugins(c)) }
		bound := r.m.Plugins(bridge)[0].Binding()
		if bound.InstallationUUID != "inst-from-host" || !r.m.LegacyBound(bound) || r.m.LegacyBound(workspace) {
			r.t.Errorf("bound to %+v", bound)
		}
		b := p.bind("inst-a", 1, 1)
		r.apply(b, p, false, pluginwire.ModeDedicated)
		if seen(bridge) != 0 || seen(b) != 0 {
			r.t.Error("a disabled installation does not hide its legacy copy")
		}
		otherGeneration := p.bind("x", 2, 1)
		if seen(otherGeneration) != 0 {
			r.t.Error("another generation sees the legacy plugin")
		}
		r.remove(b)
		if seen(bridge) != 1 {
			r.t.Error("removing the installation does not bring the legacy plugin back")
		}
		r.m.StopLegacy("tester", "toy")
		if seen(bridge) != 0 {
			r.t.Error("a stopped legacy plugin is seen")
		}
	})
}

// In the profile shared nothing but the binding's own installation is seen.
func TestSharedSeesNothingElse(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		isCode(r.t, r.m.StartLegacy(Legacy{Author: "a", Name: "b", Dir: r.dir}), errdefs.Denied)
		_, a, _ := r.pair()
		if n := len(r.m.Plugins(a)); n != 1 {
			r.t.Errorf("%d plugins", n)
		}
		for _, c := range []pluginwire.Context{{}, workspace, pack(r.t, "z", "1").bind("other", 1, 1)} {
			if n := len(r.m.Plugins(c)); n != 0 {
				r.t.Errorf("%+v sees %d plugins", c, n)
			}
		}
	})
}

// Many things at once: applies, removals and crashes of a few installations, in
// both modes; in the end what is wanted runs, and nothing else.
func TestTurmoil(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		ids := []string{"1", "2", "3", "4", "5"}
		var group sync.WaitGroup
		for i, id := range ids {
			group.Go(func() {
				for rev := int64(1); rev <= 12; rev++ {
					mode := inPool
					if (rev+int64(i))%3 == 0 {
						mode = pluginwire.ModeDedicated
					}
					b := p.bind(id, 1, rev)
					_, _ = r.m.Apply(context.Background(), b, p.archive, pluginwire.ApplyRequest{Enabled: rev%5 != 0, Mode: mode})
					time.Sleep(time.Duration(rev*37+int64(i)*101) * time.Millisecond)
					if rev%4 == 0 {
						_, _ = r.m.Remove(context.Background(), b)
					}
					if rev%3 == 0 && r.launcher.count() > 0 {
						r.launcher.nth(r.launcher.count() - 1).exit(worker.Exit{Text: "exited with code 1", Code: 1})
					}
				}
			})
		}
		group.Wait()
		for i, id := range ids {
			mode := inPool
			if i%2 == 0 {
				mode = pluginwire.ModeDedicated
			}
			r.apply(p.bind(id, 2, 1), p, true, mode)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		for _, id := range ids {
			b := p.bind(id, 2, 1)
			r.state(b, pluginwire.StateRunning)
			r.call(b)
		}
		alive := 0
		for n := range r.launcher.count() {
			select {
			case <-r.launcher.nth(n).ended:
			default:
				alive++
			}
		}
		if alive != 4 { // three of their own and one pool
			r.t.Errorf("%d workers live", alive)
		}
		if n := r.m.pending.Count(time.Now()); n != 0 {
			r.t.Errorf("%d capabilities are left", n)
		}
	})
}

func FuzzContainer(f *testing.F) {
	w := &puppet{}
	good, err := json.Marshal(w.container(StatusMounted))
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(good))
	f.Add([]byte(`{"plugin_container":` + string(good) + `,"enabled":false}`))
	f.Add([]byte(`{"manifest":{"manifest":{"metadata":{"author":"a","name":"b"}}},"components":[1,null,{"manifest":3}]}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := decodeContainer(raw)
		if err != nil {
			return
		}
		s, err := decodeSettings(raw)
		if err != nil {
			s, _ = decodeSettings([]byte("{}"))
		}
		c = c.with(s, true)
		again, err := decodeContainer(c.JSON)
		if err != nil || again.ID() != c.ID() || len(again.Components) != len(c.Components) {
			t.Fatalf("%q became %q: %v", raw, c.JSON, err)
		}
	})
}
