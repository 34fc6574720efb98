package pluginhost

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

// IM-36, IM-22: a dedicated installation from apply to a call. The worker is
// given its own directories and a capability that is used up by registering.
func TestDedicatedRunsAndAnswers(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.host.set(map[string]string{"inst-a": `{"greeting":"hi"}`})
		res := r.apply(b, p, true, pluginwire.ModeDedicated)
		if res.State != pluginwire.StateStarting || res.DependencyEnvironmentDigest == "" || !strings.Contains(res.ArtifactPath, p.digest) {
			r.t.Fatalf("apply answered %+v", res)
		}
		synctest.Wait()
		r.state(b, pluginwire.StateRunning)
		w := r.launcher.nth(0)
		if w.spec.Private == nil || !strings.Contains(w.spec.Private.Data, "inst-a") || w.spec.Scratch != "" || !strings.HasSuffix(w.spec.TransferDir, "rpc-transfer") {
			r.t.Errorf("the worker was started with %+v", w.spec)
		}
		if got := r.call(b); got != 0 {
			r.t.Errorf("worker %d answered", got)
		}
		if !strings.Contains(w.setting(b), `"greeting":"hi"`) {
			r.t.Errorf("the worker was initialised with %s", w.setting(b))
		}
		if n := r.m.pending.Count(time.Now()); n != 0 {
			r.t.Errorf("%d capabilities are left", n)
		}
		c := r.plugin(b).Container()
		tool, ok := c.Named("Tool", "echo")
		if !ok || !c.Enabled || c.Priority != 1 || c.Status != StatusInitialized || !strings.Contains(string(tool.Manifest), `"owner":"tester/toy"`) {
			r.t.Errorf("the container is %+v", c)
		}
		if calls := r.host.made(pluginwire.ActionGetPluginSettings); len(calls) != 1 || calls[0].from != b {
			r.t.Errorf("settings were asked: %+v", calls)
		}
	})
}

// IM-01, IM-03: two installations of one package: one code directory, no shared
// worker, directories of their own.
func TestTwoDedicatedInstallationsOfOneArtifact(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		ra, rb := r.apply(a, p, true, pluginwire.ModeDedicated), r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		r.state(a, pluginwire.StateRunning)
		r.state(b, pluginwire.StateRunning)
		if ra.ArtifactPath != rb.ArtifactPath {
			r.t.Errorf("two code directories: %s, %s", ra.ArtifactPath, rb.ArtifactPath)
		}
		if r.call(a) == r.call(b) {
			r.t.Error("one process answers for both")
		}
		if r.launcher.nth(0).spec.Private.Home == r.launcher.nth(1).spec.Private.Home {
			r.t.Error("two installations have one home")
		}
		r.m.mu.Lock()
		defer r.m.mu.Unlock()
		if len(r.m.pools) != 0 {
			r.t.Error("there is a pool")
		}
	})
}

// IM-20, IM-35: a newer revision fences the old worker before it is stopped, and
// neither it nor a removed binding comes back.
func TestNewRevisionFencesTheOld(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		old, next := p.bind("inst-a", 1, 1), p.bind("inst-a", 1, 2)
		r.run(old, p, pluginwire.ModeDedicated)
		plugin := r.plugin(old)
		r.run(next, p, pluginwire.ModeDedicated)
		if _, err := plugin.Call(r.t.Context(), pluginwire.ActionCallTool, struct{}{}, 0); err == nil {
			r.t.Error("the old handle still works")
		} else {
			isCode(r.t, err, errdefs.Denied)
		}
		if r.call(next) != 1 {
			r.t.Error("the new worker does not answer")
		}
		isCode(r.t, r.m.Authorise(old), errdefs.Denied)
		isCode(r.t, r.m.Candidate(old), errdefs.Conflict)
		r.remove(next)
		isCode(r.t, r.m.Candidate(next), errdefs.Conflict)
		if st, _, _ := r.record(next); st != "" {
			r.t.Errorf("a removed installation is %q", st)
		}
		if sig := r.launcher.nth(0).signalled(); len(sig) != 0 {
			r.t.Errorf("a graceful worker got %v", sig)
		}
	})
}

// A call whose worker dies is told which plugin went, in the words of a later call, and
// not that some connection was closed: LangBot has one of its own.
func TestCallOfADyingWorker(t *testing.T) {
	for name, die := range map[string]func(w *puppet){
		"its output ends first": func(w *puppet) { w.out.Close() },
		"it exits":              func(w *puppet) { w.exit(worker.Exit{Text: "killed", Code: -1}) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
				p := pack(r.t, "toy", "1")
				b := p.bind("inst-a", 1, 1)
				r.run(b, p, pluginwire.ModeDedicated)
				w, plugin := r.launcher.nth(0), r.plugin(b)
				w.mu.Lock()
				w.on = func(w *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
					if in.Action != pluginwire.ActionCallTool {
						return nil, nil, false
					}
					die(w)
					<-ctx.Done()
					return nil, ctx.Err(), true
				}
				w.mu.Unlock()
				_, during := plugin.Call(r.t.Context(), pluginwire.ActionCallTool, struct{}{}, 0)
				<-plugin.Gone()
				_, after := plugin.Call(r.t.Context(), pluginwire.ActionCallTool, struct{}{}, 0)
				const want = "ConnectionClosedError: plugin tester/toy is not connected; its worker is being restarted; try again"
				for when, err := range map[string]error{"during": during, "after": after} {
					if err == nil || pluginwire.FromError(err) != want {
						r.t.Errorf("%s: %v", when, err)
					}
				}
			})
		})
	}
}

// What a worker was sent and did not delete goes with it, whether it crashes or is
// stopped: documents of a tenant would stay for ever, since no SDK looks for them.
func TestFilesOfAnEndedWorkerGo(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		spec := r.launcher.nth(0).spec
		sent := []string{filepath.Join(spec.TransferDir, "space", "ft1_x"), filepath.Join(spec.Private.Tmp, "lbp-rpc", "space", "ft1_x")}
		own := filepath.Join(spec.Private.Tmp, "own")
		leave := func() {
			for _, name := range append(sent, own) {
				if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
					r.t.Fatal(err)
				}
				if err := os.WriteFile(name, nil, 0o600); err != nil {
					r.t.Fatal(err)
				}
			}
		}
		gone := func(when string) {
			for _, name := range sent {
				if _, err := os.Stat(name); !os.IsNotExist(err) {
					r.t.Errorf("%s: %s: %v", when, name, err)
				}
			}
			if _, err := os.Stat(own); err != nil {
				r.t.Errorf("%s: the plugin's own file: %v", when, err)
			}
		}
		leave()
		r.launcher.nth(0).exit(worker.Exit{Text: "killed", Code: -1})
		time.Sleep(2 * time.Second) // virtual
		synctest.Wait()
		r.state(b, pluginwire.StateRunning)
		gone("restarted")
		if st, err := os.Stat(spec.TransferDir); err != nil || st.Mode().Perm() != 0o700 {
			r.t.Errorf("the directory of the next worker: %v, %v", st, err)
		}
		leave()
		r.remove(b)
		gone("removed")
	})
}

// IM-37, IM-39, CT-01: the order of a stop, for remove, reconcile and shutdown: the
// worker's requests are cancelled, shutdown, the connection closed, no signals.
func TestStopOrder(t *testing.T) {
	for name, end := range map[string]func(r *rig, b pluginwire.Context){
		"remove":    func(r *rig, b pluginwire.Context) { r.remove(b) },
		"reconcile": func(r *rig, b pluginwire.Context) { _, _ = r.m.Reconcile(r.t.Context(), nil) },
		"shutdown":  func(r *rig, b pluginwire.Context) { _ = r.m.Shutdown(r.t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
				p := pack(r.t, "toy", "1")
				b := p.bind("inst-a", 1, 1)
				cancelled := make(chan struct{})
				r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
					if in.Action != pluginwire.ActionGetBots {
						return nil, nil, false
					}
					<-ctx.Done()
					close(cancelled)
					return nil, ctx.Err(), true
				})
				r.run(b, p, pluginwire.ModeDedicated)
				w := r.launcher.nth(0)
				w.mu.Lock()
				w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
					if in.Action != pluginwire.ActionShutdown {
						return nil, nil, false
					}
					for range 100 { // virtual time: they were cancelled, and end now
						if r.host.near.Counters().Waiting == 0 {
							return nil, nil, true
						}
						time.Sleep(10 * time.Millisecond)
					}
					r.t.Error("its request still runs when it is told to shut down")
					return nil, nil, true
				}
				w.mu.Unlock()
				asked := make(chan error, 1)
				go func() { _, err := w.ask(pluginwire.ActionGetBots, struct{}{}, b); asked <- err }()
				synctest.Wait()
				end(r, b)
				synctest.Wait()
				if err := <-asked; err == nil {
					r.t.Error("the worker's request was answered")
				}
				got := w.actions()
				if got[len(got)-1] != pluginwire.ActionShutdown {
					r.t.Errorf("the last action was %s", got[len(got)-1])
				}
				if sig := w.signalled(); len(sig) != 0 {
					r.t.Errorf("signals: %v", sig)
				}
				select {
				case <-w.ended:
				default:
					r.t.Error("the worker lives")
				}
				r.host.close() // LangBot's own handler ends with its connection at the latest
				<-cancelled
			})
		})
	}
}

// CT-01: a worker that ignores shutdown, the end of its input and SIGTERM is
// killed, after 5 + 2 + 2 s.
func TestStubbornWorkerIsKilled(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.launcher.set(func(w *puppet) {
			w.ignoreTerm = true
			w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				if in.Action == pluginwire.ActionShutdown {
					<-ctx.Done()
					return nil, ctx.Err(), true
				}
				return nil, nil, false
			}
			go func() { _, _ = w.register(w.spec.Capability) }()
			_ = w.conn.Run(context.Background())
		})
		r.run(b, p, pluginwire.ModeDedicated)
		before := time.Now()
		r.remove(b)
		if took := time.Since(before); took != ShutdownWithin+2*worker.StopStep {
			r.t.Errorf("it took %s", took)
		}
		if got := r.launcher.nth(0).signalled(); !slices.Equal(got, []string{"TERM", "KILL"}) {
			r.t.Errorf("signals: %v", got)
		}
	})
}

// IM-28: a worker that crashes is started again by the same supervisor, and its
// failure is counted once.
func TestCrashRestarts(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		sup, handle := r.supervisor(b), r.plugin(b)
		r.launcher.nth(0).exit(worker.Exit{Text: "exited with code 3", Code: 3})
		synctest.Wait()
		if st, code, msg := r.record(b); st != pluginwire.StateFailed || code != pluginwire.ErrorWorkerLaunch || !strings.Contains(msg, "code 3") {
			r.t.Fatalf("after the crash: %s %s %s", st, code, msg)
		}
		select {
		case <-handle.Gone():
		default:
			r.t.Error("the handle is not gone")
		}
		r.apply(b, p, true, pluginwire.ModeDedicated)
		if r.supervisor(b) != sup {
			r.t.Error("a second supervisor")
		}
		time.Sleep(2 * time.Second) // virtual: the first wait is at most 1.2 s
		synctest.Wait()
		r.state(b, pluginwire.StateRunning)
		if r.call(b) != 1 {
			r.t.Error("not the second worker")
		}
		if s := r.m.gate.Snapshot(); s.ActiveLaunches != 0 || s.FailuresTotal != 1 {
			r.t.Errorf("gate: %+v", s)
		}
	})
}

func (r *rig) supervisor(b pluginwire.Context) *supervisor {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	return r.m.installs[b].sup
}

// IM-29: a worker that does not get ready in 30 s is ended and says so.
func TestReadyLimit(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.launcher.set(func(w *puppet) { // never registers
			_ = w.conn.Run(context.Background())
			w.exit(worker.Exit{Text: "exited with code 0"})
		})
		r.apply(b, p, true, pluginwire.ModeDedicated)
		time.Sleep(ReadyWithin - time.Second)
		synctest.Wait()
		r.state(b, pluginwire.StateStarting)
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		if st, code, msg := r.record(b); st != pluginwire.StateFailed || code != pluginwire.ErrorWorkerLaunch || !strings.Contains(msg, "did not become ready") {
			r.t.Fatalf("%s %s %s", st, code, msg)
		}
	})
}

// IM-30: first launches are bounded too: with one at a time, the second begins
// when the first is ready.
func TestFirstLaunchesAreBounded(t *testing.T) {
	pol := policy()
	pol.MaxConcurrentRestarts = 1
	inBubble(t, pluginwire.ProfileOSS, pol, func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		let := make(chan struct{})
		r.launcher.set(func(w *puppet) {
			if w.n == 0 {
				<-let
			}
			w.behave()
		})
		r.apply(a, p, true, pluginwire.ModeDedicated)
		r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		if n := r.launcher.count(); n != 1 {
			r.t.Fatalf("%d launches at a time", n)
		}
		close(let)
		synctest.Wait()
		r.state(a, pluginwire.StateRunning)
		r.state(b, pluginwire.StateRunning)
	})
}

// IM-34: an error before a worker runs is kept as the message.
func TestLaunchErrorIsKept(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.launcher.refuse = func(int) error { return errdefs.New(errdefs.Unavailable, "no interpreter here") }
		r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		if st, code, msg := r.record(b); st != pluginwire.StateFailed || code != pluginwire.ErrorWorkerLaunch || msg != "no interpreter here" {
			r.t.Fatalf("%s %s %s", st, code, msg)
		}
	})
}

// A worker whose registration is refused is told why, and the failure says it
// without waiting for the ready limit. IM-34, LM-33.
func TestRefusedRegistrationFailsAtOnce(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.launcher.set(func(w *puppet) {
			w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				return nil, pluginwire.WithClass("RuntimeError", errors.New("told to fail")), in.Action == pluginwire.ActionInitializePlugin
			}
			w.behave()
		})
		before := time.Now()
		r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		if st, _, msg := r.record(b); st != pluginwire.StateFailed || !strings.Contains(msg, "told to fail") || time.Since(before) > settleTime {
			r.t.Fatalf("%s %s after %s", st, msg, time.Since(before))
		}
		if ps := r.m.Plugins(b); len(ps) != 0 {
			r.t.Error("a plugin that failed to initialise is registered")
		}
	})
}

// Disable stops the worker; enabling again starts one. IM-40.
func TestDisableAndEnable(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		if res := r.apply(b, p, false, pluginwire.ModeDedicated); res.State != pluginwire.StateDisabled {
			r.t.Fatalf("%+v", res)
		}
		time.Sleep(5 * time.Minute)
		if r.launcher.count() != 1 || len(r.m.Plugins(b)) != 0 {
			r.t.Fatal("a disabled installation runs")
		}
		r.run(b, p, pluginwire.ModeDedicated)
		// Applying what runs changes nothing, and it still counts as running.
		if res := r.apply(b, p, true, pluginwire.ModeDedicated); res.State != pluginwire.StateRunning || r.launcher.count() != 2 {
			r.t.Errorf("%+v, %d workers", res, r.launcher.count())
		}
	})
}

// Workers that do not keep to the protocol end themselves and nobody else.
func TestHostileWorkers(t *testing.T) {
	scripts := map[string]func(w *puppet){
		"closes stdout": func(w *puppet) { w.out.Close(); _, _ = io.Copy(io.Discard, w.in); w.exit(worker.Exit{}) },
		"floods garbage": func(w *puppet) {
			go func() { _, _ = io.Copy(io.Discard, w.in) }()
			line := []byte(strings.Repeat("x", 4000) + "\n")
			for range 2000 {
				if _, err := w.out.Write(line); err != nil {
					break
				}
			}
			w.exit(worker.Exit{Text: "exited with code 0"})
		},
		"breaks the framing": func(w *puppet) {
			go func() { _, _ = io.Copy(io.Discard, w.in); w.exit(worker.Exit{}) }()
			_, _ = io.WriteString(w.out, "{\"type\":\"chunk_start\",\"total_size\":10}\n{\"type\":\"chunk_data\",\"data\":\"x\",\"offset\":7}\n")
			for {
				if _, err := io.WriteString(w.out, "{}\n"); err != nil {
					return
				}
			}
		},
		"answers for others": func(w *puppet) {
			for i := range 1000 {
				if _, err := io.WriteString(w.out, `{"seq_id":`+strings.Repeat("9", i%5+1)+`,"code":0,"message":"ok","data":{}}`+"\n"); err != nil {
					return
				}
			}
			w.behave()
		},
	}
	for name, script := range scripts {
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
				good := pack(r.t, "toy", "1")
				g, bad := good.bind("inst-good", 1, 1), good.bind("inst-bad", 1, 1)
				r.run(g, good, pluginwire.ModeDedicated)
				r.launcher.set(script)
				r.apply(bad, good, true, pluginwire.ModeDedicated)
				time.Sleep(3 * time.Minute)
				synctest.Wait()
				if r.call(g) != 0 {
					r.t.Error("the good worker was restarted")
				}
				r.remove(bad)
			})
		})
	}
}

// A worker that answers twice confuses nobody.
func TestDoubleAnswer(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		var n atomic.Int64
		r.launcher.set(func(w *puppet) {
			w.on = func(w *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				if in.Action != pluginwire.ActionCallTool {
					return nil, nil, false
				}
				n.Add(1)
				return map[string]any{"launch": w.n}, nil, true
			}
			w.behave()
		})
		r.run(b, p, pluginwire.ModeDedicated)
		for range 20 {
			r.call(b)
		}
		if n.Load() != 20 {
			r.t.Errorf("%d calls reached the worker", n.Load())
		}
	})
}

// IM-38: a worker that nothing can end is left behind after a bounded time, and
// its installation goes on with the next revision.
func TestUndeadWorkerIsLeftBehind(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		old, next := p.bind("inst-a", 1, 1), p.bind("inst-a", 1, 2)
		r.launcher.set(func(w *puppet) {
			w.ignoreTerm, w.undead = true, true
			go func() { _, _ = w.register(w.spec.Capability) }()
			_ = w.conn.Run(context.Background())
		})
		r.run(old, p, pluginwire.ModeDedicated)
		r.launcher.set(nil)
		before := time.Now()
		r.run(next, p, pluginwire.ModeDedicated)
		if took := time.Since(before); took > JoinWithin {
			r.t.Errorf("it took %s", took)
		}
		if r.call(next) != 1 {
			r.t.Error("not the new worker")
		}
		if _, err := r.launcher.nth(0).register("x"); err == nil {
			r.t.Error("the old worker's connection still works")
		}
		r.launcher.nth(0).exit(worker.Exit{Text: "at last"}) // the kernel lets go: nothing is left then
	})
}

// IM-51: the end of an old connection does not touch what a newer one registered.
func TestOldLinkEndsAlone(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		_, a, b := r.pair()
		r.m.mu.Lock()
		old := r.m.installs[a].slot.pool.link
		r.m.mu.Unlock()
		r.launcher.nth(0).exit(worker.Exit{Text: "exited with code 1", Code: 1})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		old.unregister(nil)
		if r.call(a) != 1 || r.call(b) != 1 {
			r.t.Error("the new process lost its slots")
		}
	})
}
