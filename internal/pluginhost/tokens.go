package pluginhost

import "context"

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
