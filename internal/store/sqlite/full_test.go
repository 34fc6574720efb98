package sqlite

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/store"
)

// fill records processes from several goroutines until the ledger says that it
// cannot, and returns those it confirmed.
func fill(t *testing.T, s *Store, r store.Run) map[string]bool {
	t.Helper()
	var mu sync.Mutex
	made := map[string]bool{}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 100_000 {
				p, a := processOf(r, fmt.Sprintf("w%d.%d", w, i))
				_, _, err := s.CreateProcess(t.Context(), p, store.Capacity{}, a)
				if err != nil {
					e, ok := errors.AsType[*errdefs.Error](err)
					if !ok || e.Code != errdefs.Unavailable || e.Detail["reason"] != "disk_full" || !strings.Contains(e.Error(), "free space") {
						t.Errorf("on a full disk: %v (%v)", err, errors.Unwrap(err))
					}
					return
				}
				mu.Lock()
				made[p.Handle] = true
				mu.Unlock()
			}
			t.Error("the disk never filled")
		})
	}
	wg.Wait()
	if len(made) == 0 {
		t.Fatal("nothing was recorded before the disk was full")
	}
	return made
}

func present(t *testing.T, s *Store, made map[string]bool) {
	t.Helper()
	for handle := range made {
		if _, err := s.Process(t.Context(), store.Scope{All: true}, handle); err != nil {
			t.Fatalf("a confirmed process cannot be read: %v", err)
		}
	}
}

// TestFileAtItsBound: the file reaches its largest size.
func TestFileAtItsBound(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	s := open(t, Config{Path: path, MaxPages: 150})
	defer s.Close()
	r, err := seed(t.Context(), s, "w")
	if err != nil {
		t.Fatal(err)
	}
	made := fill(t, s, r)
	present(t, s, made)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Path: path})
	defer s.Close()
	present(t, s, made)
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
	p, a := processOf(r, "with more room")
	if _, created, err := s.CreateProcess(t.Context(), p, store.Capacity{}, a); err != nil || !created {
		t.Error(created, err)
	}
}

// TestFullDiskLeavesRoomForTheEnd: whatever the disk is full of, what is recorded
// can still change, thousands of times; nothing new is begun.
func TestFullDiskLeavesRoomForTheEnd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=24m,mode=0700")
	path := filepath.Join(dir, "ledger.db")
	s := open(t, Config{Path: path})
	defer func() { _ = s.Close() }()
	r, err := seed(t.Context(), s, "w")
	if err != nil {
		t.Fatal(err)
	}
	p, a := processOf(r, "first")
	if p, _, err = s.CreateProcess(t.Context(), p, store.Capacity{}, a); err != nil {
		t.Fatal(err)
	}
	ballast, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Close()
	for err == nil {
		_, err = ballast.Write(make([]byte, 64<<10))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	fill := func(id string) error {
		p, a := processOf(r, id)
		_, _, err := s.CreateProcess(t.Context(), p, store.Capacity{}, a)
		return err
	}
	for range 1000 {
		if err := fill("new"); !errdefs.Is(err, errdefs.Unavailable) {
			t.Fatalf("a new process on a full disk: %v", err)
		}
	}
	for i := range 1000 {
		p.Log.Next = int64(i)
		if p.Version, err = s.SaveProcess(t.Context(), p, store.Change{}); err != nil {
			t.Fatalf("change %d on a full disk: %v", i, err)
		}
	}
	if err := errors.Join(ballast.Truncate(0), fill("new")); err != nil {
		t.Errorf("with space again: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Path: path})
	if got, err := s.Process(t.Context(), store.Scope{All: true}, p.Handle); err != nil || got.Version != p.Version || got.Log.Next != 999 {
		t.Errorf("got %+v, %v", got, err)
	}
}

// TestDiskFull: a real file system without space, and with space again.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=2m,mode=0700")
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 512<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "ledger.db")
	s := open(t, Config{Path: path})
	defer func() { _ = s.Close() }()
	r, err := seed(t.Context(), s, "w")
	if err != nil {
		t.Fatal(err)
	}
	made := fill(t, s, r)
	present(t, s, made)
	if _, err := s.Processes(t.Context(), store.Scope{Workspace: "w"}, store.ProcessFilter{Live: true, Page: store.Page{Limit: 100}}); err != nil {
		t.Errorf("listing on a full disk: %v", err)
	}

	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	p, a := processOf(r, "with space again")
	if _, created, err := s.CreateProcess(t.Context(), p, store.Capacity{}, a); err != nil || !created {
		t.Fatalf("with space again: %v %v", created, err)
	}
	made[p.Handle] = true
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Path: path})
	present(t, s, made)
	if err := s.Check(t.Context()); err != nil {
		t.Error(err)
	}
}
