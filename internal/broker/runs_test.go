package broker

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestFinishRevokesThenClosesThenFinishes(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		who := r.newRun(r.key, r.newBox("w"), "openai")
		p, err := r.b.Open(r.ctx, who, request("one", "true"))
		r.ok(err)
		var env map[string]bool = map[string]bool{}
		for _, kv := range r.host.procs[p.Handle].spec.Env {
			env[kv] = true
		}
		if !env["OPENAI_BASE_URL=http://127.0.0.1/openai"] || !env["HOME=/home/agent"] {
			r.t.Errorf("environment %v", r.host.procs[p.Handle].spec.Env)
		}
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "close" && r.gate.isOpen(who.Run) {
					r.t.Error("a process is closed while the run's rights stand (P8)")
				}
				return none
			}
		})
		out, err := r.b.FinishRun(r.ctx, r.key, who.Run, api.FinishRequest{Reason: "done", GraceMillis: millis(0)})
		r.ok(err)
		if !out.Quiescent || out.Run.State != api.RunFinished || len(out.Processes) != 1 || out.Processes[0].Process.Reason != "done" {
			r.t.Fatalf("got %+v", out)
		}
		if r.gate.isOpen(who.Run) {
			r.t.Error("the routes are open")
		}
		_, err = r.b.Open(r.ctx, who, request("two", "true"))
		r.code(err, errdefs.Conflict)
		again, err := r.b.FinishRun(r.ctx, r.key, who.Run, api.FinishRequest{})
		r.ok(err)
		if len(again.Processes) != 1 || again.Processes[0].Receipt == nil {
			r.t.Fatalf("got %+v", again)
		}
	})
}

func TestFinishWaitsForTheGateway(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		who := r.newRun(r.key, r.newBox("w"), "openai")
		r.gate.mu.Lock()
		r.gate.fail = errdefs.New(errdefs.Indeterminate, "a call is still unwinding")
		r.gate.mu.Unlock()
		_, err := r.b.FinishRun(r.ctx, who, who.Run, api.FinishRequest{})
		r.code(err, errdefs.Indeterminate)
		run, err := r.b.Run(r.ctx, r.key, who.Run)
		r.ok(err)
		if run.State != api.RunFinishing {
			r.t.Fatalf("the run is %s", run.State)
		}
		r.gate.mu.Lock()
		r.gate.fail = nil
		r.gate.mu.Unlock()
		r.eventually("the sweep finishes it", func() bool {
			run, err := r.b.Run(r.ctx, r.key, who.Run)
			return err == nil && run.State == api.RunFinished
		})
	})
}

func TestRunsExpire(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		created, err := r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: r.newBox("w"), TTLMillis: 60_000, Models: []string{"openai"}})
		r.ok(err)
		who := r.run
		who.Run = created.Run.ID
		p, err := r.b.Open(r.ctx, who, request("one", "true"))
		r.ok(err)
		time.Sleep(time.Minute)
		checkReceipt(r.t, r.becomes(p.Handle, api.StateClosed))
		r.eventually("finished", func() bool {
			run, err := r.b.Run(r.ctx, r.key, who.Run)
			return err == nil && run.State == api.RunFinished
		})
		if r.gate.isOpen(who.Run) {
			r.t.Error("its routes are open")
		}
	})
}

// A run that finishes by itself waits for its first process, and ends with the
// last one.
func TestRunsFinishByThemselves(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		created, err := r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: r.newBox("w"), AutoFinish: true})
		r.ok(err)
		who := r.run
		who.Run = created.Run.ID
		state := func() api.RunState {
			run, err := r.b.Run(r.ctx, r.key, who.Run)
			r.ok(err)
			return run.State
		}
		time.Sleep(time.Minute)
		if got := state(); got != api.RunActive {
			r.t.Errorf("before its first process it is %s", got)
		}
		one, err := r.b.Open(r.ctx, who, request("one", "true"))
		r.ok(err)
		two, err := r.b.Open(r.ctx, who, request("two", "true"))
		r.ok(err)
		r.host.exit(one.Handle, 0)
		r.becomes(one.Handle, api.StateClosed)
		time.Sleep(time.Minute)
		if got := state(); got != api.RunActive {
			r.t.Errorf("while one of two lives it is %s", got)
		}
		r.host.exit(two.Handle, 0)
		r.eventually("finished", func() bool { return state() == api.RunFinished })
	})
}

func TestFinishWithAFence(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		r.open("one")
		r.host.set(func() { r.host.unproven = true })
		out, err := r.b.FinishRun(r.ctx, r.run, r.run.Run, api.FinishRequest{GraceMillis: millis(0)})
		r.ok(err)
		if out.Quiescent || out.Run.State != api.RunFinished || out.Processes[0].Fence == nil {
			r.t.Fatalf("got %+v", out)
		}
	})
}

// However many processes a run had, one that is not proven gone is told.
func TestFinishOfManyWithAFence(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		for i := range maxFinished + 1 {
			_, err := r.b.CloseByRequest(r.ctx, r.run, api.CloseByRequest{RequestID: "never" + decimal(int64(i))})
			r.ok(err)
		}
		r.host.set(func() { r.host.unproven = true })
		out, err := r.b.FinishRun(r.ctx, r.run, r.run.Run, api.FinishRequest{GraceMillis: millis(0)})
		r.ok(err)
		last := out.Processes[len(out.Processes)-1]
		if out.Quiescent || len(out.Processes) != maxFinished+1 || last.Process.Handle != p.Handle || last.Fence == nil {
			r.t.Fatalf("quiescent %v, %d processes, the last %+v", out.Quiescent, len(out.Processes), last)
		}
	})
}

func TestModelRoutesSurviveARestart(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		who := r.newRun(r.key, r.newBox("w"), "openai")
		port := r.gate.open[who.Run].Ports["openai"]
		if port < firstPort || port >= lastPort {
			r.t.Errorf("port %d", port)
		}
		r.restart()
		r.eventually("reopened", func() bool { return r.gate.isOpen(who.Run) })
		if got := r.gate.open[who.Run]; got.Ports["openai"] != port || got.NetNS == "" {
			r.t.Errorf("reopened as %+v", got)
		}
	})
}

func TestCreateRunThatCannotOpenItsRoutes(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		box := r.newBox("w")
		r.gate.shift = 1 // every port it is asked for is taken
		_, err := r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: box, Models: []string{"openai"}})
		r.code(err, errdefs.Unavailable)
		if r.gate.opened != portTries {
			r.t.Errorf("tried %d times", r.gate.opened)
		}
		if len(r.gate.open) != 0 {
			r.t.Error("a listener is left")
		}
		r.gate.shift = 0
		who := r.newRun(r.key, box, "openai") // the box is not taken by a half-made run
		_, err = r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: box})
		r.code(err, errdefs.Conflict)
		_, err = r.b.FinishRun(r.ctx, who, who.Run, api.FinishRequest{})
		r.ok(err)
		for _, bad := range []api.RunRequest{{Box: box, TTLMillis: -1}, {Box: box, Models: []string{"openai", "openai"}}, {Box: box, Models: []string{"a b"}}} {
			_, err = r.b.CreateRun(r.ctx, r.key, bad)
			r.code(err, errdefs.Invalid)
		}
		_, err = r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: box, Models: []string{"nobody"}})
		r.code(err, errdefs.NotFound)
	})
}

func TestTargets(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		got, err := r.b.Target(r.ctx, r.admin, "local")
		r.ok(err)
		if !got.Up || !got.Enabled || got.Processes != 1 || got.Boxes != 1 || got.Host != r.host.hostID || got.Version != "fake" {
			r.t.Fatalf("got %+v", got)
		}
		no, yes := false, true
		off, err := r.b.UpdateTarget(r.ctx, r.admin, "local", api.TargetUpdate{Enabled: &no})
		r.ok(err)
		if off.Enabled || off.Generation <= got.Generation {
			r.t.Fatalf("got %+v", off)
		}
		q := r.becomes(p.Handle, api.StateClosed)
		checkReceipt(r.t, q)
		_, err = r.b.Open(r.ctx, r.run, request("two", "true"))
		if err == nil {
			r.t.Fatal("opened on a disabled target")
		}
		on, err := r.b.UpdateTarget(r.ctx, r.admin, "local", api.TargetUpdate{Enabled: &yes})
		r.ok(err)
		if !on.Enabled || on.Generation <= off.Generation {
			r.t.Fatalf("got %+v", on)
		}
		r.open("two")
		_, err = r.b.UpdateTarget(r.ctx, r.admin, "local", api.TargetUpdate{})
		r.code(err, errdefs.Invalid)
		_, err = r.b.Target(r.ctx, r.admin, "nowhere")
		r.code(err, errdefs.NotFound)
		_, err = r.b.Targets(r.ctx, r.key)
		r.code(err, errdefs.Denied)
		list, err := r.b.Targets(r.ctx, r.admin)
		r.ok(err)
		if len(list.Items) != 1 {
			r.t.Fatalf("got %+v", list)
		}
		// Whoever needs the host of a target that is down learns why.
		_, err = r.b.Host("local")
		r.ok(err)
		_, err = r.b.Host("nowhere")
		r.code(err, errdefs.NotFound)
		r.host.stop()
		r.eventually("down", func() bool { return r.b.targets["local"].here() == nil })
		_, err = r.b.Host("local")
		r.code(err, errdefs.Unavailable)
		if down, terr := r.b.Target(r.ctx, r.admin, "local"); terr != nil || down.Problem == "" || !strings.Contains(err.Error(), down.Problem) {
			r.t.Errorf("the problem is %q, the error %v", down.Problem, err)
		}
	})
}

// A process that was opened under an older generation is closed by whoever finds
// it, also after a crash between the change and the closing.
func TestOldGenerationIsClosedAtRestart(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		for _, enabled := range []bool{false, true} {
			_, err := r.ledger.SetTargetEnabled(r.ctx, "local", enabled, r.b.audit(r.admin, "", "target.update", "local", nil))
			r.ok(err)
		}
		r.restart()
		r.becomes(p.Handle, api.StateClosed)
	})
}

func TestCapacity(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{PerRun: 2}, func(r *rig) {
		r.open("one")
		two := r.open("two")
		_, err := r.b.Open(r.ctx, r.run, request("three", "true"))
		r.code(err, errdefs.Exhausted)
		r.close(two.Handle, 0)
		r.open("three")
	})
}

func TestOldRecordsAreForgotten(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{LogRetention: time.Hour, RecordRetention: 2 * time.Hour}, func(r *rig) {
		p := r.open("one")
		_, err := r.b.FinishRun(r.ctx, r.run, r.run.Run, api.FinishRequest{GraceMillis: millis(0)})
		r.ok(err)
		r.host.stop() // a log that cannot be forgotten keeps its record
		time.Sleep(4 * time.Hour)
		if _, err := r.b.Get(r.ctx, r.key, p.Handle); err != nil {
			r.t.Fatalf("the record of a kept log is gone: %v", err)
		}
		r.host.start()
		time.Sleep(time.Hour)
		_, err = r.b.Get(r.ctx, r.key, p.Handle)
		r.code(err, errdefs.NotFound)
		_, err = r.b.Run(r.ctx, r.key, r.run.Run)
		r.code(err, errdefs.NotFound)
		if _, ok := r.host.procs[p.Handle]; ok {
			r.t.Error("the host keeps the log")
		}
	})
}

// One workspace keeps so many logs and no more, the newest.
func TestExcessLogsAreForgotten(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{KeptLogs: 2}, func(r *rig) {
		var all []string
		for _, id := range []string{"a", "b", "c", "d", "e"} {
			p := r.open(id)
			r.host.output(p.Handle, wire.KindStdout, "output")
			r.close(p.Handle, 0)
			all = append(all, p.Handle)
			time.Sleep(time.Millisecond)
		}
		r.ok(r.ledger.CreateWorkspace(r.ctx, store.Workspace{Name: "v", Created: now()}, r.b.audit(r.admin, "", "workspace.create", "v", nil)))
		neighbour := r.newRun(authz.Principal{Kind: authz.Workspace, Workspace: "v", Key: r.key.Key}, r.newBox("v"))
		theirs, err := r.b.Open(r.ctx, neighbour, request("a", "true"))
		r.ok(err)
		_, err = r.b.Close(r.ctx, neighbour, theirs.Handle, api.CloseRequest{GraceMillis: millis(0)})
		r.ok(err)
		r.eventually("three are gone", func() bool { return r.host.has(all[3]) && !r.host.has(all[2]) })
		for i, h := range append(all, theirs.Handle) {
			if r.host.has(h) != (i >= 3) {
				r.t.Errorf("log %d kept: %v", i, r.host.has(h))
			}
		}
		got, err := r.b.Read(r.ctx, r.run, all[0], ReadQuery{Cursor: cursorAt(all[0], 0)})
		r.ok(err)
		if !got.EOF || got.Gap == nil || got.Gap.Bytes != 6 || got.Exit == nil {
			r.t.Errorf("a forgotten log reads as %+v", got)
		}
		if p := r.get(all[0]); p.State != api.StateClosed || p.Receipt == nil || len(p.Argv) == 0 {
			r.t.Errorf("its record is %+v", p)
		}
	})
}

func TestRecordsOfAWorkspaceAreBounded(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{KeptProcesses: 3, KeptSpecBytes: 4096, RunsPerWorkspace: 2}, func(r *rig) {
		p := r.open("one")
		r.close(p.Handle, 0)
		_, err := r.b.Open(r.ctx, r.run, request("long", "echo", strings.Repeat("x", 4096)))
		r.code(err, errdefs.Exhausted)
		r.open("two")
		_, err = r.b.CloseByRequest(r.ctx, r.run, api.CloseByRequest{RequestID: "three"})
		r.ok(err)
		_, err = r.b.CloseByRequest(r.ctx, r.run, api.CloseByRequest{RequestID: "four"})
		r.code(err, errdefs.Exhausted)
		_, err = r.b.Open(r.ctx, r.run, request("five", "true"))
		r.code(err, errdefs.Exhausted)
		if again := r.open("one"); again.Handle != p.Handle { // what is recorded is answered
			r.t.Errorf("one is %s now", again.Handle)
		}
		r.newRun(r.key, r.box)
		_, err = r.b.CreateRun(r.ctx, r.key, api.RunRequest{Box: r.box})
		r.code(err, errdefs.Exhausted)
	})
}

func TestListPages(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		var want []string
		for _, id := range []string{"a", "b", "c", "d", "e"} {
			want = append([]string{r.open(id).Handle}, want...)
			time.Sleep(time.Second)
		}
		r.close(want[0], 0)
		var got []string
		q := ListQuery{Limit: 2}
		for {
			page, err := r.b.List(r.ctx, r.run, q)
			r.ok(err)
			for _, p := range page.Items {
				got = append(got, p.Handle)
			}
			if q.After = page.Next; q.After == "" {
				break
			}
		}
		if len(got) != 5 {
			r.t.Fatalf("got %v", got)
		}
		for i := range want {
			if got[i] != want[i] {
				r.t.Fatalf("got %v, want %v", got, want)
			}
		}
		live, err := r.b.List(r.ctx, r.key, ListQuery{Live: true, Run: r.run.Run, Box: r.box})
		r.ok(err)
		if len(live.Items) != 4 {
			r.t.Fatalf("%d live", len(live.Items))
		}
		_, err = r.b.List(r.ctx, r.key, ListQuery{Limit: 1001})
		r.code(err, errdefs.Invalid)
		runs, err := r.b.Runs(r.ctx, r.key, store.Page{})
		r.ok(err)
		if len(runs.Items) != 1 || runs.Items[0].Processes != 4 {
			r.t.Fatalf("got %+v", runs)
		}
	})
}

// A list holds no more than a little of each process's arguments.
func TestListCutsArguments(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{PerRun: 100}, func(r *rig) {
		long := strings.Repeat("é", 60<<10)
		for i := range pieceOf + 3 {
			_, err := r.b.Open(r.ctx, r.run, request("r"+decimal(int64(i)), "echo", long, "end"))
			r.ok(err)
		}
		page, err := r.b.List(r.ctx, r.run, ListQuery{Limit: pieceOf + 2})
		r.ok(err)
		if len(page.Items) != pieceOf+2 || page.Next != page.Items[pieceOf+1].Handle {
			r.t.Fatalf("%d items, next %s", len(page.Items), page.Next)
		}
		for _, p := range page.Items {
			if got := strings.Join(p.Argv, " "); len(got) > maxBrief+8 || !strings.HasPrefix(got, "echo é") || !strings.HasSuffix(got, "é…") {
				r.t.Fatalf("%d bytes: %.20s", len(got), got)
			}
		}
		if whole := r.get(page.Items[0].Handle); len(whole.Argv) != 3 || whole.Argv[1] != long {
			r.t.Error("a get does not have all arguments")
		}
		for _, argv := range [][]string{{"a", "b"}, {strings.Repeat("x", maxBrief)}, make([]string, 4096)} {
			if got := brief(argv); len(strings.Join(got, " ")) > maxBrief+8 || len(argv) < 10 && len(got) != len(argv) {
				r.t.Errorf("%d arguments became %d", len(argv), len(got))
			}
		}
	})
}

// 500 live processes are all classified after the death of the server, each by
// what really became of it.
func TestRestartClassifiesEverything(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{PerRun: 1000, PerWorkspace: 1000}, func(r *rig) {
		const n = 500
		handles := make([]string, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				p, err := r.b.Open(r.ctx, r.run, request("r"+decimal(int64(i)), "true"))
				if err == nil {
					handles[i] = p.Handle
				}
			})
		}
		wg.Wait()
		r.stop()
		for i, h := range handles {
			switch i % 4 {
			case 1:
				r.host.exit(h, i%200)
			case 2:
				r.host.set(func() { r.host.unproven = true })
				r.host.exit(h, 0)
				r.host.set(func() { r.host.unproven = false })
			case 3:
				if i%8 == 3 {
					r.host.forgetRecord(h)
				}
			}
		}
		begun := time.Now()
		r.boot()
		r.eventually("all classified", func() bool { return r.b.Stats().Unclassified == 0 })
		if took := time.Since(begun); took > 5*time.Second {
			r.t.Errorf("took %v", took)
		}
		for i, h := range handles {
			want := api.StateRunning
			switch {
			case i%4 == 1:
				want = api.StateClosed
			case i%4 == 2, i%8 == 3:
				want = api.StateFenced
			}
			p, err := r.ledger.Process(r.ctx, everything(), h)
			r.ok(err)
			if p.State != want {
				r.t.Errorf("process %d is %s, want %s", i, p.State, want)
			}
			if want == api.StateClosed && (p.Exit == nil || p.Exit.Code == nil || *p.Exit.Code != i%200) {
				r.t.Errorf("process %d: exit %+v", i, p.Exit)
			}
			if n := r.host.ran(h); n != 1 {
				r.t.Errorf("process %d was executed %d times", i, n)
			}
		}
	})
}

func TestStoppedBrokerIsUnavailable(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		old := r.b
		r.restart()
		_, err := old.Open(r.ctx, r.run, request("two", "true"))
		if err == nil {
			r.t.Error("opened by a stopped broker")
		}
		_, err = old.Close(r.ctx, r.run, p.Handle, api.CloseRequest{})
		if err == nil {
			r.t.Error("closed by a stopped broker")
		}
		if err := old.Stop(r.ctx); err != nil {
			r.t.Error("a second stop:", err)
		}
		if errors.Is(err, r.ctx.Err()) {
			r.t.Error("wrong error:", err)
		}
	})
}
