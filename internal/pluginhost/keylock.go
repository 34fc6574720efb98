package pluginhost

import (
	"context"
	"sync"
)

// keylocks is one lock per key that is in use. An entry is counted by everybody
// who holds or waits for it, so it survives a hand-off and is gone when unused.
type keylocks struct {
	mu sync.Mutex
	m  map[string]*keylock
}

type keylock struct {
	held chan struct{} // one token
	refs int
}

// lock waits for the key's lock. The function it returns gives the lock back and
// must be called once.
func (k *keylocks) lock(ctx context.Context, key string) (func(), error) {
	k.mu.Lock()
	if k.m == nil {
		k.m = map[string]*keylock{}
	}
	l := k.m[key]
	if l == nil {
		l = &keylock{held: make(chan struct{}, 1)}
		k.m[key] = l
	}
	l.refs++
	k.mu.Unlock()
	release := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if l.refs--; l.refs == 0 {
			delete(k.m, key)
		}
	}
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; release() }, nil
	case <-ctx.Done():
		release()
		return nil, context.Cause(ctx)
	}
}

// len is how many keys are in use.
func (k *keylocks) len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.m)
}

// tokens is a semaphore whose waiters can give up.
type tokens chan struct{}

func (t tokens) acquire(ctx context.Context) (func(), error) {
	select {
	case t <- struct{}{}:
		return func() { <-t }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
