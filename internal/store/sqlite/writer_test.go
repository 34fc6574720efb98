package sqlite

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// hold keeps the writer inside a change until the returned function is called,
// so that what is submitted meanwhile shares its transaction. The result of the
// held change comes from the channel.
func hold(s *Store, do func(*tx) error) (release func(), result <-chan error) {
	inside, free, out := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var once sync.Once
	go func() {
		out <- s.change(context.Background(), "holding", func(t *tx) error {
			once.Do(func() { close(inside); <-free })
			return do(t)
		})
	}()
	<-inside
	return func() { close(free) }, out
}

func nothing(*tx) error { return nil }

func event(id string) store.AuditEvent {
	return store.AuditEvent{ID: id, At: at, Actor: "test", Action: "test"}
}

func recorded(t *testing.T, s *Store) map[string]bool {
	t.Helper()
	list, err := s.Audit(t.Context(), "", store.Page{Limit: store.MaxPage})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, a := range list {
		out[a.ID] = true
	}
	return out
}

// TestOwnErrors: of many changes in one transaction those that are refused are
// refused alone.
func TestOwnErrors(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Path: tempPath(t)})
	defer s.Close()
	release, held := hold(s, nothing)
	const pairs = 20
	errs := make([]error, 2*pairs)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = s.AppendAudit(t.Context(), event(fmt.Sprint("a", i/2))) })
	}
	release()
	wg.Wait()
	if err := <-held; err != nil {
		t.Fatal(err)
	}
	for i := range pairs {
		a, b := errs[2*i], errs[2*i+1]
		if (a == nil) == (b == nil) || !errdefs.Is(errors.Join(a, b), errdefs.Conflict) {
			t.Errorf("pair %d: %v and %v, want one success and one conflict", i, a, b)
		}
	}
	if got := recorded(t, s); len(got) != pairs {
		t.Errorf("%d acts are recorded, want %d", len(got), pairs)
	}
}

// TestLostTransaction: when SQLite drops the whole transaction because of one
// change, the others are made again.
func TestLostTransaction(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Path: tempPath(t)})
	defer s.Close()
	release, held := hold(s, func(t *tx) error { return t.audit(event("first")) })
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			if err := s.AppendAudit(t.Context(), event(fmt.Sprint("a", i))); err != nil {
				t.Error(err)
			}
		})
	}
	var runs atomic.Int32
	wg.Go(func() {
		err := s.change(t.Context(), "losing the transaction", func(tx *tx) error {
			if runs.Add(1) == 1 {
				tx.rollbackForTest()
			}
			return errdefs.New(errdefs.Invalid, "mine alone")
		})
		if !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("got %v", err)
		}
	})
	release()
	wg.Wait()
	if err := <-held; err != nil {
		t.Fatal(err)
	}
	if got := recorded(t, s); len(got) != 11 {
		t.Errorf("%d acts are recorded, want 11", len(got))
	}
}

func (t *tx) rollbackForTest() { _ = t.plain(`ROLLBACK`) }

// TestCommitFails: nobody in the transaction is told that it was made, and the
// ledger takes no more changes.
func TestCommitFails(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	s := open(t, Config{Path: path})
	defer s.Close()
	if err := s.AppendAudit(t.Context(), event("before")); err != nil {
		t.Fatal(err)
	}
	if s.Failing() {
		t.Error("it fails before anything failed")
	}
	// A violation that SQLite finds at commit only.
	release, held := hold(s, func(t *tx) error {
		if err := t.plain(`PRAGMA defer_foreign_keys = 1`); err != nil {
			return err
		}
		_, err := t.exec(`INSERT INTO run_models (run, provider, pos, port, requests, bytes_up, bytes_down) VALUES ('none', 'p', 0, 0, 0, 0, 0)`)
		return err
	})
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			err := s.AppendAudit(t.Context(), event(fmt.Sprint("a", i)))
			if !errdefs.Is(err, errdefs.Internal) && !errdefs.Is(err, errdefs.Unavailable) {
				t.Errorf("change %d: %v", i, err)
			}
		})
	}
	release()
	wg.Wait()
	if err := <-held; !errdefs.Is(err, errdefs.Internal) {
		t.Errorf("the change that failed: %v", err)
	}
	err := s.AppendAudit(t.Context(), event("after"))
	if !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "restart the server") {
		t.Errorf("a later change: %v", err)
	}
	check := func(s *Store) {
		t.Helper()
		if got := recorded(t, s); len(got) != 1 || !got["before"] {
			t.Errorf("recorded: %v", got)
		}
	}
	if !s.Failing() {
		t.Error("it does not say that it fails")
	}
	check(s) // reading goes on
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, Config{Path: path})
	defer s.Close()
	check(s)
	if err := s.AppendAudit(t.Context(), event("after")); err != nil {
		t.Error(err)
	}
}

// TestCallerLeaves: a change that waits is given up, one under way is not.
func TestCallerLeaves(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Path: tempPath(t)})
	defer s.Close()

	release, held := hold(s, nothing)
	ctx, cancel := context.WithCancel(t.Context())
	waiting := make(chan error)
	go func() { waiting <- s.AppendAudit(ctx, event("waiting")) }()
	cancel()
	if err := <-waiting; !errdefs.Is(err, errdefs.Unavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("the change that waited: %v", err)
	}
	release()
	if err := <-held; err != nil {
		t.Error(err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	err := s.change(ctx, "leaving", func(tx *tx) error {
		cancel()
		return tx.audit(event("under way"))
	})
	if err != nil {
		t.Errorf("the change under way: %v", err)
	}
	if got := recorded(t, s); len(got) != 1 || !got["under way"] {
		t.Errorf("recorded: %v", got)
	}
}

// TestCloseDuringWrites: every caller gets an answer, and it is true.
func TestCloseDuringWrites(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	s := open(t, Config{Path: path})
	var wg sync.WaitGroup
	var mu sync.Mutex
	made := map[string]bool{}
	started := make(chan struct{}, 1)
	for w := range 8 {
		wg.Go(func() {
			for i := 0; ; i++ {
				id := fmt.Sprintf("w%d.%d", w, i)
				err := s.AppendAudit(context.Background(), event(id))
				if errdefs.Is(err, errdefs.Unavailable) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				made[id] = true
				mu.Unlock()
				select {
				case started <- struct{}{}:
				default:
				}
				if _, err := s.Audit(context.Background(), "", store.Page{Limit: 1}); err != nil && !errdefs.Is(err, errdefs.Unavailable) {
					t.Errorf("reading: %v", err)
				}
			}
		})
	}
	<-started
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	s = open(t, Config{Path: path})
	defer s.Close()
	got := map[string]bool{}
	for after := ""; ; {
		list, err := s.Audit(t.Context(), "", store.Page{Limit: store.MaxPage, After: after})
		if err != nil {
			t.Fatal(err)
		}
		if len(list) == 0 {
			break
		}
		for _, a := range list {
			got[a.ID] = true
			after = a.ID
		}
	}
	for id := range made {
		if !got[id] {
			t.Errorf("%s was confirmed and is gone", id)
		}
	}
	if len(got) != len(made) {
		t.Errorf("%d acts are recorded, %d were confirmed", len(got), len(made))
	}
}
