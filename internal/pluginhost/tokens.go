package pluginhost

import "context"

// tokens is a semaphore whose waiters can give up.
type tokens chan struct{}

func (t tokens) acquire(ctx context.Context) (func(), error) {
	select {
	case t <- struct{}{}:
		if ctx.Err() == nil {
			return func() { <-t }, nil
		}
		<-t
	case <-ctx.Done():
	}
	return nil, context.Cause(ctx)
}
