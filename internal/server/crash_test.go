package server_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/serverproc"
)

// TestKilledServerLosesNoByte is P1, P2 and P3 through kill -9 of the server: 50
// processes write 64 MiB of random output each while the server is killed and
// started at random moments. What the box saw written and what was read must
// have the same digest, with no gap, and every process must have run once.
//
// STOCKADE_CRASH_RUNS changes the count, STOCKADE_CRASH_SEED repeats a run.
func TestKilledServerLosesNoByte(t *testing.T) {
	need.Runc(t)
	runs := 50
	if testing.Short() {
		runs = 3
	}
	if n, err := strconv.Atoi(os.Getenv("STOCKADE_CRASH_RUNS")); err == nil {
		runs = n
	}
	seed := uint64(time.Now().UnixNano())
	if n, err := strconv.ParseUint(os.Getenv("STOCKADE_CRASH_SEED"), 10, 64); err == nil {
		seed = n
	}
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))

	bin := t.TempDir()
	need.Programs(t, bin)
	s, err := serverproc.New(serverproc.Config{Exe: filepath.Join(bin, "stockade"), StateDir: filepath.Join(t.TempDir(), "state")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	if err := s.Start(ctx); err != nil {
		t.Fatal(err)
	}
	tenant, err := s.Client("default")
	if err != nil {
		t.Fatal(err)
	}
	box, err := tenant.AcquireBox(ctx, api.BoxRequest{Key: "crash"})
	if err != nil {
		t.Fatal(err)
	}
	run, err := tenant.CreateRun(ctx, api.RunRequest{Box: box.ID})
	if err != nil {
		t.Fatal(err)
	}
	runner := tenant.WithKey(run.Token)
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if s.PID() == 0 {
			if err := s.Start(end); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := runner.FinishRun(end, run.Run.ID, api.FinishRequest{Reason: "test over"}); err != nil {
			t.Error(err)
		}
		if err := tenant.RemoveBox(end, box.ID); err != nil {
			t.Error(err)
		}
		tenant.CloseIdle()
		if err := s.Stop(end); err != nil {
			t.Error(err)
		}
	}()

	kills := 0
	for i := range runs {
		kills += crashRun(ctx, t, s, runner, rng, i)
	}
	t.Logf("%d runs, %d kills", runs, kills)
	if kills < runs {
		t.Errorf("the server was killed only %d times in %d runs", kills, runs)
	}
}

// crashRun streams one process through at least one kill and returns how many
// there were.
func crashRun(ctx context.Context, t *testing.T, s *serverproc.Server, runner *client.Client, rng *rand.Rand, i int) int {
	t.Helper()
	const size = 64 << 20
	req := api.OpenRequest{
		RequestID: fmt.Sprint("crash-", i), Argv: []string{"sh", "-c",
			fmt.Sprintf("echo x >> started-%d; head -c %d /dev/urandom | tee out | cat; echo done >&2", i, size)},
	}
	if i%2 == 1 {
		req.Limits.SpoolBytes = 8 << 20 // far less than the output: it waits for acknowledgements
	}
	type result struct {
		sum hash.Hash
		n   int64
		err error
	}
	read := make(chan result, 1)
	opened := make(chan *client.Process, 1)
	progress := make(chan int64, 1)
	go func() {
		r := result{sum: sha256.New()}
		defer func() { read <- r }()
		// The open itself may meet the kill; it is repeated by its request id.
		p, err := runner.Open(ctx, req)
		opened <- p
		if err != nil {
			r.err = err
			return
		}
		w := writerFunc(func(b []byte) (int, error) {
			r.sum.Write(b)
			r.n += int64(len(b))
			select {
			case progress <- r.n:
			default:
			}
			return len(b), nil
		})
		_, r.err = p.Copy(ctx, w, io.Discard, client.OutputOptions{Ack: true})
	}()

	kills := 0
	kill := func() {
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.Start(ctx); err != nil {
			t.Fatal(err)
		}
		kills++
	}
	var r result
	next := rng.Int64N(size)
	if rng.IntN(4) == 0 {
		kill() // as early as can be: around the open
	}
wait:
	for {
		select {
		case r = <-read:
			break wait
		case n := <-progress:
			if n >= next && kills < 3 {
				kill()
				next = n + 1 + rng.Int64N(size)
			}
		case <-ctx.Done():
			t.Fatalf("run %d did not end: %v", i, ctx.Err())
		}
	}
	p := <-opened
	if r.err != nil {
		t.Fatalf("run %d: %v\n%s", i, r.err, s.Tail())
	}
	if r.n != size {
		t.Fatalf("run %d: %d bytes were read of %d", i, r.n, size)
	}
	exit, err := p.Wait(ctx)
	if err != nil || exit.Kind != api.ExitExited || exit.Code == nil || *exit.Code != 0 {
		t.Fatalf("run %d ended %+v, %v", i, exit, err)
	}
	if kills == 0 {
		kill() // it was quicker than the progress was seen
	}
	// The same open again is the same process.
	again, err := runner.Open(ctx, req)
	if err != nil || again.Handle() != p.Handle() {
		t.Fatalf("run %d: opened again: %v, %v", i, again, err)
	}
	check, err := runner.Open(ctx, api.OpenRequest{RequestID: fmt.Sprint("check-", i), Argv: []string{"sh", "-c", fmt.Sprintf("sha256sum < out; wc -l < started-%d", i)}})
	if err != nil {
		t.Fatal(err)
	}
	var seen strings.Builder
	if _, err := check.Copy(ctx, &seen, io.Discard, client.OutputOptions{}); err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(seen.String())
	if len(fields) != 3 || fields[0] != hex.EncodeToString(r.sum.Sum(nil)) {
		t.Fatalf("run %d: written %v, read %x", i, fields, r.sum.Sum(nil))
	}
	if fields[2] != "1" {
		t.Fatalf("run %d started %s times", i, fields[2])
	}
	return kills
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
