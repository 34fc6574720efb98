// Package turns lets one caller at a time work on what has a name.
package turns

import (
	"context"
	"sync"
)

// Turns are one turn per name, each there while somebody has it or waits for it. The
// zero value is ready; it must not be copied.
type Turns struct {
	mu    sync.Mutex
	names map[string]*turn
}

type turn struct {
	free  chan struct{} // holds one token while nobody has the turn
	users int           // holders and waiters; guarded by Turns.mu
}

// Take waits until nobody else has the name's turn. The caller ends its turn by calling
// done once. The error is the cause of ctx; once that has ended nobody gets a turn.
func (t *Turns) Take(ctx context.Context, name string) (done func(), err error) {
	t.mu.Lock()
	k := t.names[name]
	if k == nil {
		k = &turn{free: make(chan struct{}, 1)}
		k.free <- struct{}{}
		if t.names == nil {
			t.names = map[string]*turn{}
		}
		t.names[name] = k
	}
	k.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if k.users--; k.users == 0 {
			delete(t.names, name)
		}
	}
	select {
	case <-k.free:
		if ctx.Err() == nil {
			return func() { k.free <- struct{}{}; leave() }, nil
		}
		k.free <- struct{}{}
	case <-ctx.Done():
	}
	leave()
	return nil, context.Cause(ctx)
}

// Len is how many names somebody has or waits for.
func (t *Turns) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.names)
}
