package sqlite

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/store"
)

// crashEnv makes the test program a child that writes until it is killed.
const crashEnv = "STOCKADE_TEST_LEDGER"

// crashChild opens the ledger and records processes from several goroutines. It
// prints the handle of each one that was confirmed, in one write each. It ends
// only by being killed, or when its standard output is gone.
func crashChild() bool {
	path := os.Getenv(crashEnv)
	if path == "" {
		return false
	}
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	fmt.Println("start")
	ctx := context.Background()
	s, err := Open(ctx, Config{Path: path})
	fail(err)
	n, err := s.NextGeneration(ctx)
	fail(err)
	r, err := seed(ctx, s, fmt.Sprintf("g%d", n))
	fail(err)
	fmt.Printf("gen %d\n", n)
	for w := range 4 {
		go func() {
			for i := 0; ; i++ {
				p, a := processOf(r, fmt.Sprintf("g%d.w%d.%d", n, w, i))
				_, created, err := s.CreateProcess(ctx, p, store.Capacity{}, a)
				fail(err)
				if !created {
					fail(fmt.Errorf("%s was there already", p.Handle))
				}
				// A save with a fence now and then: all of it or nothing.
				if i%5 == 0 {
					p.Version, p.State = 1, api.StateFenced
					f := &store.Fence{ID: "fence_" + p.Handle, Workspace: p.Workspace, Target: p.Target, Box: "", Handle: p.Handle, Reason: "r", Created: at}
					c := store.Change{Fence: f, ClearFence: &store.Clear{ID: f.ID, By: "b", Reason: "r", At: at}}
					_, err := s.SaveProcess(ctx, p, c)
					fail(err)
					fmt.Println("saved " + p.Handle)
					continue
				}
				fmt.Println("made " + p.Handle)
			}
		}()
	}
	select {}
}

var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// seed makes one workspace, target, box and run.
func seed(ctx context.Context, s store.Store, name string) (store.Run, error) {
	a := store.AuditEvent{ID: "aud_" + name, At: at, Actor: "test", Action: "seed"}
	r := store.Run{ID: "run_" + name, Workspace: name, Box: "box_" + name, Target: "t", State: api.RunActive, TokenHash: [32]byte{1}, Created: at, Expires: at}
	if err := s.CreateWorkspace(ctx, store.Workspace{Name: name, Created: at}, a); err != nil {
		return r, err
	}
	if _, err := s.PutTarget(ctx, store.Target{Name: "t", Kind: "box", Enabled: true}); err != nil {
		return r, err
	}
	b := store.Box{ID: r.Box, Workspace: name, Target: "t", State: api.BoxReady, Created: at, Used: at}
	if _, _, err := s.CreateBox(ctx, b, store.Capacity{}); err != nil {
		return r, err
	}
	return r, s.CreateRun(ctx, r, store.Capacity{})
}

func processOf(r store.Run, name string) (store.Process, store.AuditEvent) {
	p := store.Process{Handle: "proc_" + name, RequestID: name, Digest: [32]byte{1}, Workspace: r.Workspace, Run: r.ID, Target: r.Target, Box: r.Box,
		Generation: 1, State: api.StateRequested, Cleanup: api.CleanupPending, Created: at,
		Spec: []byte(`{"id":"proc_x","box":"box_x","argv":["/bin/sh","-c","echo hello"],"cwd":"","env":["HOME=/home/agent","PATH=/usr/local/bin:/usr/bin:/bin"],"stdin":false,"deadline_ms":3600000,"spool_bytes":67108864,"overflow":"block"}`)}
	return p, store.AuditEvent{ID: "aud_" + name, At: at, Actor: r.ID, Workspace: r.Workspace, Action: "process.open", Object: p.Handle}
}

// TestCrash kills a writing program with SIGKILL at random moments, also while
// it makes or migrates the file, and looks that what it confirmed is there.
func TestCrash(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger.db")
	acked := map[string]string{}
	generation := 0
	for round := range 12 {
		// 0 lines: killed right after the start, while it opens the file.
		crashOnce(t, path, rand.IntN(1+min(round, 1)*400), acked, &generation)

		s := open(t, Config{Path: path})
		if err := s.Check(t.Context()); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for handle, how := range acked {
			p, err := s.Process(t.Context(), store.Scope{All: true}, handle)
			if err != nil {
				t.Fatalf("round %d: a confirmed process is gone: %v", round, err)
			}
			if p.State == api.StateRequested {
				if how == "saved" {
					t.Fatalf("round %d: a confirmed save of %s is gone", round, handle)
				}
				continue
			}
			f, err := s.Fence(t.Context(), store.Scope{All: true}, "fence_"+handle)
			if err != nil || f.Cleared == nil {
				t.Fatalf("round %d: the state of %s was saved without its fence: %v", round, handle, err)
			}
		}
		if n, err := s.NextGeneration(t.Context()); err != nil || int(n) <= generation {
			t.Fatalf("round %d: generation %d after %d (%v)", round, n, generation, err)
		} else {
			generation = int(n)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(acked) == 0 {
		t.Fatal("no process was ever confirmed, so nothing was tested")
	}
	t.Logf("%d confirmed processes survived", len(acked))
}

func crashOnce(t *testing.T, path string, lines int, acked map[string]string, generation *int) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), crashEnv+"="+path)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var kill sync.Once
	end := func() { kill.Do(func() { _ = cmd.Process.Kill() }) }
	defer func() { end(); _ = cmd.Wait() }()
	seen := 0
	for sc := bufio.NewScanner(out); sc.Scan(); seen++ {
		if seen >= lines {
			end() // and read on: what is in the pipe was confirmed too
		}
		switch how, what, _ := strings.Cut(sc.Text(), " "); how {
		case "made", "saved":
			acked[what] = how
		case "gen":
			if _, err := fmt.Sscan(what, generation); err != nil {
				t.Fatal(err)
			}
		}
	}
	if stderr.Len() > 0 {
		t.Fatalf("the writing program failed: %s", stderr.String())
	}
	if seen == 0 {
		t.Fatal("the writing program printed nothing")
	}
}
